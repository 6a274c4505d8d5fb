"""One connection to Redis, shared by everybody in a process who talks to it.

Commands of concurrent callers are pipelined: each is written at once, and one task reads the replies in order. A caller
that is cancelled loses only its own reply. When the connection breaks, all callers under way get `ConnectionLost` and
know that their commands may or may not have been carried out; the next call connects again.

This sits on redis-py's `Connection` rather than its client: TLS, AUTH, RESP and hiredis come with it, and a transaction
of eight commands costs about half of what a pipeline object takes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import hiredis
from redis import exceptions as redis_errors
from redis._parsers import _AsyncHiredisParser
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.asyncio.connection import AbstractConnection

from sandbox_queue import limits
from sandbox_queue.errors import BrokerDenied, BrokerError, BrokerUnavailable

log = logging.getLogger("sandbox_queue.wire")

T = TypeVar("T")
BULKY = 8192  # bytes
Argument = bytes | memoryview | str | int | float
Command = tuple[Argument, ...]

# Error replies that say "not now" rather than "not so": the same command may succeed later.
_TRANSIENT = (redis_errors.AuthenticationError, redis_errors.OutOfMemoryError, redis_errors.ReadOnlyError)
_TRANSIENT_CODES = ("MISCONF", "BUSY ", "NOREPLICAS", "MASTERDOWN", "TRYAGAIN")


class ConnectionLost(Exception):
    """The connection broke, or could not be made; what was under way may or may not have happened."""


class ReplyTooLarge(ConnectionLost):
    """A reply was beyond all bounds, so the connection was given up: only a hostile writer makes such a value."""


class BoundedParser(_AsyncHiredisParser):
    """Gives up on a reply of more than `REPLY_MAX` bytes: what a sandbox wrote must not fill a reader's memory."""

    __slots__ = ("_size",)

    async def read_from_socket(self) -> Literal[True]:
        stream, reader = self._stream, self._reader
        if stream is None or reader is None:
            raise redis_errors.ConnectionError("not connected")
        buffer = await stream.read(self._read_size)
        if not buffer:
            raise redis_errors.ConnectionError("the server closed the connection")
        self._size += len(buffer)
        if self._size > limits.REPLY_MAX:
            raise _TooLargeError(f"a reply is larger than {limits.REPLY_MAX} bytes")
        reader.feed(buffer)
        return True

    async def read_response(self, disable_decoding: bool = False) -> Any:
        self._size = 0
        return await super().read_response(disable_decoding)

    async def read_replies(self, count: int) -> list[Any]:
        """Several replies, errors among them as they are, without redis-py's detours for each single one."""
        reader = self._reader
        if reader is None or not self._connected:
            raise redis_errors.ConnectionError("not connected")
        self._size = 0
        replies: list[Any] = []
        while len(replies) < count:
            reply = reader.gets(False)
            if reply is NOT_ENOUGH_DATA:
                await self.read_from_socket()
            elif isinstance(reply, redis_errors.ConnectionError):  # LOADING: the server is not ready for anybody
                raise reply
            else:
                replies.append(reply)
                self._size = 0
        return replies


class _TooLargeError(redis_errors.RedisError):
    pass


class Wire:
    """`async with Wire(make_connection) as wire: await wire.call((…), (…))`."""

    def __init__(self, make_connection: Callable[[], AbstractConnection], *, connect_timeout: float) -> None:
        self._make_connection = make_connection
        self._connect_timeout = connect_timeout
        self._connection: AbstractConnection | None = None
        self._connecting = asyncio.Lock()
        # Calls whose replies are still to come, in the order in which they were written.
        self._expected: deque[tuple[int, asyncio.Future[list[Any]]]] = deque()
        self._reading = asyncio.Event()
        # Not a TaskGroup: a wire may live in an async generator, where a group's cancel scope must not span a yield.
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reader = asyncio.get_running_loop().create_task(self._read(), name="wire-reader")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._drop(ConnectionLost("closed"))
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def connect(self) -> None:
        """Connect now rather than at the first call.

        Raises:
            ConnectionLost: with redis-py's error as its cause.
        """
        async with self._connecting:
            if self._connection is not None:
                return
            connection = self._make_connection()
            try:
                # redis-py's own timeout ends with the TCP connection; AUTH can hang as well.
                async with asyncio.timeout(self._connect_timeout):
                    await connection.connect()  # type: ignore[no-untyped-call]  # redis-py has left this one untyped
            except (redis_errors.RedisError, OSError) as error:  # TimeoutError is an OSError
                await connection.disconnect(nowait=True)
                raise ConnectionLost(str(error) or "no answer in time") from error
            self._connection = connection

    async def call(self, *commands: Command) -> list[Any]:
        """Send commands in one write and return their replies; an error reply is returned in its place.

        Raises:
            ConnectionLost: some, all or none of them may have been carried out.
        """
        while (connection := self._connection) is None or not connection.is_connected:
            await self._drop(ConnectionLost("the connection broke"), connection)
            await self.connect()
        packed = _pack(commands)
        replies: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        # No await from here to the write, or replies would be handed out in another order than commands were written.
        self._expected.append((len(commands), replies))
        sending = connection.send_packed_command(packed, check_health=False)  # type: ignore[arg-type]  # bytes-like will do
        try:
            self._reading.set()
            await sending
        except (redis_errors.RedisError, OSError) as error:
            await self._drop(ConnectionLost(str(error)), connection)
        return await replies

    async def transaction(self, *commands: Command, lenient: int = 0) -> list[Any]:
        """The same, all or nothing; the first `lenient` commands may fail without failing the rest.

        Raises:
            ConnectionLost: as `call`; here it is all of them or none.
            ResponseError: the transaction was refused, or a command in it failed.
        """
        *queued, done = await self.call(("MULTI",), *commands, ("EXEC",))
        # Redis answers EXEC with a mere EXECABORT: the reason stands in the reply of the command that it refused.
        for reply in (*queued, done, *(done[lenient:] if isinstance(done, list) else ())):
            if isinstance(reply, Exception):
                raise reply
        replies: list[Any] = done
        return replies

    async def one(self, *command: Argument) -> Any:
        """One command, whose error reply is raised."""
        (reply,) = await self.call(command)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _read(self) -> None:
        while True:
            await self._reading.wait()
            self._reading.clear()
            connection = self._connection
            try:
                while self._expected and connection is not None:
                    count, future = self._expected[0]
                    replies = await _parser_of(connection).read_replies(count)
                    if connection is not self._connection:  # dropped meanwhile by a failed write
                        break
                    self._expected.popleft()
                    if not future.done():
                        future.set_result(replies)
            except _TooLargeError as error:
                await self._drop(ReplyTooLarge(str(error)), connection)
            except (redis_errors.RedisError, OSError) as error:
                await self._drop(ConnectionLost(str(error)), connection)
            except Exception as error:  # this loop must live: everybody's replies come through it
                log.exception("reading from the broker failed")
                await self._drop(ConnectionLost(repr(error)), connection)

    async def _drop(self, why: ConnectionLost, connection: AbstractConnection | None = None) -> None:
        """Forget the connection and tell everybody who waits for a reply from it."""
        if connection is not None and connection is not self._connection:
            return  # somebody noticed before us
        dropped, self._connection = self._connection, None
        expected, self._expected = self._expected, deque()
        for _, future in expected:
            if not future.done():
                future.set_exception(why)
                future.exception()  # the caller may have been cancelled: no "never retrieved" at exit
        if dropped is not None:
            await dropped.disconnect(nowait=True)


def _pack(commands: tuple[Command, ...]) -> list[bytes | memoryview]:
    """The commands as they go over the wire. Bulky data, which stands last, is put between rather than copied."""
    packed: list[bytes | memoryview] = []
    for command in commands:
        *_, data = command
        bulky = data if isinstance(data, (bytes, memoryview)) and len(data) > BULKY else None
        head = hiredis.pack_command(command if bulky is None else (*command[:-1], b""))  # type: ignore[arg-type]  # its stub allows one item
        if bulky is not None:
            packed += (b"%b$%d\r\n" % (head[: -len(b"$0\r\n\r\n")], len(bulky)), bulky, b"\r\n")
        else:
            packed.append(head)
    return packed


def _parser_of(connection: AbstractConnection) -> BoundedParser:
    parser = connection._parser  # pyright: ignore[reportPrivateUsage]  # given by us, as `parser_class`
    if not isinstance(parser, BoundedParser):
        raise TypeError("a Wire needs a connection made with parser_class=BoundedParser")
    return parser


async def persist(what: Callable[[], Awaitable[T]], *, patience: float, doing: str) -> T:
    """Repeat something that may be repeated until the broker has taken it, with growing, jittered pauses.

    Raises:
        BrokerUnavailable: it did not within `patience` seconds.
        BrokerDenied, BrokerError: it will not, ever.
    """
    started = time.monotonic()
    for attempt in range(10**9):
        try:
            return await what()
        except ReplyTooLarge:
            raise
        except (ConnectionLost, redis_errors.ResponseError) as error:
            if not is_transient(error):
                refused = BrokerDenied if isinstance(error, redis_errors.NoPermissionError) else BrokerError
                raise refused(f"{doing} was refused: {error}") from error
            outage = time.monotonic() - started
            if outage > patience:
                raise BrokerUnavailable(f"{doing} failed for {outage:.0f} s, last with: {error}") from error
            if attempt == 0:
                log.warning("broker trouble while %s, trying again: %s", doing, error)
            await asyncio.sleep(min(0.02 * 2 ** min(attempt, 7), 2.0) * random.uniform(0.5, 1.0))
    raise AssertionError("unreachable")


def is_transient(error: Exception) -> bool:
    """Whether it says that the server cannot now, rather than that it will not."""
    return isinstance(error, (ConnectionLost, *_TRANSIENT)) or str(error).startswith(_TRANSIENT_CODES)


def keepalive_options() -> dict[int, int]:
    """A peer that vanished without a word is noticed after 15 + 3 * 5 seconds."""
    names = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
    return {getattr(socket, name): value for name, value in names.items() if hasattr(socket, name)}
