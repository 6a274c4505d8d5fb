"""A function in a process of its own: one that can be killed, whatever it is doing.

A catastrophic regular expression holds Python's one lock, and a dead disk holds the thread that reads it; the worker
must go on beating. A fork of the worker is ready in a millisecond or two, where a new interpreter would take a hundred.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

READ_SIZE = 256 * 1024


def fork(work: Callable[[], bytes]) -> tuple[int, int]:
    """Run `work` in a child; returns its pid and where to read what it returned. An exit status other than 0 means that it
    did not return."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    status = 1
    try:
        # The parent's event loop is in our memory as well: its signals and descriptors are not for us.
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        answer = memoryview(work())
        while answer:
            answer = answer[os.write(write, answer) :]
        status = 0
    finally:
        os._exit(status)  # not an exception, not `atexit`, not a second return into the parent's code


class Answer:
    """Gathers what the child writes, as it comes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._parts: list[bytes] = []
        self._done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._ready)

    async def read(self) -> bytes:
        """All of it, once the child has closed its end."""
        await self._done.wait()
        return b"".join(self._parts)

    def close(self) -> None:
        if not self._done.is_set():
            self._done.set()
            self._loop.remove_reader(self._fd)
            os.close(self._fd)

    def _ready(self) -> None:
        try:
            data = os.read(self._fd, READ_SIZE)
        except BlockingIOError:
            return
        if data:
            self._parts.append(data)
        else:
            self.close()
