"""A step that was enqueued, from whichever process: await its result, follow its output, cancel it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import TYPE_CHECKING, Any

from sandbox_queue import enqueue, stream
from sandbox_queue.errors import StepNotFound
from sandbox_queue.events import Cursor, Event, Line
from sandbox_queue.lines import LineAssembler
from sandbox_queue.models import StepResult
from sandbox_queue.wire import persist

if TYPE_CHECKING:
    from sandbox_queue.client import SandboxQueue


class Handle:
    """Refers to one step; holds no state of its own, so any number may refer to the same step."""

    def __init__(
        self,
        queue: SandboxQueue,
        sandbox_id: str,
        step_id: str,
        *,
        seq: int | None = None,
        accepted_ms: int = 0,
        subscription: object = None,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.step_id = step_id
        self._queue = queue
        self._seq = seq
        self._accepted_ms = accepted_ms
        self._subscription = subscription

    def __repr__(self) -> str:
        return f"Handle({self.sandbox_id!r}, {self.step_id!r})"

    def __await__(self) -> Generator[Any, None, StepResult]:
        return self.result().__await__()

    async def result(self) -> StepResult:
        """Wait for the end. Cancelling this wait does not cancel the step.

        Raises:
            ResultExpired: the step has ended, and its result is no longer kept.
            StepNotFound: there never was such a step.
            BrokerUnavailable: the broker was away for longer than `outage_patience`.
        """
        # Good for one wait: who waits again may have been told already.
        subscription, self._subscription = self._subscription, None
        return await self._queue.results.wait(self.sandbox_id, await self._number(), self.step_id, subscription)

    async def cancel(self, *, grace: float = 5.0) -> bool:
        """End the step and wait until it has ended; False if it ended by itself before that.

        A step that is still queued never starts. A running one gets `grace` seconds between TERM and KILL.
        """
        seq = await self._number()
        broker = self._queue.broker
        answer = await persist(
            lambda: enqueue.cancel(
                broker.wire, self.sandbox_id, seq, self.step_id, grace=grace, result_ttl=broker.settings.result_ttl
            ),
            patience=broker.settings.outage_patience,
            doing=f"cancelling step {self.step_id} of sandbox {self.sandbox_id}",
        )
        if answer == "ended":
            return False
        # `unknown` too: it may have ended just now, or never existed, and the result's absence says which
        return (await self.result()).cause == "cancelled"

    async def events(self, since: Cursor | str | None = None) -> AsyncGenerator[Event, None]:
        """Everything the step prints, from the beginning or from a cursor, as it comes; ends with `Finished`.

        Raises:
            InvalidCursor: `since` is not a cursor.
        """
        cursor = None if since is None else Cursor.parse(since)
        seq = await self._number()
        async with self._queue.broker.address.wire() as wire:
            async for event in stream.follow(
                wire,
                self.sandbox_id,
                str(seq),
                cursor,
                lambda: self._queue.results.peek(self.sandbox_id, seq, self.step_id),
                accepted_ms=self._accepted_ms,
                patience=self._queue.broker.settings.outage_patience,
            ):
                yield event

    async def lines(self, since: Cursor | str | None = None) -> AsyncGenerator[Line, None]:
        """The same as text, a line at a time; bytes that are not UTF-8 are replaced."""
        assembler = LineAssembler(None if since is None else Cursor.parse(since))
        async for event in self.events(since):
            for line in assembler.feed(event):
                yield line

    async def _number(self) -> int:
        if self._seq is None:
            broker = self._queue.broker
            self._seq = await persist(
                lambda: enqueue.find(broker.wire, self.sandbox_id, self.step_id),
                patience=broker.settings.outage_patience,
                doing=f"looking for step {self.step_id} of sandbox {self.sandbox_id}",
            )
            if self._seq is None:
                raise StepNotFound(self.sandbox_id, self.step_id, "no step of that id was enqueued there")
        return self._seq
