"""Enqueue to result: ours, stock arq and SAQ on the same server, each with its worker in a process of its own.

Every job carries the same small payload and its result is received by the client. Sequential: one job at a time.
Pipelined: all at once. The first jobs of each measurement warm up both processes and are not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings
from saq import Queue

from benchmarks.ground import SANDBOX, Ground, Transport, process
from benchmarks.rounds import Bar, Contestant, Figures, Metric, Table, percentiles
from sandbox_queue import keys
from sandbox_queue.client import SandboxQueue
from sandbox_queue.models import Step

STEP = Step.run(["true"])
PAYLOAD = STEP.to_dict()
SAQ = ("SAQ", "SAQ, kept subscription")

Ask = Callable[[], Awaitable[object]]  # enqueue one job and wait for its result
Opened = contextlib.AbstractAsyncContextManager[Ask]


def table(ground: Ground, quick: bool) -> Table:
    jobs = 200 if quick else 1000
    fair, slow = (jobs, 500), (10 if quick else 20, 500)

    def row(name: str, opened: Callable[[], Opened], sizes: tuple[int, int]) -> Contestant:
        return Contestant(name, lambda: _measure(opened, *sizes))

    return Table(
        name="queue",
        title=f"enqueue to result: {jobs} jobs one at a time, then {fair[1]} at once",
        metrics=[
            Metric("p50", "p50 ms", 2),
            Metric("p99", "p99 ms", 2),
            Metric("rate", "jobs/s"),
            Metric("all-p50", "at once: p50 ms", 1),
            Metric("all-p99", "p99 ms", 1),
            Metric("all-rate", "jobs/s"),
        ],
        contestants=[
            row("ours", lambda: _ours(ground, "tcp"), fair),
            row("ours, Unix socket", lambda: _ours(ground, "unix"), fair),
            row(SAQ[0], lambda: _saq(ground), fair),
            row(SAQ[1], lambda: _saq(ground, keep=True), fair),
            row("arq, polling every 10 ms", lambda: _arq(ground, 0.01), fair),
            row(f"arq ({slow[0]} jobs)", lambda: _arq(ground, 0.5), slow),
        ],
        bars=[
            Bar("ours", "p50", "<=", 0.6, against=SAQ),
            Bar("ours", "p99", "<=", 1.0, against=SAQ),
            Bar("ours", "rate", ">=", 1.5, against=SAQ),
        ],
        rounds=3 if quick else 7,
    )


async def _measure(opened: Callable[[], Opened], one_by_one: int, at_once: int) -> Figures:
    async with opened() as ask:

        async def timed() -> float:
            started = time.perf_counter()
            await ask()
            return time.perf_counter() - started

        for _ in range(max(one_by_one // 5, 2)):
            await timed()
        started = time.perf_counter()
        sequential = [await timed() for _ in range(one_by_one)]
        rate = one_by_one / (time.perf_counter() - started)
        await asyncio.gather(*(timed() for _ in range(at_once // 5)))
        started = time.perf_counter()
        pipelined = await asyncio.gather(*(timed() for _ in range(at_once)))
        all_rate = at_once / (time.perf_counter() - started)
    return {**percentiles(sequential), "rate": rate, **percentiles(pipelined, "all-"), "all-rate": all_rate}


@contextlib.asynccontextmanager
async def _ours(ground: Ground, transport: Transport) -> AsyncIterator[Ask]:
    login = await ground.sandbox_login(transport)
    with process("benchmarks.peers", "ours", env=login):
        await ground.appears(keys.HEARTBEAT.of(SANDBOX))
        async with SandboxQueue.connect(ground.url(transport)) as queue:

            async def ask() -> None:
                result = await (await queue.enqueue(SANDBOX, STEP))
                assert result.ok

            yield ask


@contextlib.asynccontextmanager
async def _saq(ground: Ground, *, keep: bool = False) -> AsyncIterator[Ask]:
    """`keep` leaves its subscription open between jobs, which spares it one round trip each and most lost messages."""
    with process("benchmarks.peers", "saq", env={"BENCH_URL": ground.tcp_url}):
        await ground.appears("saq:default:sweep")  # a job that its first sweep catches half started is aborted
        queue = Queue.from_url(ground.tcp_url)
        await queue.connect()

        async def ask() -> None:
            job = await queue.enqueue("step", payload=PAYLOAD)
            assert job is not None
            while not job.completed:
                with contextlib.suppress(TimeoutError):  # its message may pass before it listens: it then has to look again
                    await job.refresh(until_complete=1)
            assert job.result["exitCode"] == 0, job.error

        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(queue.disconnect)
            if keep:
                listening = asyncio.ensure_future(queue.listen(["nobody"], lambda *_: False, timeout=None))
                stack.callback(listening.cancel)
            yield ask


@contextlib.asynccontextmanager
async def _arq(ground: Ground, poll: float) -> AsyncIterator[Ask]:
    with process("benchmarks.peers", "arq", env={"BENCH_URL": ground.tcp_url, "BENCH_POLL": str(poll)}):
        await ground.appears("arq:queue:health-check")
        pool = await create_pool(RedisSettings.from_dsn(ground.tcp_url))

        async def ask() -> None:
            job = await pool.enqueue_job("step", PAYLOAD)
            assert job is not None
            result: dict[str, Any] = await job.result(poll_delay=poll)
            assert result["exitCode"] == 0

        try:
            yield ask
        finally:
            await pool.aclose()
