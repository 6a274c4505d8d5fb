"""`sandbox-worker` as a program: how it is called, how it ends, what it gives away."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sandbox_queue import Step, keys
from tests.kit import Server, skip_without, wait_until
from tests.sandboxes import SANDBOX, Box, WorkerProcess, boxed, worker_process


def call(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sandbox_queue.workers", *arguments],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_a_password_on_the_command_line_is_refused_with_the_reason() -> None:
    done = call("--sandbox-id", "box-1", "--redis-url", "redis://:hush@localhost")
    assert done.returncode == 2
    assert "every process in the sandbox could read" in done.stderr
    assert "SANDBOX_QUEUE_REDIS_PASSWORD" in done.stderr
    assert "hush" not in done.stderr


def test_what_is_missing_is_named() -> None:
    assert "--sandbox-id" in call("--redis-url", "redis://localhost").stderr
    assert "--redis-url" in call("--sandbox-id", "box-1").stderr
    bad = call("--sandbox-id", "a b", "--redis-url", "redis://localhost")
    assert bad.returncode == 2
    assert "4 to 63 letters" in bad.stderr


def test_version_and_help() -> None:
    assert call("--version").stdout.startswith("sandbox-worker 0.")
    assert "SANDBOX_QUEUE_REDIS_PASSWORD" in call("--help").stdout


async def last_words(box: Box) -> Any:
    value = await box.queue.broker.wire.one("GET", keys.HEARTBEAT.of(SANDBOX))
    return json.loads(value)["exit"]


async def test_everything_can_come_by_environment(tmp_path: Path) -> None:
    server = Server("valkey")
    env = {
        "SANDBOX_QUEUE_SANDBOX_ID": SANDBOX,
        "SANDBOX_QUEUE_WORK_DIR": str(tmp_path),
        "SANDBOX_QUEUE_VERBOSE": "1",
        "REDIS_URL": server.url,  # with its password: an environment is not a command line
    }
    process = subprocess.Popen([sys.executable, "-m", "sandbox_queue.workers"], env={**os.environ, **env})
    try:
        from sandbox_queue import SandboxQueue

        async with SandboxQueue.connect(server.url) as queue:
            result = await (await queue.enqueue(SANDBOX, Step.run("pwd; env")))
            assert result.stdout.startswith(f"{tmp_path}\n")
            assert server.password not in result.stdout
            await (await queue.enqueue(SANDBOX, Step.shutdown()))
            assert await asyncio.to_thread(process.wait, 10) == 0
    finally:
        process.kill()
        process.wait()
        server.close()


async def test_a_shutdown_step_ends_it_with_0(tmp_path: Path) -> None:
    with worker_process(tmp_path) as worker:
        async with boxed(worker) as box:
            assert (await box.do(Step.shutdown())).ok
            assert await asyncio.to_thread(worker.process.wait, 10) == 0
            assert await last_words(box) == {"code": 0, "reason": "a shutdown step was finished"}
    assert "exit 0: a shutdown step was finished" in worker.log.read_text()


async def test_sigterm_ends_the_running_step_first_and_delivers_what_it_has(tmp_path: Path) -> None:
    with worker_process(tmp_path) as worker:
        async with boxed(worker) as box:
            handle = await box.start("echo so far; setsid sleep 1000 & sleep 1000")
            async for line in handle.lines():
                assert line.text == "so far"
                break
            started = time.monotonic()
            worker.process.terminate()
            result = await handle
            assert (result.cause, result.stdout, result.survivors) == ("cancelled", "so far\n", 0)
            assert await asyncio.to_thread(worker.process.wait, 10) == 0
            assert time.monotonic() - started < 10
            assert await last_words(box) == {"code": 0, "reason": "terminated by a signal"}
            assert worker.descendants() == []


async def test_an_abandoned_worker_ends_with_2_unless_a_launcher_is_there(tmp_path: Path) -> None:
    with worker_process(tmp_path, "--abandoned-after", "1") as worker:
        async with boxed(worker) as box:
            lease = keys.LEASE.of(SANDBOX)
            await box.queue.broker.wire.one("SET", lease, "launcher", "EX", 60)
            await box.run("true")
            with pytest.raises(subprocess.TimeoutExpired):
                await asyncio.to_thread(worker.process.wait, 4)
            await box.queue.broker.wire.one("DEL", lease)
            assert await asyncio.to_thread(worker.process.wait, 15) == 2
            words = await last_words(box)
            assert words["code"] == 2
            assert "no launcher and no step" in words["reason"]


def test_a_broker_that_is_never_there_ends_it_with_3_and_the_reason(tmp_path: Path) -> None:
    done = call("--sandbox-id", "box-1", "--redis-url", f"unix://{tmp_path}/none", "--patience", "0.5")
    assert done.returncode == 3
    assert "failed for" in done.stderr
    assert "Traceback" not in done.stderr


async def test_as_pid_1_it_reaps_orphans_forwards_signals_and_ends_on_term(tmp_path: Path) -> None:
    skip_without("root", os.geteuid() == 0 and shutil.which("unshare") is not None, "a pid namespace needs root and unshare")
    server = Server("valkey")
    try:
        work = tmp_path / "work"
        work.mkdir()
        worker = WorkerProcess(server, work, prefix=["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"])
        async with boxed(worker) as box:
            assert (await box.run("echo $PPID")).stdout == "1\n"
            for _ in range(20):
                await box.run("(sleep 0.01 &) ; exit 0")
            zombies = "ps -eo stat= | grep -c '^Z'; true"
            await wait_until(lambda: _says(box, zombies, "0\n"), "no zombie is left")
            handle = await box.start("trap 'echo got it; exit 4' USR1; echo up; while :; do sleep 0.05; done")
            async for line in handle.lines():
                assert line.text == "up"
                break
            inner = subprocess.run(["pgrep", "-P", str(worker.pid)], capture_output=True, text=True, check=True)
            os.kill(int(inner.stdout), signal.SIGUSR1)
            result = await handle
            assert (result.exit_code, result.stdout) == (4, "up\ngot it\n")
            os.kill(int(inner.stdout), signal.SIGTERM)
            assert await asyncio.to_thread(worker.process.wait, 10) == 0
        worker.close()
    finally:
        server.close()


async def _says(box: Box, command: str, expected: str) -> bool:
    return (await box.run(command)).stdout == expected


SPY = "setpriv --inh-caps=-all --bounding-set=-all "


async def test_a_step_cannot_read_the_workers_secrets(tmp_path: Path) -> None:
    """As root, but without capabilities, as in a container that has dropped them."""
    skip_without("root", os.geteuid() == 0 and shutil.which("setpriv") is not None, "needs root and setpriv")
    with worker_process(tmp_path) as worker:
        async with boxed(worker) as box:
            password = (
                Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"SANDBOX_QUEUE_REDIS_PASSWORD=")[1].split(b"\0")[0]
            )
            assert len(password) > 20
            for name in ("environ", "maps", "mem", "auxv"):
                result = await box.run(f"{SPY} cat /proc/{worker.pid}/{name}")
                assert result.exit_code != 0, name
                assert "ermission denied" in result.stderr
                assert password.decode() not in result.stdout
            assert (await box.run(f"{SPY} readlink /proc/{worker.pid}/fd/0")).exit_code != 0
            everything = await box.run("env; cat /proc/self/environ /proc/$PPID/cmdline | tr '\\0' '\\n'")
            assert password.decode() not in everything.stdout
            assert "SANDBOX_QUEUE" not in everything.stdout.replace("--redis-url", "")
