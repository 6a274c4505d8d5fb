"""The real `sandbox-worker` as a child process, for the tables that run real commands."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator

from benchmarks.ground import SANDBOX, Ground, Transport
from sandbox_queue import keys


@contextlib.asynccontextmanager
async def real_worker(
    ground: Ground, transport: Transport = "tcp", *, wait: bool = True
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A worker in a directory of its own, ended with the block."""
    login = await ground.sandbox_login(transport)
    scheme, _, place = login["BENCH_URL"].partition("://")
    url = f"{scheme}://{login['BENCH_USER']}@{place}"
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        options = ["--sandbox-id", SANDBOX, "--redis-url", url, "--work-dir", folder]
        worker = subprocess.Popen(  # noqa: ASYNC220  # a benchmark may wait for a spawn
            [sys.executable, "-m", "sandbox_queue.workers", *options],
            env={**os.environ, "SANDBOX_QUEUE_REDIS_PASSWORD": login["BENCH_PASSWORD"]},
            stderr=subprocess.DEVNULL,
        )
        try:
            if wait:
                await ground.appears(keys.HEARTBEAT.of(SANDBOX))
            yield worker
        finally:
            worker.terminate()
            worker.wait(20)
