"""The broker: connect to it, and find out before anything is enqueued whether it can do the job.

`Broker.open(settings)` is where a process meets Redis. With no URL it starts a private server (`embedded.py`). The checks
read only what `INFO` tells: version, Cluster mode, eviction policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

from redis import exceptions as redis_errors

from sandbox_queue.address import Address
from sandbox_queue.embedded import EmbeddedServer
from sandbox_queue.errors import BrokerDenied, BrokerError, BrokerUnavailable, BrokerUnsuitable, InvalidSettings
from sandbox_queue.settings import Settings
from sandbox_queue.wire import ConnectionLost, Wire

OLDEST = (7, 0)


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
            address = address_of(settings, url)
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


def address_of(settings: Settings, url: str | None = None) -> Address:
    """The broker that the settings name, or the one at `url` with the settings' certificates."""
    if url is None:
        if settings.redis_url is None:
            raise InvalidSettings("REDIS_URL", "is not set", "set it, or let Broker.open start a private server")
        url = settings.redis_url.get_secret_value()
    return Address(
        url,
        ca_file=settings.redis_ca_file,
        cert_file=settings.redis_cert_file,
        key_file=settings.redis_key_file,
        connect_timeout=settings.connect_timeout,
    )


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
