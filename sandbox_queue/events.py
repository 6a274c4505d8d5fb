"""What a reader of a step sees, and the cursor by which it goes on where it stopped.

A cursor carries the id of a stream entry *and* the byte offset reached in stdout and stderr. An id alone could not tell
what a trim took away; offsets alone could not find the place in the stream. It may point into the middle of an entry:
the entry is then read again, and what lies below the offsets is dropped.
"""

from __future__ import annotations

import re
from typing import Literal, Self

import msgspec

from sandbox_queue.errors import InvalidCursor
from sandbox_queue.models import StepResult

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")

_CURSOR = re.compile(r"(\d{1,20})-(\d{1,20}):(\d{1,19}):(\d{1,19})", re.ASCII)
_U64 = 2**64


class Cursor(msgspec.Struct, frozen=True, order=True):
    """A place in a step's output. `str(cursor)` and `Cursor.parse` carry it through a URL, a header or a file."""

    ms: int = 0
    n: int = 0
    stdout: int = 0
    stderr: int = 0

    @classmethod
    def parse(cls, text: str | Cursor) -> Self:
        """Read what `str(cursor)` wrote.

        Raises:
            InvalidCursor: this is no cursor of ours.
        """
        match = _CURSOR.fullmatch(str(text))
        numbers = [int(part) for part in match.groups()] if match else []
        if not numbers or max(numbers[:2]) >= _U64 or max(numbers[2:]) >= _U64 // 2:
            raise InvalidCursor("cursor", f"{str(text)[:80]!r} is not a cursor", "give one that an event carried, or none")
        cursor = cls(*numbers)
        if str(cursor) != str(text):
            raise InvalidCursor("cursor", f"{str(text)[:80]!r} is not a cursor", "give one that an event carried, or none")
        return cursor

    def __str__(self) -> str:
        return f"{self.ms}-{self.n}:{self.stdout}:{self.stderr}"

    @property
    def entry_id(self) -> str:
        """Everything up to this stream entry has been seen."""
        return f"{self.ms}-{self.n}"


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The worker has begun the step. `at` is the worker's clock, in seconds since 1970."""

    at: float
    cursor: Cursor


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that the step printed; `offset` is where they stand in that stream."""

    stream: Stream
    data: bytes
    offset: int
    cursor: Cursor


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that were printed and are gone: trimmed before they were read, or lost by Redis."""

    stream: Stream
    bytes: int
    offset: int
    cursor: Cursor


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The step has ended; always the last event."""

    result: StepResult
    cursor: Cursor


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line, without its ending. `complete` is False for a piece of a very long line and for a last line that has no
    newline. Where bytes are gone, a line of its own says so, with their number in `lost`."""

    stream: Stream
    text: str
    cursor: Cursor
    complete: bool = True
    lost: int = 0


Event = Started | Output | Gap | Finished
