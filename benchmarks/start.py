"""What a worker costs that does nothing yet: its start, up to its first claim, above a bare interpreter's; its idle state."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.ground import SANDBOX, Ground
from benchmarks.real_worker import real_worker
from benchmarks.rounds import Bar, Contestant, Figures, Metric, Table
from sandbox_queue import keys
from sandbox_queue.client import SandboxQueue
from sandbox_queue.models import Step


def table(ground: Ground, quick: bool) -> Table:
    idle = 4.0 if quick else 10.0
    return Table(
        name="start",
        title=f"from spawning the worker to its claim of a step that waits; then {idle:g} s without any",
        metrics=[
            Metric("above", "ms above bare Python"),
            Metric("bare", "bare Python ms"),
            Metric("memory", "idle MB", 1),
            Metric("cpu", "idle % of a core", 2),
        ],
        contestants=[Contestant("sandbox-worker", lambda: _measure(ground, idle))],
        bars=[
            Bar("sandbox-worker", "above", "<=", 220),
            Bar("sandbox-worker", "memory", "<=", 32),
            Bar("sandbox-worker", "cpu", "<=", 0.2),
        ],
        rounds=3 if quick else 7,
    )


async def _measure(ground: Ground, idle: float) -> Figures:
    bare = min([_bare_start() for _ in range(3)])
    async with SandboxQueue.connect(ground.tcp_url) as queue:
        handle = await queue.enqueue(SANDBOX, Step.run(["true"]))
        claim = keys.IN_PROGRESS.of(SANDBOX, 1)
        started = time.perf_counter()
        async with real_worker(ground, wait=False) as worker:
            while not await ground.wire.one("EXISTS", claim, keys.RESULT.of(SANDBOX, 1)):  # noqa: ASYNC110  # another process's doing
                await asyncio.sleep(0.001)
            took = time.perf_counter() - started
            await handle
            before = _cpu_seconds(worker.pid)
            await asyncio.sleep(idle)
            cpu = (_cpu_seconds(worker.pid) - before) / idle * 100
            memory = _resident_bytes(worker.pid) / 1e6
    return {"above": (took - bare) * 1000, "bare": bare * 1000, "memory": memory, "cpu": cpu}


def _bare_start() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - started


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cpu_seconds(pid: int) -> float:
    """From the scheduler's own count, in nanoseconds: clock ticks are too coarse for an idle process."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
