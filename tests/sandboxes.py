"""A sandbox for tests of the worker: the real entrypoint as a process of its own, under its real Redis user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sandbox_queue import SandboxQueue, Step, StepResult, acl, keys
from sandbox_queue.address import Address
from sandbox_queue.handle import Handle
from tests.kit import Server

SANDBOX = "box-1"


class WorkerProcess:
    """`sandbox-worker` as a child of the test, as the inprocess backend will start it."""

    def __init__(
        self,
        server: Server,
        work: Path,
        *options: str,
        env: dict[str, str] | None = None,
        sandbox: str = SANDBOX,
        prefix: Sequence[str] = (),
    ) -> None:
        self.server = server
        self.sandbox = sandbox
        self.work = work
        with ThreadPoolExecutor(1) as pool:  # a loop of its own: the caller may be in one, or not
            password = pool.submit(asyncio.run, _grant(server, sandbox)).result()
        self.log = work.parent / f"{work.name}.log"
        command = [*prefix, sys.executable, "-m", "sandbox_queue.workers", "--sandbox-id", sandbox, "--work-dir", str(work)]
        command += ["--redis-url", f"unix://{keys.acl_user(sandbox)}@{server.directory}/s", *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, "SANDBOX_QUEUE_REDIS_PASSWORD": password, **(env or {})}, stderr=log, stdout=log
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def descendants(self) -> list[str]:
        """Command lines of everything alive below the worker."""
        parents: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        found: list[str] = []
        front = [self.pid]
        while front:
            for pid in parents.get(front.pop(), ()):
                front.append(pid)
                with contextlib.suppress(OSError):
                    found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip())
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        subprocess.run(["pkill", "-9", "-f", str(self.work)], check=False)  # what a test may have left in its directory


async def _grant(server: Server, sandbox: str) -> str:
    async with Address(server.url).wire() as wire:
        return await acl.grant(wire, sandbox)


class Box:
    """What a service sees of it."""

    def __init__(self, queue: SandboxQueue, worker: WorkerProcess) -> None:
        self.queue = queue
        self.worker = worker

    async def start(self, command: str | list[str], **options: Any) -> Handle:
        return await self.queue.enqueue(self.worker.sandbox, Step.run(command, **options))

    async def run(self, command: str | list[str], **options: Any) -> StepResult:
        return await (await self.start(command, **options))

    async def do(self, step: Step) -> StepResult:
        return await (await self.queue.enqueue(self.worker.sandbox, step))


@contextlib.asynccontextmanager
async def boxed(worker: WorkerProcess) -> AsyncIterator[Box]:
    async with SandboxQueue.connect(settings=worker.server.settings()) as queue:
        yield Box(queue, worker)


@contextlib.contextmanager
def worker_process(
    tmp: Path, *options: str, server: Server | None = None, env: dict[str, str] | None = None
) -> Iterator[WorkerProcess]:
    """A worker with a server of its own, unless one is given."""
    own = None if server is not None else Server("valkey")
    work = tmp / "work"
    work.mkdir()
    worker = WorkerProcess(server or own or Server("valkey"), work, *options, env=env)
    try:
        yield worker
    finally:
        worker.close()
        if own is not None:
            own.close()
