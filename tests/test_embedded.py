"""The private server: nobody else gets in, and it is gone when its owner is, however that ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_queue import BrokerDenied, BrokerUnavailable, SandboxQueue
from sandbox_queue.broker import Broker
from sandbox_queue.embedded import EmbeddedServer
from sandbox_queue.settings import load
from tests.kit import wait_until

OWNER = """
import asyncio, os, sys, signal
from sandbox_queue import SandboxQueue
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started with it ignored
async def main():
    async with SandboxQueue.connect() as queue:
        info = (await queue.broker.wire.one("INFO", "server")).decode()
        pid = next(line for line in info.splitlines() if line.startswith("process_id:")).split(":")[1]
        print(pid, queue.broker.address.path, flush=True)
        how = sys.argv[1]
        if how == "exception":
            raise RuntimeError("on purpose")
        if how == "fork":
            child = os.fork()
            if child == 0:
                os.close(1)
                os.read(0, 1)   # outlives its parent, which has the same standard input
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "child-exits":
            if os.fork() == 0:
                sys.exit(0)
            os.wait()
            print(await queue.broker.wire.one("PING"), flush=True)
        if how != "exit":
            await asyncio.Event().wait()
asyncio.run(main())
"""


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextlib.contextmanager
def owner(how: str) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """A process that owns a private server; the server's pid and directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert process.stdin is not None
    pid, path = process.stdout.readline().split()
    try:
        yield process, int(pid), Path(path.decode()).parent
    finally:
        process.kill()
        shutil.rmtree(Path(path.decode()).parent, ignore_errors=True)
        process.stdin.close()
        process.stdout.close()
        process.wait()


@pytest.mark.parametrize("how", ["exit", "exception", "SIGTERM", "SIGINT", "SIGKILL", "fork"])
async def test_it_ends_with_its_owner(how: str) -> None:
    with owner(how) as (process, pid, directory):
        if how.startswith("SIG"):
            assert alive(pid)
            process.send_signal(getattr(signal, how))
        await wait_until(lambda: not alive(pid), "the server has ended")
        await wait_until(lambda: not directory.exists(), "its directory is gone")
        assert await asyncio.to_thread(process.wait) != 0 or how == "exit"


async def test_it_survives_the_end_of_a_forked_child() -> None:
    with owner("child-exits") as (process, pid, _):
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"b'PONG'\n"
        assert alive(pid)


async def test_it_ends_when_its_watcher_is_killed() -> None:
    with owner("wait") as (_, pid, _):
        watcher = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(watcher, signal.SIGKILL)
        await wait_until(lambda: not alive(pid), "the server has ended")


async def test_two_at_once_do_not_meet() -> None:
    async with SandboxQueue.connect() as one, SandboxQueue.connect() as other:
        await one.broker.wire.one("SET", "whose", "one", "EX", 60)
        assert await other.broker.wire.one("GET", "whose") is None
        assert one.broker.address.path != other.broker.address.path


async def test_nobody_else_gets_in() -> None:
    async with EmbeddedServer.start() as server:
        assert server.socket.parent.stat().st_mode & 0o777 == 0o700
        password = server.url.split("@")[0].rpartition(":")[2]
        assert len(password) >= 24
        with pytest.raises(BrokerDenied):
            async with Broker.open(load(), f"unix://{server.socket}"):
                pass
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                assert password.encode() not in process.read_bytes()


async def test_it_listens_on_no_port() -> None:
    async with SandboxQueue.connect() as queue:
        assert await queue.broker.wire.one("CONFIG", "GET", "port") == [b"port", b"0"]


async def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(BrokerUnavailable, match=r"(?s)did not start.*no-such-directive"):
        async with EmbeddedServer.start("no-such-directive 5"):
            pass


async def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with SandboxQueue.connect():
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
