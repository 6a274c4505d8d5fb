"""How many `true` steps a worker runs in a second, beside a loop that does nothing but start `true` and wait for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time

from benchmarks.ground import SANDBOX, Ground
from benchmarks.real_worker import real_worker
from benchmarks.rounds import Bar, Contestant, Figures, Metric, Table
from sandbox_queue.client import SandboxQueue
from sandbox_queue.models import Step


def table(ground: Ground, quick: bool) -> Table:
    steps = 200 if quick else 1000
    return Table(
        name="steps",
        title=f"{steps} steps of `true`, all of them queued before",
        metrics=[Metric("rate", "steps/s")],
        contestants=[
            Contestant("ours", lambda: _ours(ground, steps)),
            Contestant("bare Popen and wait4", lambda: _bare(steps)),
        ],
        bars=[Bar("ours", "rate", ">=", 0.6, against=("bare Popen and wait4",))],
        rounds=3 if quick else 9,
    )


async def _ours(ground: Ground, steps: int) -> Figures:
    async with real_worker(ground), SandboxQueue.connect(ground.tcp_url) as queue:
        gate = await queue.enqueue(SANDBOX, Step.run("sleep 0.5"))  # holds the queue while we fill it
        handles = await asyncio.gather(*(queue.enqueue(SANDBOX, Step.run(["true"])) for _ in range(steps)))
        await gate
        started = time.perf_counter()
        await handles[-1]  # steps run in order, so the others have ended
        return {"rate": steps / (time.perf_counter() - started)}


async def _bare(steps: int) -> Figures:
    return await asyncio.to_thread(_bare_loop, steps)


def _bare_loop(steps: int) -> Figures:
    started = time.perf_counter()
    for _ in range(steps):
        child = subprocess.Popen(["true"], stdin=subprocess.DEVNULL, start_new_session=True)
        os.wait4(child.pid, 0)
        child.returncode = 0
    return {"rate": steps / (time.perf_counter() - started)}
