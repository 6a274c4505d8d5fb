"""listFiles: what is in a directory, as rows of JSON, sorted before they are cut."""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from sandbox_queue import limits
from sandbox_queue.models import ListFiles
from sandbox_queue.workers.outcome import Outcome, Row, fitting
from sandbox_queue.workers.paths import reach
from sandbox_queue.workers.scan import Missed, entries, is_directory, shown

LATEST = 253_402_300_799  # the last second of the year 9999: a file may claim a later one, but no date format has it
EARLIEST = -62_135_596_800  # the first one of the year 1


class Found(NamedTuple):
    """One entry. `size` is None for a directory."""

    path: bytes
    size: int | None
    mtime_ns: int


# The largest and the newest come first; equals are in the order of their names.
_ORDER: dict[Literal["name", "size", "mtime"], Callable[[Found], Any]] = {
    "name": lambda found: found.path,
    "size": lambda found: (1 if found.size is None else -found.size, found.path),
    "mtime": lambda found: (-found.mtime_ns, found.path),
}


def list_files(step: ListFiles, roots: Sequence[str]) -> Outcome:
    """List a directory, as deep as asked. The memory it takes does not grow with the directory.

    Raises:
        FileError: there is no such directory, or it may not be read.
    """
    base, directory = reach(step.path, step.cwd, roots, lambda place: (place.path, place.open_directory()))
    missed = Missed()
    found = _walk(directory, base.rstrip(b"/"), step.max_depth, missed)
    first = heapq.nsmallest(limits.LIST_ENTRIES_MAX + 1, found, key=_ORDER[step.sort_by])
    content, rows, complete = fitting(map(_row, first[: limits.LIST_ENTRIES_MAX]))
    truncated = not complete or len(first) > len(rows)
    notes = [f"directory truncated at {len(rows)} entries"] if truncated else []
    return Outcome(content, truncated=truncated, notes=notes + missed.notes())


def _walk(directory: int, base: bytes, depth: int, missed: Missed) -> Iterator[Found]:
    try:
        for name, entry in entries(directory):
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            path = base + b"/" + name
            if not is_directory(entry):
                yield Found(path, status.st_size, status.st_mtime_ns)
                continue
            yield Found(path, None, status.st_mtime_ns)
            if depth > 1 and (child := missed.enter(directory, name)) is not None:
                yield from _walk(child, path, depth - 1, missed)
    finally:
        os.close(directory)


def _row(found: Found) -> Row:
    size: Row = {} if found.size is None else {"size_bytes": found.size}
    return {"path": shown(found.path), **size, "mtime": _moment(found.mtime_ns), "is_directory": found.size is None}


def _moment(at_ns: int) -> str:
    seconds, nanoseconds = divmod(at_ns, 10**9)
    moment = time.gmtime(min(max(seconds, EARLIEST), LATEST))
    return f"{moment.tm_year:04}-{time.strftime('%m-%dT%H:%M:%S', moment)}.{nanoseconds // 1000:06}Z"
