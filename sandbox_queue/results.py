"""Waiting for results: one pub/sub connection per process, however many steps are awaited.

A message only says that a result is there; the result itself is a key. So a lost message costs time, never a result:
everybody who waits also looks every few seconds, and after each reconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import OrderedDict, deque
from types import TracebackType
from typing import Any, Self

from redis import exceptions as redis_errors
from redis.asyncio.connection import AbstractConnection

from sandbox_queue import jobs, keys, limits
from sandbox_queue.broker import Broker
from sandbox_queue.errors import ResultExpired, StepNotFound
from sandbox_queue.models import StepResult
from sandbox_queue.wire import Command, persist

log = logging.getLogger("sandbox_queue.results")

RECENT = 1024  # steps remembered per sandbox that ended before anybody waited: all that are enqueued and not yet awaited
IDLE_CHANNELS = 1024  # sandboxes nobody waits for at the moment whose channel is kept: most will be waited for again


class _Channel:
    """What is known of one sandbox's `done` channel."""

    __slots__ = ("recent", "subscribed", "subscription", "waiting")

    def __init__(self) -> None:
        self.subscribed = asyncio.Event()  # Redis has confirmed it, on the connection that is open now
        self.subscription: object = None  # a new one for each time it did
        self.recent: deque[int] = deque(maxlen=RECENT)  # steps that ended before anybody waited for them
        self.waiting: dict[int, set[asyncio.Event]] = {}  # step number -> those who want to know


class Results:
    """`async with Results(broker) as results: await results.wait(sandbox, seq, step_id)`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._channels: OrderedDict[str, _Channel] = OrderedDict()
        self._connection: AbstractConnection | None = None
        self._wanted = asyncio.Event()  # somebody waits: the connection is opened when first needed
        # Not a TaskGroup: it would wrap whatever a service raises within `connect()` into an ExceptionGroup.
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._listener = asyncio.get_running_loop().create_task(self._listen(), name="results")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])

    def subscription(self, sandbox: str) -> object:
        """What to hand to `wait` for a step that is enqueued after this call; None while nobody listens to that sandbox."""
        channel = self._channels.get(keys.DONE.of(sandbox))
        return channel.subscription if channel is not None and channel.subscribed.is_set() else None

    async def wait(self, sandbox: str, seq: int, step_id: str, subscription: object = None) -> StepResult:
        """The result of a step, as soon as it is there. Who has been listening since before the step was enqueued, as
        `subscription` says, would have been told of its end, and need not look first.

        Raises:
            ResultExpired: it has ended, and its result is no longer kept.
            StepNotFound: there never was such a step.
            BrokerUnavailable: the broker was away for longer than `outage_patience`.
        """
        name = keys.DONE.of(sandbox)
        channel = self._channels.setdefault(name, _Channel())
        self._channels.move_to_end(name)
        told = asyncio.Event()
        channel.waiting.setdefault(seq, set()).add(told)
        try:
            await self._subscribe(name, channel)
            # Only now: a result that came before the subscription is found by this look, a later one by its message.
            look = self.peek
            if subscription is not None and subscription is channel.subscription and seq not in channel.recent:
                look = self._nothing_yet
            while (result := await look(sandbox, seq, step_id)) is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(limits.LOOK_EVERY):
                        await told.wait()
                look = self._fetch if told.is_set() else self.peek
                told.clear()
            return result
        finally:
            channel.waiting[seq].discard(told)
            if not channel.waiting[seq]:
                del channel.waiting[seq]
            await self._forget_idle()

    async def _nothing_yet(self, sandbox: str, seq: int, step_id: str) -> None:
        """The first look of who need not look."""

    async def _fetch(self, sandbox: str, seq: int, step_id: str) -> StepResult | None:
        """What `peek` does, for who was told that the result is there: a plain read instead of a transaction."""
        record = await persist(
            lambda: self._broker.wire.one(*_read_result(sandbox, seq)),
            patience=self._broker.settings.outage_patience,
            doing=f"fetching the result of step {step_id} of sandbox {sandbox}",
        )
        return jobs.decode_result(record, sandbox, step_id) if record else await self.peek(sandbox, seq, step_id)

    async def peek(self, sandbox: str, seq: int, step_id: str) -> StepResult | None:
        """The result if it is there, None while the step is queued or running. Raises as `wait` does."""
        look = (
            _read_result(sandbox, seq),
            ("EXISTS", keys.JOB.of(sandbox, seq), keys.IN_PROGRESS.of(sandbox, seq)),
        )
        record, alive = await persist(
            lambda: self._broker.wire.transaction(*look),
            patience=self._broker.settings.outage_patience,
            doing=f"looking for the result of step {step_id} of sandbox {sandbox}",
        )
        if record:
            return jobs.decode_result(record, sandbox, step_id)
        if alive:
            return None
        last = await self._broker.wire.one("HGET", keys.SEQUENCE.of(sandbox), "seq")
        if last is not None and int(last) >= seq:
            raise ResultExpired(
                sandbox, step_id, f"its result is no longer kept (results stay for {self._broker.settings.result_ttl:g} s)"
            )
        raise StepNotFound(sandbox, step_id, "Redis knows of no such step (or was restarted without persistence)")

    async def _subscribe(self, name: str, channel: _Channel) -> None:
        if channel.subscribed.is_set():
            return
        self._wanted.set()
        if self._connection is not None:
            with contextlib.suppress(redis_errors.RedisError, OSError):  # the listener sees the same, and subscribes anew
                await self._connection.send_command("SUBSCRIBE", name, check_health=False)
        # No longer than a look's time: without the broker it is `peek` that decides how much patience there is.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.LOOK_EVERY):
                await channel.subscribed.wait()

    async def _forget_idle(self) -> None:
        excess = len(self._channels) - IDLE_CHANNELS
        if excess <= 0:
            return
        for name in [name for name, channel in self._channels.items() if not channel.waiting][:excess]:
            del self._channels[name]
            if self._connection is not None:
                with contextlib.suppress(redis_errors.RedisError, OSError):
                    await self._connection.send_command("UNSUBSCRIBE", name, check_health=False)

    async def _listen(self) -> None:
        """Keep one subscribed connection open, for as long as anybody has ever waited."""
        await self._wanted.wait()
        while True:
            connection = self._broker.address.connection()
            try:
                await connection.connect()  # type: ignore[no-untyped-call]  # redis-py has left this one untyped
                self._connection = connection
                if self._channels:
                    await connection.send_command("SUBSCRIBE", *self._channels, check_health=False)
                while True:
                    self._receive(await connection.read_response(disable_decoding=True))
            except (redis_errors.RedisError, OSError) as error:
                log.debug("the connection that waits for results broke: %s", error)
            except Exception:  # this loop must live: without it, everybody waits for their next look
                log.exception("listening for results failed")
            finally:
                self._connection = None
                for channel in self._channels.values():
                    channel.subscribed.clear()
                await connection.disconnect(nowait=True)
            await asyncio.sleep(random.uniform(0.05, 0.25))

    def _receive(self, message: Any) -> None:
        kind, name, value = message
        channel = self._channels.get(name.decode("utf-8", "replace"))
        if channel is None:
            return
        if kind == b"subscribe":
            channel.subscribed.set()
            channel.subscription = object()
            everybody = [event for events in channel.waiting.values() for event in events]
            for event in everybody:  # what happened while nobody listened
                event.set()
        elif kind == b"message" and value.isdigit() and len(value) <= keys.SEQ_DIGITS:
            seq = int(value)
            if seq not in channel.waiting:
                channel.recent.append(seq)
            for event in channel.waiting.get(seq, ()):
                event.set()


def _read_result(sandbox: str, seq: int) -> Command:
    """GETRANGE, not GET: a sandbox can write as much as it likes, and we read as much as we like."""
    return ("GETRANGE", keys.RESULT.of(sandbox, seq), 0, limits.RESULT_WIRE_MAX - 1)
