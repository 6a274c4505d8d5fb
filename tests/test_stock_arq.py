"""Stock arq beside us: it sees our steps, feeds our queues, and may even consume them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from arq import ArqRedis
from arq.connections import RedisSettings, create_pool
from arq.jobs import Job, JobStatus
from arq.worker import Worker, func

from sandbox_queue import jobs, keys, limits
from sandbox_queue.address import Address
from sandbox_queue.client import SandboxQueue
from sandbox_queue.errors import StepNotFound
from sandbox_queue.models import Run, Step, StepResult
from sandbox_queue.workers.loop import Running
from tests.conftest import SANDBOX
from tests.kit import Server, succeed, wait_until, working

QUEUE = keys.QUEUE.of(SANDBOX)


@pytest.fixture
async def arq(server: Server) -> AsyncIterator[ArqRedis]:
    """arq's own client, with nothing of ours but the serializers."""
    where = RedisSettings(unix_socket_path=f"{server.directory}/s", password=server.password)
    pool = await create_pool(where, job_serializer=jobs.dumps, job_deserializer=jobs.loads, default_queue_name=QUEUE)
    yield pool
    await pool.aclose()


def job_of(arq: ArqRedis, seq: int) -> Job:
    return Job(keys.job_id(SANDBOX, seq), arq, _queue_name=QUEUE, _deserializer=jobs.loads)


async def feed(arq: ArqRedis, queue: SandboxQueue, job_id: str, *args: Any, function: str = "step") -> None:
    """arq's `enqueue_job`, and the hint that spares the test the worker's next look by itself."""
    assert await arq.enqueue_job(function, *args, _job_id=job_id, _queue_name=QUEUE)
    await hint(queue)


async def hint(queue: SandboxQueue) -> None:
    wire = queue.broker.wire
    await wire.transaction(("RPUSH", keys.WAKE.of(SANDBOX), "1"), ("EXPIRE", keys.WAKE.of(SANDBOX), 60))


async def echo(running: Running) -> StepResult:
    """A handler that says what it was asked to run."""
    assert isinstance(running.step, Run)
    return StepResult(cause="exit", exit_code=0, stdout=" ".join((running.step.command, *running.step.args)))


# --- it sees


async def test_a_queued_step_is_a_queued_job_of_arqs(queue: SandboxQueue, arq: ArqRedis) -> None:
    step = Step.run(["make", "test"], step_id="build")
    await queue.enqueue(SANDBOX, step)
    await queue.enqueue(SANDBOX, Step.run("true"))
    job = job_of(arq, 1)
    assert await job.status() == JobStatus.queued
    info = await job.info()
    assert info is not None
    assert (info.function, info.kwargs) == ("step", {})
    assert Step.from_dict(info.args[0]) == step
    assert await job.result_info() is None
    listed = await arq.queued_jobs(queue_name=QUEUE)
    assert [definition.job_id for definition in listed] == [keys.job_id(SANDBOX, 1), keys.job_id(SANDBOX, 2)]
    assert Step.from_dict(listed[0].args[0]) == step


async def test_a_running_step_is_a_job_in_progress_and_its_end_a_complete_one(
    queue: SandboxQueue, worker: Address, arq: ArqRedis
) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def handler(running: Running) -> StepResult:
        started.set()
        await release.wait()
        return StepResult(cause="exit", exit_code=3, stdout="done")

    async with working(worker, SANDBOX, handler):
        handle = await queue.enqueue(SANDBOX, Step.run("x"))
        await started.wait()
        job = job_of(arq, 1)
        assert await job.status() == JobStatus.in_progress
        release.set()
        ours = await handle
        theirs = await job.result(timeout=5, poll_delay=0.01)
    assert StepResult.from_dict(theirs) == ours
    assert (ours.exit_code, ours.stdout) == (3, "done")
    assert await job.status() == JobStatus.complete
    info = await job.result_info()
    assert info is not None
    assert (info.success, info.job_id, info.queue_name, *info.args) == (True, keys.job_id(SANDBOX, 1), QUEUE, "1")
    assert info.enqueue_time <= info.start_time <= info.finish_time
    assert await arq.queued_jobs(queue_name=QUEUE) == []
    assert keys.job_id(SANDBOX, 1) in {result.job_id for result in await arq.all_job_results()}


async def test_a_step_that_failed_or_was_cancelled_is_a_complete_job_and_raises_nothing(
    queue: SandboxQueue, worker: Address, arq: ArqRedis
) -> None:
    """What a command did is data; arq would raise what it finds in an unsuccessful result."""

    async def handler(running: Running) -> StepResult:
        raise ValueError("a bug of the worker's")

    cancelled = await queue.enqueue(SANDBOX, Step.run("x"))
    assert await cancelled.cancel()
    async with working(worker, SANDBOX, handler):
        await (await queue.enqueue(SANDBOX, Step.run("x")))
    assert (await job_of(arq, 1).result(timeout=5))["cause"] == "cancelled"
    assert (await job_of(arq, 2).result(timeout=5))["cause"] == "infra"


async def test_a_job_that_never_was_is_not_found(arq: ArqRedis) -> None:
    assert await job_of(arq, 9).status() == JobStatus.not_found


# --- it feeds


async def test_a_step_from_stock_arq_is_run_and_our_client_gets_its_result(
    queue: SandboxQueue, worker: Address, arq: ArqRedis
) -> None:
    async with working(worker, SANDBOX, echo):
        await feed(arq, queue, keys.job_id(SANDBOX, 7), Step.run(["make", "it"]).to_dict())
        result = await queue.handle(SANDBOX, 7)
    assert (result.stdout, result.step_id, result.sandbox_id) == ("make it", "7", SANDBOX)
    assert StepResult.from_dict(await job_of(arq, 7).result(timeout=5)) == result


async def test_a_step_object_needs_no_conversion_with_our_serializer(
    queue: SandboxQueue, worker: Address, arq: ArqRedis
) -> None:
    step = Step.run(["cat"], env={"A": "1"}, stdin=b"\xff\x00")
    seen: list[Step] = []

    async def handler(running: Running) -> StepResult:
        seen.append(running.step)
        return StepResult(cause="exit", exit_code=0)

    async with working(worker, SANDBOX, handler):
        await feed(arq, queue, keys.job_id(SANDBOX, 1), step)
        await feed(arq, queue, keys.job_id(SANDBOX, 2), step.to_dict())
        assert (await queue.handle(SANDBOX, 1)).ok
        assert (await queue.handle(SANDBOX, 2)).ok
    assert seen == [step, step]


async def test_a_step_from_stock_arq_is_found_without_a_hint(
    queue: SandboxQueue, worker: Address, arq: ArqRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """arq sends none, so the worker looks by itself now and then."""
    monkeypatch.setattr(limits, "LOOK_EVERY", 0.2)
    async with working(worker, SANDBOX, succeed):
        heartbeat = keys.HEARTBEAT.of(SANDBOX)
        await wait_until(lambda: queue.broker.wire.one("EXISTS", heartbeat), "the worker is up and has looked")
        assert await arq.enqueue_job("step", Step.run("x").to_dict(), _job_id=keys.job_id(SANDBOX, 1), _queue_name=QUEUE)
        assert (await queue.handle(SANDBOX, 1)).ok


@pytest.mark.parametrize("step_id", [None, "mine"])
async def test_what_a_step_from_stock_arq_prints_can_be_followed_by_its_number(
    queue: SandboxQueue, worker: Address, arq: ArqRedis, step_id: str | None
) -> None:
    """Also where it has an id of its own: arq told nobody else of it, so the number is all there is."""

    async def handler(running: Running) -> StepResult:
        await running.output.write("stdout", b"hello\n")
        return StepResult(cause="exit", exit_code=0)

    async with working(worker, SANDBOX, handler):
        await feed(arq, queue, keys.job_id(SANDBOX, 1), Step.run("x", step_id=step_id).to_dict())
        assert [line.text async for line in queue.handle(SANDBOX, 1).lines()] == ["hello"]


async def test_a_queued_step_from_stock_arq_can_be_cancelled(queue: SandboxQueue, arq: ArqRedis) -> None:
    await feed(arq, queue, keys.job_id(SANDBOX, 4), Step.run("x").to_dict())
    assert await queue.handle(SANDBOX, 4).cancel()
    assert (await job_of(arq, 4).result(timeout=5))["cause"] == "cancelled"


@pytest.mark.parametrize("state", ["queued", "complete"])
async def test_our_own_numbers_pass_over_those_that_stock_arq_used(
    queue: SandboxQueue, worker: Address, arq: ArqRedis, state: str
) -> None:
    for seq in (1, 2, 4):
        await feed(arq, queue, keys.job_id(SANDBOX, seq), Step.run(["theirs", str(seq)]).to_dict())
    async with contextlib.AsyncExitStack() as stack:
        if state == "complete":
            await stack.enter_async_context(working(worker, SANDBOX, echo))
            for seq in (1, 2, 4):
                await queue.handle(SANDBOX, seq)
        ours = [await queue.enqueue(SANDBOX, Step.run(["ours", str(n)])) for n in range(3)]
        if state == "queued":
            await stack.enter_async_context(working(worker, SANDBOX, echo))
        assert [handle.step_id for handle in ours] == ["3", "5", "6"]
        assert [(await handle).stdout for handle in ours] == ["ours 0", "ours 1", "ours 2"]
        assert [(await queue.handle(SANDBOX, seq)).stdout for seq in (1, 2, 4)] == ["theirs 1", "theirs 2", "theirs 4"]


async def test_stock_arq_does_not_overwrite_a_step_of_ours(queue: SandboxQueue, worker: Address, arq: ArqRedis) -> None:
    handle = await queue.enqueue(SANDBOX, Step.run(["ours"]))
    assert (
        await arq.enqueue_job("step", Step.run(["theirs"]).to_dict(), _job_id=keys.job_id(SANDBOX, 1), _queue_name=QUEUE)
        is None
    )
    async with working(worker, SANDBOX, echo):
        assert (await handle).stdout == "ours"


# --- it feeds nonsense


class _Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


NONSENSE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "no arguments": ("step", ()),
    "two steps": ("step", ({"kind": "shutdown"}, {"kind": "shutdown"})),
    "a string": ("step", ("make test",)),
    "a list": ("step", ([],)),
    "null": ("step", (None,)),
    "an unknown kind": ("step", ({"kind": "dance"},)),
    "a kind that is no string": ("step", ({"kind": ["run"]},)),
    "an unknown field": ("step", ({"kind": "run", "command": "x", "shell": True},)),
    "an unknown field of absurd length": ("step", ({"kind": "run", "command": "x", "z" * 100_000: 1},)),
    "NUL in the command": ("step", ({"kind": "run", "command": "x\0"},)),
    "another function": ("launch", ({"image": "python"},)),
    "absurd nesting": ("step", (json.loads("[" * 900 + "]" * 900),)),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
async def test_a_job_with_nonsense_in_it_is_rejected_and_harms_no_other(
    queue: SandboxQueue, worker: Address, arq: ArqRedis, nonsense: str
) -> None:
    function, args = NONSENSE[nonsense]
    before = await queue.enqueue(SANDBOX, Step.run(["before"]))
    await feed(arq, queue, keys.job_id(SANDBOX, 2), *args, function=function)
    after = await queue.enqueue(SANDBOX, Step.run(["after"]))
    async with working(worker, SANDBOX, echo):
        assert (await before).stdout == "before"
        rejected = await queue.handle(SANDBOX, 2)
        assert (await after).stdout == "after"
    assert (rejected.cause, rejected.exit_code) == ("rejected", None)
    assert rejected.error


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"null",
        b'{"t":null,"f":"\xff","a":[{"kind":"shutdown"}],"k":{},"et":1}',
        b'{"t":null,"f":"step","a":[' + b"[" * 100_000 + b"]" * 100_000 + b'],"k":{},"et":1}',
        b'{"t":null,"f":"step","a":[{"kind":"run","command":"x"}],"k":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b'},"et":1}',
    ],
    ids=[
        "nothing",
        "not UTF-8",
        "half an object",
        "null",
        "a name that is not UTF-8",
        "deep nesting",
        "deep nesting beside the step",
    ],
)
async def test_a_job_that_is_no_json_is_rejected_and_harms_no_other(
    queue: SandboxQueue, worker: Address, payload: bytes
) -> None:
    wire = queue.broker.wire
    await wire.one("SET", keys.JOB.of(SANDBOX, 1), payload, "EX", 60)
    await wire.one("ZADD", QUEUE, 1, keys.job_id(SANDBOX, 1))
    after = await queue.enqueue(SANDBOX, Step.run(["after"]))
    async with working(worker, SANDBOX, echo):
        assert (await after).stdout == "after"
        assert (await queue.handle(SANDBOX, 1)).cause == "rejected"


async def test_a_pickled_job_is_rejected_and_never_unpickled(
    queue: SandboxQueue, worker: Address, arq: ArqRedis, tmp_path: Path
) -> None:
    """arq pickles by default, so this is what a client without our serializer sends."""
    trace = tmp_path / "unpickled"
    pickle.loads(pickle.dumps(_Bomb(trace)))  # noqa: S301  # the bomb works
    trace.unlink()
    arq.job_serializer = None
    await feed(arq, queue, keys.job_id(SANDBOX, 1), _Bomb(trace))
    after = await queue.enqueue(SANDBOX, Step.run(["after"]))
    async with working(worker, SANDBOX, echo):
        assert (await after).stdout == "after"
        rejected = await queue.handle(SANDBOX, 1)
    assert rejected.cause == "rejected"
    assert "not JSON" in (rejected.error or "")
    assert not trace.exists()


@pytest.mark.parametrize(
    "job_id",
    ["box-2:000000000001", "box-10:000000000001", "2a1f00c0ffee", f"{SANDBOX}:", SANDBOX, "", ":", f"x{SANDBOX}:000000000001"],
)
async def test_a_job_that_is_not_of_this_sandbox_is_dropped_and_harms_no_other(
    queue: SandboxQueue, worker: Address, arq: ArqRedis, job_id: str
) -> None:
    """Its own key may not even be read: it could be another sandbox's step."""
    wire = queue.broker.wire
    await wire.one("SET", "arq:job:" + job_id, jobs.encode_job(Step.run(["stolen"])), "EX", 60)
    await wire.one("ZADD", QUEUE, 1, job_id)
    seen: list[str] = []

    async def handler(running: Running) -> StepResult:
        seen.append((await echo(running)).stdout)
        return StepResult(cause="exit", exit_code=0)

    async with working(worker, SANDBOX, handler):
        assert (await (await queue.enqueue(SANDBOX, Step.run(["ours"])))).ok
    assert seen == ["ours"]
    assert await wire.one("ZCARD", QUEUE) == 0
    assert await wire.one("EXISTS", "arq:job:" + job_id) == 1, "whose it is decides what becomes of it"


async def test_jobs_of_others_at_the_head_do_not_keep_our_steps_waiting(queue: SandboxQueue, worker: Address) -> None:
    """Not even until the worker's next look by itself: it sees what follows when it drops one."""
    wire = queue.broker.wire
    for n in range(3):
        await wire.one("ZADD", QUEUE, 1, f"box-2:{n:012d}")
    handle = await queue.enqueue(SANDBOX, Step.run("x"))
    async with working(worker, SANDBOX, succeed), asyncio.timeout(limits.LOOK_EVERY * 0.6):
        assert (await handle).ok


@pytest.mark.parametrize(
    "suffix", ["mine", "1", "0" * 30, "1" * 5000, "a b\n*?[", "ü", ":", "x" * 300], ids=lambda suffix: suffix[:12]
)
async def test_a_job_whose_number_is_none_is_run_and_harms_no_other(
    queue: SandboxQueue, worker: Address, arq: ArqRedis, suffix: str
) -> None:
    await feed(arq, queue, f"{SANDBOX}:{suffix}", Step.run(["odd"]).to_dict())
    async with working(worker, SANDBOX, echo):
        assert (await (await queue.enqueue(SANDBOX, Step.run(["ours"])))).stdout == "ours"
        odd = await Job(f"{SANDBOX}:{suffix}", arq, _queue_name=QUEUE, _deserializer=jobs.loads).result(timeout=5)
    assert odd["stdout"] == "odd"


async def test_a_job_id_that_is_not_utf_8_does_not_stop_the_queue(queue: SandboxQueue, worker: Address) -> None:
    wire = queue.broker.wire
    await wire.one("ZADD", QUEUE, 1, SANDBOX.encode() + b":\xff")
    await wire.one("ZADD", QUEUE, 2, b"\xff\xfe")
    async with working(worker, SANDBOX, succeed):
        handle = await queue.enqueue(SANDBOX, Step.run("x"))
        async with asyncio.timeout(10):
            assert (await handle).ok
    assert await wire.one("ZCARD", QUEUE) == 0


async def test_a_job_that_expired_in_the_queue_is_lost_and_harms_no_other(queue: SandboxQueue, worker: Address) -> None:
    gone = await queue.enqueue(SANDBOX, Step.run(["gone"]))
    await queue.broker.wire.one("DEL", keys.JOB.of(SANDBOX, 1))
    after = await queue.enqueue(SANDBOX, Step.run(["after"]))
    async with working(worker, SANDBOX, echo):
        assert (await after).stdout == "after"
        assert (await gone).cause == "lost"


async def test_a_step_that_nobody_fed_is_not_found(queue: SandboxQueue) -> None:
    with pytest.raises(StepNotFound):
        await queue.handle(SANDBOX, 7)


# --- it consumes


async def stock_step(ctx: dict[Any, Any], *args: Any, **kwargs: Any) -> StepResult:
    """A handler for a stock worker; its signature is the one that arq's types ask for."""
    step = Step.from_dict(args[0])
    assert isinstance(step, Run)
    if step.command == "fail":
        raise ValueError("no")
    return StepResult(cause="exit", exit_code=0, stdout=" ".join((step.command, *step.args)))


async def burst(arq: ArqRedis) -> Worker:
    """A stock worker that empties the queue and ends."""
    worker = Worker(
        functions=[func(stock_step, name=jobs.FUNCTION)],
        queue_name=QUEUE,
        redis_pool=arq,
        burst=True,
        handle_signals=False,
        poll_delay=0.01,
        job_serializer=jobs.dumps,
        job_deserializer=jobs.loads,
        max_tries=1,
    )
    await worker.main()
    await worker.pool.delete(worker.health_check_key)
    return worker


async def test_a_stock_worker_consumes_our_queue_and_our_client_gets_the_results(queue: SandboxQueue, arq: ArqRedis) -> None:
    handles = [await queue.enqueue(SANDBOX, Step.run(["step", str(n)], stdin=b"\xff")) for n in range(3)]
    worker = await burst(arq)
    assert worker.jobs_complete == 3
    results = [await handle for handle in handles]
    assert [result.stdout for result in results] == ["step 0", "step 1", "step 2"]
    assert [(result.sandbox_id, result.step_id) for result in results] == [(SANDBOX, "1"), (SANDBOX, "2"), (SANDBOX, "3")]
    assert await job_of(arq, 1).status() == JobStatus.complete


async def test_a_handler_that_raises_in_a_stock_worker_fails_its_step_only(queue: SandboxQueue, arq: ArqRedis) -> None:
    failing = await queue.enqueue(SANDBOX, Step.run(["fail"]))
    after = await queue.enqueue(SANDBOX, Step.run(["after"]))
    await burst(arq)
    assert (await failing).cause == "infra"
    assert (await after).stdout == "after"


async def test_our_worker_takes_over_a_queue_from_a_stock_one(queue: SandboxQueue, worker: Address, arq: ArqRedis) -> None:
    first = await queue.enqueue(SANDBOX, Step.run(["first"]))
    await burst(arq)
    second = await queue.enqueue(SANDBOX, Step.run(["second"]))
    async with working(worker, SANDBOX, echo):
        assert [(await first).stdout, (await second).stdout] == ["first", "second"]
