"""What the tests share: real servers, a real worker loop under its real Redis user, and waiting for conditions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox_queue import acl, keys
from sandbox_queue.address import Address
from sandbox_queue.embedded import find_program
from sandbox_queue.models import Run, Step, StepResult
from sandbox_queue.settings import Settings, load
from sandbox_queue.wire import Wire
from sandbox_queue.workers.loop import Handler, Loop, Running

REQUIRED = {name for name in os.environ.get("SANDBOX_QUEUE_TEST_REQUIRE", "").split(",") if name}


def skip_without(name: str, present: bool, reason: str) -> None:
    """Skip with a reason; where `SANDBOX_QUEUE_TEST_REQUIRE` names it, such a skip is a failure."""
    if present:
        return
    if name in REQUIRED:
        pytest.fail(f"SANDBOX_QUEUE_TEST_REQUIRE names {name}, but {reason}")
    pytest.skip(reason)


async def wait_until(condition: Callable[[], Any], what: str, *, timeout: float = 20.0) -> Any:  # noqa: ASYNC109  # a test's patience, not an operation's
    """Wait until `condition()`, awaited if need be, is true; fail with `what` should it never become so."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"did not come true within {timeout:g} s: {what}")
        await asyncio.sleep(0.005)


class Server:
    """A real server of the tests' own, on a Unix socket and a TCP port, with a password. It may be stopped and started."""

    def __init__(self, flavour: str, *options: str) -> None:
        program = find_program() if flavour == "valkey" else shutil.which("redis-server")
        skip_without(flavour, program is not None, "redis-server is not installed")
        assert program is not None
        self.flavour = flavour
        self.password = secrets.token_urlsafe(12)
        self.directory = Path(tempfile.mkdtemp(prefix="sq-test-"))
        self.port = free_port()
        self._program = program
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"unix://:{self.password}@{self.directory}/s"

    @property
    def tcp_url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def start(self) -> None:
        config = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f'unixsocket "{self.directory}/s"',
            f"requirepass {self.password}",
            f'dir "{self.directory}"',
            f'logfile "{self.directory}/log"',
            'save ""',
            *self._options,
        ]
        self._process = subprocess.Popen([self._program, "-"], stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write("\n".join(config).encode())
        self._process.stdin.close()
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(f"{self.directory}/s")
                return
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError((self.directory / "log").read_text()[-1000:])
            time.sleep(0.005)

    def stop(self) -> None:
        """End it as an operator would; with AOF on, all is on disk afterwards."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.directory)

    def settings(self, **overrides: Any) -> Settings:
        return load(redis_url=self.url, **overrides)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def worker_address(wire: Wire, server: Server, sandbox: str) -> Address:
    """Where and as whom a sandbox's worker connects: with an ACL user of its own, always."""
    password = await acl.grant(wire, sandbox)
    return Address(f"unix://{server.directory}/s", username=keys.acl_user(sandbox), password=password)


@contextlib.asynccontextmanager
async def working(address: Address, sandbox: str, handler: Handler, **options: Any) -> AsyncIterator[Loop]:
    """A worker's loop that runs for as long as the block does; should it fail, the block does too."""
    async with address.wire() as wire, address.wire() as waiting, asyncio.TaskGroup() as tasks:
        loop = Loop(wire, waiting, sandbox, handler, **options)
        task = tasks.create_task(loop.run())
        yield loop
        task.cancel()


def script_of(step: Step) -> str:
    """What a `Step.run("…")` says; handlers of tests act it out."""
    assert isinstance(step, Run)
    return step.args[-1] if step.args else step.command


async def succeed(running: Running) -> StepResult:
    """A handler that does nothing, successfully."""
    return StepResult(cause="exit", exit_code=0)
