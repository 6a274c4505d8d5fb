"""What a step prints, from its pipe into the stream: lines and megabytes per second.

A child prints into a pipe, and the worker's own reader takes it from there. Beside: the same reader with the bytes thrown
away ("bare pipe"), the tightest loop that Python has for the same pipe, and one awaited XADD per line, which is what one
would write first.
"""

from __future__ import annotations

import os
import time

from redis.asyncio import Redis

from benchmarks.ground import SANDBOX, Ground, Mode, Transport, printer, read_pipe
from benchmarks.rounds import Bar, Contestant, Figures, Metric, Table
from sandbox_queue import keys, limits
from sandbox_queue.events import Stream
from sandbox_queue.stream import EventWriter, StepOutput
from sandbox_queue.wire import Command
from sandbox_queue.workers.process import PIPE_SIZE

MIB = 1024 * 1024
KINDS: dict[str, tuple[int, Mode]] = {
    "8 B, blocks": (8, "block"),
    "1 KB, blocks": (1024, "block"),
    "8 B, each flushed": (8, "line"),
    "1 KB, each flushed": (1024, "line"),
}


def table(ground: Ground, quick: bool) -> Table:
    share = 4 if quick else 1
    contestants = []
    for kind, (size, mode) in KINDS.items():
        total = (512 * MIB if mode == "block" or size > 8 else 8 * MIB) // share
        contestants += _rows(ground, kind, size, mode, total)
    for size, name in ((8, "8 B"), (1024, "1 KB")):
        contestants.append(Contestant(f"{name}: an XADD per line", lambda size=size: _xadd(ground, size, 8000 // share)))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
    return Table(
        name="output",
        title="a child's output, from its pipe into the stream",
        metrics=[Metric("lines", "lines/s"), Metric("mb", "MB/s", 1)],
        contestants=contestants,
        bars=[
            # A program that flushes each line of 8 bytes cannot be 500 times faster than an XADD per line: the bare pipe is
            # not. And blocks of 8 KiB pass through a bare pipe in two copies, on their way to Redis in five: there is no bar
            # for these two, only the rows.
            Bar("8 B, blocks: ours", "lines", ">=", 500, against=("8 B: an XADD per line",)),
            Bar("8 B, each flushed: ours", "lines", ">=", 0.5, against=("8 B, each flushed: bare pipe",)),
            Bar("1 KB, each flushed: ours", "mb", ">=", 0.5, against=("1 KB, each flushed: bare pipe",)),
        ],
        rounds=3 if quick else 7,
    )


def _rows(ground: Ground, kind: str, size: int, mode: Mode, total: int) -> list[Contestant]:
    return [
        Contestant(f"{kind}: ours", lambda: _ours(ground, "tcp", size, mode, total)),
        Contestant(f"{kind}: ours, Unix socket", lambda: _ours(ground, "unix", size, mode, total)),
        Contestant(f"{kind}: bare pipe", lambda: _bare(ground, size, mode, total)),
        Contestant(f"{kind}: a blocking read loop", lambda: _blocking(size, mode, total)),
    ]


async def _ours(ground: Ground, transport: Transport, size: int, mode: Mode, total: int) -> Figures:
    address = await ground.sandbox_address(transport)
    async with address.wire() as wire, EventWriter(wire, SANDBOX) as writer:
        await wire.connect()
        return await _timed(StepOutput(writer, "1"), size, mode, total)


class _Nowhere(StepOutput):
    """Takes all there is, at once."""

    def put(self, stream: Stream, data: bytes) -> None:
        self.sizes[stream] += len(data)

    async def close(self) -> list[Command]:
        return []


async def _bare(ground: Ground, size: int, mode: Mode, total: int) -> Figures:
    return await _timed(_Nowhere(EventWriter(ground.wire, SANDBOX), "1"), size, mode, total)


async def _timed(output: StepOutput, size: int, mode: Mode, total: int) -> Figures:
    with printer(size, mode, total) as pipe:
        started = time.perf_counter()
        await read_pipe(pipe, output)
        took = time.perf_counter() - started
    assert output.sizes["stdout"] == total
    return _rates(total, size, took)


async def _blocking(size: int, mode: Mode, total: int) -> Figures:
    with printer(size, mode, total) as pipe:
        started = time.perf_counter()
        left = total
        while data := os.read(pipe, PIPE_SIZE):
            left -= len(data)
        took = time.perf_counter() - started
        os.close(pipe)
    assert left == 0
    return _rates(total, size, took)


async def _xadd(ground: Ground, size: int, count: int) -> Figures:
    line = b"x" * (size - 1) + b"\n"
    key = keys.EVENTS.of(SANDBOX)
    async with Redis.from_url(ground.tcp_url) as client:
        await client.ping()
        started = time.perf_counter()
        for _ in range(count):
            await client.xadd(key, {"step": "1", "kind": "stdout", "data": line}, maxlen=limits.EVENTS_MAXLEN)
        return _rates(count * size, size, time.perf_counter() - started)


def _rates(total: int, size: int, seconds: float) -> Figures:
    return {"lines": total / size / seconds, "mb": total / 1e6 / seconds}
