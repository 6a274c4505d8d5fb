"""A step's output between its pipes and the event stream.

Every byte is read, whatever becomes of it: a program must never hang because nobody reads what it prints. Up to a cap the
bytes go to the stream; a head and a tail are kept for the result. When the stream has no room, reading pauses, the pipe
fills, and the program waits: memory is bounded.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import termios
from collections import deque

from sandbox_queue import limits
from sandbox_queue.events import Stream
from sandbox_queue.stream import StepOutput

DRAIN = 0.2  # seconds for which output is awaited after the leader's end, if somebody else still holds the pipe
READ_SIZE = 256 * 1024


class Excerpt:
    """The first and the last bytes of a stream."""

    def __init__(self, size: int) -> None:
        self._half = size // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._total = 0

    def add(self, data: bytes) -> None:
        self._total += len(data)
        if len(self._head) < self._half:
            room = self._half - len(self._head)
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.append(data)
            self._tail_size += len(data)
            while self._tail_size - len(self._tail[0]) >= self._half:
                self._tail_size -= len(self._tail.popleft())

    @property
    def tail(self) -> bytes:
        """The last bytes, as far as they are not in the head."""
        return b"".join(self._tail)[-self._half :]

    @property
    def omitted(self) -> int:
        """How many bytes are in neither."""
        return self._total - len(self._head) - min(self._tail_size, self._half)

    def text(self) -> str:
        """Both as text, with a line between them that says what is missing."""
        head, tail = bytes(self._head), self.tail
        if not self.omitted:
            return (head + tail).decode("utf-8", "replace")
        between = f"\n[… {self.omitted} bytes omitted …]\n"
        return head.decode("utf-8", "replace") + between + tail.decode("utf-8", "replace")


class Budget:
    """How many bytes of a step may still go to the stream, both streams together."""

    def __init__(self, size: int) -> None:
        self.left = size


class Pipe:
    """Reads one pipe of a step to its end. It may outlive the step, where a survivor holds the other end."""

    def __init__(self, fd: int, stream: Stream, output: StepOutput, budget: Budget) -> None:
        self.excerpt = Excerpt(limits.RESULT_STREAM_MAX)
        self._fd = fd
        self._stream: Stream = stream
        self._output: StepOutput | None = output
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._received = 0
        self._skipped = 0
        self._progress = asyncio.Event()  # bytes came, the pipe was closed, or there is room again
        self.closed = False
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._ready)

    async def drain(self) -> None:
        """Read what the leader has printed, which may be in the pipe still, and wait a moment for what others print."""
        wanted = self._received + (0 if self.closed else _unread(self._fd))
        while self._received < wanted and not self.closed:
            if not self._output_is_full():
                self._ready()
            else:
                await self._next()
        if not self.closed:
            self._ready()  # nearly always the end of the pipe, found without another turn of the loop
        if not self.closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN):
                    while not self.closed:
                        await self._next()
        if self._skipped and self._output is not None:  # what the cap kept from the stream ends with its tail
            self._output.put_tail(self._stream, self.excerpt.tail[-self._skipped :])

    def release(self) -> None:
        """The step is over. Where somebody still holds the other end, reading goes on, for nobody, until nobody does:
        a survivor must not die of what it prints."""
        self._output = None
        if not self.closed:
            self._loop.add_reader(self._fd, self._ready)

    def _ready(self) -> None:
        try:
            data = os.read(self._fd, READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._progress.set()
        if not data:
            self.closed = True
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
        elif self._output is not None:
            self._received += len(data)
            self._take(self._output, data)

    def _take(self, output: StepOutput, data: bytes) -> None:
        self.excerpt.add(data)
        if len(data) <= self._budget.left:
            self._budget.left -= len(data)
            output.put(self._stream, data)
        else:
            send, self._budget.left = data[: self._budget.left], 0
            output.put(self._stream, send)
            output.skip(self._stream, len(data) - len(send))
            self._skipped += len(data) - len(send)
        if output.full:
            self._loop.remove_reader(self._fd)
            output.when_room(self._resume)

    def _resume(self) -> None:
        self._progress.set()
        if not self.closed:
            self._loop.add_reader(self._fd, self._ready)

    def _output_is_full(self) -> bool:
        return self._output is not None and self._output.full

    async def _next(self) -> None:
        self._progress.clear()
        await self._progress.wait()


def _unread(fd: int) -> int:
    """How many bytes wait in a pipe."""
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]
