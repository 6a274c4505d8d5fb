"""The broker: connect to it, and find out before anything is enqueued whether it can do the job.

`Broker.open(settings)` is where a process meets Redis. With no URL it starts a private server (`embedded.py`). The checks
read only what `INFO` tells: version, Cluster mode, eviction policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from redis import exceptions as redis_errors
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection

from sandbox_queue.embedded import EmbeddedServer
from sandbox_queue.errors import BrokerDenied, BrokerError, BrokerUnavailable, BrokerUnsuitable, InvalidSettings
from sandbox_queue.settings import Settings
from sandbox_queue.wire import BoundedParser, ConnectionLost, Wire, keepalive_options

OLDEST = (7, 0)
CLIENT_NAME = "sandbox-queue"
TLS_SETTINGS = {
    "ssl_ca_certs": "SANDBOX_QUEUE_REDIS_CA_FILE",
    "ssl_certfile": "SANDBOX_QUEUE_REDIS_CERT_FILE",
    "ssl_keyfile": "SANDBOX_QUEUE_REDIS_KEY_FILE",
}


class Address:
    """Where a broker is and how to log in. `str()` is safe to print."""

    def __init__(
        self,
        url: str,
        *,
        username: str | None = None,
        password: str | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        connect_timeout: float = 5.0,
    ) -> None:
        """`username` and `password` are for callers that keep them out of the URL, as the worker does."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InvalidSettings("REDIS_URL", f"is not a URL ({error})", "write redis://host:port/db") from None
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        self.scheme = parts.scheme
        self.username = username or (unquote(parts.username) if parts.username else None)
        self.password = password or (unquote(parts.password) if parts.password else None)
        self.path = parts.path if parts.scheme == "unix" else None
        self.host = parts.hostname or "localhost"
        self.port = port or 6379
        self.db = _database(query.get("db") or (parts.path.strip("/") if parts.scheme != "unix" else ""))
        self.connect_timeout = connect_timeout
        self._tls: dict[str, Any] = {
            "ssl_ca_certs": ca_file or query.get("ssl_ca_certs"),
            "ssl_certfile": cert_file or query.get("ssl_certfile"),
            "ssl_keyfile": key_file or query.get("ssl_keyfile"),
        }
        for option, file in self._tls.items():
            if file is not None and not os.access(file, os.R_OK):
                raise InvalidSettings(TLS_SETTINGS[option], f"{file} cannot be read", "give a PEM file that this user may read")
        if self.scheme not in ("redis", "rediss", "unix"):
            raise InvalidSettings("REDIS_URL", f"has the scheme {self.scheme!r}", "use redis://, rediss:// or unix://")
        if self.scheme == "unix" and not self.path:
            raise InvalidSettings("REDIS_URL", "names no socket", "write unix:///path/to/socket")

    @classmethod
    def from_settings(cls, settings: Settings, url: str | None = None) -> Address:
        if url is None:
            if settings.redis_url is None:
                raise InvalidSettings("REDIS_URL", "is not set", "set it, or let Broker.open start a private server")
            url = settings.redis_url.get_secret_value()
        return cls(
            url,
            ca_file=settings.redis_ca_file,
            cert_file=settings.redis_cert_file,
            key_file=settings.redis_key_file,
            connect_timeout=settings.connect_timeout,
        )

    def __str__(self) -> str:
        user = f"{self.username}@" if self.username else ""
        return f"unix://{user}{self.path}" if self.path else f"{self.scheme}://{user}{self.host}:{self.port}/{self.db}"

    def connection(self) -> AbstractConnection:
        """A redis-py connection to this address, not yet connected."""
        common: dict[str, Any] = {
            "db": self.db,
            "username": self.username,
            "password": self.password,
            "socket_connect_timeout": self.connect_timeout,
            "client_name": CLIENT_NAME,
            "lib_name": None,  # CLIENT SETINFO came with 7.2: an ACL that names it is an error before
            "lib_version": None,
            "parser_class": BoundedParser,
            "socket_read_size": 256 * 1024,
        }
        if self.path:
            return UnixDomainSocketConnection(path=self.path, **common)
        common |= {
            "host": self.host,
            "port": self.port,
            "socket_keepalive": True,
            "socket_keepalive_options": keepalive_options(),
        }
        if self.scheme == "rediss":
            return SSLConnection(**common, **self._tls, ssl_check_hostname=True)
        return Connection(**common)

    def wire(self) -> Wire:
        """A pipelining connection to this address, to be entered with `async with`."""
        return Wire(self.connection, connect_timeout=self.connect_timeout)


class Broker:
    """A broker that has passed the checks. `wire` is for short commands; who blocks opens an `address.wire()` of its own."""

    def __init__(self, address: Address, wire: Wire, settings: Settings, *, embedded: bool) -> None:
        self.address = address
        self.wire = wire
        self.settings = settings
        self.embedded = embedded

    @staticmethod
    @contextlib.asynccontextmanager
    async def open(settings: Settings, url: str | None = None) -> AsyncIterator[Broker]:
        """Connect and check; without a URL, start a private server and connect to that.

        Raises:
            BrokerUnavailable, BrokerDenied, BrokerUnsuitable: in that order of asking.
        """
        async with contextlib.AsyncExitStack() as stack:
            embedded = url is None and settings.redis_url is None
            if embedded:
                url = (await stack.enter_async_context(EmbeddedServer.start())).url
            address = Address.from_settings(settings, url)
            wire = await stack.enter_async_context(address.wire())
            await check(address, wire)
            yield Broker(address, wire, settings, embedded=embedded)


async def check(address: Address, wire: Wire) -> dict[str, str]:
    """Make sure that this broker can carry a queue; returns what `INFO` said.

    Raises:
        BrokerUnavailable, BrokerDenied, BrokerUnsuitable: each says what to do.
    """
    where = str(address)
    try:
        await wire.connect()
        async with asyncio.timeout(address.connect_timeout):
            info = _parse_info(await wire.one("INFO"))
    except (ConnectionLost, TimeoutError) as error:
        raise _explain(error, where) from error
    except redis_errors.NoPermissionError as error:
        raise BrokerDenied(f"the user may not run INFO ({error}); grant it: +info", url=where) from error
    except redis_errors.AuthenticationError as error:
        raise _explain(error, where) from error
    version = tuple(int(part) for part in info.get("redis_version", "0").split(".")[:2])
    if version < OLDEST:
        raise BrokerUnsuitable(
            f"this is Redis {info.get('redis_version')}; at least 7.0 is needed (ACL selectors, SET NX GET): upgrade it",
            url=where,
        )
    if info.get("cluster_enabled") == "1":
        raise BrokerUnsuitable(
            "this is a Redis Cluster, and the queue needs transactions over several keys: use a single primary", url=where
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise BrokerUnsuitable(
            f"maxmemory-policy is {policy}, which silently evicts queued steps (every key has a TTL): "
            "CONFIG SET maxmemory-policy noeviction",
            url=where,
        )
    return info


def _explain(error: BaseException, where: str) -> BrokerError:
    """Translate what redis-py and the system say into what an operator can act on. redis-py wraps the telling error
    in others, differently for each kind of connection, so all of them are looked at."""
    chain = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    for link in chain:
        text = str(link)
        if isinstance(link, redis_errors.NoPermissionError):
            return BrokerDenied(f"the user lacks a permission: {text}", url=where)
        if isinstance(link, redis_errors.AuthenticationError):
            if "required" in text.lower():
                return BrokerDenied("a password is needed: put it into the URL, redis://:password@host", url=where)
            if "without any password" in text.lower():
                return BrokerDenied("a password was given but the server has none: drop it from the URL", url=where)
            return BrokerDenied(f"wrong user name or password ({text}): check the URL", url=where)
        if isinstance(link, ssl.SSLError):
            return BrokerUnavailable(
                f"TLS failed ({text}): check the scheme, SANDBOX_QUEUE_REDIS_CA_FILE and the client certificate", url=where
            )
        if isinstance(link, redis_errors.InvalidResponse):
            return BrokerUnavailable(f"what answers there is not Redis ({text}): check host and port", url=where)
    if any(isinstance(link, (redis_errors.TimeoutError, TimeoutError)) for link in chain):
        hint = "does it speak TLS there?" if where.startswith("rediss:") else "is a firewall in between?"
        return BrokerUnavailable(f"no answer in time: is the address right, {hint}", url=where)
    return BrokerUnavailable(f"cannot be reached ({error}): is it running there?", url=where)


def _parse_info(reply: bytes) -> dict[str, str]:
    lines = reply.decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def _database(text: str) -> int:
    if text and not text.isdigit():
        raise InvalidSettings("REDIS_URL", f"has the database {text!r}", "give a number: redis://host:port/0")
    return int(text or 0)
