"""Lines out of bytes that arrive in any pieces.

UTF-8 never has a newline byte inside a character, so cutting at newlines and decoding each line whole gives exactly what
decoding the whole stream would. Only a line that is too long to be kept has to be cut elsewhere, between characters.
"""

from __future__ import annotations

from collections.abc import Iterator

from sandbox_queue import limits
from sandbox_queue.events import STREAMS, Cursor, Event, Finished, Gap, Line, Output, Stream


class LineSplitter:
    """Feed bytes, get `(text, size, complete)`: the line without its ending, the bytes it took, and whether it ended."""

    def __init__(self, line_max: int = limits.LINE_MAX) -> None:
        if line_max < 4:
            raise ValueError("line_max must leave room for one character")
        self._max = line_max
        self._kept = bytearray()  # an unfinished line; never longer than line_max

    def feed(self, data: bytes) -> Iterator[tuple[str, int, bool]]:
        """Lines that `data` completes; pieces of a line that grows beyond the limit."""
        start = 0
        while True:
            end = data.find(b"\n", start)
            if end < 0:
                break
            yield from self._take(data[start:end], b"\n")
            start = end + 1
        yield from self._take(data[start:], b"")

    def flush(self) -> Iterator[tuple[str, int, bool]]:
        """What is left when no more comes: a last line without its newline."""
        if self._kept:
            yield _text(self._kept), len(self._kept), False
            self._kept.clear()

    @property
    def pending(self) -> int:
        """Bytes that were fed and not yielded yet."""
        return len(self._kept)

    def _take(self, part: bytes, newline: bytes) -> Iterator[tuple[str, int, bool]]:
        """Append a part of a line, with its newline or without."""
        view = memoryview(part)
        while len(self._kept) + len(view) > self._max:
            room = self._max - len(self._kept)
            self._kept += view[:room]
            view = view[room:]
            cut = _character_boundary(self._kept)
            yield _text(self._kept[:cut]), cut, False
            del self._kept[:cut]
        self._kept += view
        if newline:
            line = self._kept
            size = len(line) + 1
            yield _text(line[:-1] if line.endswith(b"\r") else line), size, True
            self._kept.clear()


class LineAssembler:
    """Turns events into lines, each with a cursor from which the next line follows, exactly."""

    def __init__(self, cursor: Cursor | None, line_max: int = limits.LINE_MAX) -> None:
        start = cursor or Cursor()
        self._splitters = {stream: LineSplitter(line_max) for stream in STREAMS}
        self._used: dict[Stream, int] = {"stdout": start.stdout, "stderr": start.stderr}  # bytes given out as lines
        # Where an unfinished line began: the entry before that. A cursor must not skip it.
        self._unfinished: dict[Stream, tuple[int, int] | None] = {"stdout": None, "stderr": None}
        self._seen = (start.ms, start.n)

    def feed(self, event: Event) -> Iterator[Line]:
        """The lines that this event completes."""
        here = (event.cursor.ms, event.cursor.n)
        if isinstance(event, Output):
            yield from self._output(event, here)
        elif isinstance(event, Gap):
            yield from self._flush(event.stream, here)
            self._used[event.stream] = event.offset + event.bytes
            text = f"[{event.bytes} bytes of {event.stream} are gone]"
            yield Line(stream=event.stream, text=text, lost=event.bytes, complete=False, cursor=self._cursor(here))
        elif isinstance(event, Finished):
            for stream in STREAMS:
                yield from self._flush(stream, here)
        self._seen = here

    def _output(self, event: Output, here: tuple[int, int]) -> Iterator[Line]:
        stream, splitter = event.stream, self._splitters[event.stream]
        if splitter.pending == 0:
            self._used[stream] = event.offset
        end = event.offset + len(event.data)
        before, self._unfinished[stream] = self._unfinished[stream], None
        for text, size, complete in splitter.feed(event.data):
            self._used[stream] += size
            # A cut before the end of a character leaves bytes of an earlier entry pending.
            rest = self._seen if before is None or self._used[stream] >= event.offset else before
            reached = here if self._used[stream] == end else rest
            yield Line(stream=stream, text=text, complete=complete, cursor=self._cursor(reached))
        if splitter.pending:
            began_here = self._used[stream] >= event.offset
            self._unfinished[stream] = self._seen if began_here else before

    def _flush(self, stream: Stream, here: tuple[int, int]) -> Iterator[Line]:
        self._unfinished[stream] = None
        for text, size, complete in self._splitters[stream].flush():
            self._used[stream] += size
            yield Line(stream=stream, text=text, complete=complete, cursor=self._cursor(here))

    def _cursor(self, reached: tuple[int, int]) -> Cursor:
        ms, n = min([reached, *(place for place in self._unfinished.values() if place is not None)])
        return Cursor(ms, n, self._used["stdout"], self._used["stderr"])


def _text(data: bytes | bytearray) -> str:
    return data.decode("utf-8", "replace")


def _character_boundary(data: bytearray) -> int:
    """Where to cut so that a character which may still be going on stays whole; invalid bytes are cut anywhere."""
    for back in range(1, min(4, len(data))):
        byte = data[-back]
        if byte >= 0xC0:  # a leading byte: keep it back if its character is longer than what is here
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if length > back else len(data)
        if byte < 0x80:
            break
    return len(data)
