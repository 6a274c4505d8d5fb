"""Each step starts at most once and ends with exactly one result, whatever breaks and whenever.

A proxy counts the worker's commands, and a fault is put before and after each one of them in turn: first a broken
connection, then `kill -9` of the worker.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from pathlib import Path
from typing import Literal

import pytest

from sandbox_queue import Output, Step, StepResult, keys
from sandbox_queue.address import Address
from sandbox_queue.client import SandboxQueue
from sandbox_queue.handle import Handle
from sandbox_queue.workers.loop import Handler, Loop, Running
from tests.conftest import SANDBOX
from tests.faults import proxied
from tests.kit import Server, succeed, wait_until, working

STEPS = 3

# Forked from a server process that has everything imported: one of these starts per command of a worker's life.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.test_at_most_once"])


def work_in_a_process(path: str, user: str, password: str, log: str, beat: float, ttl: float) -> None:
    """A worker whose handler leaves a line in a file for each step that it starts."""

    async def handler(running: Running) -> StepResult:
        fd = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.write(fd, running.step_id.encode() + b"\n")
        os.close(fd)
        await running.output.write("stdout", b"output of " + running.step_id.encode())
        return StepResult(cause="exit", exit_code=0)

    async def main() -> None:
        address = Address(f"unix://{path}", username=user, password=password)
        async with address.wire() as wire, address.wire() as waiting:
            await Loop(wire, waiting, SANDBOX, handler, heartbeat_every=beat, heartbeat_ttl=ttl).run()

    asyncio.run(main())


def through(worker: Address, path: str) -> Address:
    return Address(f"unix://{path}", username=worker.username, password=worker.password)


async def enqueue_some(queue: SandboxQueue) -> list[Handle]:
    return [await queue.enqueue(SANDBOX, Step.run(f"{n}")) for n in range(STEPS)]


async def finished_with_one_result(queue: SandboxQueue, handles: list[Handle]) -> list[StepResult]:
    results = await asyncio.gather(*handles)
    await asyncio.sleep(0)
    assert await asyncio.gather(*handles) == results, "a result changed after it had been read"
    assert await queue.broker.wire.one("ZCARD", keys.QUEUE.of(SANDBOX)) == 0
    return results


async def count_commands(queue: SandboxQueue, worker: Address, server: Server) -> int:
    """How many commands a worker needs for the whole scenario when nothing breaks."""
    async with proxied(f"{server.directory}/s") as proxy, working(through(worker, proxy.path), SANDBOX, printing([])):
        await asyncio.gather(*await enqueue_some(queue))
        return len(proxy.commands)


def printing(started: list[str]) -> Handler:
    async def handler(running: Running) -> StepResult:
        started.append(running.step_id)
        await running.output.write("stdout", b"output of " + running.step_id.encode())
        return StepResult(cause="exit", exit_code=0)

    return handler


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_connection_that_breaks_at_any_command_runs_each_step_exactly_once(
    queue: SandboxQueue, worker: Address, server: Server, when: Literal["before", "after"]
) -> None:
    total = await count_commands(queue, worker, server)
    assert total > 30
    for at in range(1, total + 1):
        started: list[str] = []
        async with (
            proxied(f"{server.directory}/s", at=at, when=when) as proxy,
            working(through(worker, proxy.path), SANDBOX, printing(started)),
        ):
            handles = await enqueue_some(queue)
            results = await finished_with_one_result(queue, handles)
        assert started == [handle.step_id for handle in handles], f"broken {when} command {at}"
        assert all(result.ok for result in results), f"broken {when} command {at}: {results}"
        for handle, result in zip(handles, results, strict=True):
            data = b"".join([event.data async for event in handle.events() if isinstance(event, Output)])
            assert data == b"output of " + handle.step_id.encode(), f"broken {when} command {at}"
            assert result.stdout_size == len(data)


@pytest.mark.parametrize("shared_server", ["valkey"], indirect=True)  # the longest test: one server will do
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_worker_killed_at_any_command_leaves_no_step_started_twice_or_without_a_result(
    queue: SandboxQueue, worker: Address, server: Server, tmp_path: Path, when: Literal["before", "after"]
) -> None:
    causes = set()
    at = 3  # AUTH and CLIENT SETNAME of the first connection come before
    while True:
        log = tmp_path / f"{at}"
        log.touch()
        killed = asyncio.Event()
        handles = await enqueue_some(queue)
        async with proxied(f"{server.directory}/s", at=at, when=when, fault=killed.set) as proxy:
            login = (str(worker.username), str(worker.password))
            victim = processes.Process(target=work_in_a_process, args=(proxy.path, *login, str(log), 60.0, 0.1))
            victim.start()
            done = asyncio.create_task(finished_with_one_result(queue, handles))
            kill = asyncio.create_task(killed.wait())
            await asyncio.wait([done, kill], return_when=asyncio.FIRST_COMPLETED)
            kill.cancel()
            victim.kill()
            await asyncio.to_thread(victim.join)
            if not killed.is_set():
                await done
                break
        started: list[str] = []
        async with working(worker, SANDBOX, printing(started), heartbeat_every=0.02, heartbeat_ttl=0.1):
            results = await done
        starts = log.read_text().split() + started
        assert len(starts) == len(set(starts)), f"killed {when} command {at}: started twice: {starts}"
        for result in results:
            assert result.cause in ("exit", "lost")
            assert result.cause == "lost" or result.step_id in starts
        causes |= {result.cause for result in results}
        at += 1
    assert at > 30
    assert causes == {"exit", "lost"}


async def test_two_workers_on_one_queue_share_it_without_starting_a_step_twice(queue: SandboxQueue, worker: Address) -> None:
    started: list[str] = []
    handles = [await queue.enqueue(SANDBOX, Step.run("x")) for _ in range(100)]
    async with working(worker, SANDBOX, printing(started)), working(worker, SANDBOX, printing(started)):
        handles += [await queue.enqueue(SANDBOX, Step.run("x")) for _ in range(100)]
        results = await finished_with_one_result(queue, handles)
    assert all(result.ok for result in results)
    assert sorted(started, key=int) == [handle.step_id for handle in handles]


async def test_a_new_worker_waits_for_as_long_as_the_one_that_has_the_head_is_alive(
    queue: SandboxQueue, worker: Address
) -> None:
    release = asyncio.Event()

    async def slow(running: Running) -> StepResult:
        await release.wait()
        return StepResult(cause="exit", exit_code=7)

    async with working(worker, SANDBOX, slow, heartbeat_every=0.05, heartbeat_ttl=0.5) as first:
        handle = await queue.enqueue(SANDBOX, Step.run("x"))
        await wait_until(lambda: any(first._taken.values()), "the first worker has it")
        async with working(worker, SANDBOX, succeed, heartbeat_every=0.05, heartbeat_ttl=0.5) as second:
            await wait_until(lambda: second._others, "the second one has noticed the first")
            release.set()
            assert (await handle).exit_code == 7


async def test_a_result_that_comes_after_the_step_was_declared_lost_changes_nothing(
    queue: SandboxQueue, worker: Address
) -> None:
    release = asyncio.Event()

    async def slow(running: Running) -> StepResult:
        await release.wait()
        return StepResult(cause="exit", exit_code=0)

    # The first one's heart does not beat for as long as the second one would wait: it might as well be dead.
    async with working(worker, SANDBOX, slow, heartbeat_every=60, heartbeat_ttl=0.05) as first:
        handle = await queue.enqueue(SANDBOX, Step.run("x"))
        await wait_until(lambda: any(first._taken.values()), "the first worker has it")
        await wait_until(lambda: _no_heartbeat(queue), "its heartbeat has expired")
        async with working(worker, SANDBOX, succeed, heartbeat_every=0.05, heartbeat_ttl=0.2):
            assert (await handle).cause == "lost"
            release.set()
            await wait_until(lambda: not first._taken, "the first worker has delivered its result, too late")
            assert (await handle).cause == "lost"


async def _no_heartbeat(queue: SandboxQueue) -> bool:
    return bool(await queue.broker.wire.one("EXISTS", keys.HEARTBEAT.of(SANDBOX)) == 0)
