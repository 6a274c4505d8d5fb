"""The one place that waits for processes.

As PID 1 or subreaper the worker is handed every orphan of every step, so somebody must reap whatever comes. There must be
one such somebody: a second `waitpid` beside it steals exit codes, and a stolen one would have to be made up.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from types import TracebackType
from typing import NamedTuple, Self


class Exit(NamedTuple):
    """How a process ended, as the kernel told us when we reaped it."""

    status: int  # as `os.waitstatus_to_exitcode` gives it: negative for a signal
    usage: resource.struct_rusage


class Child:
    """A child that is awaited. Unlike a future, it loses nothing when a wait for it is cancelled."""

    def __init__(self) -> None:
        self._exit: Exit | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> Exit:
        while self._exit is None:
            await self._ended.wait()
        return self._exit

    def ended(self, exit: Exit) -> None:  # noqa: A002  # the word for it
        self._exit = exit
        self._ended.set()


class Reaper:
    """`async with Reaper() as reaper`: from then on all children of this process are reaped, those awaited and others."""

    def __init__(self) -> None:
        self._awaited: dict[int, Child] = {}
        self._reaped = asyncio.Event()  # something ended since somebody last looked

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        self._reap()  # what ended before the handler was there
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def expect(self, pid: int) -> Child:
        """To be called for a child just started, before the loop runs again: only then can it not have been reaped."""
        child = self._awaited[pid] = Child()
        return child

    async def something_ended(self, within: float) -> None:
        """Return when any child has ended, or after that time."""
        self._reaped.clear()
        try:
            async with asyncio.timeout(within):
                await self._reaped.wait()
        except TimeoutError:
            pass

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            child = self._awaited.pop(pid, None)
            if child is not None:
                child.ended(Exit(os.waitstatus_to_exitcode(status), usage))
        self._reaped.set()
