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


class Reaper:
    """`async with Reaper() as reaper`: from then on all children of this process are reaped, those awaited and others."""

    def __init__(self) -> None:
        self._awaited: dict[int, asyncio.Future[Exit]] = {}
        self._reaped = asyncio.Event()  # something ended since somebody last looked

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        self._reap()  # what ended before the handler was there
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def expect(self, pid: int) -> asyncio.Future[Exit]:
        """The exit of a child just started. Call it before the loop runs again: only then can it not have been reaped."""
        future = self._awaited[pid] = asyncio.get_running_loop().create_future()
        return future

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
            future = self._awaited.pop(pid, None)
            if future is not None and not future.done():
                future.set_result(Exit(os.waitstatus_to_exitcode(status), usage))
        self._reaped.set()
