"""File steps through the real worker: what they return, and that none of them can hold it up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from sandbox_queue import Step
from tests.kit import wait_until
from tests.sandboxes import Box, WorkerProcess, boxed, worker_process


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("files")
    with worker_process(folder, "--root", str(folder / "work")) as worker:
        yield worker


@pytest.fixture
async def box(worker: WorkerProcess) -> AsyncIterator[Box]:
    async with boxed(worker) as box:
        yield box
    await wait_until(lambda: not worker.descendants(), "nothing is left")


async def test_a_file_is_written_and_read_back(box: Box, worker: WorkerProcess) -> None:
    assert (await box.do(Step.write_file("notes/a.txt", "zwölf\r\n"))).ok
    assert (worker.work / "notes/a.txt").read_bytes() == "zwölf\r\n".encode()
    result = await box.do(Step.read_file("/work/notes/a.txt"))
    assert (result.content, result.file_size) == ("zwölf\r\n", 8)
    assert (await box.do(Step.read_file("a.txt", cwd="/work/notes"))).content == "zwölf\r\n"


async def test_a_failure_has_a_message_for_people_and_a_code_for_programs(box: Box) -> None:
    result = await box.do(Step.read_file("no/such"))
    assert (result.cause, result.exit_code, result.error_code, result.content) == ("exit", 1, "notFound", None)
    assert "no/such" in (result.error or "")
    assert (await box.do(Step.read_file("/etc/passwd"))).error_code == "outsideRoots"


async def test_listing_grep_and_tree(box: Box) -> None:
    await box.run("mkdir -p src && printf 'one\\nTODO two\\n' > src/a.py && echo TODO > src/b.txt")
    listed = json.loads((await box.do(Step.list_files("src"))).content or "")
    assert [row["path"].rpartition("/")[2] for row in listed] == ["a.py", "b.txt"]
    found = json.loads((await box.do(Step.grep("TODO", "src", glob="*.py"))).content or "")
    assert [(row["path"], row["line"], row["text"]) for row in found] == [("a.py", 2, "TODO two")]
    assert (await box.do(Step.directory_tree("src"))).content == "src/\n├── a.py\n└── b.txt"


async def test_what_was_left_out_is_said_on_stderr(box: Box) -> None:
    await box.run("mkdir -p many && cd many && seq 1 1500 | xargs touch")
    handle = await box.queue.enqueue(box.worker.sandbox, Step.list_files("many"))
    result = await handle
    assert (result.truncated, result.stderr) == (True, "directory truncated at 1000 entries\n")
    assert [line.text async for line in handle.lines() if line.stream == "stderr"] == ["directory truncated at 1000 entries"]


async def test_a_catastrophic_pattern_costs_its_step_and_not_the_worker(box: Box) -> None:
    await box.do(Step.write_file("trap.txt", "a" * 60 + "b"))
    handle = await box.queue.enqueue(box.worker.sandbox, Step.grep(r"(?=a)(a+)+$", "trap.txt", timeout=1))
    result = await handle
    assert (result.cause, result.timed_out, result.exit_code) == ("timeout", True, None)
    assert (await box.run("echo next")).stdout == "next\n"


async def test_a_file_step_can_be_cancelled(box: Box) -> None:
    await box.do(Step.write_file("trap.txt", "a" * 60 + "b"))
    handle = await box.queue.enqueue(box.worker.sandbox, Step.grep(r"(?=a)(a+)+$", "trap.txt"))
    await wait_until(box.worker.descendants, "it runs")
    assert await asyncio.wait_for(handle.cancel(grace=0.1), 10) is True
    assert (await handle).cause == "cancelled"


async def test_a_fifo_does_not_hang_it(box: Box) -> None:
    await box.run("mkfifo pipe")
    assert (await box.do(Step.read_file("pipe"))).error_code == "notRegular"
