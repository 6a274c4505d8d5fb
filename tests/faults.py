"""A proxy between a worker and its server that understands commands, so that a fault can be put after each of them."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Literal

import hiredis

Fault = Callable[[], Awaitable[None] | None]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Proxy:
    """Counts the commands that pass. At number `at` it does its mischief, once.

    `before`: the command never reaches the server. `after`: it does, and is carried out, but its reply is lost.
    """

    def __init__(self, upstream: str, path: str, at: int, when: Literal["before", "after"], fault: Fault | None) -> None:
        self.path = path
        self.commands: list[str] = []
        self._upstream = upstream
        self._at = at
        self._when = when
        self._fault = fault

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(self._upstream)
        down = asyncio.create_task(_copy(up_reader, writer))
        parser = hiredis.Reader()
        try:
            while data := await reader.read(65536):
                parser.feed(data)
                while (command := parser.gets()) is not False:
                    name = command[0].decode().upper()
                    self.commands.append(name)
                    here = len(self.commands) == self._at
                    if here and self._when == "before":
                        return await self._break(down)
                    if here:
                        down.cancel()
                        await asyncio.wait([down])
                    up_writer.write(_encode(command))
                    await up_writer.drain()
                    if here:
                        if name != "BLPOP":  # that one may not answer for seconds
                            await up_reader.read(65536)
                        return await self._break(down)
        except OSError:
            pass
        finally:
            down.cancel()
            for stream in (writer, up_writer):
                stream.close()
        return None

    async def _break(self, down: asyncio.Task[None]) -> None:
        down.cancel()
        if self._fault is not None and (waiting := self._fault()) is not None:
            await waiting


@contextlib.asynccontextmanager
async def proxied(
    upstream: str, *, at: int = 0, when: Literal["before", "after"] = "after", fault: Fault | None = None
) -> AsyncIterator[Proxy]:
    """A proxy to the server's socket; its connections end with the block."""
    with tempfile.TemporaryDirectory(prefix="sq-proxy-") as directory:
        proxy = Proxy(upstream, str(Path(directory, "s")), at, when, fault)
        async with serving(proxy.serve, path=proxy.path):
            yield proxy


@contextlib.asynccontextmanager
async def serving(serve: Serve, *, path: str | None = None, port: int | None = None) -> AsyncIterator[None]:
    """Accept connections, on a Unix socket or a port of the loopback; they end with the block."""
    connections: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await serve(reader, writer)
        finally:
            connections.discard(task)
            writer.close()

    if path is not None:
        server = await asyncio.start_unix_server(accept, path)
    else:
        server = await asyncio.start_server(accept, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()
        waiting = tuple(connections)
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()


def _encode(command: list[bytes]) -> bytes:
    parts = [b"*%d\r\n" % len(command)]
    parts += [b"$%d\r\n%b\r\n" % (len(part), part) for part in command]
    return b"".join(parts)
