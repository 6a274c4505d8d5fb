"""directoryTree: a directory drawn as text, for people and for models."""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterator, Sequence

from sandbox_queue import limits
from sandbox_queue.models import DirectoryTree
from sandbox_queue.workers.globs import compiled_glob
from sandbox_queue.workers.outcome import Outcome
from sandbox_queue.workers.paths import reach
from sandbox_queue.workers.scan import Missed, entries, is_directory, is_noisy, shown

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # a name must not draw lines of its own


def directory_tree(step: DirectoryTree, roots: Sequence[str]) -> Outcome:
    """Draw a directory: at each level its directories first, then the rest, both by name.

    Raises:
        FileError: there is no such directory, or it may not be read; or a glob means nothing.
    """
    drawing = _Drawing(step)
    path, directory = reach(step.path, step.cwd, roots, lambda place: (place.path, place.open_directory()))
    drawing.lines.append(f"{_label(path.rpartition(b'/')[2])}/")
    drawing.draw(directory, step.max_depth, "")
    notes = [f"directory truncated at {limits.LIST_ENTRIES_MAX} entries"] if drawing.truncated else []
    return Outcome("\n".join(drawing.lines), truncated=drawing.truncated, notes=notes + drawing.missed.notes())


class _Drawing:
    def __init__(self, step: DirectoryTree) -> None:
        self.lines: list[str] = []
        self.truncated = False
        self.missed = Missed()
        self._excluded = [compiled_glob(glob) for glob in step.exclude_globs]

    def draw(self, directory: int, depth: int, indent: str) -> None:
        """Draw what is in a directory, and close it."""
        try:
            room = limits.LIST_ENTRIES_MAX + 1 - len(self.lines)  # the first line is the directory itself
            chosen = heapq.nsmallest(room + 1, self._wanted(directory))  # one more shows that there is more
            for position, (is_file, name) in enumerate(chosen, 1):
                if len(self.lines) > limits.LIST_ENTRIES_MAX:
                    self.truncated = True
                    return
                last = position == len(chosen)
                self.lines.append(f"{indent}{'└── ' if last else '├── '}{_label(name)}{'' if is_file else '/'}")
                if not is_file and depth > 1 and (child := self.missed.enter(directory, name)) is not None:
                    self.draw(child, depth - 1, indent + ("    " if last else "│   "))
        finally:
            os.close(directory)

    def _wanted(self, directory: int) -> Iterator[tuple[bool, bytes]]:
        for name, entry in entries(directory):
            if not is_noisy(name, entry) and not any(glob.fullmatch(shown(name)) for glob in self._excluded):
                yield not is_directory(entry), name


def _label(name: bytes) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", shown(name))
