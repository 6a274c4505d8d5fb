"""A line on its way: from `StepOutput.write` in the worker's process to `Handle.events()` in ours.

The line is the time at which it was written; the monotonic clock is the same for all processes of a machine.
"""

from __future__ import annotations

import time

from benchmarks.ground import SANDBOX, Ground, Transport, process
from benchmarks.rounds import Bar, Contestant, Figures, Metric, Table, percentiles
from sandbox_queue import keys
from sandbox_queue.client import SandboxQueue
from sandbox_queue.events import Output
from sandbox_queue.models import Step

PAUSE = "0.003"
WARM_UP = 20


def table(ground: Ground, quick: bool) -> Table:
    lines = 200 if quick else 1000
    return Table(
        name="latency",
        title=f"one line from the worker to a reader in another process, {lines} lines, one every 3 ms",
        metrics=[Metric("p50", "p50 ms", 2), Metric("p99", "p99 ms", 2)],
        contestants=[
            Contestant("ours", lambda: _measure(ground, "tcp", lines)),
            Contestant("ours, Unix socket", lambda: _measure(ground, "unix", lines)),
        ],
        bars=[Bar("ours", "p50", "<=", 2.0)],
        rounds=3 if quick else 7,
    )


async def _measure(ground: Ground, transport: Transport, lines: int) -> Figures:
    delays: list[float] = []
    with process("benchmarks.peers", "ours", env=await ground.sandbox_login(transport)):
        await ground.appears(keys.HEARTBEAT.of(SANDBOX))
        async with SandboxQueue.connect(ground.url(transport)) as queue:
            handle = await queue.enqueue(SANDBOX, Step.run(["tick", str(lines + WARM_UP), PAUSE]))
            async for event in handle.events():
                now = time.monotonic_ns()
                if isinstance(event, Output):
                    delays += [(now - int(line)) / 1e9 for line in event.data.split()]
    assert len(delays) == lines + WARM_UP
    return percentiles(delays[WARM_UP:])
