"""Fixtures. After every test that used a server, each key in it must have a time to live."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from sandbox_queue.address import Address
from sandbox_queue.client import SandboxQueue
from tests.kit import Server, worker_address

SANDBOX = "box-1"


@pytest.fixture(scope="session", params=["valkey", "redis"])
def shared_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """One server per flavour for the whole run; use `server`, which leaves it clean."""
    server = Server(request.param)
    yield server
    server.close()


@pytest.fixture
async def server(shared_server: Server) -> AsyncIterator[Server]:
    """A real server, empty at first, which must hold no key without a time to live afterwards."""
    yield shared_server
    address = Address(shared_server.url)
    async with address.wire() as wire:
        leaks = [name for name in await wire.one("KEYS", "*") if await wire.one("TTL", name) == -1]
        await wire.one("FLUSHALL")
        for user in await wire.one("ACL", "USERS"):
            if user != b"default":
                await wire.one("ACL", "DELUSER", user)
    assert not leaks, f"keys without a time to live: {leaks}"


@pytest.fixture
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server for tests that stop it; `@pytest.mark.parametrize("own_server", [("appendonly yes",)], indirect=True)`."""
    server = Server("valkey", *getattr(request, "param", ()))
    yield server
    with contextlib.suppress(FileNotFoundError):
        server.close()


@pytest.fixture
async def queue(server: Server) -> AsyncIterator[SandboxQueue]:
    """A client as a service has it."""
    async with SandboxQueue.connect(settings=server.settings()) as queue:
        yield queue


@pytest.fixture
async def worker(queue: SandboxQueue, server: Server) -> Address:
    """How the worker of `box-1` connects."""
    return await worker_address(queue.broker.wire, server, SANDBOX)
