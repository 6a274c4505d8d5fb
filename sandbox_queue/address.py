"""Where a broker is and how to log in: a URL taken apart, and the redis-py connection that it means.

Apart from `broker.py` because the worker needs this and must not pay for the service's settings.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection

from sandbox_queue.errors import InvalidSettings
from sandbox_queue.wire import BoundedParser, Wire, keepalive_options

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
        except ValueError:
            raise InvalidSettings("REDIS_URL", "is not a URL", "write redis://host:port/db") from None
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        self.scheme = parts.scheme
        self.username = username or (unquote(parts.username) if parts.username else None)
        self.password = password or (unquote(parts.password) if parts.password else None)
        self.has_password_in_url = bool(parts.password)
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


def _database(text: str) -> int:
    if text and not text.isdigit():
        raise InvalidSettings("REDIS_URL", "has a database that is no number", "give a number: redis://host:port/0")
    return int(text or 0)
