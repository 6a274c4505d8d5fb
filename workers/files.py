"""File steps: readFile, writeFile, listFiles, directoryTree and grep, in every sandbox the same way.

`perform` is synchronous and keeps nothing between two calls, so the runner calls it in a process that it can kill. Each
kind is a module of its own; `paths.py` is how all of them stay inside the allowed directories. What each one promises is
written in docs/files.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sandbox_queue.models import DirectoryTree, Grep, ListFiles, ReadFile, Step, WriteFile
from sandbox_queue.workers.directory_tree import directory_tree
from sandbox_queue.workers.grep import grep
from sandbox_queue.workers.list_files import list_files
from sandbox_queue.workers.outcome import FileError, Outcome
from sandbox_queue.workers.read_file import read_file
from sandbox_queue.workers.write_file import write_file

__all__ = ["FileError", "Outcome", "perform"]

_KINDS: dict[type[Step], Callable[[Any, Sequence[str]], Outcome]] = {
    ReadFile: read_file,
    WriteFile: write_file,
    ListFiles: list_files,
    DirectoryTree: directory_tree,
    Grep: grep,
}


def perform(step: Step, roots: Sequence[str]) -> Outcome:
    """Do what a file step asks for, inside `roots` and nowhere else.

    Raises:
        FileError: it could not be done; `code` and `message` say why.
        TypeError: it is not a file step.
    """
    kind = _KINDS.get(type(step))
    if kind is None:
        raise TypeError(f"{type(step).__name__} is not a file step")
    try:
        return kind(step, roots)
    except OSError as error:
        raise FileError.of(error, getattr(step, "path", "")) from error
