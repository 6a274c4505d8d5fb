"""`run` steps, with real processes: started as asked, ended whichever way, and told truthfully."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandbox_queue import Output, Step, StepFailed, limits
from tests.kit import skip_without, wait_until
from tests.sandboxes import Box, WorkerProcess, boxed, worker_process


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """One worker for the whole file: whatever a step does must not hurt the next one."""
    env = {"FROM_IMAGE": "yes", "REDIS_URL": "redis://not-for-steps", "SANDBOX_TYPE": "none"}
    with worker_process(tmp_path_factory.mktemp("run"), env=env) as worker:
        yield worker


@pytest.fixture
async def box(worker: WorkerProcess) -> AsyncIterator[Box]:
    """After each test, nothing may be left below the worker."""
    async with boxed(worker) as box:
        yield box
    await wait_until(lambda: not worker.descendants(), f"nothing is left: {worker.descendants()}")


# --- what is started


async def test_a_string_is_given_to_the_shell_and_a_sequence_is_not(box: Box) -> None:
    assert (await box.run("echo $((1 + 2)) | tr 3 4")).stdout == "4\n"
    assert (await box.run(["echo", "$((1 + 2)) | tr"])).stdout == "$((1 + 2)) | tr\n"


async def test_the_working_directory_is_work_unless_the_step_says_otherwise(box: Box, worker: WorkerProcess) -> None:
    (worker.work / "sub").mkdir(exist_ok=True)
    assert (await box.run("pwd")).stdout == f"{worker.work}\n"
    assert (await box.run("pwd", cwd="/work/sub")).stdout == f"{worker.work}/sub\n"
    assert (await box.run("pwd", cwd="/usr")).stdout == "/usr\n"


async def test_the_environment_is_the_containers_overlaid_by_the_steps_and_less_ours(box: Box) -> None:
    result = await box.run("env", env={"ADDED": "a b=c", "FROM_IMAGE": None, "EMPTY": ""})
    env = dict(line.split("=", 1) for line in result.stdout.splitlines())
    assert env["ADDED"] == "a b=c"
    assert env["EMPTY"] == ""
    assert "FROM_IMAGE" not in env
    assert "PATH" in env
    assert not [name for name in env if name.startswith("SANDBOX_QUEUE_") or name in ("REDIS_URL", "SANDBOX_TYPE")]
    assert "FROM_IMAGE=yes" in (await box.run("env")).stdout


async def test_path_of_the_step_finds_the_program(box: Box, worker: WorkerProcess) -> None:
    folder = worker.work / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "mine").write_text("#!/bin/sh\necho found\n")
    (folder / "mine").chmod(0o755)
    assert (await box.run(["mine"], env={"PATH": f"{folder}:/bin"})).stdout == "found\n"


async def rejected(box: Box, command: str | list[str], *words: str, **options: object) -> None:
    result = await box.run(command, **options)
    assert (result.cause, result.exit_code, result.signal) == ("rejected", None, None)
    for word in words:
        assert word in (result.error or ""), result.error
    with pytest.raises(StepFailed, match=re.escape(words[0])):
        result.check()


async def test_a_program_that_cannot_be_started_is_rejected_with_the_reason(box: Box, worker: WorkerProcess) -> None:
    files = {"plain": ("echo", 0o644), "shebang": ("#!/no/such/interpreter\n", 0o755), "text": ("just text", 0o755)}
    for name, (content, mode) in files.items():
        (worker.work / name).write_text(content)
        (worker.work / name).chmod(mode)
    await rejected(box, ["no-such-program"], "no-such-program", "no such program in PATH")
    await rejected(box, ["/no/such"], "/no/such", "no such program in this image")
    await rejected(box, ["./plain"], "./plain", "not executable")
    await rejected(box, ["./shebang"], "./shebang", "interpreter")
    await rejected(box, ["./text"], "./text", "no '#!' line")
    await rejected(box, ["/usr"], "/usr", "is a directory")
    await rejected(box, "pwd", "/no/such/dir does not exist", cwd="/no/such/dir")
    await rejected(box, "pwd", "/bin/sh is not a directory", cwd="/bin/sh")


async def test_a_busy_text_file_is_rejected_with_the_reason(box: Box, worker: WorkerProcess) -> None:
    busy = worker.work / "busy"
    shutil.copy("/bin/true", busy)
    with busy.open("r+b"):
        await rejected(box, ["./busy"], "./busy", "open for writing")
    assert (await box.run(["./busy"])).ok


async def test_a_step_runs_as_the_user_it_names(box: Box) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start steps as another user")
    assert (await box.run("id -u; id -g; id -G", user="nobody", cwd="/")).stdout == "65534\n65534\n65534\n"
    assert (await box.run("id -u; id -g", user=12345, cwd="/")).stdout == "12345\n12345\n"
    assert (await box.run("id -u; id -g; id -G", user="12:34", cwd="/")).stdout == "12\n34\n34\n"
    await rejected(box, "id", "user nosuchuser does not exist", user="nosuchuser")


async def test_another_user_is_refused_where_the_worker_is_not_root(tmp_path: Path) -> None:
    skip_without("root", os.geteuid() == 0, "only root can start a worker as another user")
    for module in ("grp", "pwd"):  # the other user may not be able to read this interpreter's files
        importlib.import_module(module)
    from sandbox_queue.models import Run
    from sandbox_queue.workers.process import NotStarted, spawn

    step = Step.run("id", user="root", cwd="/")
    assert isinstance(step, Run)
    pid = os.fork()
    if pid == 0:
        os.setresuid(65534, 65534, 65534)
        try:
            spawn(step, {})
        except NotStarted as error:
            os._exit(0 if "only root can start steps as another user" in str(error) else 1)
        os._exit(2)
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# --- input


async def test_stdin_is_the_steps_bytes_or_nothing(box: Box) -> None:
    assert (await box.run("cat")).stdout == ""
    assert (await box.run("cat", stdin=b"one\ntwo")).stdout == "one\ntwo"
    big = os.urandom(10 * limits.MIB)
    result = await box.run("sha256sum", stdin=big)
    import hashlib

    assert result.stdout.split()[0] == hashlib.sha256(big).hexdigest()


async def test_a_program_that_does_not_read_its_stdin_ends_as_usual(box: Box) -> None:
    assert (await box.run("exec <&-; echo closed", stdin=b"x" * limits.MIB)).stdout == "closed\n"
    assert (await box.run("head -c 3", stdin=b"x" * limits.MIB)).stdout == "xxx"


# --- ends


async def test_every_exit_code_comes_back(box: Box) -> None:
    handles = [await box.start(f"exit {code}") for code in range(256)]
    results = await asyncio.gather(*handles)
    assert [result.exit_code for result in results] == list(range(256))
    assert {(result.cause, result.signal) for result in results} == {("exit", None)}


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGPIPE, signal.SIGUSR1, 34, 64]
)
async def test_a_signal_is_told_as_such(box: Box, number: int) -> None:
    result = await box.run(["sh", "-c", f"kill -{int(number)} $$"])
    assert (result.cause, result.signal, result.exit_code) == ("signal", number, None)


async def test_a_timeout_ends_the_step_and_keeps_what_it_printed(box: Box) -> None:
    result = await box.run("echo before; sleep 1000", timeout=0.3)
    assert (result.cause, result.timed_out, result.exit_code) == ("timeout", True, None)
    assert result.error == "timed out after 0.3 s"
    assert result.stdout == "before\n"
    assert 0.3 <= result.duration < 5


async def test_a_program_that_handles_term_gets_its_grace(box: Box) -> None:
    result = await box.run("trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.05; done", timeout=0.5)
    assert (result.cause, result.exit_code, result.stdout) == ("timeout", 7, "up\nbye\n")


@pytest.mark.parametrize(
    "command",
    [
        "trap '' TERM; while :; do sleep 0.05; done",
        "kill -STOP $$; echo never",
        "(trap '' TERM; kill -STOP $(exec sh -c 'echo $PPID')) & wait",
    ],
    ids=["ignores TERM", "is stopped", "has a stopped child"],
)
async def test_what_does_not_heed_term_is_killed(box: Box, command: str) -> None:
    handle = await box.start(command)
    await wait_until(lambda: box.worker.descendants(), "it runs")
    assert await handle.cancel(grace=0.3) is True
    assert (await handle).cause == "cancelled"
    assert box.worker.descendants() == []


async def test_cancel_while_the_step_floods_its_output(box: Box) -> None:
    handle = await box.start("yes a rather long line of output that goes on and on")
    events = handle.events()
    async for event in events:
        if isinstance(event, Output) and event.offset > limits.MIB:
            break
    assert await handle.cancel(grace=1) is True
    result = await handle
    assert result.cause == "cancelled"
    assert (result.stdout_size or 0) > limits.MIB
    assert box.worker.descendants() == []


async def test_an_error_in_the_middle_of_a_pipeline_is_the_shells_business(box: Box) -> None:
    assert (await box.run("false | true")).exit_code == 0
    assert (await box.run("set -e; false; echo no")).exit_code == 1


# --- usage


async def test_usage_is_plausible_for_a_program_of_known_cost(box: Box) -> None:
    burn = "import os, time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nx = b'x' * 80_000_000\n"
    result = await box.run(["python3", "-c", burn])
    assert result.ok
    assert result.usage is not None
    assert 0.2 < result.usage.user + result.usage.system < 3
    assert result.usage.max_rss is not None
    assert 80_000_000 < result.usage.max_rss < 200_000_000
    assert (await box.run(["true"])).usage.max_rss is None  # type: ignore[union-attr]  # below the worker's own: not known


# --- output


async def test_output_of_every_shape_arrives_as_it_was(box: Box) -> None:
    assert (await box.run(["true"])).stdout == ""
    assert (await box.run("printf x")).stdout == "x"
    assert (await box.run("printf 'a\\nb'")).stdout == "a\nb"
    handle = await box.start("printf 'nul\\000 invalid\\377 utf\\303\\274'")
    data = b"".join([event.data async for event in handle.events() if isinstance(event, Output)])
    assert data == b"nul\x00 invalid\xff utf\xc3\xbc"
    assert (await handle).stdout == "nul\x00 invalid\ufffd utfü"


async def test_both_streams_come_in_the_order_in_which_they_were_read(box: Box) -> None:
    handle = await box.start("for i in 1 2 3; do echo o$i; sleep 0.05; echo e$i >&2; sleep 0.05; done")
    assert [line.text async for line in handle.lines()] == ["o1", "e1", "o2", "e2", "o3", "e3"]


async def test_a_program_that_closes_its_output_early_goes_on(box: Box) -> None:
    result = await box.run("echo before; exec >&- 2>&-; sleep 0.2; exit 5")
    assert (result.exit_code, result.stdout) == (5, "before\n")


async def test_long_output_is_told_by_head_and_tail_with_true_sizes(box: Box) -> None:
    result = await box.run("seq 1 100000")
    assert result.stdout_size == sum(len(str(n)) + 1 for n in range(1, 100_001))
    assert result.truncated
    assert result.stdout.startswith("1\n2\n3\n")
    assert result.stdout.endswith("99999\n100000\n")
    assert "bytes omitted" in result.stdout
    assert len(result.stdout) <= limits.RESULT_STREAM_MAX + 100


# --- what a step leaves behind


async def test_a_background_child_that_holds_the_pipe_does_not_hang_the_step(box: Box) -> None:
    result = await box.run("sleep 1000 & echo done")
    assert (result.exit_code, result.stdout, result.survivors) == (0, "done\n", 1)
    assert result.duration < 5
    again = await box.run("true")
    assert again.survivors == 0, "an earlier step's survivor is not this one's"
    await box.run("pkill -9 -f 'sleep 1000'; true")


async def test_kill_background_leaves_no_survivor(box: Box) -> None:
    result = await box.run(
        "sleep 1000 & setsid sleep 1000 & nohup sleep 1000 >/dev/null 2>&1 & echo done", kill_background=True
    )
    assert (result.exit_code, result.survivors) == (0, 0)
    assert box.worker.descendants() == []


async def test_a_survivor_may_go_on_printing_and_does_not_die_of_it(box: Box, worker: WorkerProcess) -> None:
    script = "(while :; do echo noise; echo alive >> beats; sleep 0.02; done) & echo started"
    result = await box.run(script)
    assert result.survivors >= 1
    beats = worker.work / "beats"
    size = beats.stat().st_size if beats.exists() else 0
    await wait_until(lambda: beats.stat().st_size > size + 60, "it lives on, though its output goes nowhere")
    handle = await box.start("sleep 1000")
    await wait_until(lambda: "sleep 1000" in box.worker.descendants(), "another step runs")
    assert await handle.cancel(grace=0) is True
    size = beats.stat().st_size
    await wait_until(lambda: beats.stat().st_size > size, "cancelling another step did not touch it")
    await box.run("pkill -9 -f 'echo noise'; true")
    await wait_until(lambda: not worker.descendants(), "it is gone")


RUNAWAYS = {
    "a plain child": "sleep 1000 & wait",
    "setsid": "setsid sleep 1000 & setsid sh -c 'sleep 1000; true' & wait",
    "nohup": "nohup sleep 1000 >/dev/null 2>&1 & wait",
    "a double fork": "(setsid sh -c 'setsid sleep 1000 & sleep 1000 & wait' &) ; sleep 1000",
    "an empty environment": "env -i setsid sh -c '(sleep 1000 &) ; exec sleep 1000' & wait",
    "TERM ignored by a daemon": "(setsid sh -c 'trap \"\" TERM; while :; do sleep 0.1; done' &) ; sleep 1000",
}


@pytest.mark.parametrize("how", RUNAWAYS)
@pytest.mark.parametrize("end", ["timeout", "cancel"])
async def test_nothing_gets_away(box: Box, how: str, end: str) -> None:
    handle = await box.start(RUNAWAYS[how], timeout=0.6 if end == "timeout" else 60)
    await wait_until(lambda: any("sleep" in line for line in box.worker.descendants()), "it runs")
    if end == "cancel":
        assert await handle.cancel(grace=0.2) is True
    result = await handle
    assert result.cause == ("timeout" if end == "timeout" else "cancelled")
    assert result.survivors == 0
    assert box.worker.descendants() == []


async def test_a_daemon_whose_main_thread_has_ended_does_not_get_away(box: Box) -> None:
    """Such a process says Z in /proc, as the dead do, while its other threads go on."""
    script = (
        "import ctypes, os, threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "print(os.getpid(), flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    handle = await box.start('setsid -f python3 -c "$0"; sleep 1000'.replace("$0", script))
    pid = int((await anext(handle.lines())).text)
    stat = Path(f"/proc/{pid}/stat")
    await wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "its main thread has ended")
    assert await handle.cancel(grace=0) is True
    assert not stat.exists()


async def test_two_thousand_children_are_gone_after_a_cancel(box: Box) -> None:
    handle = await box.start("i=0; while [ $i -lt 2000 ]; do sleep 1000 & i=$((i+1)); done; echo all; wait")
    async for line in handle.lines():
        if line.text == "all":
            break
    assert await handle.cancel(grace=0) is True
    assert box.worker.descendants() == []


async def test_a_step_that_deletes_its_working_directory_hurts_nobody(box: Box, worker: WorkerProcess) -> None:
    (worker.work / "doomed").mkdir()
    assert (await box.run("rm -rf ../doomed; echo gone", cwd="/work/doomed")).stdout == "gone\n"
    await rejected(box, "pwd", "does not exist", cwd="/work/doomed")
    assert (await box.run("true")).ok


async def test_a_step_that_exhausts_its_file_descriptors_hurts_nobody(box: Box) -> None:
    script = (
        "import os\nfds = []\ntry:\n    while True: fds.append(os.open('/dev/null', 0))\nexcept OSError as e: print(e.errno)"
    )
    assert (await box.run(["python3", "-c", script])).stdout == "24\n"
    assert (await box.run("true")).ok


async def test_a_step_that_fills_the_disk_is_told_and_the_next_one_runs(box: Box, tmp_path: Path) -> None:
    skip_without("root", os.geteuid() == 0, "a small file system can only be mounted by root")
    small = tmp_path / "small"
    small.mkdir()
    mounted = await box.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)])
    if not mounted.ok:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr}")
    try:
        result = await box.run(f"cat /dev/zero > {small}/file")
        assert result.exit_code != 0
        assert "No space left" in result.stderr
        assert (await box.run("echo still here", cwd=str(small))).stdout == "still here\n"
    finally:
        await box.run(["umount", str(small)])


async def test_a_thousand_steps_leave_nothing_behind(box: Box, worker: WorkerProcess) -> None:
    async def warm_up(count: int) -> None:
        handles = [await box.start("echo out; echo err >&2") for _ in range(count)]
        for handle in handles:
            assert (await handle).ok

    def footprint() -> tuple[int, int, int]:
        status = Path(f"/proc/{worker.pid}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        return len(list(Path(f"/proc/{worker.pid}/fd").iterdir())), int(fields["Threads"]), int(fields["VmRSS"].split()[0])

    await warm_up(100)
    fds, threads, memory = footprint()
    await warm_up(1000)
    fds_after, threads_after, memory_after = footprint()
    assert (fds_after, threads_after) == (fds, threads)
    assert memory_after - memory < 3 * 1024, f"grew by {memory_after - memory} KiB"
    await wait_until(lambda: not _zombies_of(worker.pid), "there is no zombie")


def _zombies_of(parent: int) -> list[str]:
    zombies = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent_of_it = stat.read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(parent_of_it) == parent:
                zombies.append(stat.parent.name)
    return zombies
