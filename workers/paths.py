"""Where a path really leads, found without ever asking the kernel to follow a link.

Hostile code runs beside us and may swap a directory for a symbolic link at any moment, so a path that was checked must not
be used again: what we hold is a descriptor. The walk opens one component after the other, relative to the descriptor
before it, and reads links by hand. Thereby the names that it collects are those of real directories, "/proc/self/root" is
just a link to "/", and ".." is a step back on our own trail rather than a question to the kernel, whose answer changes
when somebody moves the directory. (`openat2` would save a few microseconds, and cost `ctypes` and a second way for gVisor,
old kernels and macOS.)
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from sandbox_queue.workers.outcome import FileError

T = TypeVar("T")

LINKS_MAX = 40  # as the kernel's own
ATTEMPTS = 10  # to get hold of what somebody keeps replacing

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
LOOKUP = _DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)  # macOS has no O_PATH; there directories must be readable
# A FIFO must not make us wait, a terminal must not become ours.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(slots=True)
class Place:
    """A location inside the allowed roots, held by the descriptor of the nearest directory. Use it in a `with` block.

    `rest` is what follows below that directory: nothing if the place is the directory itself, one name if it is something
    else or does not exist, several if directories are missing, too.
    """

    asked: str  # the path as the step gave it, for messages
    directory: int  # for lookups only, where there is O_PATH
    trail: tuple[bytes, ...]  # the names that lead from / to it, none of them a link
    rest: tuple[bytes, ...]
    exists: bool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self.directory)

    @property
    def path(self) -> bytes:
        """The absolute path after all links."""
        return b"/" + b"/".join(self.trail + self.rest)

    def open_directory(self) -> int:
        """A descriptor of the directory that this place is, for reading its entries.

        Raises:
            FileError: there is none, or it is something else.
        """
        if not self.exists:
            raise FileError("notFound", f"directory not found: {self.asked}")
        if self.rest:
            raise FileError("notDirectory", f"not a directory: {self.asked}")
        return open_directory(self.directory, b".")

    def open_file(self) -> tuple[int, os.stat_result]:
        """A descriptor of the regular file that this place is, for reading, and its status.

        Raises:
            FileError: there is none, or it is something else.
        """
        if not self.exists:
            raise FileError("notFound", f"file not found: {self.asked}")
        if not self.rest:
            raise FileError("isDirectory", f"is a directory: {self.asked}")
        try:
            return open_regular(self.directory, self.rest[0])
        except OSError as error:
            raise FileError.of(error, self.asked) from None


def reach(path: str, cwd: str, roots: Sequence[str], take: Callable[[Place], T]) -> T:
    """Follow `path` from `cwd` to where it leads, links included, and give that place to `take`.

    `take` is called again where it says `changed`: a link may be replaced at any time, by honest programs, too.

    Raises:
        FileError: `outsideRoots` for what does not end up in or below a root, whether it exists or not; `changed` if it
            did so without end; else what the walk or `take` met.
    """
    attempts = ATTEMPTS
    while True:
        try:
            with _resolve(path, cwd, roots) as place:
                return take(place)
        except FileError as error:
            attempts -= 1
            if error.code != "changed" or not attempts:
                raise


def open_directory(parent: int, name: bytes) -> int:
    """Open a directory for reading its entries; a link is an error."""
    return os.open(name, os.O_RDONLY | _DIRECTORY, dir_fd=parent)


def open_regular(parent: int, name: bytes) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; a link is an error (ELOOP), and so is a FIFO, device or socket (ENXIO)."""
    # An open has effects of its own on devices and FIFOs, so look first; and look again at what was opened.
    _check_regular(os.stat(name, dir_fd=parent, follow_symlinks=False))
    descriptor = os.open(name, _FILE, dir_fd=parent)
    try:
        status = os.fstat(descriptor)
        _check_regular(status)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, status


def _check_regular(status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode) or stat.S_ISDIR(status.st_mode):  # the walk has seen neither here
        raise OSError(errno.ELOOP, "replaced meanwhile")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ENXIO, "not a regular file")


def _resolve(path: str, cwd: str, roots: Sequence[str]) -> Place:
    walk = _Walk(os.path.join(cwd, path))  # pathlib would drop a slash at the end, which has a meaning
    try:
        problem = walk.run()
        if not any(walk.where[: len(end)] == end for end in map(_end_of, roots) if end is not None):
            raise FileError("outsideRoots", f"outside the allowed directories: {path} (allowed: {', '.join(roots)})")
        if problem is not None:
            raise FileError.of(problem, path) from None
        return Place(path, walk.descriptors.pop(), tuple(walk.trail), tuple(walk.rest), walk.exists)
    finally:
        walk.close()


def _end_of(root: str) -> list[bytes] | None:
    """Where a root really is; it may be a link itself, and need not exist yet."""
    walk = _Walk(f"/{root}")
    try:
        return walk.where if walk.run() is None else None
    finally:
        walk.close()


class _Walk:
    """One walk from / along a path. Afterwards `trail` leads to the nearest directory, and `rest` is what follows it."""

    def __init__(self, path: str) -> None:
        self.trail: list[bytes] = []
        self.rest: list[bytes] = []
        self.exists = True
        self.descriptors = [os.open(b"/", LOOKUP)]  # one for each name of the trail, and that of /
        self._ahead = path.encode().split(b"/")[::-1]  # what is still to go, the next name last
        self._links = 0

    @property
    def where(self) -> list[bytes]:
        return self.trail + self.rest

    def run(self) -> OSError | None:
        """Walk to the end. Returns what got in the way, for `where` it did decides who may know."""
        try:
            while self._ahead:
                name = self._ahead.pop()
                if name == b"..":
                    self._back()
                elif name not in (b"", b"."):
                    self._forward(name)
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())

    def _forward(self, name: bytes) -> None:
        here = self.descriptors[-1]
        self.rest = [name]
        try:
            self.descriptors.append(os.open(name, LOOKUP, dir_fd=here))
        except FileNotFoundError:
            self._miss()
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):  # Linux and macOS: a link, or not a directory
                raise
            self._turn(name)
        else:
            self.rest = []
            self.trail.append(name)

    def _turn(self, name: bytes) -> None:
        """Go where a link points; what is no link is the end of the walk."""
        try:
            target = os.readlink(name, dir_fd=self.descriptors[-1])
        except FileNotFoundError:
            return self._miss()
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            if self._ahead:  # if only by a slash at its end
                raise NotADirectoryError(errno.ENOTDIR, "not a directory") from None
            return None
        self._links += 1
        if self._links > LINKS_MAX:
            raise OSError(errno.EMLINK, "too many links")
        self.rest = []
        self._ahead += target.split(b"/")[::-1]
        if target.startswith(b"/"):
            while self.trail:
                self._back()
        return None

    def _miss(self) -> None:
        """Nothing is there, so what is still ahead are only names, and `..` leads nowhere, as the kernel has it."""
        self.exists = False
        if b".." in self._ahead:
            raise FileNotFoundError(errno.ENOENT, "no such file")
        self.rest += [name for name in reversed(self._ahead) if name not in (b"", b".")]
        self._ahead = []

    def _back(self) -> None:
        if self.trail:
            self.trail.pop()
            os.close(self.descriptors.pop())
