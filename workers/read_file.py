"""readFile: a file's text or bytes, as they are: neither a byte order mark nor a line ending is changed.

Whole, by lines, or by ranges of bytes; never more than 1 MiB in one step, whatever the size of the file.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Sequence

from sandbox_queue import limits
from sandbox_queue.models import ReadFile
from sandbox_queue.workers.outcome import FileError, Outcome
from sandbox_queue.workers.paths import Place, reach

LIMIT = f"{limits.READ_MAX // limits.MIB} MB limit"


def read_file(step: ReadFile, roots: Sequence[str]) -> Outcome:
    """Read a file.

    Raises:
        FileError: among others `tooLarge` and `notText`, whose messages say how to read it instead.
    """
    descriptor, status = reach(step.path, step.cwd, roots, Place.open_file)
    try:
        if step.start_line is not None or step.line_count is not None or step.with_line_numbers:
            return _by_lines(step, descriptor, status.st_size)
        if step.offset is not None:
            return _range(step, descriptor, step.offset, status.st_size)
        return _whole(step, descriptor, status.st_size)
    finally:
        os.close(descriptor)


def read_bytes(descriptor: int, count: int, offset: int = 0) -> bytes:
    """Up to `count` bytes from `offset`; fewer only at the end of the file."""
    parts: list[bytes] = []
    while count and (part := os.pread(descriptor, count, offset)):
        parts.append(part)
        offset += len(part)
        count -= len(part)
    return b"".join(parts)


def pieces(descriptor: int) -> Iterator[bytes]:
    """All of a file, however large, in pieces of 1 MiB at most."""
    offset = 0
    while piece := os.pread(descriptor, limits.MIB, offset):
        yield piece
        offset += len(piece)


def _whole(step: ReadFile, descriptor: int, size: int) -> Outcome:
    data = read_bytes(descriptor, limits.READ_MAX + 1)  # its size is a claim: it may grow, and those in /proc say 0
    if len(data) > limits.READ_MAX:
        raise FileError(
            "tooLarge",
            f"file exceeds {LIMIT}: {step.path} has {max(size, len(data))} bytes; read it in ranges by offset, or by lines",
        )
    return Outcome(_encode(step, data), file_size=len(data))


def _range(step: ReadFile, descriptor: int, offset: int, size: int) -> Outcome:
    if offset >= size:
        return Outcome("", file_size=size)
    data = read_bytes(descriptor, limits.READ_MAX, offset)
    if step.encoding == "utf-8":
        if data and data[0] & 0xC0 == 0x80 and offset:
            raise FileError(
                "notText", f"offset {offset} of {step.path} is within a UTF-8 character; move it, or use encoding base64"
            )
        if offset + len(data) < size:
            data = data[: _last_boundary(data)]
    return Outcome(_encode(step, data), truncated=offset + len(data) < size, file_size=size)


def _by_lines(step: ReadFile, descriptor: int, size: int) -> Outcome:
    """Lines end at "\\n" and come joined by it; nothing after the last "\\n" is no line, and has no number."""
    first = step.start_line or 1
    before = first - 1
    until = None if step.line_count is None else before + step.line_count
    index = _Newlines(descriptor, [before, until], count_all=step.with_line_numbers)
    begin = 0 if before == 0 else index.offsets.get(before, index.size - 1) + 1
    end = index.offsets.get(until, max(size, index.size))
    if end - begin > limits.READ_MAX:
        raise FileError("tooLarge", f"these lines exceed {LIMIT}: {end - begin} bytes of {step.path}; ask for fewer")
    content = _encode(step, read_bytes(descriptor, end - begin, begin))
    if step.with_line_numbers and content:
        content = _numbered(content, first, index.lines)
        if len(content) > limits.READ_MAX:
            raise FileError("tooLarge", f"these lines exceed {LIMIT} with their numbers: {step.path}; ask for fewer")
    return Outcome(content, file_size=size)


def _numbered(content: str, first: int, total: int) -> str:
    width = len(str(total))
    return "\n".join(
        f"{number:>{width}}\t{line}" if number <= total else line for number, line in enumerate(content.split("\n"), first)
    )


class _Newlines:
    """Where some of a file's newlines are, by their number from 1. It is read in pieces, however large it is."""

    def __init__(self, descriptor: int, wanted: Sequence[int | None], *, count_all: bool) -> None:
        self.offsets: dict[int | None, int] = {}
        self.size = 0  # of what was read
        self.lines = 0  # in what was read
        last = b"\n"
        missing = {number for number in wanted if number}
        for piece in pieces(descriptor):
            inside = piece.count(b"\n")
            for number in [number for number in missing if number <= self.lines + inside]:
                self.offsets[number] = self.size + _nth_newline(piece, number - self.lines)
                missing.remove(number)
            self.lines += inside
            self.size += len(piece)
            last = piece[-1:]
            if not missing and not count_all:
                break
        self.lines += last != b"\n"


def _nth_newline(piece: bytes, count: int) -> int:
    position = -1
    for _ in range(count):
        position = piece.index(b"\n", position + 1)
    return position


def _encode(step: ReadFile, data: bytes) -> str:
    if step.encoding == "base64":
        return base64.b64encode(data).decode("ascii")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise FileError(
            "notText", f"binary or non-UTF-8 content not supported: {step.path}; read it with encoding base64"
        ) from None


def _last_boundary(data: bytes) -> int:
    """Where the last complete UTF-8 character ends; all of it, if what it ends in is no UTF-8 anyway."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return len(data) - back if length > back else len(data)
    return len(data)
