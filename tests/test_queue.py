"""A step's way through the queue: order, repeated ids, cancelling, results."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_queue import Step, StepResult
from sandbox_queue.broker import Address
from sandbox_queue.client import SandboxQueue
from sandbox_queue.workers.loop import Running
from tests.conftest import SANDBOX
from tests.kit import succeed, working


async def test_a_step_is_run_and_its_result_comes_back(queue: SandboxQueue, worker: Address) -> None:
    async with working(worker, SANDBOX, succeed):
        handle = await queue.enqueue(SANDBOX, Step.run("true"))
        result = await handle
    assert result.ok
    assert (result.sandbox_id, result.step_id) == (SANDBOX, "1")
