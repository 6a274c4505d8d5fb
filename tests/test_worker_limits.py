"""Floods, memory and process limits: the step is told what happened to it, and the worker goes on."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_queue import Finished, Gap, Output, limits
from sandbox_queue.workers.kernel import OomCounter
from tests.kit import skip_without, wait_until
from tests.sandboxes import Box, WorkerProcess, boxed, worker_process


def peak_memory(worker: WorkerProcess) -> int:
    """In bytes."""
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


async def test_a_gigabyte_of_output_passes_in_bounded_memory(tmp_path: Path) -> None:
    with worker_process(tmp_path) as worker:
        async with boxed(worker) as box:
            await box.run("true")
            before = peak_memory(worker)
            result = await box.run("head -c 1000000000 /dev/zero")
            growth = peak_memory(worker) - before
            assert (result.exit_code, result.stdout_size) == (0, 1_000_000_000)
            assert growth < 16 * limits.MIB, f"grew by {growth / limits.MIB:.1f} MiB"


async def test_beyond_the_cap_output_is_read_and_counted_and_its_tail_kept(tmp_path: Path) -> None:
    with worker_process(tmp_path, "--output-max", "100000") as worker:
        async with boxed(worker) as box:
            handle = await box.start("seq 1 500000; echo the end")
            events = [event async for event in handle.events()]
            result = await handle
    size = sum(len(str(n)) + 1 for n in range(1, 500_001)) + 8
    assert (result.exit_code, result.stdout_size, result.truncated) == (0, size, True)
    assert result.stdout.startswith("1\n2\n")
    assert result.stdout.endswith("500000\nthe end\n")
    output = [event for event in events if isinstance(event, Output)]
    (gap,) = (event for event in events if isinstance(event, Gap))
    assert sum(len(event.data) for event in output) + gap.bytes == size
    assert gap.offset == 100_000
    assert output[-1].data.endswith(b"the end\n")
    assert isinstance(events[-1], Finished)


@contextlib.contextmanager
def cgroup(controller: str, **files: str) -> Iterator[Path]:
    """A real cgroup (version 1) with these limits."""
    parent = Path("/sys/fs/cgroup") / controller
    skip_without("root", os.geteuid() == 0, "only root can make a cgroup")
    if not (parent / "cgroup.procs").exists():
        pytest.skip(f"there is no version 1 hierarchy of the controller {controller}")
    group = parent / f"sandbox-queue-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        for name, value in files.items():
            (group / f"{controller}.{name}").write_text(value)
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (parent / "cgroup.procs").write_text(pid)
        group.rmdir()


HUNGRY = ["python3", "-c", "x = b'x' * 400_000_000; print('survived')"]


async def test_a_step_killed_for_lack_of_memory_says_so_and_the_worker_lives(tmp_path: Path) -> None:
    with cgroup("memory", limit_in_bytes="200M") as group, in_cgroup(group), worker_process(tmp_path) as worker:
        leave(group, keep=worker.pid)
        async with boxed(worker) as box:
            await check_oom(box)


async def check_oom(box: Box) -> None:
    result = await box.run(HUNGRY)
    assert (result.cause, result.exit_code, result.signal) == ("oom", None, 9)
    assert "memory" in (result.error or "")
    assert result.oom_kills >= 1
    child = await box.run(["sh", "-c", f'{HUNGRY[0]} -c "{HUNGRY[2]}"; echo "child: $?"'])
    assert (child.cause, child.exit_code, child.stdout) == ("exit", 0, "child: 137\n")
    assert child.oom_kills >= 1
    fine = await box.run("echo fine")
    assert (fine.stdout, fine.oom_kills) == ("fine\n", 0)


@contextlib.contextmanager
def in_cgroup(group: Path) -> Iterator[None]:
    """This process, and so what it starts, is in that cgroup."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        leave(group)


def leave(group: Path, keep: int | None = None) -> None:
    """Everything in that cgroup but `keep` goes back up."""
    for pid in (group / "cgroup.procs").read_text().split():
        if int(pid) != keep:
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(pid)


@pytest.mark.parametrize("membership", ["0::/a/b\n", "0::/\n", "5:cpu,memory:/a/b\n4:pids:/x\n", "5:memory:/elsewhere\n"])
def test_the_oom_counter_is_found_in_both_versions_with_and_without_a_namespace(tmp_path: Path, membership: str) -> None:
    """Only version 1 can be had with a real memory controller where these tests run; version 2 differs by this file."""
    version2 = membership.startswith("0:")
    folder = tmp_path / ("" if version2 else "memory") / ("a/b" if "/a/b" in membership else "")
    folder.mkdir(parents=True, exist_ok=True)
    text = "low 0\nhigh 0\nmax 3\noom 3\noom_kill 2\n" if version2 else "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
    file = folder / ("memory.events" if version2 else "memory.oom_control")
    file.write_text(text)
    (tmp_path / "membership").write_text(membership)
    counter = OomCounter(str(tmp_path), str(tmp_path / "membership"))
    assert counter.read() == 2
    file.write_text(text.replace("oom_kill 2", "oom_kill 5"))
    assert counter.read() == 5


def test_without_a_memory_cgroup_nothing_is_counted(tmp_path: Path) -> None:
    assert OomCounter(str(tmp_path), str(tmp_path / "none")).read() == 0


async def test_a_fork_bomb_under_a_limit_of_processes_is_gone_after_its_timeout(tmp_path: Path) -> None:
    with cgroup("pids", max="200") as group, in_cgroup(group), worker_process(tmp_path) as worker:
        leave(group, keep=worker.pid)
        async with boxed(worker) as box:
            await box.run("true")
            bomb = "bomb() { bomb | bomb & }; bomb; sleep 1000"
            result = await box.run(bomb, timeout=1.5)
            assert (result.cause, result.survivors) == ("timeout", 0)
            await wait_until(lambda: not worker.descendants(), "nothing of it is left")
            assert (await box.run("echo fine")).stdout == "fine\n"
