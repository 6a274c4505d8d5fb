"""grep: the lines that a regular expression matches, found by ripgrep where there is one, else by Python.

Both get the same text from here: files are chosen, opened, checked and decoded in one place, and rows are made in one
place. A searcher only says which lines match, so the rows cannot differ in anything else. ripgrep, for that, is fed from
memory: given paths it would open them by name, and thereby follow a link that somebody has just put there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

from sandbox_queue import limits
from sandbox_queue.models import Grep
from sandbox_queue.workers import ripgrep
from sandbox_queue.workers.globs import compiled, compiled_glob
from sandbox_queue.workers.outcome import Outcome, Row, fitting
from sandbox_queue.workers.paths import Place, open_regular, reach
from sandbox_queue.workers.read_file import read_bytes
from sandbox_queue.workers.scan import Missed, entries, is_directory, is_noisy, shown

FILE_MAX = 1_000_000  # bytes; a larger file is data rather than source
BATCH = 4 * limits.MIB  # of text at a time


@dataclass(frozen=True, slots=True)
class Text:
    """A file to search: its path as rows show it, and its lines, each ended by a newline and no carriage return."""

    path: str
    content: str


def grep(step: Grep, roots: Sequence[str]) -> Outcome:
    """Search a file, or all files below a directory in the order of their paths.

    Raises:
        FileError: nothing is there, or it may not be read; or `invalidPattern`.
    """
    search = _Search(step)
    wanted = _wanted(step.glob)
    descriptor, is_file = reach(step.path, step.cwd, roots, _open)
    missed = Missed()
    if is_file:
        files = _one(descriptor, step.path.rpartition("/")[2], missed)
    else:
        files = _below(descriptor, b"", wanted, limits.DEPTH_MAX, missed)
    content, rows, complete = fitting(search.rows(files))
    truncated = search.more or not complete
    matches = sum(row.get("kind") != "context" for row in rows)
    notes = [f"grep truncated at {matches} matches"] if truncated else []
    return Outcome(content, truncated=truncated, notes=notes + missed.notes())


class _Search:
    """One grep under way."""

    def __init__(self, step: Grep) -> None:
        self.more = False  # there are matches beyond the limit
        self._step = step
        self._room = step.head_limit  # rows still to come; in `content` mode, rows that match
        self._regex = compiled(step.pattern)
        self._common = ripgrep.common(step.pattern)
        # What matches a line matches the text as well, if it is simple enough; most files need no second look.
        self._anywhere = compiled(step.pattern, re.MULTILINE) if self._common else None

    def rows(self, files: Iterator[Text]) -> Iterator[Row]:
        for batch in _batches(files):
            for text, numbers in zip(batch, self._matches(batch), strict=True):
                yield from self._rows_of(text, numbers)
                if self.more:
                    return

    def _rows_of(self, text: Text, numbers: Iterable[int]) -> Iterator[Row]:
        mode = self._step.output_mode
        if mode == "content":
            chosen = list(islice(numbers, self._room + 1))
            self.more = len(chosen) > self._room
            yield from _lines_around(text, chosen[: self._room], self._step.context_before, self._step.context_after)
            self._room -= min(self._room, len(chosen))
        elif count := sum(1 for _ in (numbers if mode == "count" else islice(numbers, 1))):
            self.more = self._room == 0
            if not self.more:
                yield {"path": text.path, "count": count} if mode == "count" else {"path": text.path}
                self._room -= 1

    def _matches(self, batch: Sequence[Text]) -> Iterator[Iterable[int]]:
        """The numbers of the matching lines of each text, from 1."""
        by_ripgrep: Mapping[int, Sequence[int]] = {}
        if self._common is not None:
            enough = self._room + 1 if self._step.output_mode == "content" else None
            fit = {index: text.content for index, text in enumerate(batch) if self._common.fits(text.content)}
            by_ripgrep = ripgrep.search(self._common, fit, enough)
        for index, text in enumerate(batch):
            yield by_ripgrep[index] if index in by_ripgrep else self._by_python(text.content)

    def _by_python(self, content: str) -> Iterator[int]:
        if self._anywhere is None or self._anywhere.search(content):
            for number, line in enumerate(_lines(content), 1):
                if self._regex.search(line):
                    yield number


# --- rows


def _lines_around(text: Text, numbers: Sequence[int], before: int, after: int) -> Iterator[Row]:
    """Matching lines with their surroundings, each line once, however close the matches are to one another."""
    if not numbers:
        return
    lines = _lines(text.content)
    shown_up_to = 0
    for number, following in zip(numbers, [*numbers[1:], len(lines) + 1], strict=True):
        first = max(shown_up_to + 1, number - before)
        shown_up_to = min(number + after, following - 1, len(lines))
        for at in range(first, shown_up_to + 1):
            yield {"path": text.path, "line": at, "text": _cut(lines[at - 1]), "kind": "match" if at == number else "context"}


def _lines(content: str) -> list[str]:
    return content.split("\n")[:-1]


def _cut(line: str) -> str:
    return line if len(line) <= limits.GREP_ROW_MAX else line[: limits.GREP_ROW_MAX] + "…"


# --- files


def _wanted(glob: str | None) -> Callable[[str], bool]:
    if glob is None:
        return lambda path: True
    regex = compiled_glob(glob.removeprefix("!"))
    return lambda path: (regex.fullmatch(path) is None) == glob.startswith("!")


def _open(place: Place) -> tuple[int, bool]:
    if place.exists and not place.rest:
        return place.open_directory(), False
    return place.open_file()[0], True


def _one(descriptor: int, name: str, missed: Missed) -> Iterator[Text]:
    try:
        content = _text(descriptor, missed)
    finally:
        os.close(descriptor)
    if content is not None:
        yield Text(name, content)


def _below(directory: int, base: bytes, wanted: Callable[[str], bool], depth: int, missed: Missed) -> Iterator[Text]:
    try:
        for name, entry in sorted(entries(directory), key=itemgetter(0)):
            path = base + name
            if is_directory(entry):
                if is_noisy(name, entry):
                    continue
                if depth == 1:
                    missed.deep += 1
                elif (child := missed.enter(directory, name)) is not None:
                    yield from _below(child, path + b"/", wanted, depth - 1, missed)
            elif entry.is_file(follow_symlinks=False) and wanted(shown(path)):
                content = _content(directory, name, missed)
                if content is not None:
                    yield Text(shown(path), content)
    finally:
        os.close(directory)


def _content(directory: int, name: bytes, missed: Missed) -> str | None:
    try:
        descriptor, _ = open_regular(directory, name)
    except PermissionError:
        missed.denied += 1
        return None
    except OSError:  # replaced or removed since
        return None
    try:
        return _text(descriptor, missed)
    finally:
        os.close(descriptor)


def _text(descriptor: int, missed: Missed) -> str | None:
    """What a file says, for searching: None if it is too large, or binary, which one NUL makes it."""
    data = read_bytes(descriptor, FILE_MAX + 1)
    if len(data) > FILE_MAX:
        missed.large += 1
        return None
    if b"\0" in data:
        return None
    content = data.decode("utf-8", "replace").replace("\r\n", "\n")
    return content if content.endswith("\n") or not content else content + "\n"


def _batches(files: Iterator[Text]) -> Iterator[list[Text]]:
    batch: list[Text] = []
    size = 0
    for text in files:
        batch.append(text)
        size += len(text.content)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
