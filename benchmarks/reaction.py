"""How fast a worker reacts: from enqueueing `echo` to its first output, from a cancel to the end of 1 and of 100 processes."""

from __future__ import annotations

import time

from benchmarks.ground import SANDBOX, Ground
from benchmarks.real_worker import real_worker
from benchmarks.rounds import Contestant, Figures, Metric, Table, percentiles
from sandbox_queue.client import SandboxQueue
from sandbox_queue.events import Output
from sandbox_queue.models import Step


def table(ground: Ground, quick: bool) -> Table:
    times = 10 if quick else 30
    return Table(
        name="reaction",
        title=f"{times} times each; the process table of the whole machine is looked through at every cancel",
        metrics=[Metric("p50", "p50 ms", 1), Metric("p99", "p99 ms", 1)],
        contestants=[
            Contestant("enqueue to first output", lambda: _first_output(ground, times)),
            Contestant("cancel of 1 process", lambda: _cancel(ground, times, 1)),
            Contestant("cancel of 100 processes", lambda: _cancel(ground, times, 100)),
        ],
        bars=[],
        rounds=3 if quick else 7,
    )


async def _first_output(ground: Ground, times: int) -> Figures:
    delays: list[float] = []
    async with real_worker(ground), SandboxQueue.connect(ground.tcp_url) as queue:
        for _ in range(times):
            started = time.perf_counter()
            handle = await queue.enqueue(SANDBOX, Step.run(["echo", "hello"]))
            async for event in handle.events():
                if isinstance(event, Output):
                    delays.append(time.perf_counter() - started)
            await handle
    return percentiles(delays)


async def _cancel(ground: Ground, times: int, processes: int) -> Figures:
    delays: list[float] = []
    script = f"for i in $(seq 2 {processes}); do sleep 1000 & done; echo up; exec sleep 1000"
    async with real_worker(ground), SandboxQueue.connect(ground.tcp_url) as queue:
        for _ in range(times):
            handle = await queue.enqueue(SANDBOX, Step.run(script))
            await anext(handle.lines())
            started = time.perf_counter()
            assert await handle.cancel(grace=1), "it had ended by itself"
            delays.append(time.perf_counter() - started)  # the result is written when nothing of it is left
    return percentiles(delays)
