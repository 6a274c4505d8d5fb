"""One step, exactly one end: this is the handler that the loop calls.

A `run` step's life: started, its output read as it comes, ended by itself, by its timeout, or by a cancel; then the last
of its output, what it used, what it left behind. File steps are performed in a process of their own, so that a bad
regular expression or a dead disk costs the step and not the worker.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from sandbox_queue import limits
from sandbox_queue.models import ErrorCode, Run, Step, StepResult, Usage
from sandbox_queue.workers import kernel
from sandbox_queue.workers.forked import Answer, fork
from sandbox_queue.workers.loop import Running
from sandbox_queue.workers.outcome import FileError, Outcome
from sandbox_queue.workers.output import Budget, Pipe
from sandbox_queue.workers.process import NotStarted, spawn
from sandbox_queue.workers.reaper import Child, Exit, Reaper
from sandbox_queue.workers.tree import Forest, Tree

WORK = "/work"  # what steps call their directory, wherever it really is
GRACE = 5.0  # between TERM and KILL where the caller named none

Ended = Literal["exit", "timeout", "cancelled"]


@dataclass(frozen=True, slots=True)
class _End:
    """How a step's leader came to its end, and what else of it would not."""

    how: Ended
    exit: Exit
    unkillable: int = 0


class Runner:
    """Performs steps. One instance serves all lanes of a worker."""

    def __init__(
        self,
        reaper: Reaper,
        memory: kernel.OwnMemory,
        *,
        inherited: Mapping[bytes, bytes],
        work_dir: str = WORK,
        roots: Sequence[str] = (WORK, "/tmp"),  # noqa: S108  # the sandbox's, not ours
        output_max: int = limits.OUTPUT_MAX,
        grace: float = GRACE,
    ) -> None:
        self.forest = Forest(reaper)
        self._reaper = reaper
        self._inherited = inherited
        self._work_dir = work_dir
        self._roots = roots
        self._output_max = output_max
        self._grace = grace
        self._memory = memory
        self._oom = kernel.OomCounter()

    async def __call__(self, running: Running) -> StepResult:
        step = msgspec.structs.replace(running.step, cwd=self._real(running.step.cwd))
        if isinstance(step, Run):
            return await self._run(step, running)
        path = getattr(step, "path", None)
        if path is not None:
            step = msgspec.structs.replace(step, path=self._real(path))
        return await self._perform(step, running)

    def forward(self, number: int) -> None:
        """Pass a signal on to the leaders of all running steps."""
        for tree in self.forest.trees:
            tree.forward(number)

    def _real(self, path: str) -> str:
        """Where a path that the caller knows as `/work/…` really is; the same outside of the inprocess backend."""
        if path == WORK or path.startswith(f"{WORK}/"):
            return self._work_dir + path[len(WORK) :]
        return path

    async def _run(self, step: Run, running: Running) -> StepResult:
        started = time.monotonic()
        memory_floor = self._memory.floor_for_children()
        oom_before = self._oom.read()
        tree = self.forest.plant()
        try:
            process = spawn(step, self._inherited)
            child = self._reaper.expect(process.pid)
            tree.leader = process.pid
            budget = Budget(self._output_max)
            pipes = [
                Pipe(process.stdout, "stdout", running.output, budget),
                Pipe(process.stderr, "stderr", running.output, budget),
            ]
            try:
                end = await self._until_ended(child, tree, step, running)
                duration = time.monotonic() - started
                for pipe in pipes:
                    await pipe.drain()
                survivors = len(await tree.end(grace=0)) if step.kill_background else len(tree.members())
            finally:
                for pipe in pipes:
                    pipe.release()
        except NotStarted as error:
            return StepResult(cause="rejected", error=str(error))
        finally:
            tree.fell()
        oom_kills = self._oom.read() - oom_before
        out, err = (pipe.excerpt for pipe in pipes)
        return self._result(
            end,
            step,
            duration=duration,
            stdout=out.text(),
            stderr=err.text(),
            truncated=bool(out.omitted or err.omitted),
            usage=_usage(end.exit, memory_floor),
            oom_kills=oom_kills,
            survivors=survivors + end.unkillable if end.how != "exit" else survivors,
        )

    async def _perform(self, step: Step, running: Running) -> StepResult:
        """A file step."""
        from sandbox_queue.workers import files  # most sandboxes never need it, and it would cost their start-up

        started = time.monotonic()
        tree = self.forest.plant()
        try:
            pid, fd = fork(lambda: _answer(files.perform, step, self._roots))
            child = self._reaper.expect(pid)
            tree.leader = pid
            answer = Answer(fd)
            try:
                end = await self._until_ended(child, tree, step, running)
                if end.how == "exit" and end.exit.status == 0:
                    return self._answered(await answer.read(), running, time.monotonic() - started)
            finally:
                answer.close()
        finally:
            tree.fell()
        result = self._result(end, step, duration=time.monotonic() - started, oom_kills=0)
        if result.cause not in ("exit", "signal"):
            return msgspec.structs.replace(result, exit_code=None, signal=None)
        return StepResult(cause="infra", error=f"the process that performed it ended with status {end.exit.status}")

    def _answered(self, answer: bytes, running: Running, duration: float) -> StepResult:
        outcome = _decode_answer(answer)
        stderr = "".join(f"{note}\n" for note in outcome.notes)
        if stderr:
            running.output.put("stderr", stderr.encode("utf-8", "replace"))
        return StepResult(
            cause="exit",
            exit_code=0 if outcome.error is None else 1,
            duration=duration,
            error=outcome.error,
            error_code=outcome.code,
            content=outcome.content,
            truncated=outcome.truncated,
            file_size=outcome.file_size,
            stderr=stderr,
        )

    async def _until_ended(self, child: Child, tree: Tree, step: Step, running: Running) -> _End:
        """Wait for the leader, and see to its end should its time be up or somebody cancel."""
        try:
            async with asyncio.timeout(step.timeout):
                return _End("exit", await child.wait())
        except TimeoutError:
            how: Ended = "timeout"
            grace = self._grace
        except asyncio.CancelledError:
            how = "cancelled"
            grace = self._grace if running.grace is None else running.grace
        try:
            left = await tree.end(grace)
        except asyncio.CancelledError:  # once more, while we were being gentle: the worker itself has to go
            left = await tree.end(0)
        return _End(how, await child.wait(), len(left))

    def _result(self, end: _End, step: Step, **observed: object) -> StepResult:
        """Say what happened, in the one word `cause` and in the numbers that belong to it."""
        status = end.exit.status
        oom_kills = observed["oom_kills"]
        fields: dict[str, object] = {"exit_code": status if status >= 0 else None, "signal": -status if status < 0 else None}
        if end.how == "timeout":
            fields |= {"cause": "timeout", "timed_out": True, "error": f"timed out after {step.timeout:g} s"}
        elif end.how == "cancelled":
            fields |= {"cause": "cancelled", "error": "cancelled while it ran"}
        elif status == -signal.SIGKILL and oom_kills:
            fields |= {"cause": "oom", "error": "killed: the sandbox ran out of memory"}
        else:
            fields["cause"] = "exit" if status >= 0 else "signal"
        return StepResult(**fields, **observed)  # type: ignore[arg-type]  # assembled above, field by field


class _Answer(msgspec.Struct, omit_defaults=True):
    """What the process of a file step tells the worker."""

    content: str | None = None
    truncated: bool = False
    file_size: int | None = None
    notes: list[str] = []
    error: str | None = None
    code: ErrorCode | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


def _answer(perform: Callable[[Step, Sequence[str]], Outcome], step: Step, roots: Sequence[str]) -> bytes:
    try:
        outcome = perform(step, roots)
    except FileError as error:
        return msgspec.json.encode(_Answer(error=error.message[: limits.FAILURE_TAIL], code=error.code))
    answer = _Answer(outcome.content, outcome.truncated, outcome.file_size, outcome.notes)
    return msgspec.json.encode(answer)


def _usage(exit: Exit, memory_floor: int) -> Usage:  # noqa: A002  # the word for it
    max_rss = exit.usage.ru_maxrss * 1024
    return Usage(user=exit.usage.ru_utime, system=exit.usage.ru_stime, max_rss=max_rss if max_rss > memory_floor else None)
