"""What every table stands on: one server for all, and child processes that end with us."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from sandbox_queue import acl, keys
from sandbox_queue.address import Address
from sandbox_queue.embedded import EmbeddedServer
from sandbox_queue.stream import StepOutput
from sandbox_queue.wire import Wire
from sandbox_queue.workers.output import Budget, Pipe
from sandbox_queue.workers.process import PIPE_SIZE

SANDBOX = "bench"
ROOT = Path(__file__).parent.parent

Transport = Literal["tcp", "unix"]


@dataclass(frozen=True)
class Ground:
    """The server, as its administrator sees it."""

    tcp_url: str
    unix_url: str
    wire: Wire

    @staticmethod
    @contextlib.asynccontextmanager
    async def prepare() -> AsyncIterator[Ground]:
        """A private server on a Unix socket and on the loopback interface, with a password for both."""
        port = _free_port()
        async with EmbeddedServer.start(f"port {port}", "bind 127.0.0.1") as server, Address(server.url).wire() as wire:
            password = urlsplit(server.url).password
            yield Ground(f"redis://:{password}@127.0.0.1:{port}/0", server.url, wire)

    def url(self, transport: Transport) -> str:
        return self.tcp_url if transport == "tcp" else self.unix_url

    async def clean(self) -> None:
        await self.wire.one("FLUSHALL", "SYNC")

    async def appears(self, key: str) -> None:
        """Wait for a key that a worker writes when it is up."""
        async with asyncio.timeout(20):
            while not await self.wire.one("EXISTS", key):  # noqa: ASYNC110  # another process's doing
                await asyncio.sleep(0.01)

    async def sandbox_login(self, transport: Transport) -> dict[str, str]:
        """The environment of a worker of ours: a user of its own with a sandbox's rights, as in production."""
        parts = urlsplit(self.url(transport))
        place = f"redis://127.0.0.1:{parts.port}/0" if transport == "tcp" else f"unix://{parts.path}"
        return {"BENCH_URL": place, "BENCH_USER": keys.acl_user(SANDBOX), "BENCH_PASSWORD": await acl.grant(self.wire, SANDBOX)}

    async def sandbox_address(self, transport: Transport) -> Address:
        """The same, for a writer in this process."""
        return address_from(await self.sandbox_login(transport))


def address_from(login: dict[str, str]) -> Address:
    return Address(login["BENCH_URL"], username=login.get("BENCH_USER"), password=login.get("BENCH_PASSWORD"))


@contextlib.contextmanager
def process(module: str, *arguments: str, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m module …` for as long as the block lasts. It ends at the end of its stdin, hence also with us."""
    child = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield child
    finally:
        for end in (child.stdin, child.stdout):
            if end is not None:
                end.close()
        child.wait(10)


# A child as a program in a sandbox would be. `line`: one write(2) per line, as a program that flushes each line. `block`:
# 8 KiB at a time, as Python's print does by itself when stdout is a pipe (C's printf: 4 KiB). `numbered`: as `line`, each
# line being its number.
_PRINTER = """
import os, sys
size, mode, total = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
line = b"x" * (size - 1) + b"\\n"
data = line * (8192 // size) if mode == "block" else line
for number in range(total // len(data)):
    os.write(1, data if mode != "numbered" else b"%*d\\n" % (size - 1, number))
"""
Mode = Literal["line", "block", "numbered"]


@contextlib.contextmanager
def printer(size: int, mode: Mode, total: int) -> Iterator[int]:
    """A child that prints `total` bytes in lines of `size`; gives the reading end of its pipe, for `read_pipe` to close."""
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", _PRINTER, str(size), mode, str(total)], stdout=writing)
    os.close(writing)
    try:
        select.select([reading], [], [])  # its start-up is not what we measure
        yield reading
    finally:
        child.wait(10)


async def read_pipe(fd: int, output: StepOutput) -> None:
    """Read a pipe to its end with the worker's own reader, and wait until Redis has all of it."""
    pipe = Pipe(fd, "stdout", output, Budget(sys.maxsize))
    while not pipe.closed:
        await pipe.drain()
    await output.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
