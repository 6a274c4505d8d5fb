"""A directory that file steps may use, a secret beside it that they may not, and no descriptor left open afterwards."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox_queue.models import Step
from sandbox_queue.workers.files import FileError, Outcome, perform

SECRET = "the secret outside"


class Box:
    """`root` is the only allowed directory and the working directory; `outside/secret` is what must not be reached."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self.outside = directory / "outside"
        self.root.mkdir()
        self.outside.mkdir()
        (self.outside / "secret").write_text(SECRET)

    def perform(self, step: Step) -> Outcome:
        return perform(step, [str(self.root)])

    def read(self, path: str, **options: Any) -> Outcome:
        return self.perform(Step.read_file(path, cwd=str(self.root), **options))

    def text(self, path: str, **options: Any) -> str:
        content = self.read(path, **options).content
        assert content is not None
        return content

    def write(self, path: str, content: str | bytes, **options: Any) -> Outcome:
        return self.perform(Step.write_file(path, content, cwd=str(self.root), **options))

    def list_files(self, path: str = ".", **options: Any) -> Outcome:
        return self.perform(Step.list_files(path, cwd=str(self.root), **options))

    def names(self, path: str = ".", **options: Any) -> list[str]:
        """What listFiles shows, relative to the root."""
        return [row["path"].removeprefix(f"{self.root}/") for row in rows(self.list_files(path, **options))]

    def tree(self, path: str = ".", **options: Any) -> Outcome:
        return self.perform(Step.directory_tree(path, cwd=str(self.root), **options))

    def grep(self, pattern: str, path: str = ".", **options: Any) -> Outcome:
        return self.perform(Step.grep(pattern, path, cwd=str(self.root), **options))

    def fill(self, **files: str | bytes) -> None:
        """Make files: `fill(**{"src/a.py": "…"})`."""
        for name, content in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    def everything(self) -> set[str]:
        """All names below the root, temporary files included."""
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*")}


def rows(outcome: Outcome) -> list[dict[str, Any]]:
    assert outcome.content is not None
    found: list[dict[str, Any]] = json.loads(outcome.content)
    return found


def refused(code: str, message: str, act: Callable[[], object]) -> None:
    """Assert that `act` fails with that code and exactly that message."""
    with pytest.raises(FileError) as caught:
        act()
    assert (caught.value.code, caught.value.message) == (code, message)


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Run `act` over and over in a process of its own, as fast as it goes, for as long as the block runs."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_forever, args=(act,), daemon=True)
    process.start()
    try:
        yield
        assert process.is_alive(), "the other process gave up"
    finally:
        process.kill()
        process.join()
        process.close()


def exchange(one: Path, other: Path) -> None:
    """Let two names change places at once, without a moment in which either is missing."""
    at_cwd, rename_exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(at_cwd, bytes(one), at_cwd, bytes(other), rename_exchange) != 0:
        raise OSError(ctypes.get_errno(), "renameat2")


def _forever(act: Callable[[], None]) -> None:
    while True:
        act()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208  # its own descriptor is among them, and gone afterwards
