"""The reader's two machines, without any I/O: `Tracker` (entries to events) and `LineAssembler` (events to lines).

A model plays the worker, Redis and a reader that stops and resumes wherever it likes. The promise: no byte comes twice,
and none is missing without a `Gap` of exactly the missing bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from sandbox_queue.errors import InvalidCursor
from sandbox_queue.events import STREAMS, Cursor, Event, Finished, Gap, Line, Output, Started, Stream
from sandbox_queue.lines import LineAssembler
from sandbox_queue.models import StepResult
from sandbox_queue.stream import Tracker

LINE_MAX = 6
STEP = "build"
OTHERS = ("test", "1")

patient = settings(max_examples=50, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])

chunks = st.lists(
    st.sampled_from([b"a", b"bc", b"\n", b"\r\n", b"\0", "é".encode(), "😀".encode(), b"\xff", b"\xe2\x82"]),
    min_size=1,
    max_size=8,
).map(b"".join)
streams: st.SearchStrategy[Stream] = st.sampled_from(STREAMS)


# --- the model


@dataclass(frozen=True)
class Entry:
    """One entry of the Redis stream."""

    ms: int
    n: int
    step: str
    kind: str
    offset: int = 0
    data: bytes = b""

    @property
    def id(self) -> tuple[int, int]:
        return self.ms, self.n

    def fields(self) -> list[bytes]:
        fields = [b"step", self.step.encode(), b"kind", self.kind.encode(), b"at", b"1700000000000"]
        return [*fields, b"offset", b"%d" % self.offset, b"data", self.data] if self.kind in STREAMS else fields


class Redis:
    """The stream of one sandbox, and all that its steps have ever printed."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.printed: dict[tuple[str, Stream], bytes] = {}
        self._last = (1, 0)

    def add(self, step: str, kind: str, offset: int = 0, data: bytes = b"", *, new_ms: bool = False) -> None:
        self._last = (self._last[0] + 1, 0) if new_ms else (self._last[0], self._last[1] + 1)
        self.entries.append(Entry(*self._last, step, kind, offset, data))

    def write(self, step: str, stream: Stream, data: bytes, *, new_ms: bool = False) -> None:
        before = self.printed.get((step, stream), b"")
        self.add(step, stream, len(before), data, new_ms=new_ms)
        self.printed[step, stream] = before + data

    def repeat(self, count: int) -> None:
        """A reply was lost, so the worker sends its last batch again."""
        for entry in self.entries[-count:]:
            self.add(entry.step, entry.kind, entry.offset, entry.data)

    def trim(self, count: int) -> None:
        del self.entries[:count]

    def read(self, after: Cursor, count: int) -> list[Entry]:
        """XREAD COUNT."""
        return [entry for entry in self.entries if entry.id > (after.ms, after.n)][:count]

    def text(self, stream: Stream) -> bytes:
        return self.printed.get((STEP, stream), b"")

    def holds_any_of(self, stream: Stream, start: int, end: int, until: tuple[int, int]) -> bool:
        """Whether a reader that has come as far as `until` could have been given some of these bytes."""
        return any(
            entry.step == STEP
            and entry.kind == stream
            and entry.id <= until
            and entry.offset < end
            and start < entry.offset + len(entry.data)
            for entry in self.entries
        )

    def result(self) -> StepResult:
        return StepResult(cause="exit", exit_code=0, stdout_size=len(self.text("stdout")), stderr_size=len(self.text("stderr")))


class Ledger:
    """What a reader has been given: checks every event, or every line, against what was printed."""

    def __init__(self, redis: Redis, cursor: Cursor) -> None:
        self.redis = redis
        self.reached: dict[Stream, int] = {"stdout": cursor.stdout, "stderr": cursor.stderr}
        self.seen = (cursor.ms, cursor.n)  # the entry that is being read
        self.torn: set[Stream] = set()  # a line ended without newline: only a gap or the end may follow

    def event(self, event: Event) -> None:
        if isinstance(event, Output):
            assert event.offset == self.reached[event.stream], "no byte twice, none skipped"
            assert event.data
            assert event.data == self.redis.text(event.stream)[event.offset :][: len(event.data)]
            self.reached[event.stream] += len(event.data)
        elif isinstance(event, Gap):
            self.gap(event.stream, event.offset, event.bytes, event.cursor)
        assert (event.cursor.stdout, event.cursor.stderr) == (self.reached["stdout"], self.reached["stderr"])

    def gap(self, stream: Stream, offset: int, size: int, cursor: Cursor) -> None:
        assert offset == self.reached[stream]
        assert size > 0
        assert not self.redis.holds_any_of(stream, offset, offset + size, self.seen), "what is still there is not missing"
        self.reached[stream] += size

    def line(self, line: Line) -> None:
        end: int = line.cursor.stdout if line.stream == "stdout" else line.cursor.stderr
        start = self.reached[line.stream]
        if line.lost:
            self.torn.discard(line.stream)
            self.gap(line.stream, start, line.lost, line.cursor)
            assert f"{line.lost} bytes of {line.stream}" in line.text
        else:
            assert line.stream not in self.torn
            raw = self.redis.text(line.stream)[start:end]
            assert raw
            assert raw.endswith(b"\n") == line.complete
            body = raw.removesuffix(b"\n").removesuffix(b"\r") if line.complete else raw
            assert b"\n" not in body
            assert body.decode("utf-8", "replace") == line.text
            if not line.complete and len(raw) <= LINE_MAX - 4:
                self.torn.add(line.stream)
            self.reached[line.stream] = end
        assert (line.cursor.stdout, line.cursor.stderr) == (self.reached["stdout"], self.reached["stderr"])


class Following(RuleBasedStateMachine):
    """A worker prints, Redis trims, and one reader follows events, stopping and resuming at will."""

    cursors = Bundle("cursors")

    def __init__(self, redis: Redis | None = None) -> None:
        super().__init__()
        self.redis = redis or Redis()

    @initialize(target=cursors)
    def begin(self) -> Cursor:
        self.redis.add(STEP, "started")
        self.open(Cursor())
        return Cursor()

    def open(self, cursor: Cursor) -> None:
        self.tracker = Tracker(STEP, cursor)
        self.ledger = Ledger(self.redis, cursor)
        self.given: list[Cursor] = [cursor]  # since it was opened

    def deliver(self, events: Iterator[Event]) -> None:
        for event in events:
            self.ledger.event(event)
            self.given.append(event.cursor)

    def finish(self) -> None:
        """What a reader does when the step has ended: read on to the end, and count what is missing."""
        self.take_all(10**6)
        self.ledger.seen = (2**64, 0)
        self.deliver(self.tracker.finish(self.redis.result()))

    def take_all(self, count: int) -> None:
        for entry in self.redis.read(self.tracker.cursor, count):
            self.ledger.seen = entry.id
            self.deliver(self.tracker.take(b"%d-%d" % entry.id, entry.fields()))
            assert (self.tracker.cursor.ms, self.tracker.cursor.n) == entry.id

    @rule(stream=streams, data=chunks, new_ms=st.booleans())
    def the_step_prints(self, stream: Stream, data: bytes, new_ms: bool) -> None:
        self.redis.write(STEP, stream, data, new_ms=new_ms)

    @rule(step=st.sampled_from(OTHERS), stream=streams, data=chunks)
    def another_step_prints(self, step: str, stream: Stream, data: bytes) -> None:
        self.redis.write(step, stream, data)

    @rule(count=st.integers(1, 4))
    def the_worker_repeats_itself(self, count: int) -> None:
        self.redis.repeat(count)

    @rule(count=st.integers(1, 4))
    def redis_trims(self, count: int) -> None:
        self.redis.trim(count)

    @rule(count=st.integers(1, 4))
    def the_reader_reads_a_page(self, count: int) -> None:
        before = len(self.given)
        self.take_all(count)
        for cursor in self.given[before:]:
            self.check_the_rest(cursor)

    @rule(target=cursors, which=st.integers(0, 10**6))
    def the_reader_keeps_a_cursor(self, which: int) -> Cursor:
        return self.given[which % len(self.given)]

    @rule(cursor=cursors)
    def the_reader_resumes(self, cursor: Cursor) -> None:
        assert Cursor.parse(str(cursor)) == Cursor.parse(cursor) == cursor
        self.open(Cursor.parse(str(cursor)))

    @invariant()
    def the_rest_can_be_read_from_here(self) -> None:
        if hasattr(self, "given"):
            self.check_the_rest(self.given[-1])

    def check_the_rest(self, cursor: Cursor) -> None:
        """Whoever goes on from this cursor gets every byte or its gap, to the very end."""
        reader = type(self)(self.redis)
        reader.open(Cursor.parse(str(cursor)))
        reader.finish()
        for stream in STREAMS:
            assert reader.ledger.reached[stream] == len(self.redis.text(stream))


class FollowingLines(Following):
    """The same by lines, resuming from the cursors of lines only."""

    def open(self, cursor: Cursor) -> None:
        super().open(cursor)
        self.assembler = LineAssembler(cursor, LINE_MAX)

    def deliver(self, events: Iterator[Event]) -> None:
        for event in events:
            for line in self.assembler.feed(event):
                self.ledger.line(line)
                self.given.append(line.cursor)


TestFollowing = Following.TestCase
TestFollowing.settings = patient
TestFollowingLines = FollowingLines.TestCase
TestFollowingLines.settings = patient


# --- resuming, exhaustively: from every cursor that was ever given

actions = st.lists(
    st.one_of(
        st.tuples(st.just("print"), st.sampled_from([STEP, STEP, STEP, "1"]), streams, chunks),
        st.tuples(st.just("repeat"), st.integers(1, 4)),
        st.tuples(st.just("trim"), st.integers(1, 3)),
    ),
    max_size=14,
)


def act(todo: list[tuple[Any, ...]]) -> Redis:
    redis = Redis()
    perform: dict[str, Callable[..., None]] = {"print": redis.write, "repeat": redis.repeat, "trim": redis.trim}
    for action, *arguments in todo:
        perform[action](*arguments)
    return redis


def events_of(redis: Redis, cursor: Cursor) -> list[Event]:
    tracker = Tracker(STEP, cursor)
    events: list[Event] = []
    for entry in redis.read(cursor, 10**6):
        events += tracker.take(b"%d-%d" % entry.id, entry.fields())
    return events + list(tracker.finish(redis.result()))


def lines_of(redis: Redis, cursor: Cursor) -> list[Line]:
    assembler = LineAssembler(cursor, LINE_MAX)
    return [line for event in events_of(redis, cursor) for line in assembler.feed(event)]


def plain(lines: list[Line]) -> list[tuple[str, str, bool, int]]:
    return [(line.stream, line.text, line.complete, line.lost) for line in lines]


@many
@given(actions)
@example([("print", STEP, "stdout", b"gone"), ("print", STEP, "stdout", b"kept"), ("trim", 1)])
@example([("print", STEP, "stdout", b"a"), ("print", STEP, "stderr", b"b"), ("repeat", 2), ("print", STEP, "stdout", b"c")])
def test_whoever_resumes_from_an_event_gets_exactly_the_events_after_it(todo: list[tuple[Any, ...]]) -> None:
    redis = act(todo)
    events = events_of(redis, Cursor())
    for place, event in enumerate(events[:-1], 1):
        assert events_of(redis, Cursor.parse(str(event.cursor))) == events[place:]


@many
@given(actions)
@example([("print", STEP, "stdout", b"gone\n"), ("print", STEP, "stdout", b"one\ntwo\n"), ("trim", 1)])
@example(
    [("print", STEP, "stderr", b"begun "), ("print", STEP, "stdout", b"one\ntwo\n"), ("print", STEP, "stderr", b"ended\n")]
)
@example(
    [
        ("print", STEP, "stdout", b"a\nb"),
        ("print", STEP, "stderr", b"x\n"),
        ("print", STEP, "stdout", b"c\nd"),
        ("print", STEP, "stdout", b"\n"),
    ]
)
@example(
    [
        ("print", "1", "stdout", b"x"),
        ("print", STEP, "stderr", b"be"),
        ("print", STEP, "stderr", b"gun"),
        ("print", STEP, "stdout", b"one\n"),
        ("print", STEP, "stderr", b"\n"),
    ]
)
@example([("print", STEP, "stdout", b"0123456789" * 3)])
@example([("print", "1", "stdout", b"x"), ("print", STEP, "stdout", b"abcd\xe2\x82"), ("print", STEP, "stdout", b"\xac")])
def test_whoever_resumes_from_a_line_gets_exactly_the_lines_after_it(todo: list[tuple[Any, ...]]) -> None:
    redis = act(todo)
    lines = lines_of(redis, Cursor())
    for place, line in enumerate(lines, 1):
        assert plain(lines_of(redis, Cursor.parse(str(line.cursor)))) == plain(lines[place:])


@many
@given(st.lists(st.tuples(streams, chunks), max_size=12))
def test_lines_are_those_of_the_whole_output(printed: list[tuple[Stream, bytes]]) -> None:
    redis = Redis()
    for stream, data in printed:
        redis.write(STEP, stream, data)
    lines = lines_of(redis, Cursor())
    for stream in STREAMS:
        joined = "".join(line.text + "\n" * line.complete for line in lines if line.stream == stream)
        assert joined == redis.text(stream).decode("utf-8", "replace").replace("\r\n", "\n")


# --- single facts about the Tracker


def take(tracker: Tracker, entry_id: bytes, **fields: bytes | int | str) -> list[Event]:
    flat: list[bytes] = []
    for name, value in fields.items():
        flat += [name.encode(), value if isinstance(value, bytes) else str(value).encode()]
    return list(tracker.take(entry_id, flat))


def test_output_carries_its_offset_and_a_cursor_behind_it() -> None:
    tracker = Tracker("build", Cursor())
    assert take(tracker, b"5-1", step="build", kind="stdout", at=1, offset=0, data="abc") == [
        Output(stream="stdout", data=b"abc", offset=0, cursor=Cursor(5, 1, 3, 0))
    ]
    assert take(tracker, b"5-2", step="build", kind="stderr", at=1, offset=0, data="de") == [
        Output(stream="stderr", data=b"de", offset=0, cursor=Cursor(5, 2, 3, 2))
    ]


def test_a_jump_is_a_gap_of_exactly_the_bytes_between() -> None:
    tracker = Tracker("build", Cursor(1, 0, 10, 0))
    gap, output = take(tracker, b"5-1", step="build", kind="stdout", at=1, offset=25, data="abc")
    assert isinstance(gap, Gap)
    assert (gap.stream, gap.offset, gap.bytes) == ("stdout", 10, 15)
    assert output == Output(stream="stdout", data=b"abc", offset=25, cursor=Cursor(5, 1, 28, 0))


def test_the_cursor_of_a_gap_does_not_skip_the_bytes_after_it() -> None:
    """They stand in the same entry as the jump, so that entry has not been seen yet."""
    tracker = Tracker("build", Cursor(1, 0, 10, 0))
    gap, _ = take(tracker, b"5-1", step="build", kind="stdout", at=1, offset=25, data="abc")
    assert (gap.cursor.ms, gap.cursor.n) < (5, 1)
    resumed = Tracker("build", gap.cursor)
    assert take(resumed, b"5-1", step="build", kind="stdout", at=1, offset=25, data="abc") == [
        Output(stream="stdout", data=b"abc", offset=25, cursor=Cursor(5, 1, 28, 0))
    ]


def test_what_was_sent_again_is_dropped_up_to_the_byte() -> None:
    tracker = Tracker("build", Cursor(1, 0, 4, 0))
    assert take(tracker, b"5-1", step="build", kind="stdout", at=1, offset=0, data="abcd") == []
    assert take(tracker, b"5-2", step="build", kind="stdout", at=1, offset=2, data="cdEF") == [
        Output(stream="stdout", data=b"EF", offset=4, cursor=Cursor(5, 2, 6, 0))
    ]


def test_entries_of_other_steps_move_the_cursor_and_nothing_else() -> None:
    tracker = Tracker("1", Cursor())
    for step in ("11", "10", "", "1 ", "build"):
        assert take(tracker, b"7-3", step=step, kind="stdout", at=1, offset=0, data="x") == []
    assert tracker.cursor == Cursor(7, 3, 0, 0)


def test_a_step_begins_once_however_often_it_is_announced() -> None:
    tracker = Tracker("build", Cursor())
    assert take(tracker, b"1-1", step="build", kind="started", at=1500) == [Started(at=1.5, cursor=Cursor(1, 1))]
    assert take(tracker, b"1-2", step="build", kind="started", at=1500) == []


def test_the_marker_of_the_end_is_no_event() -> None:
    tracker = Tracker("build", Cursor())
    assert not tracker.ended
    assert take(tracker, b"1-1", step="other", kind="ended", at=1) == []
    assert not tracker.ended
    assert take(tracker, b"1-2", step="build", kind="ended", at=1) == []
    assert tracker.ended


def test_what_the_sizes_in_the_result_say_is_missing_is_a_gap_before_the_end() -> None:
    tracker = Tracker("build", Cursor(9, 9, 3, 0))
    result = StepResult(cause="exit", stdout_size=10, stderr_size=7)
    *gaps, end = tracker.finish(result)
    assert [(gap.stream, gap.offset, gap.bytes) for gap in gaps if isinstance(gap, Gap)] == [("stdout", 3, 7), ("stderr", 0, 7)]
    assert end == Finished(result=result, cursor=Cursor(9, 9, 10, 7))


@pytest.mark.parametrize("sizes", [(None, None), (3, 0), (0, 0)])
def test_a_result_that_knows_no_sizes_or_smaller_ones_makes_no_gap(sizes: tuple[int | None, int | None]) -> None:
    tracker = Tracker("build", Cursor(9, 9, 3, 0))
    (end,) = tracker.finish(StepResult(cause="lost", stdout_size=sizes[0], stderr_size=sizes[1]))
    assert isinstance(end, Finished)


# --- entries that no worker of ours wrote

numbers = st.sampled_from(
    [
        b"",
        b"-1",
        b"1.5",
        b"1e3",
        b" 1",
        b"1\n",
        b"0x1",
        "٣".encode(),
        b"9" * 19,
        b"9" * 5000,
        b"%d" % (2**63),
        b"%d" % (2**63 - 1),
    ]
)
names = st.sampled_from([b"step", b"kind", b"at", b"offset", b"data", b"zzz", b""])
values = (
    st.sampled_from([b"build", b"stdout", b"stderr", b"started", b"ended", b"STDOUT", b"0", b"3"])
    | numbers
    | st.binary(max_size=4)
)
odd_fields = st.one_of(
    st.lists(names | values, max_size=11),
    st.builds(
        lambda kind, at, offset, data: [b"step", b"build", b"kind", kind, b"at", at, b"offset", offset, b"data", data],
        st.sampled_from([b"stdout", b"stderr", b"started", b"ended"]),
        values,
        values,
        st.binary(max_size=4),
    ),
)


@many
@given(st.lists(odd_fields, max_size=5))
@example([[b"step", b"build", b"kind", b"stdout", b"offset", b"%d" % (2**63 - 1), b"data", b"abc"]])
@example([[b"step", b"build", b"kind", b"stdout", b"offset", b"5"]])
@example([[b"step"], [], [b"step", b"build", b"kind"]])
def test_entries_that_nobody_understands_never_raise_and_spoil_no_cursor(entries: list[list[bytes]]) -> None:
    tracker = Tracker("build", Cursor())
    assembler = LineAssembler(None)
    for number, fields in enumerate(entries, 1):
        before = tracker.cursor
        for event in tracker.take(b"%d-0" % number, fields):
            list(assembler.feed(event))
            assert Cursor.parse(str(event.cursor)) == event.cursor, "whatever a sandbox writes, the cursor can be used"
            if isinstance(event, Output):
                assert event.data, "an event without bytes is none"
        assert tracker.cursor.stdout >= before.stdout
        assert tracker.cursor.stderr >= before.stderr
        assert tracker.cursor.entry_id == f"{number}-0"
    for event in tracker.finish(StepResult(cause="exit", stdout_size=2**63 - 1)):
        assert Cursor.parse(str(event.cursor)) == event.cursor


@pytest.mark.parametrize(
    "offset", [b"", b"-1", b"1.5", b"zero", "٣".encode(), b"9" * 5000, b"%d" % 2**63], ids=lambda raw: repr(raw)[:12]
)
def test_an_entry_without_a_usable_offset_is_skipped(offset: bytes) -> None:
    tracker = Tracker("build", Cursor())
    assert take(tracker, b"1-0", step="build", kind="stdout", at=1, offset=offset, data="x") == []
    assert take(tracker, b"2-0", step="build", kind="stdout", at=1, offset=0, data="y") == [
        Output(stream="stdout", data=b"y", offset=0, cursor=Cursor(2, 0, 1, 0))
    ]


# --- cursors

u64 = st.integers(0, 2**64 - 1)
u63 = st.integers(0, 2**63 - 1)


@many
@given(st.builds(Cursor, u64, u64, u63, u63))
@example(Cursor(2**64 - 1, 2**64 - 1, 2**63 - 1, 2**63 - 1))
def test_a_cursor_survives_being_written_down(cursor: Cursor) -> None:
    assert Cursor.parse(str(cursor)) == cursor
    assert Cursor.parse(cursor) == cursor
    assert str(cursor).isascii()
    assert " " not in str(cursor)


@many
@given(st.text() | st.from_regex(r"\d+-\d+:\d+:\d+", fullmatch=True) | st.text("0123456789-:", max_size=30))
@example("007-0:0:0")
@example("1-1:1:1\n")
@example("٣-٣:٣:٣")
@example("+1-1:1:1")
@example("1-1")
@example("")
def test_nothing_but_a_written_cursor_is_read_as_one(text: str) -> None:
    try:
        cursor = Cursor.parse(text)
    except InvalidCursor as refusal:
        as_expected = refusal.field == "cursor" and len(str(refusal)) < 500
    else:
        as_expected = str(cursor) == text
    assert as_expected


@pytest.mark.parametrize(
    "cursor",
    [Cursor(2**64, 0, 0, 0), Cursor(0, 2**64, 0, 0), Cursor(0, 0, 2**63, 0), Cursor(0, 0, 0, 2**63), Cursor(-1, 0, 0, 0)],
    ids=str,
)
def test_a_cursor_beyond_what_redis_or_a_file_can_count_is_refused(cursor: Cursor) -> None:
    with pytest.raises(InvalidCursor):
        Cursor.parse(cursor)
    with pytest.raises(InvalidCursor):
        Cursor.parse(str(cursor))


def test_cursors_sort_by_their_place_in_the_stream() -> None:
    assert Cursor(1, 9) < Cursor(2, 0) < Cursor(10, 0) < Cursor(10, 0, 1, 0)
