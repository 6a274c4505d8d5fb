"""How a file step ends: with an Outcome, or with a FileError whose code comes from a closed set.

A missing file is the sandbox's business and not a failure of ours: the runner turns either of the two into a StepResult.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from sandbox_queue import limits
from sandbox_queue.models import ErrorCode

_CODES: dict[int, ErrorCode] = {
    errno.ENOENT: "notFound",
    errno.EISDIR: "isDirectory",
    errno.ENOTDIR: "notDirectory",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
    errno.ENXIO: "notRegular",  # what the open of a socket says, and of a device without a driver
    errno.ENOSPC: "noSpace",
    errno.EDQUOT: "noSpace",
    errno.EFBIG: "tooLarge",
    errno.ELOOP: "changed",  # we resolve links ourselves, so one in this place was not there a moment ago
}
_WORDS: dict[ErrorCode, str] = {
    "notFound": "file not found",
    "notRegular": "not a regular file",
    "changed": "replaced while it was opened",
}


class FileError(Exception):
    """A file step failed: `code` for programs, `message` for people."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        self.code: ErrorCode = code
        self.message = message
        super().__init__(message)

    def __reduce__(self) -> tuple[type, tuple[ErrorCode, str]]:
        return type(self), (self.code, self.message)

    @classmethod
    def of(cls, error: OSError, path: str) -> FileError:
        """Translate what the kernel said about `path`."""
        number = error.errno or errno.EIO
        code = _CODES.get(number, "io")
        return cls(code, f"{_WORDS.get(code) or os.strerror(number).lower()}: {path}")


@dataclass(slots=True)
class Outcome:
    """What a file step gives back. `notes` are for the step's stderr: what was left out, and why."""

    content: str | None = None
    truncated: bool = False
    file_size: int | None = None
    notes: list[str] = field(default_factory=list)


Row = dict[str, str | int | bool]


def fitting(rows: Iterable[Row]) -> tuple[str, list[Row], bool]:
    """As many rows as fit into one result: as a JSON array, as they are, and whether these are all.

    Rows are bounded in number before this. The bytes are for a thousand paths of 4 KiB each, which are too many.
    """
    parts: list[bytes] = []
    kept: list[Row] = []
    size = len("[]")
    for row in rows:
        part = msgspec.json.encode(row)
        size += len(part) + len(",")
        if size > limits.READ_MAX:
            break
        parts.append(part)
        kept.append(row)
    return f"[{b','.join(parts).decode()}]", kept, size <= limits.READ_MAX
