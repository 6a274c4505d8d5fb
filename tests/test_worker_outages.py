"""The broker goes away while a step prints as fast as it can: no byte lost, none twice, the step undisturbed."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from sandbox_queue import Gap, Output, StepResult, acl, limits
from sandbox_queue.address import Address
from sandbox_queue.handle import Handle
from tests.kit import Server, wait_until
from tests.sandboxes import SANDBOX, WorkerProcess, boxed, worker_process

LINES = 4_000_000
FLOOD = f"seq 1 {LINES}"
SIZE = sum(9 * 10 ** (digits - 1) * (digits + 1) for digits in range(1, 7)) + (LINES - 999_999) * 8


class Follower:
    """Reads a step's output as it comes and checks every byte of it."""

    def __init__(self) -> None:
        self.size = 0
        self.lost = 0
        self._next = 1
        self._rest = b""

    async def follow(self, handle: Handle) -> StepResult:
        async for event in handle.events():
            if isinstance(event, Output):
                assert event.offset == self.size
                self.size += len(event.data)
                *lines, self._rest = (self._rest + event.data).split(b"\n")
                assert lines == [b"%d" % n for n in range(self._next, self._next + len(lines))]
                self._next += len(lines)
            elif isinstance(event, Gap):
                self.lost += event.bytes
        return await handle


def memory(worker: WorkerProcess, field: str = "VmRSS") -> int:
    return int(Path(f"/proc/{worker.pid}/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


async def test_a_stall_of_ten_seconds(tmp_path: Path) -> None:
    with worker_process(tmp_path) as worker:
        async with boxed(worker) as box, Address(worker.server.url).wire() as admin:
            await box.run("true")
            follower = Follower()
            following = asyncio.create_task(follower.follow(await box.start(FLOOD)))
            await wait_until(lambda: follower.size > limits.MIB, "the flood is under way")
            before = memory(worker, "VmHWM")
            await admin.one("CLIENT", "PAUSE", 10_000, "ALL")
            result = await following
            assert (result.exit_code, follower.size, follower.lost) == (0, SIZE, 0)
            growth = memory(worker, "VmHWM") - before
            assert growth < 16 * limits.MIB, f"grew by {growth / limits.MIB:.1f} MiB"


async def test_connections_killed_over_and_over(tmp_path: Path) -> None:
    with worker_process(tmp_path) as worker:
        async with boxed(worker) as box, Address(worker.server.url).wire() as admin:
            follower = Follower()
            following = asyncio.create_task(follower.follow(await box.start(FLOOD)))
            kills = 0
            while not following.done():
                before = follower.size
                await admin.one("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                kills += 1
                await wait_until(lambda b=before: following.done() or follower.size > b + limits.MIB, "it goes on")  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            assert (following.result().exit_code, follower.size, follower.lost) == (0, SIZE, 0)
            assert kills > 5


async def test_a_restart_with_aof(tmp_path: Path) -> None:
    server = Server("valkey", "appendonly yes", "appendfsync always")
    try:
        with worker_process(tmp_path, server=server) as worker:
            async with boxed(worker) as box:
                follower = Follower()
                following = asyncio.create_task(follower.follow(await box.start(FLOOD)))
                await wait_until(lambda: follower.size > limits.MIB, "the flood is under way")
                await asyncio.to_thread(server.restart)
                async with Address(server.url).wire() as admin:
                    assert await acl.restore(admin, SANDBOX)
                result = await following
                assert (result.exit_code, follower.size, follower.lost) == (0, SIZE, 0)
    finally:
        server.close()


async def test_a_broker_that_is_gone_for_good(tmp_path: Path) -> None:
    """The step finishes, the worker waits its bound, and ends with 3 and the reason."""
    server = Server("valkey")
    with worker_process(tmp_path, "--patience", "1", server=server) as worker:
        async with boxed(worker) as box:
            await box.start("echo started; touch started; while [ ! -e go ]; do sleep 0.05; done; touch finished")
            await wait_until((worker.work / "started").exists, "the step runs")
        server.close()
        with pytest.raises(subprocess.TimeoutExpired):
            await asyncio.to_thread(worker.process.wait, 3)  # longer than its patience, but the step goes on
        (worker.work / "go").touch()
        await wait_until((worker.work / "finished").exists, "the step has finished undisturbed")
        assert await asyncio.to_thread(worker.process.wait, 15) == 3
        assert "exit 3" in worker.log.read_text()
