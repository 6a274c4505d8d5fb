"""A step's way through the queue: order, repeated ids, cancelling, results."""

from __future__ import annotations

import asyncio
import sys

import pytest

from sandbox_queue import InvalidSpec, InvalidStep, ResultExpired, Step, StepNotFound, StepResult, keys
from sandbox_queue.address import Address
from sandbox_queue.client import SandboxQueue
from sandbox_queue.workers.loop import Running
from tests.conftest import SANDBOX
from tests.kit import Server, script_of, succeed, wait_until, working

CLIENT_WITH_A_WRONG_CLOCK = """
import asyncio, sys, time
url, name, minutes = sys.argv[1], sys.argv[2], float(sys.argv[3])
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + minutes * 60
time.time_ns = lambda: real_ns() + int(minutes * 60e9)
from sandbox_queue import SandboxQueue, Step
async def main():
    async with SandboxQueue.connect(url) as queue:
        print("ready", flush=True)
        sys.stdin.read(1)
        for i in range(250):
            await queue.enqueue("box-1", Step.run("true", step_id=f"{name}-{i}"))
asyncio.run(main())
"""

WAIT_ELSEWHERE = """
import asyncio, sys
from sandbox_queue import SandboxQueue
async def main():
    async with SandboxQueue.connect(sys.argv[1]) as queue:
        print("ready", flush=True)
        print((await queue.handle("box-1", sys.argv[2])).exit_code)
asyncio.run(main())
"""


class Recorder:
    """A handler that notes what it was given, and can be held up."""

    def __init__(self, *, hold: bool = False) -> None:
        self.started: list[str] = []
        self.release = asyncio.Event()
        if not hold:
            self.release.set()

    async def __call__(self, running: Running) -> StepResult:
        self.started.append(running.step_id)
        await self.release.wait()
        return StepResult(cause="exit", exit_code=0, stdout=script_of(running.step))


async def test_a_step_is_run_and_its_result_comes_back(queue: SandboxQueue, worker: Address) -> None:
    async with working(worker, SANDBOX, succeed):
        handle = await queue.enqueue(SANDBOX, Step.run("true"))
        result = await handle
    assert result.ok
    assert (result.sandbox_id, result.step_id) == (SANDBOX, "1")


async def test_steps_run_in_the_order_in_which_redis_accepted_them_whatever_the_clients_clocks_say(
    queue: SandboxQueue, worker: Address, server: Server
) -> None:
    minutes = {"a": -7, "b": 0, "c": 3, "d": 45}
    clients = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT_WITH_A_WRONG_CLOCK, server.url, name, str(offset),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )
        for name, offset in minutes.items()
    ]  # fmt: skip
    for client in clients:
        assert client.stdout is not None
        await client.stdout.readline()
    for client in clients:
        await client.communicate(b"x")
        assert client.returncode == 0
    recorder = Recorder()
    async with working(worker, SANDBOX, recorder):
        await (await queue.enqueue(SANDBOX, Step.run("true", step_id="last")))
    accepted = await queue.broker.wire.one("HGETALL", keys.STEPS.of(SANDBOX))
    numbers = {step.decode(): int(seq) for step, seq in zip(accepted[::2], accepted[1::2], strict=True)}
    assert len(recorder.started) == 1001
    assert recorder.started == sorted(numbers, key=numbers.__getitem__)
    for name in minutes:
        assert [s for s in recorder.started if s.startswith(f"{name}-")] == [f"{name}-{i}" for i in range(250)]


async def test_a_repeated_step_id_returns_the_first_ones_handle_before_while_and_after_it_runs(
    queue: SandboxQueue, worker: Address
) -> None:
    first = await queue.enqueue(SANDBOX, Step.run("first", step_id="build"))
    before = await queue.enqueue(SANDBOX, Step.run("second", step_id="build"))
    recorder = Recorder(hold=True)
    async with working(worker, SANDBOX, recorder):
        await wait_until(lambda: recorder.started, "the step runs")
        while_running = await queue.enqueue(SANDBOX, Step.run("third", step_id="build"))
        recorder.release.set()
        assert (await first).stdout == "first"
        after = await queue.enqueue(SANDBOX, Step.run("fourth", step_id="build"))
        for handle in (before, while_running, after):
            assert (await handle).stdout == "first"
    assert recorder.started == ["build"]


async def test_two_clients_that_race_with_one_step_id_get_one_step(
    queue: SandboxQueue, worker: Address, server: Server
) -> None:
    recorder = Recorder()
    async with SandboxQueue.connect(server.tcp_url) as other, working(worker, SANDBOX, recorder):
        for i in range(50):
            step = Step.run("x", step_id=f"race-{i}")
            ours, theirs = await asyncio.gather(queue.enqueue(SANDBOX, step), other.enqueue(SANDBOX, step))
            assert (await ours) == (await theirs)
    assert recorder.started == [f"race-{i}" for i in range(50)]


async def test_a_connection_that_breaks_while_enqueueing_enqueues_the_step_once(queue: SandboxQueue, worker: Address) -> None:
    recorder = Recorder()
    async with working(worker, SANDBOX, recorder):
        for _ in range(20):
            enqueueing = [asyncio.create_task(queue.enqueue(SANDBOX, Step.run("x"))) for _ in range(5)]
            await asyncio.sleep(0)
            connection = queue.broker.wire._connection
            if connection is not None:
                await connection.disconnect(nowait=True)
            for handle in await asyncio.gather(*enqueueing):
                await handle
    assert recorder.started == [str(n) for n in range(1, 101)]


async def test_a_queued_step_that_is_cancelled_never_starts(queue: SandboxQueue, worker: Address) -> None:
    handle = await queue.enqueue(SANDBOX, Step.run("never"))
    assert await handle.cancel() is True
    result = await handle
    assert (result.cause, result.exit_code) == ("cancelled", None)
    recorder = Recorder()
    async with working(worker, SANDBOX, recorder):
        await (await queue.enqueue(SANDBOX, Step.run("next")))
    assert recorder.started == ["2"]


async def test_a_running_step_that_is_cancelled_ends_as_cancelled_and_the_next_one_runs(
    queue: SandboxQueue, worker: Address
) -> None:
    recorder = Recorder(hold=True)
    async with working(worker, SANDBOX, recorder):
        handle = await queue.enqueue(SANDBOX, Step.run("long"))
        await wait_until(lambda: recorder.started, "the step runs")
        assert await handle.cancel() is True
        assert (await handle).cause == "cancelled"
        recorder.release.set()
        assert (await (await queue.enqueue(SANDBOX, Step.run("next")))).ok


async def test_the_handler_learns_the_grace_that_the_caller_gave(queue: SandboxQueue, worker: Address) -> None:
    graces: list[float | None] = []

    async def handler(running: Running) -> StepResult:
        try:
            await asyncio.Event().wait()
        finally:
            graces.append(running.grace)
        raise AssertionError

    async with working(worker, SANDBOX, handler) as loop:
        handle = await queue.enqueue(SANDBOX, Step.run("long"))
        await wait_until(lambda: any(loop._taken.values()), "the step runs")
        await handle.cancel(grace=2.5)
    assert graces == [2.5]


async def test_cancelling_a_step_that_has_ended_says_false_and_changes_nothing(queue: SandboxQueue, worker: Address) -> None:
    async with working(worker, SANDBOX, succeed):
        handle = await queue.enqueue(SANDBOX, Step.run("true"))
        before = await handle
        assert await handle.cancel() is False
        assert await handle == before


async def test_a_step_that_ends_by_itself_while_it_is_being_cancelled_was_not_cancelled(
    queue: SandboxQueue, worker: Address
) -> None:
    async def stubborn(running: Running) -> StepResult:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return StepResult(cause="exit", exit_code=3)
        raise AssertionError

    async with working(worker, SANDBOX, stubborn) as loop:
        handle = await queue.enqueue(SANDBOX, Step.run("x"))
        await wait_until(lambda: any(loop._taken.values()), "the step runs")
        assert await handle.cancel() is False
        assert (await handle).exit_code == 3


async def test_cancel_racing_with_claim_gives_one_result_that_both_sides_agree_on(queue: SandboxQueue, worker: Address) -> None:
    started: list[str] = []

    async def handler(running: Running) -> StepResult:
        started.append(running.step_id)
        await asyncio.sleep(0)
        return StepResult(cause="exit", exit_code=0)

    async with working(worker, SANDBOX, handler):
        for _ in range(100):
            handle = await queue.enqueue(SANDBOX, Step.run("x"))
            cancelled, result = await asyncio.gather(handle.cancel(), handle.result())
            assert cancelled == (result.cause == "cancelled")
            assert started.count(handle.step_id) <= 1
            if result.cause == "exit":
                assert handle.step_id in started


async def test_five_hundred_tasks_await_results_over_one_connection(queue: SandboxQueue, worker: Address) -> None:
    async with working(worker, SANDBOX, succeed):
        handles = await asyncio.gather(*(queue.enqueue(SANDBOX, Step.run("x")) for _ in range(500)))
        waiting = asyncio.gather(*handles)
        listeners = await queue.broker.wire.one("CLIENT", "LIST", "TYPE", "pubsub")
        results = await waiting
    assert len(listeners.splitlines()) <= 1
    assert {result.step_id for result in results} == {handle.step_id for handle in handles}


async def test_another_process_awaits_a_result_by_step_id(queue: SandboxQueue, worker: Address, server: Server) -> None:
    await queue.enqueue(SANDBOX, Step.run("x", step_id="shared"))
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WAIT_ELSEWHERE, server.url, "shared", stdout=asyncio.subprocess.PIPE
    )
    assert other.stdout is not None
    assert await other.stdout.readline() == b"ready\n"
    async with working(worker, SANDBOX, succeed):
        assert await other.stdout.read() == b"0\n"
    assert await other.wait() == 0


async def test_who_attaches_late_gets_the_same_result(queue: SandboxQueue, worker: Address) -> None:
    async with working(worker, SANDBOX, succeed):
        result = await (await queue.enqueue(SANDBOX, Step.run("x", step_id="early")))
    assert await queue.handle(SANDBOX, "early") == result
    assert (await queue.handle(SANDBOX, 1)).ok


async def test_a_result_arrives_although_the_connections_that_wait_for_it_were_killed(
    queue: SandboxQueue, worker: Address, server: Server
) -> None:
    recorder = Recorder(hold=True)
    async with working(worker, SANDBOX, recorder), Address(server.url).wire() as admin:
        handle = await queue.enqueue(SANDBOX, Step.run("x"))
        waiting = asyncio.create_task(handle.result())
        await wait_until(lambda: admin.one("PUBSUB", "NUMSUB", keys.DONE.of(SANDBOX)), "somebody waits")
        for _ in range(3):
            await admin.one("CLIENT", "KILL", "TYPE", "pubsub")
            await admin.one("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        recorder.release.set()
        assert (await waiting).ok


async def test_awaiting_an_expired_result_is_an_error_that_says_so(queue: SandboxQueue, worker: Address) -> None:
    async with working(worker, SANDBOX, succeed):
        handle = await queue.enqueue(SANDBOX, Step.run("x"))
        await handle
    await queue.broker.wire.one("DEL", keys.RESULT.of(SANDBOX, 1))
    with pytest.raises(ResultExpired, match="step 1 of sandbox box-1: its result is no longer kept"):
        await handle
    with pytest.raises(ResultExpired):
        await handle.cancel()


async def test_awaiting_a_step_that_never_was_is_an_error(queue: SandboxQueue) -> None:
    for step_id in ("nobody", "17"):
        with pytest.raises(StepNotFound, match=step_id) as caught:
            await queue.handle(SANDBOX, step_id)
        assert not isinstance(caught.value, ResultExpired)


async def test_a_step_that_expired_in_the_queue_is_lost_and_its_waiter_told(queue: SandboxQueue, worker: Address) -> None:
    handle = await queue.enqueue(SANDBOX, Step.run("x"))
    await queue.broker.wire.one("DEL", keys.JOB.of(SANDBOX, 1))
    async with working(worker, SANDBOX, succeed):
        assert (await (await queue.enqueue(SANDBOX, Step.run("next")))).ok
        result = await handle
    assert result.cause == "lost"
    assert "expired in the queue" in (result.error or "")


async def test_a_handler_that_raises_gives_a_result_and_the_next_step_runs(queue: SandboxQueue, worker: Address) -> None:
    async def broken(running: Running) -> StepResult:
        if running.step_id == "1":
            raise RuntimeError("something of ours")
        return StepResult(cause="exit", exit_code=0)

    async with working(worker, SANDBOX, broken):
        first, second = [await queue.enqueue(SANDBOX, Step.run("x")) for _ in range(2)]
        result = await first
        assert (result.cause, result.exit_code) == ("infra", None)
        assert "something of ours" in (result.error or "")
        assert (await second).ok


async def test_several_steps_run_at_once_where_the_sandbox_allows_it_and_start_in_order(
    queue: SandboxQueue, worker: Address
) -> None:
    recorder = Recorder(hold=True)
    async with working(worker, SANDBOX, recorder, concurrency=3):
        handles = [await queue.enqueue(SANDBOX, Step.run("x")) for _ in range(7)]
        await wait_until(lambda: len(recorder.started) == 3, "three run at once")
        recorder.release.set()
        assert all(result.ok for result in await asyncio.gather(*handles))
    assert recorder.started[:3] == ["1", "2", "3"]
    assert sorted(recorder.started, key=int) == [str(n) for n in range(1, 8)]


@pytest.mark.parametrize("lanes", [1, 3])
async def test_a_shutdown_step_ends_the_loop_after_what_was_enqueued_before_it(
    queue: SandboxQueue, worker: Address, lanes: int
) -> None:
    recorder = Recorder()
    handles = [await queue.enqueue(SANDBOX, Step.run("x")) for _ in range(5)]
    last = await queue.enqueue(SANDBOX, Step.shutdown())
    after = await queue.enqueue(SANDBOX, Step.run("after"))
    async with working(worker, SANDBOX, recorder, concurrency=lanes):
        assert all(result.ok for result in await asyncio.gather(*handles, last))
    assert sorted(recorder.started) == ["1", "2", "3", "4", "5"]
    assert await after.cancel() is True


async def test_stopping_the_worker_ends_the_running_step_as_cancelled(queue: SandboxQueue, worker: Address) -> None:
    recorder = Recorder(hold=True)
    async with working(worker, SANDBOX, recorder):
        handle = await queue.enqueue(SANDBOX, Step.run("x"))
        await wait_until(lambda: recorder.started, "the step runs")
    assert (await handle).cause == "cancelled"


async def test_what_a_service_raises_within_its_connection_comes_out_as_it_is(server: Server) -> None:
    async def service() -> None:
        async with SandboxQueue.connect(settings=server.settings()) as queue:
            await queue.enqueue(SANDBOX, Step.run("x"))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await service()


async def test_what_is_not_a_sandbox_id_or_step_is_refused_before_redis_hears_of_it(queue: SandboxQueue) -> None:
    for bad in ("", "a", "a b c d", "x" * 64, "box:1", "box*1", "-box", "box\n", None, 5):
        with pytest.raises(InvalidSpec) as caught:
            await queue.enqueue(bad, Step.run("x"))  # type: ignore[arg-type]
        assert caught.value.field == "id"
    with pytest.raises(InvalidStep, match=r"Step\.run"):
        await queue.enqueue(SANDBOX, "make test")  # type: ignore[arg-type]
    with pytest.raises(InvalidStep):
        queue.handle(SANDBOX, "a b")
    assert await queue.broker.wire.one("DBSIZE") == 0
