"""writeFile: all of a file or nothing of it, and what was written is read again before anybody sees it.

The new content goes into a temporary file beside the target, is verified by size and SHA-256, brought to disk, and renamed
over the target: a reader has the old file or the new one, never a part. A write through a link replaces what the link
points to, and never leaves the directory that the walk has found.

A file above 10 MiB comes in chunks, one step after another. They gather in one temporary file per target, whose name
follows from the target's, so an abandoned upload is continued or overwritten by the next one. No chunk is trusted to have
arrived: the last one carries the size and the SHA-256 of the whole, and these decide.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from binascii import a2b_base64
from collections.abc import Iterator, Sequence

from sandbox_queue.models import WriteFile
from sandbox_queue.workers.outcome import FileError, Outcome
from sandbox_queue.workers.paths import LOOKUP, Place, open_directory, open_regular, reach
from sandbox_queue.workers.read_file import pieces
from sandbox_queue.workers.scan import TEMPORARY

# A file without a name until it is complete leaves nothing behind when we are killed. It gets its name by way of /proc.
ANONYMOUS = getattr(os, "O_TMPFILE", 0) if os.path.isdir("/proc/self/fd") else 0
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_OLD = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_file(step: WriteFile, roots: Sequence[str]) -> Outcome:
    """Write a file, or one chunk of it.

    Raises:
        FileError: the old file, if there is one, is as it was. Among others `noSpace`, `mismatch` and `wrongOffset`.
    """
    data = a2b_base64(step.content) if step.encoding == "base64" else step.content.encode()
    if step.offset is None:
        digest = hashlib.sha256(data).hexdigest()
        if step.sha256 not in (None, digest):
            raise FileError("mismatch", f"the content for {step.path} has the SHA-256 {digest}, not {step.sha256}")
        return reach(step.path, step.cwd, roots, lambda place: _write_whole(data, digest, place))
    offset = step.offset
    return reach(step.path, step.cwd, roots, lambda place: _write_chunk(step, data, offset, place))


def _write_whole(data: bytes, digest: str, place: Place) -> Outcome:
    with _target(place) as (directory, old):
        temporary = TEMPORARY + os.urandom(16).hex().encode()
        descriptor, anonymous = _create(directory, temporary, old)
        with _held(descriptor, directory, temporary):
            _write_at(descriptor, data, 0)
            _verify(descriptor, len(data), digest, place.asked)
            _settle(descriptor, old)
            if anonymous:
                os.link(f"/proc/self/fd/{descriptor}", temporary, dst_dir_fd=directory)
            _publish(directory, temporary, place.rest[-1])
    return Outcome(file_size=len(data))


def _write_chunk(step: WriteFile, data: bytes, offset: int, place: Place) -> Outcome:
    with _target(place) as (directory, old):
        temporary = TEMPORARY + hashlib.sha256(place.rest[-1]).hexdigest()[:32].encode()
        descriptor = _open_upload(place.asked, directory, temporary, old, begin=offset == 0)
        if descriptor is None:
            if old is not None and _is_complete(directory, place.rest[-1], old, step):
                return Outcome(file_size=step.size)  # the last chunk once more: its reply got lost
            raise FileError("wrongOffset", f"no upload of {step.path} is under way: begin at offset 0, not {offset}")
        if offset > (size := os.fstat(descriptor).st_size):
            os.close(descriptor)
            raise FileError("wrongOffset", f"offset {offset} leaves a gap: the upload of {step.path} has {size} bytes so far")
        with _held(descriptor, directory, temporary):
            _write_at(descriptor, data, offset)
            if step.size is not None and step.sha256 is not None:
                os.ftruncate(descriptor, step.size)  # an abandoned upload may have been longer
                _verify(descriptor, step.size, step.sha256, step.path)
                _settle(descriptor, old)
                _publish(directory, temporary, place.rest[-1])
    return Outcome(file_size=offset + len(data))


# --- the target


@contextlib.contextmanager
def _target(place: Place) -> Iterator[tuple[int, os.stat_result | None]]:
    """The directory to write into, made if it was missing, and what stands there under the target's name now."""
    if not place.rest or place.asked.endswith(("/", "/.")):
        raise FileError("isDirectory", f"is a directory: {place.asked}")
    directory = os.dup(place.directory)
    try:
        for name in place.rest[:-1]:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=directory)
                _sync(directory)
            parent = directory
            directory = os.open(name, LOOKUP, dir_fd=parent)
            os.close(parent)
        yield directory, _status(place.asked, directory, place.rest[-1])
    finally:
        os.close(directory)


def _status(asked: str, directory: int, name: bytes) -> os.stat_result | None:
    status = _look(directory, name)
    if status is None or stat.S_ISREG(status.st_mode):
        return status
    if stat.S_ISDIR(status.st_mode):
        raise FileError("isDirectory", f"is a directory: {asked}")
    if stat.S_ISLNK(status.st_mode):  # the walk saw none here
        raise FileError("changed", f"replaced while it was written: {asked}")
    raise FileError("notRegular", f"not a regular file: {asked}")


def _is_complete(directory: int, name: bytes, old: os.stat_result, step: WriteFile) -> bool:
    if step.sha256 is None or old.st_size != step.size:
        return False
    descriptor, _ = open_regular(directory, name)
    try:
        return _measure(descriptor) == (step.size, step.sha256)
    finally:
        os.close(descriptor)


# --- the temporary file


def _create(directory: int, temporary: bytes, old: os.stat_result | None) -> tuple[int, bool]:
    """A new file, and whether it still lacks a name."""
    mode = _mode(old)
    if ANONYMOUS:
        with contextlib.suppress(OSError):  # not every file system can; the other way tells what else is wrong
            return os.open(b".", ANONYMOUS | os.O_RDWR | os.O_CLOEXEC, mode, dir_fd=directory), True
    return os.open(temporary, _NEW, mode, dir_fd=directory), False


def _open_upload(asked: str, directory: int, temporary: bytes, old: os.stat_result | None, *, begin: bool) -> int | None:
    """The file in which the chunks gather, locked; None if there is none and this is not the first chunk.

    Its name can be guessed, so somebody may have put a link, a FIFO or another's file there to have us write into it.
    """
    there = _look(directory, temporary)
    if there is not None and not _is_ours(there):
        os.unlink(temporary, dir_fd=directory)
        there = None
    if there is None and not begin:
        return None
    mode = _mode(old)
    descriptor = os.open(temporary, _NEW if there is None else _OLD, mode, dir_fd=directory)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        now = _look(directory, temporary)
        if now is None or not _is_ours(now) or not os.path.samestat(now, os.fstat(descriptor)):
            raise FileError("changed", f"replaced while it was written: {asked}")
    except BlockingIOError:
        os.close(descriptor)
        raise FileError("changed", f"another upload is writing: {asked}") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _held(descriptor: int, directory: int, temporary: bytes) -> Iterator[None]:
    """Closes the temporary file afterwards; should the block fail, nothing of it stays."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
    finally:
        os.close(descriptor)


def _look(directory: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_ours(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1


def _mode(old: os.stat_result | None) -> int:
    """The permissions to begin with: nobody may read more than before. The kernel takes off the umask."""
    return 0o666 if old is None else old.st_mode & 0o777 | 0o600


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


def _measure(descriptor: int) -> tuple[int, str]:
    """Size and SHA-256 of what a file holds, by reading it."""
    size = 0
    digest = hashlib.sha256()
    for piece in pieces(descriptor):
        digest.update(piece)
        size += len(piece)
    return size, digest.hexdigest()


def _verify(descriptor: int, size: int, sha256: str, asked: str) -> None:
    found_size, found = _measure(descriptor)
    if (found_size, found) != (size, sha256):
        raise FileError(
            "mismatch",
            f"not written: {asked} would have {found_size} bytes with the SHA-256 {found}, and not {size} with {sha256}",
        )


def _settle(descriptor: int, old: os.stat_result | None) -> None:
    """Give it the owner and the permissions of the file that it replaces, as far as we may, and bring it to disk.

    Not the bits that run it as somebody else: a write takes them away from any file.
    """
    if old is not None:
        try:
            os.fchown(descriptor, old.st_uid, old.st_gid)
        except PermissionError:
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, -1, old.st_gid)
        os.fchmod(descriptor, old.st_mode & 0o777)
    os.fsync(descriptor)


def _publish(directory: int, temporary: bytes, name: bytes) -> None:
    os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    _sync(directory)


def _sync(directory: int) -> None:
    """Bring a directory's names to disk, where we may open it and its file system knows how."""
    with contextlib.suppress(PermissionError):
        descriptor = open_directory(directory, b".")
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(descriptor)
