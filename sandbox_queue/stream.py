"""Both ends of the event stream: the worker's writer and the client's reader.

An entry holds up to 64 KiB of raw bytes with their absolute offset in that step's stdout or stderr. Writing is adaptive:
the first bytes go at once, and while one write is under way the next batch gathers. Entries are at-least-once (a lost
reply is sent again); the reader drops what lies below the offset it expects and reports a jump as a `Gap`, so no byte
comes twice and none is missing unnoticed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Self

import msgspec

from sandbox_queue import keys, limits
from sandbox_queue.events import STREAMS, Cursor, Event, Finished, Gap, Output, Started, Stream
from sandbox_queue.models import StepResult
from sandbox_queue.wire import Command, Wire, is_transient, persist

log = logging.getLogger("sandbox_queue.stream")

ENTRY_OVERHEAD = 128  # about what Redis keeps besides the data; it keeps the byte budget honest for short entries
STARTED_DELAY = 0.05  # a step that prints nothing is announced after this time, or together with its end
EXPIRE_EVERY = 60.0
READ_COUNT = 32  # entries per read: 2 MiB at most from an honest worker


# --- the worker's end


class _Chunk:
    """One entry to be. Parts of the same stream gather in it for as long as it waits."""

    __slots__ = ("at", "kind", "offset", "owner", "parts", "size")

    def __init__(self, owner: StepOutput, kind: str, offset: int, data: bytes | memoryview) -> None:
        self.owner = owner
        self.kind = kind
        self.offset = offset
        self.parts: list[bytes | memoryview] = [data]
        self.size = len(data)
        self.at = time.time_ns() // 1_000_000


class EventWriter:
    """Writes the events of one sandbox: `async with EventWriter(wire, sandbox) as writer`.

    Memory is bounded whatever the steps print and however long Redis stalls: beyond `WRITER_BUFFER` unsent bytes,
    `StepOutput.write` waits, and the child waits in its pipe.
    """

    def __init__(
        self,
        wire: Wire,
        sandbox: str,
        *,
        maxlen: int = limits.EVENTS_MAXLEN,
        budget: int = limits.EVENTS_BYTES,
        patience: float = limits.OUTAGE_MAX,
    ) -> None:
        self._wire = wire
        self._key = keys.EVENTS.of(sandbox)
        self._maxlen = maxlen
        self._budget = budget
        self._patience = patience
        self._waiting: deque[_Chunk] = deque()  # not sent yet
        self._buffered = 0  # bytes in _waiting
        self._kept: deque[tuple[bytes, int]] = deque()  # (id, size) of entries in the stream, for the byte budget
        self._kept_bytes = 0
        self._expire_due = 0.0
        self._work = asyncio.Event()  # _waiting is not empty
        self.full = False  # _buffered is above the bound
        self._when_room: list[Callable[[], None]] = []  # whom to tell when it no longer is
        self._tasks = asyncio.TaskGroup()
        self._pump_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._pump_task = self._tasks.create_task(self._pump(), name="event-writer")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pump_task is not None:
            self._pump_task.cancel()
        await self._tasks.__aexit__(kind, error, trace)

    def put(self, chunk: _Chunk) -> None:
        """Take a chunk, at once and without waiting; who puts much waits for `room` first."""
        last = self._waiting[-1] if self._waiting else None
        if (
            last is not None
            and last.owner is chunk.owner
            and last.kind == chunk.kind
            and last.offset + last.size == chunk.offset
            and last.size + chunk.size <= limits.ENTRY_MAX
        ):
            last.parts += chunk.parts
            last.size += chunk.size
        else:
            self._waiting.append(chunk)
            chunk.owner.sending(+1)
        self._buffered += chunk.size
        self.full = self._buffered >= limits.WRITER_BUFFER
        self._work.set()

    def when_room(self, tell: Callable[[], None]) -> None:
        """Call `tell` as soon as there is room for more, which may be at once."""
        if self.full:
            self._when_room.append(tell)
        else:
            tell()

    def entry(self, chunk: _Chunk) -> Command:
        """The XADD of one entry. No id of our own: one at the highest id would block the stream for ever."""
        data = chunk.parts[0] if len(chunk.parts) == 1 else b"".join(chunk.parts)
        body: tuple[Any, ...] = ("offset", chunk.offset, "data", data) if chunk.kind in STREAMS else ()
        step = chunk.owner.step_id
        return ("XADD", self._key, "MAXLEN", "~", self._maxlen, "*", "step", step, "kind", chunk.kind, "at", chunk.at, *body)

    def upkeep(self) -> list[Command]:
        """What must go along with some entry now and then: the byte budget's trim, the key's time to live."""
        commands: list[Command] = []
        if self._kept_bytes > self._budget:
            # Some slack, so that a flood does not trim with every batch.
            while self._kept and self._kept_bytes > self._budget * 7 // 8:
                self._kept_bytes -= self._kept.popleft()[1]
            oldest = self._kept[0][0] if self._kept else b"+"
            commands.append(("XTRIM", self._key, "MINID", "~", oldest))
        now = time.monotonic()
        if now >= self._expire_due:
            self._expire_due = now + EXPIRE_EVERY
            commands.append(("EXPIRE", self._key, round(limits.EVENTS_TTL)))
        return commands

    async def _pump(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            batch, self._waiting, self._buffered = self._waiting, deque(), 0
            self.full = False
            waiting, self._when_room = self._when_room, []
            for tell in waiting:
                tell()
            await self._send(batch)

    async def _send(self, batch: deque[_Chunk]) -> None:
        commands = [self.entry(chunk) for chunk in batch]
        commands += self.upkeep()

        async def attempt() -> list[Any]:
            replies = await self._wire.call(*commands)
            for reply in replies:
                if isinstance(reply, Exception) and is_transient(reply):
                    raise reply
            return replies

        replies = await persist(attempt, patience=self._patience, doing="writing events")
        for chunk, reply in zip(batch, replies, strict=False):
            if isinstance(reply, bytes):
                chunk.owner.acknowledged(reply)
                self._kept.append((reply, chunk.size + ENTRY_OVERHEAD))
                self._kept_bytes += chunk.size + ENTRY_OVERHEAD
            else:  # somebody in the sandbox broke its own stream; the reader sees a Gap, from the sizes in the result
                log.error("an event was refused: %s", reply)
            chunk.owner.sending(-1)
        while len(self._kept) > self._maxlen:
            self._kept_bytes -= self._kept.popleft()[1]


class StepOutput:
    """The output of one step: counts bytes, remembers where its entries stand."""

    def __init__(self, writer: EventWriter, step_id: str) -> None:
        self.step_id = step_id
        self.sizes: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self.first_event_id: str | None = None
        self.last_event_id: str | None = None
        self._writer = writer
        self._unacknowledged = 0  # chunks
        self._delivered = asyncio.Event()
        self._delivered.set()
        # The announcement waits for company: it goes with the first output, with the end, or after a moment, so that
        # a short silent step costs no round trip of its own.
        self._announcement: _Chunk | None = _Chunk(self, "started", 0, b"")
        self._timer = asyncio.get_running_loop().call_later(STARTED_DELAY, self._announce)

    def put(self, stream: Stream, data: bytes) -> None:
        """Take over bytes, at once; who puts much calls `when_room` before the next time."""
        self._announce()
        view = memoryview(data)
        for start in range(0, len(view), limits.ENTRY_MAX):
            piece = view[start : start + limits.ENTRY_MAX] if len(view) > limits.ENTRY_MAX else data
            self._writer.put(_Chunk(self, stream, self.sizes[stream], piece))
            self.sizes[stream] += len(piece)

    @property
    def full(self) -> bool:
        """Whether to wait for room before the next `put`: the unsent bytes of all steps together are bounded."""
        return self._writer.full

    def when_room(self, tell: Callable[[], None]) -> None:
        """Call `tell` when there is room for more, which may be at once."""
        self._writer.when_room(tell)

    async def write(self, stream: Stream, data: bytes) -> None:
        """`put`, then wait until there is room for more."""
        self.put(stream, data)
        room = asyncio.get_running_loop().create_future()
        self.when_room(lambda: None if room.done() else room.set_result(None))
        await room

    def skip(self, stream: Stream, size: int) -> None:
        """Count bytes that were printed and are not sent; a reader sees a Gap of that size."""
        self.sizes[stream] += size

    def put_tail(self, stream: Stream, data: bytes) -> None:
        """Send the last of the bytes that were skipped."""
        self._writer.put(_Chunk(self, stream, self.sizes[stream] - len(data), data))

    async def close(self) -> list[Command]:
        """Wait until all of it is in Redis; returns what is to be sent along with the step's result."""
        self._timer.cancel()
        await self._delivered.wait()
        chunks = [self._announcement] if self._announcement else []
        self._announcement = None
        chunks.append(_Chunk(self, "ended", 0, b""))
        return [*(self._writer.entry(chunk) for chunk in chunks), *self._writer.upkeep()]

    def sending(self, change: int) -> None:
        self._unacknowledged += change
        if self._unacknowledged:
            self._delivered.clear()
        else:
            self._delivered.set()

    def acknowledged(self, entry_id: bytes) -> None:
        self.last_event_id = entry_id.decode("ascii")
        self.first_event_id = self.first_event_id or self.last_event_id

    def _announce(self) -> None:
        if self._announcement is not None:
            self._timer.cancel()
            self._writer.put(self._announcement)
            self._announcement = None


# --- the client's end


class Tracker:
    """Turns stream entries into the events of one step. No I/O: what Redis says goes in, events come out."""

    def __init__(self, step_id: str, cursor: Cursor) -> None:
        self.cursor = cursor
        self.ended = False  # the end's marker was seen
        self._step = step_id.encode()
        self._started = False

    def take(self, entry_id: bytes, fields: list[bytes]) -> Iterator[Event]:
        """Events of one entry: none if it is another step's, malformed, or a repetition."""
        ms, _, n = entry_id.partition(b"-")
        entry = dict(zip(fields[::2], fields[1::2], strict=False))
        found = self._bytes(entry)
        if found is not None:
            # Before the cursor moves on to this entry: whoever resumes from the Gap must read it again.
            yield from self._gap(found[0], found[1])
        self.cursor = msgspec.structs.replace(self.cursor, ms=int(ms), n=int(n))
        if entry.get(b"step") != self._step:
            return
        kind = entry.get(b"kind")
        if kind == b"ended":
            self.ended = True
        elif kind == b"started" and not self._started:
            self._started = True
            at = _number(entry.get(b"at"))
            if at is not None:
                yield Started(at=at / 1000, cursor=self.cursor)
        elif found is not None:
            yield from self._output(*found)

    def finish(self, result: StepResult) -> Iterator[Event]:
        """What the sizes in the result say is missing, and the end."""
        for stream in STREAMS:
            size = result.stdout_size if stream == "stdout" else result.stderr_size
            if size is not None:
                yield from self._gap(stream, size)
        yield Finished(result=result, cursor=self.cursor)

    def _bytes(self, entry: dict[bytes, bytes]) -> tuple[Stream, int, bytes] | None:
        """The new bytes in an entry of this step, and where they stand."""
        stream: Stream | None = {b"stdout": "stdout", b"stderr": "stderr"}.get(entry.get(b"kind", b""))  # type: ignore[assignment]
        offset, data = _number(entry.get(b"offset")), entry.get(b"data", b"")
        if entry.get(b"step") != self._step or stream is None or offset is None:
            return None
        expected: int = getattr(self.cursor, stream)
        if offset + len(data) <= expected or not data or offset + len(data) >= 2**63:
            return None
        return (stream, offset, data) if offset >= expected else (stream, expected, data[expected - offset :])

    def _output(self, stream: Stream, offset: int, data: bytes) -> Iterator[Event]:
        self.cursor = msgspec.structs.replace(self.cursor, **{stream: offset + len(data)})
        yield Output(stream=stream, data=data, offset=offset, cursor=self.cursor)

    def _gap(self, stream: Stream, until: int) -> Iterator[Event]:
        expected: int = getattr(self.cursor, stream)
        if until > expected:
            self.cursor = msgspec.structs.replace(self.cursor, **{stream: until})
            yield Gap(stream=stream, bytes=until - expected, offset=expected, cursor=self.cursor)


async def follow(
    wire: Wire,
    sandbox: str,
    step_id: str,
    cursor: Cursor | None,
    fetch_result: Callable[[], Awaitable[StepResult | None]],
    *,
    accepted_ms: int = 0,
    patience: float = 60.0,
) -> AsyncIterator[Event]:
    """The events of one step from a cursor on, to its end. `wire` blocks: nobody else should use it.

    `fetch_result` answers None for as long as the step has not ended. `accepted_ms` spares the reader what other steps
    printed before; a minute's margin allows for a clock of Redis that was set back.
    """
    key = keys.EVENTS.of(sandbox)
    result = await fetch_result()
    tracker = Tracker(step_id, cursor or _beginning(result, accepted_ms))
    while True:
        block: Command = () if result else ("BLOCK", round(limits.LOOK_EVERY * 1000))
        command = ("XREAD", "COUNT", READ_COUNT, *block, "STREAMS", key, tracker.cursor.entry_id)
        reply = await persist(lambda command=command: wire.one(*command), patience=patience, doing="reading events")  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        entries = reply[0][1] if reply else []
        for entry_id, fields in entries:
            for event in tracker.take(entry_id, fields or []):
                yield event
            if tracker.ended:
                break
        if result is None and (tracker.ended or not entries):
            result = await fetch_result()
            tracker.ended = tracker.ended and result is not None  # a marker without a result: the sandbox made it up
        if result is not None and (tracker.ended or not entries or _passed(tracker.cursor, result.last_event_id)):
            for event in tracker.finish(result):
                yield event
            return


def _beginning(result: StepResult | None, accepted_ms: int) -> Cursor:
    if result is not None and result.first_event_id is not None:
        ms, n = map(int, result.first_event_id.split("-"))
        return Cursor(ms, n - 1) if n else Cursor(max(ms - 1, 0), 2**64 - 1)
    return Cursor(max(accepted_ms - 60_000, 0))


def _passed(cursor: Cursor, last_event_id: str | None) -> bool:
    if last_event_id is None:
        return False
    ms, n = map(int, last_event_id.split("-"))
    return (cursor.ms, cursor.n) >= (ms, n)


def _number(text: bytes | None) -> int | None:
    """A non-negative integer that fits 63 bits; anything else was not written by our worker."""
    if text is None or not text.isdigit() or len(text) > 19:
        return None
    number = int(text)
    return number if number < 2**63 else None
