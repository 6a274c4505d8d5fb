"""The worker's side of the queue: claim the head, hand it to a handler, finish it, claim the next.

A sandbox's Redis user may not run scripts, so these are plain commands in transactions, each of which may be repeated
after a lost reply. What they rest on:

- A claim is `SET in-progress <incarnation> NX GET`. Nothing came back: it is ours. Our own incarnation came back: ours,
  and the reply got lost. Another's: a former worker started it; it is `lost`, and never run again.
- A result is `SET … NX`: the first writer wins, be it a worker or whoever declares the step lost.
- Finish of a step, claim of the next and a look at what follows are one transaction: one round trip per step.
- Hints carry no id. They only say "look", so a lost one costs a few seconds and no order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sandbox_queue import __version__, jobs, keys, limits
from sandbox_queue.errors import BrokerUnavailable, InvalidStep
from sandbox_queue.models import Shutdown, Step, StepResult
from sandbox_queue.stream import EventWriter, StepOutput
from sandbox_queue.wire import Command, ConnectionLost, Wire, persist
from sandbox_queue.workers.kernel import OwnMemory

log = logging.getLogger("sandbox_queue.worker")

STOP_PATIENCE = 5.0  # for delivering the last result when the worker itself is told to stop
_LONE = re.compile("[\ud800-\udfff]")  # what was not UTF-8 in a job's id


class Abandoned(Exception):
    """No launcher has looked after this sandbox for long, and no step has come either."""


@dataclass(eq=False, slots=True)
class Claim:
    """A job at the head of the queue that we have tried to claim."""

    job: str
    suffix: str  # what follows "<sandbox>:" in the job's id, normally the padded number
    owner: str  # the incarnation that has it: ours, or that of a worker before or beside us
    payload: bytes | None  # None: it expired in the queue, or was cancelled between our look and our claim
    at_ms: int = field(default_factory=jobs.now_ms)


@dataclass(eq=False, slots=True)
class Running:
    """A step under way, as its handler sees it. When the handler is cancelled, `grace` says how gently to end it."""

    step: Step
    step_id: str
    output: StepOutput
    grace: float | None = None
    task: asyncio.Task[StepResult] | None = None


Handler = Callable[[Running], Awaitable[StepResult]]


class Loop:
    """Consumes one sandbox's queue until a shutdown step, or until cancelled.

    `wire` and `waiting` are two connections to the same broker: the second one blocks.
    """

    def __init__(
        self,
        wire: Wire,
        waiting: Wire,
        sandbox: str,
        handler: Handler,
        *,
        concurrency: int = 1,
        result_ttl: float = limits.RESULT_TTL,
        heartbeat_every: float = limits.HEARTBEAT_EVERY,
        heartbeat_ttl: float = limits.HEARTBEAT_TTL,
        patience: float = limits.OUTAGE_MAX,
        abandoned_after: float = math.inf,
        memory: OwnMemory | None = None,
    ) -> None:
        self.incarnation = uuid.uuid4().hex
        self._wire = wire
        self._waiting = waiting
        self._sandbox = sandbox
        self._queue = keys.QUEUE.of(sandbox)
        self._handler = handler
        self._lanes = concurrency
        self._result_ttl = result_ttl
        self._heartbeat_every = heartbeat_every
        self._heartbeat_ttl = heartbeat_ttl
        self._patience = patience
        self._abandoned_after = abandoned_after
        self._memory = memory or OwnMemory()
        self._needed_at = time.monotonic()  # when there last was a step, or a launcher that might send one
        self._hint = asyncio.Event()  # something may have changed: look at the queue
        self._seen: list[str] = []  # what the queue held when the last hint came, if no step has ended since
        self._taken: dict[str, Running | None] = {}  # jobs that a lane is busy with; the step once it runs
        self._closing = False  # a shutdown step was claimed: nothing after it is
        self._others: dict[str, float] = {}  # incarnation of another worker -> when its heartbeat was last seen

    async def run(self) -> None:
        """Work until a shutdown step has been finished.

        Cancelling ends the running step, delivers its result within a bound, and claims nothing more.

        Raises:
            BrokerUnavailable: the broker stayed away for longer than `patience`, counted from the end of the last step.
            Abandoned: neither launcher nor step for `abandoned_after` seconds.
        """
        # The writer never gives up: it is for the step's end to say for how long a result is worth waiting.
        async with EventWriter(self._wire, self._sandbox, patience=math.inf) as writer:
            await self._beat(self._patience)
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(self._heartbeat()), tasks.create_task(self._listen())]
                try:
                    async with asyncio.TaskGroup() as lanes:
                        for _ in range(self._lanes):
                            lanes.create_task(self._lane(writer))
                finally:
                    for helper in helpers:
                        helper.cancel()

    async def say_farewell(self, code: int, reason: str) -> None:
        """Leave exit code and reason where the heartbeat was, for whoever wonders. Best effort, within a second."""
        last = jobs.dumps({"incarnation": self.incarnation, "exit": {"code": code, "reason": reason}, "at": jobs.now_ms()})
        with contextlib.suppress(ConnectionLost, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._wire.call(("SET", keys.HEARTBEAT.of(self._sandbox), last, "PX", round(limits.FAREWELL_TTL * 1000)))

    async def _lane(self, writer: EventWriter) -> None:
        """One step after the other. Several lanes take from the same queue, each the first job that none has."""
        ahead = await self._look()
        claim: Claim | None = None
        while True:
            job = self._free(ahead)
            if claim is None and job is not None:
                self._taken[job] = None
                claim, ahead = await self._claim(job)
                if claim is None:  # it was not ours: what follows it may be
                    continue
            if claim is None:
                if self._closing:
                    return
                await self._hint.wait()
                self._hint.clear()
                ahead, self._seen = self._seen or await self._look(), []
            elif self._closing:  # another lane got the shutdown step that comes before this one
                await self._release(claim)
                claim, ahead = None, []
            elif claim.owner == self.incarnation or not await self._is_alive(claim.owner):
                claim, ahead = await self._process(claim, ahead, writer)
            else:  # another worker is at it; the head is the head, so we wait
                del self._taken[claim.job]
                claim = None
                await asyncio.sleep(self._heartbeat_every)
                ahead = await self._look()

    async def _process(self, claim: Claim, ahead: list[str], writer: EventWriter) -> tuple[Claim | None, list[str]]:
        """Bring one claimed job to its one result, and claim the next in the same breath."""
        interrupted: asyncio.CancelledError | None = None
        output: StepOutput | None = None
        step_id = keys.default_step_id(claim.suffix)
        started = self._needed_at = time.monotonic()
        try:
            if claim.owner != self.incarnation:
                result = StepResult(cause="lost", error="the worker that started it is gone; it is not run again")
            elif claim.payload is None:
                result = StepResult(cause="lost", error="it expired in the queue before it was started; enqueue it again")
            else:
                step = jobs.decode_job(claim.payload)
                step_id = step.step_id or step_id
                output = StepOutput(writer, keys.default_step_id(claim.suffix))
                running = Running(step, step_id, output)
                self._taken[claim.job] = running
                result, interrupted = await self._handle(running, claim.job)
        except InvalidStep as error:
            result = StepResult(cause="rejected", error=str(error)[: limits.FAILURE_TAIL])
        self._needed_at = time.monotonic()
        duration = result.duration or self._needed_at - started
        result = msgspec.structs.replace(result, step_id=step_id, sandbox_id=self._sandbox, duration=duration)
        following = None if interrupted else self._free(ahead)
        if following is not None:
            self._taken[following] = None
        if interrupted is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_PATIENCE):
                    await self._finish(claim, result, output, None)
            raise interrupted
        answer = await self._finish(claim, result, output, following)
        del self._taken[claim.job]
        self._seen = []
        if self._lanes > 1:
            self._hint.set()  # another lane may have room for what this one saw
        return answer

    async def _handle(self, running: Running, job: str) -> tuple[StepResult, asyncio.CancelledError | None]:
        """Call the handler; returns how it ended, and whether we ourselves were cancelled meanwhile."""
        if isinstance(running.step, Shutdown):
            self._closing = True
            while set(self._taken) != {job}:
                await self._hint.wait()
                self._hint.clear()
            return StepResult(cause="exit", exit_code=0), None
        interrupted = None
        task = running.task = asyncio.ensure_future(self._handler(running))
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:  # the worker is to stop: the step ends first, and its result is delivered
            interrupted = error
            task.cancel()
            await asyncio.wait([task])
        if task.cancelled():
            return StepResult(cause="cancelled", error="cancelled while it ran"), interrupted
        if (failure := task.exception()) is not None:
            log.error("the handler failed", exc_info=failure, extra={"sandbox": self._sandbox, "step": running.step_id})
            message = f"the worker failed: {type(failure).__name__}: {failure}"
            return StepResult(cause="infra", error=message[: limits.FAILURE_TAIL]), interrupted
        return task.result(), interrupted

    # --- the queue: each of these may be repeated after a lost reply

    async def _look(self) -> list[str]:
        (ahead,) = await self._transact("looking at the queue", self._look_command())
        return _names(ahead)

    async def _claim(self, job: str) -> tuple[Claim | None, list[str]]:
        suffix = self._suffix(job)
        if suffix is None:
            log.error("job %s is not of this sandbox: removed", job, extra={"sandbox": self._sandbox})
            _, ahead = await self._transact(
                "removing a job", ("ZREM", self._queue, job.encode("utf-8", "surrogateescape")), self._look_command()
            )
            del self._taken[job]
            return None, _names(ahead)
        commands = (*self._claim_commands(suffix), self._look_command())
        owner, payload, ahead = await self._transact("claiming a step", *commands)
        return self._claimed(job, suffix, owner, payload), _names(ahead)

    async def _release(self, claim: Claim) -> None:
        """Give back what was claimed and not started."""
        if claim.owner == self.incarnation:
            key = keys.IN_PROGRESS.for_suffix(self._sandbox, claim.suffix)
            await self._transact("giving back a step", ("DEL", key))
        del self._taken[claim.job]
        self._hint.set()

    async def _finish(
        self, claim: Claim, result: StepResult, output: StepOutput | None, following: str | None
    ) -> tuple[Claim | None, list[str]]:
        events: list[Command] = []
        if output is not None:
            events = await self._close(output)
            result = msgspec.structs.replace(
                result,
                stdout_size=output.sizes["stdout"],
                stderr_size=output.sizes["stderr"],
                first_event_id=output.first_event_id,
                last_event_id=output.last_event_id,
            )
        suffix = self._suffix(following) if following is not None else None
        record = jobs.encode_result(claim.job, self._queue, result, claim.at_ms)
        replies = await self._transact(
            "delivering a result",
            *events,
            ("SET", keys.RESULT.for_suffix(self._sandbox, claim.suffix), record, "NX", "PX", round(self._result_ttl * 1000)),
            ("PUBLISH", keys.DONE.of(self._sandbox), keys.default_step_id(claim.suffix)),
            ("ZREM", self._queue, claim.job),
            ("DEL", keys.JOB.for_suffix(self._sandbox, claim.suffix)),
            ("DEL", keys.IN_PROGRESS.for_suffix(self._sandbox, claim.suffix)),
            *(self._claim_commands(suffix) if suffix is not None else ()),
            self._look_command(),
            lenient=len(events),  # the sandbox may have ruined its own stream
        )
        ahead = _names(replies[-1])
        if following is None:
            return None, ahead
        if suffix is None:
            return await self._claim(following)
        return self._claimed(following, suffix, replies[-3], replies[-2]), ahead

    async def _close(self, output: StepOutput) -> list[Command]:
        try:
            async with asyncio.timeout(self._patience):
                return await output.close()
        except TimeoutError:
            raise BrokerUnavailable(
                f"the output of step {output.step_id} could not be delivered in {self._patience:g} s"
            ) from None

    def _claim_commands(self, suffix: str) -> tuple[Command, Command]:
        lifetime_ms = round(limits.QUEUED_TTL * 1000)  # as the job's own: with a shorter claim it could run twice
        return (
            ("SET", keys.IN_PROGRESS.for_suffix(self._sandbox, suffix), self.incarnation, "NX", "GET", "PX", lifetime_ms),
            ("GET", keys.JOB.for_suffix(self._sandbox, suffix)),
        )

    def _claimed(self, job: str, suffix: str, owner: bytes | None, payload: bytes | None) -> Claim:
        return Claim(job, suffix, self.incarnation if owner is None else owner.decode("utf-8", "replace"), payload)

    def _look_command(self) -> Command:
        return ("ZRANGE", self._queue, 0, self._lanes)  # those that the lanes may have, and one more

    def _free(self, ahead: list[str]) -> str | None:
        """The first job that no lane is busy with."""
        return None if self._closing else next((job for job in ahead if job not in self._taken), None)

    def _suffix(self, job: str) -> str | None:
        """What follows our prefix in a job's id; None if it is not ours, and then we may not even read it."""
        prefix = f"{self._sandbox}:"
        return job[len(prefix) :] or None if job.startswith(prefix) and not _LONE.search(job) else None

    async def _transact(self, doing: str, *commands: Command, lenient: int = 0, patience: float | None = None) -> list[Any]:
        return await persist(
            lambda: self._wire.transaction(*commands, lenient=lenient),
            patience=self._patience if patience is None else patience,
            doing=doing,
        )

    # --- liveness and hints

    async def _listen(self) -> None:
        """Wait for hints. Without one, look every few seconds: stock arq clients give none, and one may get lost."""
        # The look rides along: it is carried out the moment the hint comes, which spares an idle worker a round trip. Should
        # it be out of date when it is used, a claim comes to nothing: the result that is there already stays.
        commands = (("BLPOP", keys.WAKE.of(self._sandbox), limits.LOOK_EVERY), self._look_command())
        while True:
            try:
                _, ahead = await persist(
                    lambda: self._waiting.call(*commands), patience=self._patience, doing="waiting for hints"
                )
                self._seen = _names(ahead) if isinstance(ahead, list) else []
                await self._cancel_what_was_asked()
            except BrokerUnavailable:
                if not self._taken:
                    raise
            self._hint.set()
            await asyncio.sleep(0)  # the lane's claim goes out before our next wait

    async def _cancel_what_was_asked(self) -> None:
        running = {keys.default_step_id(self._suffix(job) or ""): it for job, it in self._taken.items() if it and it.task}
        if not running:
            return
        (graces,) = await self._transact("asking what is cancelled", ("HMGET", keys.CANCEL.of(self._sandbox), *running))
        for it, grace in zip(running.values(), graces, strict=True):
            if grace is not None and it.grace is None and it.task is not None:
                it.grace = _grace(grace)
                it.task.cancel()

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_every)
            await self._beat()
            idle = time.monotonic() - self._needed_at
            if not self._taken and idle > self._abandoned_after:
                raise Abandoned(f"no launcher and no step for {idle:.0f} s")

    async def _beat(self, patience: float = math.inf) -> None:
        """Say that we are alive, and learn in the same breath whether another worker is, and whether a launcher is."""
        beat = jobs.dumps(
            {
                "incarnation": self.incarnation,
                "version": __version__,
                "steps": [running.step_id for running in self._taken.values() if running],
                "memory": self._memory.now(),
                "at": jobs.now_ms(),
            }
        )
        before, lease = await self._transact(
            "the heartbeat",
            ("SET", keys.HEARTBEAT.of(self._sandbox), beat, "PX", round(self._heartbeat_ttl * 1000), "GET"),
            ("EXISTS", keys.LEASE.of(self._sandbox)),
            patience=patience,  # for ever, once we run: a step must not end because of an outage
        )
        if lease:
            self._needed_at = time.monotonic()
        with contextlib.suppress(msgspec.DecodeError):
            last = jobs.loads(before) if before is not None else {}
            if last.get("incarnation", self.incarnation) != self.incarnation and "exit" not in last:
                self._others[str(last["incarnation"])] = time.monotonic()

    async def _is_alive(self, incarnation: str) -> bool:
        if incarnation not in self._others:
            await self._beat()  # it may have come after our last one
        seen = self._others.get(incarnation)
        return seen is not None and time.monotonic() - seen < self._heartbeat_ttl


def _names(reply: list[bytes]) -> list[str]:
    return [name.decode("utf-8", "surrogateescape") for name in reply]


def _grace(text: bytes) -> float:
    with contextlib.suppress(ValueError):
        return min(max(float(text), 0.0), limits.HOUR)
    return 0.0
