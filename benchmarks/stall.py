"""Redis stalls for ten seconds while a child prints as fast as it can: the writer's memory must stay bounded, and
afterwards every byte must be there, in order.

The writer is a process of its own (`python -m benchmarks.stall`), so that its resident size can be read from outside. Its
stream is unbounded here, unlike a real one: else a trim would hide a loss.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from benchmarks.ground import SANDBOX, Ground, Transport, address_from, printer, process, read_pipe
from benchmarks.rounds import Bar, Contestant, Figures, Metric, Table
from sandbox_queue import keys, stream
from sandbox_queue.events import Output
from sandbox_queue.models import StepResult
from sandbox_queue.stream import EventWriter, StepOutput
from sandbox_queue.wire import Wire

LINE = 1024
TOTAL = 256 * 1024 * 1024  # far more than the writer may keep, so that a writer which keeps it all is found out
STEP = "1"


def table(ground: Ground, quick: bool) -> Table:
    seconds = 3 if quick else 10
    return Table(
        name="stall",
        title=f"Redis stalls for {seconds} s while a child prints {TOTAL // 2**20} MiB",
        metrics=[
            Metric("growth", "growth of the writer, MB", 1),
            Metric("missing", "bytes missing or wrong"),
            Metric("seconds", "seconds to the last byte", 1),
        ],
        contestants=[
            Contestant("ours", lambda: _measure(ground, "tcp", seconds)),
            Contestant("ours, Unix socket", lambda: _measure(ground, "unix", seconds)),
        ],
        bars=[Bar("ours", "growth", "<=", 16.0), Bar("ours", "missing", "<=", 0.0)],
        rounds=1 if quick else 3,
    )


async def _measure(ground: Ground, transport: Transport, seconds: float) -> Figures:
    events = keys.EVENTS.of(SANDBOX)
    with process("benchmarks.stall", env=await ground.sandbox_login(transport)) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        await asyncio.to_thread(writer.stdout.readline)
        before = _resident(writer.pid)
        started = time.monotonic()
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
        while await ground.wire.one("XLEN", events) < 100:  # noqa: ASYNC110  # another process's doing
            await asyncio.sleep(0.001)
        await ground.wire.one("CLIENT", "PAUSE", round(seconds * 1000), "ALL")
        highest = before
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            highest = max(highest, _resident(writer.pid))
            await asyncio.sleep(0.02)
        printed = int(await asyncio.to_thread(writer.stdout.readline))
        took = time.monotonic() - started
    missing = await _missing(ground.wire, printed)
    return {"growth": (highest - before) / 1e6, "missing": missing, "seconds": took}


async def _missing(wire: Wire, printed: int) -> int:
    """How many bytes a reader does not get as they were printed."""

    async def ended() -> StepResult:
        return StepResult(cause="exit", exit_code=0, stdout_size=printed)

    right = 0
    async for event in stream.follow(wire, SANDBOX, STEP, None, ended):
        if isinstance(event, Output):
            first, skip = divmod(event.offset, LINE)
            last = (event.offset + len(event.data)) // LINE
            expected = b"".join(b"%*d\n" % (LINE - 1, number) for number in range(first, last + 1))
            right += len(event.data) if expected[skip : skip + len(event.data)] == event.data else 0
    return TOTAL - right


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _write() -> None:
    """The writer: says that it is ready, waits for a word, and says in the end how much was printed."""
    async with (
        address_from(dict(os.environ)).wire() as wire,
        EventWriter(wire, SANDBOX, maxlen=10**9, budget=10**12) as writer,
    ):
        await wire.connect()
        output = StepOutput(writer, STEP)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)
        with printer(LINE, "numbered", TOTAL) as pipe:
            await read_pipe(pipe, output)
        sys.stdout.write(f"{output.sizes['stdout']}\n")


if __name__ == "__main__":
    asyncio.run(_write())
