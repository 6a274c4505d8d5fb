"""What the worker asks of the kernel: to keep its secrets, to be given every orphan, and what memory limits have done."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Final

PR_SET_DUMPABLE: Final = 4
PR_SET_CHILD_SUBREAPER: Final = 36
OOM_SCORE_OF_STEPS: Final = 300  # above the worker's own: when memory runs out, the step goes and the worker tells


def protect_secrets() -> None:
    """Close our environment, memory and descriptors to processes of the same user, which the steps are.

    Without it `/proc/1/environ` gives every step the sandbox's Redis password. It must happen before the first child.
    """
    _prctl(PR_SET_DUMPABLE, 0)


def adopt_orphans() -> bool:
    """Become the parent of every descendant whose own parent ends, as PID 1 is anyway; False where that cannot be had."""
    return os.getpid() == 1 or _prctl(PR_SET_CHILD_SUBREAPER, 1)


def has_children() -> bool:
    """Whether anything is left below us; one system call, and exact, since every orphan becomes our child."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children() -> frozenset[int] | None:
    """The pids of our children, exact and without looking at every process there is; None where the kernel has no such
    list, or it is too long for one read."""
    pid = os.getpid()
    try:
        fd = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = os.read(fd, 65536)
    except OSError:
        return None
    finally:
        os.close(fd)
    return frozenset(map(int, data.split())) if len(data) < 4000 else None  # one page at a time is consistent


def prefer_as_oom_victim(pid: int) -> None:
    """Let the OOM killer find this process before the worker. A hint: where it is refused, nothing is lost."""
    with contextlib.suppress(OSError):
        fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY)
        try:
            os.write(fd, b"%d" % min(1000, _own_oom_score() + OOM_SCORE_OF_STEPS))
        finally:
            os.close(fd)


class OwnMemory:
    """Our own memory. To be made before `protect_secrets`, after which these files are closed to us too."""

    def __init__(self) -> None:
        self._statm = _open("/proc/self/statm", os.O_RDONLY)
        self._clear_refs = _open("/proc/self/clear_refs", os.O_WRONLY)

    def now(self) -> int:
        """In bytes, 0 where it cannot be told."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            if self._statm is not None:
                return int(os.pread(self._statm, 256, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def floor_for_children(self) -> int:
        """The least that the kernel will report as a child's maximum: a child is born in our memory, and its maximum starts
        with ours. We have the kernel forget ours first, or one big step would hide what all later ones use."""
        with contextlib.suppress(OSError):
            if self._clear_refs is not None and os.write(self._clear_refs, b"5"):
                return self.now() + 1024 * 1024  # we may grow a little until the child is there
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class OomCounter:
    """How often the OOM killer struck in our memory cgroup, version 1 or 2; counts nothing where there is none."""

    def __init__(self, root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> None:
        found = (_open(path, os.O_RDONLY) for path in _counter_files(root, membership))
        self._fd = next((fd for fd in found if fd is not None), None)

    def read(self) -> int:
        """The number of kills so far. One read of an open file: it is asked before and after every step."""
        if self._fd is None:
            return 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in os.pread(self._fd, 4096, 0).splitlines():
                name, _, value = line.partition(b" ")
                if name == b"oom_kill":
                    return int(value)
        return 0


def _counter_files(root: str, membership: str) -> list[str]:
    """Where the counter may be: our own cgroup as the host names it, or the mount's top as a cgroup namespace shows it."""
    files: list[str] = []
    for line in _read(membership).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            files += [f"{root}{path}/memory.events", f"{root}/memory.events"]
        elif "memory" in controllers.split(","):
            files += [f"{root}/memory{path}/memory.oom_control", f"{root}/memory/memory.oom_control"]
    return files


@cache
def _own_oom_score() -> int:
    return int(_read("/proc/self/oom_score_adj") or 0)


def _open(path: str, flags: int) -> int | None:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _prctl(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    import ctypes  # 2 ms, on Linux only

    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)
