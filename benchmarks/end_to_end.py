"""Output from a real child through worker and Redis to a reader in another process, beside `child | cat > /dev/null`."""

from __future__ import annotations

import asyncio
import sys
import time

from benchmarks.ground import SANDBOX, Ground, Transport
from benchmarks.real_worker import real_worker
from benchmarks.rounds import Contestant, Figures, Metric, Table
from sandbox_queue.client import SandboxQueue
from sandbox_queue.events import Gap, Output
from sandbox_queue.models import Step

# A program that flushes every line, as in the table `output`.
PRINT = "import os, sys\nline = b'x' * 1023 + b'\\n'\nfor _ in range(int(sys.argv[1])): os.write(1, line)"


def table(ground: Ground, quick: bool) -> Table:
    lines = 20_000 if quick else 200_000
    return Table(
        name="end_to_end",
        title=f"{lines} lines of 1 KB, one write each, to a reader that receives every byte or is told what is gone",
        metrics=[Metric("rate", "MB/s"), Metric("gone", "bytes gone")],
        contestants=[
            Contestant("ours", lambda: _ours(ground, "tcp", lines)),
            Contestant("ours, Unix socket", lambda: _ours(ground, "unix", lines)),
            Contestant("child | cat > /dev/null", lambda: _bare(lines)),
        ],
        bars=[],
        rounds=3 if quick else 7,
    )


async def _ours(ground: Ground, transport: Transport, lines: int) -> Figures:
    async with real_worker(ground, transport), SandboxQueue.connect(ground.url(transport)) as queue:
        started = time.perf_counter()
        handle = await queue.enqueue(SANDBOX, Step.run([sys.executable, "-I", "-S", "-c", PRINT, str(lines)]))
        size = gone = 0
        async for event in handle.events():
            if isinstance(event, Output):
                size += len(event.data)
            elif isinstance(event, Gap):
                gone += event.bytes
        took = time.perf_counter() - started
    assert size + gone == lines * 1024
    return {"rate": lines * 1024 / took / 1e6, "gone": gone}


async def _bare(lines: int) -> Figures:
    started = time.perf_counter()
    program = f'{sys.executable} -I -S -c "$PRINT" {lines} | cat > /dev/null'
    child = await asyncio.create_subprocess_shell(program, env={"PRINT": PRINT, "PATH": "/bin:/usr/bin"})
    assert await child.wait() == 0
    return {"rate": lines * 1024 / (time.perf_counter() - started) / 1e6, "gone": 0}
