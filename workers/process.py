"""One process: started with exactly what the step says, or not at all and with the reason."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sandbox_queue.models import Run
from sandbox_queue.workers import kernel

PIPE_SIZE = 256 * 1024  # room for the child to go on while a batch is under way; Linux gives 64 KiB by default

# Ours, and none of a step's business. Whatever else the container has in its environment, a step sees.
OUR_PREFIX = b"SANDBOX_QUEUE_"
OUR_VARIABLES = frozenset({b"REDIS_URL", b"SANDBOX_TYPE"})


class NotStarted(Exception):
    """The program could not be started; the message says why, and nothing of it has run."""


@dataclass(frozen=True, slots=True)
class Spawned:
    """A process that runs, and our ends of its pipes."""

    pid: int
    stdout: int
    stderr: int


def environment(base: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """What steps inherit: the container's environment, byte for byte, less what is ours."""
    return {name: value for name, value in base.items() if not name.startswith(OUR_PREFIX) and name not in OUR_VARIABLES}


def spawn(step: Run, inherited: Mapping[bytes, bytes]) -> Spawned:
    """Start the step's program in a session of its own.

    Raises:
        NotStarted: nothing was started.
    """
    env = dict(inherited)
    for name, value in step.env.items():
        if value is None:
            env.pop(os.fsencode(name), None)
        else:
            env[os.fsencode(name)] = os.fsencode(value)
    _check_directory(step.cwd)
    identity = _identity(step.user)
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        stdin = _stdin(step.stdin, theirs)
        (out_read, out_write), (err_read, err_write) = _pipe(ours, theirs), _pipe(ours, theirs)
        try:
            # Popen without preexec_fn uses vfork, which is what makes this fast; a session of its own sets the group too.
            process = subprocess.Popen(
                [step.command, *step.args],
                stdin=stdin,
                stdout=out_write,
                stderr=err_write,
                cwd=step.cwd,
                env=env,
                start_new_session=True,
                user=identity.uid,
                group=identity.gid,
                extra_groups=identity.groups,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise NotStarted(_explain(error, step, env)) from error
        process.returncode = 0  # Popen must never wait for it: the reaper does
        kernel.prefer_as_oom_victim(process.pid)
        ours.pop_all()  # from here on they are the caller's
        return Spawned(process.pid, out_read, err_read)


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    read, write = os.pipe()
    ours.callback(os.close, read)
    theirs.callback(os.close, write)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the user has used up what the system grants for pipes
            fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    return read, write


def _stdin(data: bytes | None, stack: contextlib.ExitStack) -> int:
    """A file rather than a pipe: nobody has to feed it, and a program that reads none or half of it is nobody's trouble."""
    if not data:
        return subprocess.DEVNULL
    if sys.platform == "linux":
        fd = os.memfd_create("stdin")
        stack.callback(os.close, fd)
    else:
        fd, name = tempfile.mkstemp()
        stack.callback(os.close, fd)
        os.unlink(name)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _check_directory(path: str) -> None:
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise NotStarted(f"working directory {path} is not a directory: give one that exists")
    except FileNotFoundError:
        raise NotStarted(f"working directory {path} does not exist: create it, or give another cwd") from None
    except OSError as error:
        raise NotStarted(f"working directory {path} cannot be used: {error.strerror}") from None


class _Identity(NamedTuple):
    uid: int | None = None
    gid: int | None = None
    groups: list[int] | None = None


def _identity(user: str | None) -> _Identity:
    """Who the child is to be; nothing set means: the same as the worker."""
    if user is None:
        return _Identity()
    uid, _, gid = user.partition(":")
    wanted = _Identity(int(uid), int(gid), []) if gid else _lookup(uid)
    if (wanted.uid, wanted.gid) == (os.geteuid(), os.getegid()):
        return _Identity()
    if os.geteuid() != 0:
        raise NotStarted(f"user {user}: the worker runs as uid {os.geteuid()}, and only root can start steps as another user")
    return wanted


def _lookup(user: str) -> _Identity:
    """A user by name or uid, with its groups; a uid that the image does not know stands for itself."""
    import grp  # both read files in /etc that a minimal image need not have
    import pwd

    try:
        entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    except KeyError:
        if user.isdigit():
            return _Identity(int(user), int(user), [])
        raise NotStarted(f"user {user} does not exist in this image: give a uid instead") from None
    groups = [group.gr_gid for group in grp.getgrall() if entry.pw_name in group.gr_mem]
    return _Identity(entry.pw_uid, entry.pw_gid, groups)


def _explain(error: Exception, step: Run, env: Mapping[bytes, bytes]) -> str:
    """What went wrong with exec, in words that say what to do."""
    name = step.command
    number = error.errno if isinstance(error, OSError) else None
    path = _which(name, step.cwd, env)
    if number == errno.ENOENT and path is None:
        where = "PATH" if "/" not in name else "this image"
        return f"failed to start '{name}': there is no such program in {where}"
    if number == errno.ENOENT:
        return f"failed to start '{name}': the interpreter that its first line or its ELF header names does not exist"
    if number == errno.EACCES and path is not None and os.path.isdir(path):
        return f"failed to start '{name}': it is a directory"
    if number == errno.EACCES:
        return f"failed to start '{name}': it is not executable (or its file system is mounted noexec): chmod +x"
    if number == errno.ENOEXEC:
        return (
            f"failed to start '{name}': it is not a program for this machine, and has no '#!' line: run it by its interpreter"
        )
    if number == errno.ETXTBSY:
        return f"failed to start '{name}': somebody has it open for writing"
    if number == errno.E2BIG:
        return f"failed to start '{name}': arguments and environment are too long: use stdin or a file"
    if number == errno.EAGAIN:
        return f"failed to start '{name}': the sandbox's limit of processes is used up"
    if number in (errno.EMFILE, errno.ENFILE):
        return f"failed to start '{name}': too many files are open in the worker"
    return f"failed to start '{name}': {error}"


def _which(name: str, cwd: str, env: Mapping[bytes, bytes]) -> str | None:
    search = os.fsdecode(env.get(b"PATH", os.fsencode(os.defpath)))
    for folder in search.split(os.pathsep) if "/" not in name else [""]:
        candidate = os.path.join(cwd, folder, name)
        if os.path.lexists(candidate):
            return candidate
    return None
