"""Output on its way from the worker to readers: byte-exact, bounded, and never missing without a word."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
from collections.abc import AsyncIterator, Callable

import pytest

from sandbox_queue import Cursor, Finished, Gap, InvalidCursor, Output, Started, Step, StepResult, acl, keys, limits
from sandbox_queue.address import Address
from sandbox_queue.client import SandboxQueue
from sandbox_queue.events import STREAMS, Event, Stream
from sandbox_queue.handle import Handle
from sandbox_queue.stream import EventWriter, StepOutput
from sandbox_queue.workers.loop import Handler, Running
from tests.conftest import SANDBOX
from tests.kit import Server, wait_until, worker_address, working


def printing(*pieces: tuple[Stream, bytes]) -> Handler:
    async def handler(running: Running) -> StepResult:
        for stream, data in pieces:
            await running.output.write(stream, data)
        return StepResult(cause="exit", exit_code=0)

    return handler


async def run(queue: SandboxQueue, worker: Address, *pieces: tuple[Stream, bytes]) -> Handle:
    """Enqueue one step that prints these pieces, and let it end."""
    async with working(worker, SANDBOX, printing(*pieces)):
        handle = await queue.enqueue(SANDBOX, Step.run("x"))
        await handle
    return handle


async def read(handle: Handle, since: Cursor | str | None = None) -> list[Event]:
    return [event async for event in handle.events(since)]


def check_complete(events: list[Event], expected: dict[Stream, bytes], start: Cursor | None = None) -> dict[Stream, int]:
    """Every byte is there once, or within a Gap; returns how many bytes are in gaps."""
    at: dict[Stream, int] = {"stdout": start.stdout if start else 0, "stderr": start.stderr if start else 0}
    lost: dict[Stream, int] = {"stdout": 0, "stderr": 0}
    for event in events:
        if isinstance(event, Output):
            assert event.offset == at[event.stream]
            assert event.data == expected[event.stream][event.offset : event.offset + len(event.data)]
            at[event.stream] += len(event.data)
        elif isinstance(event, Gap):
            assert event.offset == at[event.stream]
            at[event.stream] += event.bytes
            lost[event.stream] += event.bytes
    assert at == {stream: len(expected[stream]) for stream in STREAMS}
    assert isinstance(events[-1], Finished)
    return lost


async def test_a_reader_gets_start_output_and_end_in_order(queue: SandboxQueue, worker: Address) -> None:
    handle = await run(queue, worker, ("stdout", b"out\n"), ("stderr", b"err\n"), ("stdout", b"more"))
    started, *output, finished = await read(handle)
    assert isinstance(started, Started)
    assert [(event.stream, event.data, event.offset) for event in output if isinstance(event, Output)] == [
        ("stdout", b"out\n", 0),
        ("stderr", b"err\n", 0),
        ("stdout", b"more", 4),
    ]
    assert isinstance(finished, Finished)
    assert finished.result == await handle
    assert (finished.result.stdout_size, finished.result.stderr_size) == (8, 4)


async def test_a_silent_step_has_a_start_and_an_end_too(queue: SandboxQueue, worker: Address) -> None:
    handle = await run(queue, worker)
    for reader in (handle, queue.handle(SANDBOX, handle.step_id)):
        assert [type(event) for event in await read(reader)] == [Started, Finished]


async def test_a_long_silent_step_is_announced_while_it_runs(queue: SandboxQueue, worker: Address) -> None:
    release = asyncio.Event()

    async def silent(running: Running) -> StepResult:
        await release.wait()
        return StepResult(cause="exit", exit_code=0)

    async with working(worker, SANDBOX, silent):
        events = (await queue.enqueue(SANDBOX, Step.run("x"))).events()
        assert isinstance(await anext(events), Started)
        release.set()
        assert isinstance(await anext(events), Finished)


async def test_a_line_reaches_a_reader_while_the_step_goes_on(queue: SandboxQueue, worker: Address) -> None:
    release = asyncio.Event()

    async def handler(running: Running) -> StepResult:
        await running.output.write("stdout", b"first\n")
        await release.wait()
        await running.output.write("stdout", b"second\n")
        return StepResult(cause="exit", exit_code=0)

    async with working(worker, SANDBOX, handler):
        lines = (await queue.enqueue(SANDBOX, Step.run("x"))).lines()
        assert (await anext(lines)).text == "first"
        release.set()
        assert [line.text async for line in lines] == ["second"]


async def test_a_reader_resumes_from_every_cursor_it_was_given(queue: SandboxQueue, worker: Address) -> None:
    pieces: list[tuple[Stream, bytes]] = []
    for _ in range(60):
        pieces.append((random.choice(STREAMS), random.randbytes(random.randrange(1, 5000))))
    handle = await run(queue, worker, *pieces)
    printed: dict[Stream, bytes] = {"stdout": b"", "stderr": b""}
    for stream, data in pieces:
        printed[stream] += data
    events = await read(handle)
    assert check_complete(events, printed) == {"stdout": 0, "stderr": 0}
    for event in events:
        rest = await read(handle, str(event.cursor))
        assert check_complete(rest, printed, event.cursor) == {"stdout": 0, "stderr": 0}


async def test_a_reader_of_lines_resumes_after_every_line(queue: SandboxQueue, worker: Address) -> None:
    text = "\n".join(f"zeile {n} mit ümläuten und 🦀" for n in range(50)).encode()
    cuts = sorted(random.sample(range(len(text)), 40))
    pieces: list[tuple[Stream, bytes]] = []
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces.append(("stdout", text[a:b]))
        pieces.append(("stderr", b"x"))
    handle = await run(queue, worker, *pieces)
    lines = [line async for line in handle.lines()]
    expected = [line.text for line in lines]
    assert [line.text for line in lines if line.stream == "stdout"] == text.decode().split("\n")
    for index, line in enumerate(lines[:-1]):
        rest = [line.text async for line in handle.lines(str(line.cursor))]
        assert rest == expected[index + 1 :]


async def test_several_readers_at_once_each_get_every_byte(queue: SandboxQueue, worker: Address) -> None:
    data = random.randbytes(3 * limits.MIB)

    async def handler(running: Running) -> StepResult:
        for start in range(0, len(data), 30_000):
            await running.output.write("stdout", data[start : start + 30_000])
        return StepResult(cause="exit", exit_code=0)

    async with working(worker, SANDBOX, handler):
        handle = await queue.enqueue(SANDBOX, Step.run("x"))
        readers = await asyncio.gather(*(read(handle) for _ in range(5)))
    for events in readers:
        assert check_complete(events, {"stdout": data, "stderr": b""}) == {"stdout": 0, "stderr": 0}


async def test_output_of_other_steps_is_not_mixed_in(queue: SandboxQueue, worker: Address) -> None:
    async def handler(running: Running) -> StepResult:
        for _ in range(20):
            await running.output.write("stdout", running.step_id.encode() + b"\n")
            await asyncio.sleep(0)
        return StepResult(cause="exit", exit_code=0)

    async with working(worker, SANDBOX, handler, concurrency=4):
        handles = [await queue.enqueue(SANDBOX, Step.run("x")) for _ in range(8)]
        for handle in handles:
            assert {line.text async for line in handle.lines()} == {handle.step_id}


TRIMS: dict[str, Callable[[list[bytes]], bytes]] = {
    "at the head": lambda ids: ids[3],
    "in the middle": lambda ids: ids[len(ids) // 2],
    "to the last entry": lambda ids: ids[-1],
    "entirely": lambda ids: b"99999999999999-0",
}


@pytest.mark.parametrize("trim", TRIMS)
async def test_what_was_trimmed_before_it_was_read_is_a_gap_of_exactly_those_bytes(
    queue: SandboxQueue, worker: Address, trim: str
) -> None:
    pieces: list[tuple[Stream, bytes]] = [("stdout", b"o" * 50_000), ("stderr", b"e" * 20_000)] * 10
    handle = await run(queue, worker, *pieces)
    entries = await queue.broker.wire.one("XRANGE", keys.EVENTS.of(SANDBOX), "-", "+")
    left = TRIMS[trim]([entry_id for entry_id, _ in entries])
    await queue.broker.wire.one("XTRIM", keys.EVENTS.of(SANDBOX), "MINID", "=", left)
    kept = dict.fromkeys(STREAMS, 0)
    for _, fields in await queue.broker.wire.one("XRANGE", keys.EVENTS.of(SANDBOX), "-", "+"):
        entry = dict(zip(fields[::2], fields[1::2], strict=True))
        if b"data" in entry:
            kept[entry[b"kind"].decode()] += len(entry[b"data"])
    printed: dict[Stream, bytes] = {"stdout": b"o" * 500_000, "stderr": b"e" * 200_000}
    lost = check_complete(await read(handle), printed)
    assert lost == {stream: len(printed[stream]) - kept[stream] for stream in STREAMS}
    assert sum(lost.values()) > 0
    told = [line async for line in handle.lines() if line.lost]
    assert sum(line.lost for line in told) == sum(lost.values())
    assert all("are gone" in line.text for line in told)


async def test_a_trim_in_the_middle_of_a_running_step_is_seen_by_a_slow_reader(queue: SandboxQueue, worker: Address) -> None:
    first_half_read, trimmed = asyncio.Event(), asyncio.Event()

    async def handler(running: Running) -> StepResult:
        await running.output.write("stdout", b"a" * 1000)
        await first_half_read.wait()
        await running.output.write("stdout", b"b" * 1000)
        await trimmed.wait()
        await running.output.write("stdout", b"c" * 1000)
        return StepResult(cause="exit", exit_code=0)

    async with working(worker, SANDBOX, handler):
        handle = await queue.enqueue(SANDBOX, Step.run("x"))
        events = handle.events()
        head = [await anext(events), await anext(events)]
        await events.aclose()
        first_half_read.set()
        key = keys.EVENTS.of(SANDBOX)
        await wait_until(lambda: _length(queue, key, 3), "the second part is in the stream")
        await queue.broker.wire.one("XTRIM", key, "MAXLEN", "=", 0)
        trimmed.set()
        tail = await read(handle, head[-1].cursor)
    assert [(event.bytes, event.offset) for event in tail if isinstance(event, Gap)] == [(1000, 1000)]
    assert check_complete(head + tail, {"stdout": b"a" * 1000 + b"b" * 1000 + b"c" * 1000, "stderr": b""})["stdout"] == 1000


async def _length(queue: SandboxQueue, key: str, at_least: int) -> bool:
    return bool(await queue.broker.wire.one("XLEN", key) >= at_least)


async def test_the_stream_of_a_sandbox_stays_within_its_budget_of_bytes_and_entries(
    queue: SandboxQueue, worker: Address
) -> None:
    budget = 2 * limits.MIB
    key = keys.EVENTS.of(SANDBOX)
    async with worker.wire() as wire, EventWriter(wire, SANDBOX, budget=budget, maxlen=200) as writer:
        output = StepOutput(writer, "big")
        for _ in range(300):
            await output.write("stdout", bytes(limits.ENTRY_MAX))
        await output.close()
        assert await queue.broker.wire.one("MEMORY", "USAGE", key, "SAMPLES", 0) < budget * 1.6
        output = StepOutput(writer, "many")
        for n in range(2000):
            await output.write(STREAMS[n % 2], b"x")
        await output.close()
        assert await queue.broker.wire.one("XLEN", key) < 400


@pytest.mark.parametrize(
    "since", ["", "nonsense", "1-2", "1-2:3", "1-2:3:-4", "1-2:3:4:5", "1-2:3:4 ", f"{2**64}-0:0:0", "\uff11-2:3:4"]
)
async def test_what_is_not_a_cursor_is_refused(queue: SandboxQueue, since: str) -> None:
    with pytest.raises(InvalidCursor, match="is not a cursor"):
        await read(queue.handle(SANDBOX, "1"), since)


async def test_a_hostile_stream_cannot_make_a_reader_hang_raise_or_invent_bytes(queue: SandboxQueue, worker: Address) -> None:
    key = keys.EVENTS.of(SANDBOX)

    async def handler(running: Running) -> StepResult:
        await running.output.write("stdout", b"honest ")
        async with worker.wire() as wire:
            for fields in (
                ("step", "1"),
                ("kind", "stdout", "offset", "7", "data", "no step"),
                ("step", "1", "kind", "stdout", "offset", "-5", "data", "x"),
                ("step", "1", "kind", "stdout", "offset", "9" * 30, "data", "x"),
                ("step", "1", "kind", "stdout", "offset", "\u0667", "data", "x"),
                ("step", "1", "kind", "started", "at", "soon"),
                ("step", "1", "kind", "ended"),
                ("step", "1", "kind", "finished", "result", "{}"),
                (b"\xff\xfe", b"\x00"),
            ):
                await wire.one("XADD", key, "*", *fields)
        await running.output.write("stdout", b"bytes")
        return StepResult(cause="exit", exit_code=0)

    async with working(worker, SANDBOX, handler):
        handle = await queue.enqueue(SANDBOX, Step.run("x"))
        events = await read(handle)
    assert check_complete(events, {"stdout": b"honest bytes", "stderr": b""}) == {"stdout": 0, "stderr": 0}


@pytest.mark.parametrize("shared_server", ["valkey"], indirect=True)  # it waits for a look, five seconds
async def test_a_stream_that_the_sandbox_has_ruined_costs_output_and_is_a_gap_but_the_result_arrives(
    queue: SandboxQueue, worker: Address
) -> None:
    """One XADD at the highest id makes every later one fail: the worker must not hang, and the reader must be told."""

    async def handler(running: Running) -> StepResult:
        if running.step_id == "1":
            async with worker.wire() as wire:
                await wire.one("XADD", keys.EVENTS.of(SANDBOX), f"{2**64 - 1}-{2**64 - 1}", "step", "1")
        await running.output.write("stdout", b"never seen")
        return StepResult(cause="exit", exit_code=0)

    async with working(worker, SANDBOX, handler):
        handle = await queue.enqueue(SANDBOX, Step.run("x"))
        events = await read(handle)
        assert (await (await queue.enqueue(SANDBOX, Step.run("x")))).cause == "exit"
    assert check_complete(events, {"stdout": b"never seen", "stderr": b""})["stdout"] == 10


async def test_a_reply_beyond_all_bounds_fails_one_reader_and_nobody_else(
    queue: SandboxQueue, worker: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REPLY_MAX", 4 * limits.MIB)

    async def handler(running: Running) -> StepResult:
        async with worker.wire() as wire:
            await wire.one("XADD", keys.EVENTS.of(SANDBOX), "*", "step", running.step_id, "data", bytes(8 * limits.MIB))
        return StepResult(cause="exit", exit_code=0)

    async with working(worker, SANDBOX, handler):
        handle = await queue.enqueue(SANDBOX, Step.run("x"))
        with pytest.raises(Exception, match="larger than"):
            await read(handle)
        assert (await handle).ok


# --- outages


class Flood:
    """A handler that prints numbered lines as fast as it is let, until told to stop."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.size = 0

    async def __call__(self, running: Running) -> StepResult:
        number = 0
        while not self.stop.is_set():
            block = b"".join(b"%011d\n" % n for n in range(number, number + 2000))
            number += 2000
            await running.output.write("stdout", block)
            self.size += len(block)
            await asyncio.sleep(0)
        return StepResult(cause="exit", exit_code=0)

    def printed(self) -> bytes:
        return b"".join(b"%011d\n" % n for n in range(self.size // 12))


@contextlib.asynccontextmanager
async def flooding(server: Server) -> AsyncIterator[tuple[SandboxQueue, Flood, Handle, asyncio.Task[list[Event]]]]:
    """A step that floods, and a reader that follows it live; both end with the block."""
    flood = Flood()
    async with SandboxQueue.connect(settings=server.settings()) as queue:
        worker = await worker_address(queue.broker.wire, server, SANDBOX)
        async with working(worker, SANDBOX, flood):
            handle = await queue.enqueue(SANDBOX, Step.run("flood"))
            reader = asyncio.create_task(read(handle))
            await wait_until(lambda: flood.size > 100_000, "the flood is under way")
            yield queue, flood, handle, reader
            flood.stop.set()
            await asyncio.wait([reader])


async def test_connections_killed_over_and_over_lose_and_repeat_nothing(own_server: Server) -> None:
    async with flooding(own_server) as (_, flood, _, reader), Address(own_server.url).wire() as admin:
        for _ in range(15):
            before = flood.size
            await admin.one("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await wait_until(lambda before=before: flood.size > before + 2 * limits.WRITER_BUFFER, "the flood goes on")  # type: ignore[misc]  # mypy cannot infer a lambda with a default
    lost = check_complete(reader.result(), {"stdout": flood.printed(), "stderr": b""})
    assert sum(lost.values()) == 0, "the reader kept up, so nothing was trimmed: a gap here is a loss"


async def test_a_server_stalled_for_ten_seconds_costs_time_and_no_memory(own_server: Server) -> None:
    async with flooding(own_server) as (_, flood, _, reader), Address(own_server.url).wire() as admin:
        await admin.one("CLIENT", "PAUSE", 10_000, "ALL")
        await wait_until(lambda: _is_still(flood), "the flood stands still: its output waits")
        stalled_at = flood.size
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await wait_until(lambda: flood.size > stalled_at + 4 * limits.MIB, "the flood goes on", timeout=30)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 * 1024  # KiB; the reader's events are in it
    assert check_complete(reader.result(), {"stdout": flood.printed(), "stderr": b""}) == {"stdout": 0, "stderr": 0}


async def _is_still(flood: Flood) -> bool:
    before = flood.size
    await asyncio.sleep(0.3)  # the condition itself: nothing moves for this long
    return flood.size == before


@pytest.mark.parametrize("own_server", [("appendonly yes", "appendfsync always")], indirect=True)
async def test_a_server_restarted_with_aof_loses_and_repeats_nothing(own_server: Server) -> None:
    async with flooding(own_server) as (_, flood, handle, reader):
        await asyncio.to_thread(own_server.restart)
        async with Address(own_server.url).wire() as admin:
            assert await acl.restore(admin, SANDBOX)
        before = flood.size
        await wait_until(lambda: flood.size > before + 4 * limits.MIB, "the flood goes on")
        flood.stop.set()
        assert (await handle).ok
    assert check_complete(reader.result(), {"stdout": flood.printed(), "stderr": b""}) == {"stdout": 0, "stderr": 0}


async def test_a_server_restarted_without_persistence_shows_every_lost_byte_as_a_gap(own_server: Server) -> None:
    async with flooding(own_server) as (queue, flood, handle, reader):
        digest = await queue.broker.wire.one("GET", keys.ACL.of(SANDBOX))
        await asyncio.to_thread(own_server.restart)
        async with Address(own_server.url).wire() as admin:
            await admin.one("SET", keys.ACL.of(SANDBOX), digest)
            assert await acl.restore(admin, SANDBOX)
        before = flood.size
        await wait_until(lambda: flood.size > before + 4 * limits.MIB, "the flood goes on")
        flood.stop.set()
        assert (await handle).ok, "the result is written after the restart, so it is there"
    check_complete(reader.result(), {"stdout": flood.printed(), "stderr": b""})
