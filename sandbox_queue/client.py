"""Where a service begins: connect, enqueue steps, get hold of steps that somebody else enqueued."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import AsyncIterator

from sandbox_queue import enqueue
from sandbox_queue.broker import Broker
from sandbox_queue.errors import InvalidSpec, InvalidStep
from sandbox_queue.handle import Handle
from sandbox_queue.models import SandboxSpec, Step
from sandbox_queue.results import Results
from sandbox_queue.settings import Settings, load
from sandbox_queue.wire import persist


class SandboxQueue:
    """A connection to the broker, shared by everything in this process that uses it."""

    def __init__(self, broker: Broker, results: Results) -> None:
        self.broker = broker
        self.results = results

    @staticmethod
    @contextlib.asynccontextmanager
    async def connect(redis_url: str | None = None, *, settings: Settings | None = None) -> AsyncIterator[SandboxQueue]:
        """Connect to `redis_url`, to what the settings say, or to a private server started for this block.

        Raises:
            BrokerUnavailable, BrokerDenied, BrokerUnsuitable: what is wrong with the broker, and what to do.
            InvalidSettings: an environment variable makes no sense.
        """
        async with Broker.open(settings or load(), redis_url) as broker, Results(broker) as results:
            yield SandboxQueue(broker, results)

    async def enqueue(self, sandbox_id: str, step: Step) -> Handle:
        """Put a step into a sandbox's queue. Steps run in the order in which Redis accepted them.

        A step id that was used before is not enqueued again: the handle is that of the first one, whether it is still
        queued, running or done. A broken connection is tried again, and still enqueues the step once.

        Raises:
            InvalidSpec: the sandbox id is malformed.
            InvalidStep: this is not a Step.
            BrokerUnavailable: the broker was away for longer than `outage_patience`; the step may have been accepted.
        """
        check_sandbox_id(sandbox_id)
        if not isinstance(step, Step):
            raise InvalidStep("step", f"is of type {type(step).__name__}", "build it with Step.run(…), Step.read_file(…), …")
        token = uuid.uuid4().hex
        subscription = self.results.subscription(sandbox_id)
        ticket = await persist(
            lambda: enqueue.enqueue(self.broker.wire, sandbox_id, step, token=token),
            patience=self.broker.settings.outage_patience,
            doing=f"enqueueing a step for sandbox {sandbox_id}",
        )
        return Handle(
            self,
            sandbox_id,
            ticket.step_id,
            seq=ticket.seq,
            accepted_ms=ticket.accepted_ms,
            subscription=subscription if ticket.created else None,
        )

    def handle(self, sandbox_id: str, step_id: str | int) -> Handle:
        """A handle of a step that was enqueued before, here or elsewhere. Nothing is asked of Redis yet."""
        check_sandbox_id(sandbox_id)
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", str(step_id)):
            raise InvalidStep("step_id", f"{str(step_id)[:80]!r} cannot be one", "give the id or number of an enqueued step")
        return Handle(self, sandbox_id, str(step_id))


def check_sandbox_id(sandbox_id: str) -> None:
    """Ids become key names and patterns of ACL rules, so nothing else may ever get that far."""
    if not isinstance(sandbox_id, str) or not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_-]{2,61}[a-zA-Z0-9]", sandbox_id):
        SandboxSpec.build(id=sandbox_id)
        raise InvalidSpec("id", "is missing", "give the id of a sandbox")
