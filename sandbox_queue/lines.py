"""Lines out of bytes that arrive in any pieces.

UTF-8 never has a newline byte inside a character, so cutting at newlines and decoding each line whole gives exactly what
decoding the whole stream would. Only a line that is too long to be kept has to be cut elsewhere, between characters.
"""

from __future__ import annotations

from collections.abc import Iterator

from sandbox_queue import limits


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
