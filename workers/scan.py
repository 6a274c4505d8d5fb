"""The entries of directories, for listFiles, directoryTree and grep. A link is an entry like others, and never followed."""

from __future__ import annotations

import os
from collections.abc import Iterator

from sandbox_queue.workers.paths import open_directory

# Directories that grep does not enter and directoryTree does not draw, in whatever case: what tools made or fetched, not
# what people wrote. Fixed, so that the same tree gives the same answer everywhere; a .gitignore has no say.
NOISY = frozenset(b".git node_modules bin obj .vs .idea dist build .next .nuxt coverage .terraform vendor __pycache__".split())

TEMPORARY = b".sandbox-queue-"  # begins the name of what writeFile has not finished: nothing is there yet, for every step


def entries(directory: int) -> Iterator[tuple[bytes, os.DirEntry[str]]]:
    """Every entry of an open directory under its name in bytes, in the order of the file system."""
    with os.scandir(directory) as found:
        for entry in found:
            name = os.fsencode(entry.name)  # undoes the decoding, whatever the locale was
            if not name.startswith(TEMPORARY):
                yield name, entry


def is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether it is a directory itself, rather than a link to one."""
    return entry.is_dir(follow_symlinks=False)


def is_noisy(name: bytes, entry: os.DirEntry[str]) -> bool:
    return name.lower() in NOISY and is_directory(entry)


def shown(name: bytes) -> str:
    """A name as text. JSON cannot carry bytes that are not UTF-8: U+FFFD stands for them."""
    return name.decode("utf-8", "replace")


class Missed:
    """Counts what could not be looked at, so that an answer with holes says so."""

    def __init__(self) -> None:
        self.denied = 0
        self.deep = 0  # directories below the deepest level that grep goes to
        self.large = 0  # files above grep's limit

    def enter(self, parent: int, name: bytes) -> int | None:
        """Open a directory that `entries` found; None if we may not, or if somebody has replaced or removed it since."""
        try:
            return open_directory(parent, name)
        except PermissionError:
            self.denied += 1
        except OSError:  # as if we had come a moment later
            pass
        return None

    def notes(self) -> list[str]:
        reasons = {"permission denied": self.denied, "too deep": self.deep, "too large to search": self.large}
        return [f"{count} left out: {reason}" for reason, count in reasons.items() if count]
