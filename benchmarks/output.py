"""What a step prints, from its pipe into the stream: lines and megabytes per second.

A child prints into a pipe, and we read it as a worker does. Beside: the same pipe with the bytes thrown away, which is as
fast as it could be, and one awaited XADD per line, which is what one would write first.
"""

from __future__ import annotations

import time

from redis.asyncio import Redis

from benchmarks.ground import SANDBOX, Ground, Mode, Transport, printer, read_pipe
from benchmarks.rounds import Bar, Contestant, Figures, Metric, Table
from sandbox_queue import keys, limits
from sandbox_queue.stream import EventWriter, StepOutput

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
            Bar("8 B, blocks: ours", "lines", ">=", 500, against=("8 B: an XADD per line",)),
            Bar("1 KB, blocks: ours", "mb", ">=", 0.5, against=("1 KB, blocks: bare pipe",)),
            Bar("1 KB, each flushed: ours", "mb", ">=", 0.5, against=("1 KB, each flushed: bare pipe",)),
        ],
        rounds=3 if quick else 7,
    )


def _rows(ground: Ground, kind: str, size: int, mode: Mode, total: int) -> list[Contestant]:
    return [
        Contestant(f"{kind}: ours", lambda: _ours(ground, "tcp", size, mode, total)),
        Contestant(f"{kind}: ours, Unix socket", lambda: _ours(ground, "unix", size, mode, total)),
        Contestant(f"{kind}: bare pipe", lambda: _bare(size, mode, total)),
    ]


async def _ours(ground: Ground, transport: Transport, size: int, mode: Mode, total: int) -> Figures:
    address = await ground.sandbox_address(transport)
    async with address.wire() as wire, EventWriter(wire, SANDBOX) as writer:
        await wire.connect()
        output = StepOutput(writer, "1")
        with printer(size, mode, total) as pipe:
            started = time.perf_counter()
            assert await read_pipe(pipe, lambda data: output.write("stdout", data)) == total
            await output.close()
            return _rates(total, size, time.perf_counter() - started)


async def _bare(size: int, mode: Mode, total: int) -> Figures:
    async def forget(data: bytes) -> None:
        pass

    with printer(size, mode, total) as pipe:
        started = time.perf_counter()
        assert await read_pipe(pipe, forget) == total
        return _rates(total, size, time.perf_counter() - started)


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
