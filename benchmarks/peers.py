"""The worker processes, `python -m benchmarks.peers ours|arq|saq`: each the real worker of its kind with a handler that
does nothing. Where to connect comes by environment, since a password has no place in an argument list."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from typing import Any

from benchmarks.ground import SANDBOX, address_from

RESULT = {"cause": "exit", "exitCode": 0}


def ours() -> None:
    from sandbox_queue.models import Run, StepResult
    from sandbox_queue.workers.loop import Loop, Running

    async def handler(running: Running) -> StepResult:
        """`tick COUNT PAUSE` prints the time that often, for the latency table; anything else does nothing."""
        step = running.step
        if isinstance(step, Run) and step.command == "tick":
            count, pause = int(step.args[0]), float(step.args[1])
            for _ in range(count):
                await asyncio.sleep(pause)
                await running.output.write("stdout", b"%d\n" % time.monotonic_ns())
        return StepResult(cause="exit", exit_code=0)

    async def work() -> None:
        address = address_from(dict(os.environ))
        async with address.wire() as wire, address.wire() as waiting:
            await Loop(wire, waiting, SANDBOX, handler).run()

    asyncio.run(work())


def arq() -> None:
    from arq import Worker, func
    from arq.connections import RedisSettings

    async def step(ctx: dict[Any, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return RESULT

    settings = RedisSettings.from_dsn(os.environ["BENCH_URL"])
    Worker([func(step, name="step")], redis_settings=settings, poll_delay=float(os.environ["BENCH_POLL"])).run()


def saq() -> None:
    from saq import Queue, Worker

    async def step(context: Any, *, payload: dict[str, Any]) -> dict[str, Any]:
        return RESULT

    async def work() -> None:
        queue = Queue.from_url(os.environ["BENCH_URL"])
        await queue.connect()
        await Worker(queue, [("step", step)]).start()

    asyncio.run(work())


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    {"ours": ours, "arq": arq, "saq": saq}[sys.argv[1]]()
