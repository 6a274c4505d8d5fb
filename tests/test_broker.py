"""Connecting: every way in, and for every way in which it can fail an error of its own that says what to do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme

from sandbox_queue import BrokerDenied, BrokerUnavailable, BrokerUnsuitable, InvalidSettings, SandboxQueue
from sandbox_queue.address import Address
from sandbox_queue.broker import Broker
from sandbox_queue.settings import load
from tests.faults import Serve, serving
from tests.kit import Server, free_port


async def ping(url: str, **settings: object) -> bytes:
    async with Broker.open(load(**settings), url) as broker:
        pong: bytes = await broker.wire.one("PING")
        return pong


async def test_tcp_and_unix_sockets_with_a_password(server: Server) -> None:
    assert await ping(server.tcp_url) == b"PONG"
    assert await ping(server.url) == b"PONG"


async def test_a_user_a_password_with_odd_characters_and_a_database(server: Server) -> None:
    async with Address(server.url).wire() as admin:
        await admin.one("ACL", "SETUSER", "ann", "on", ">p@ss/w:rd%", "+@all", "~*", "&*")
    url = f"redis://ann:p%40ss%2Fw%3Ard%25@127.0.0.1:{server.port}/3"
    async with SandboxQueue.connect(url) as queue:
        assert await queue.broker.wire.one("ACL", "WHOAMI") == b"ann"
        assert b"db=3" in await queue.broker.wire.one("CLIENT", "LIST", "ID", await queue.broker.wire.one("CLIENT", "ID"))
    assert str(Address(url)) == f"redis://ann@127.0.0.1:{server.port}/3"


async def test_the_environment_names_the_broker(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", server.tcp_url)
    async with SandboxQueue.connect() as queue:
        assert not queue.broker.embedded
        assert queue.broker.address.port == server.port


async def fails(url: str, kind: type[Exception], *words: str, **settings: object) -> None:
    """The error is of that kind, has those words, and never the password."""
    with pytest.raises(kind) as caught:
        await ping(url, **settings)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert "secret" not in message


async def test_nobody_listens_there(tmp_path: Path) -> None:
    port = free_port()
    await fails(f"redis://:secret@127.0.0.1:{port}", BrokerUnavailable, f"redis://127.0.0.1:{port}/0", "is it running")
    await fails(f"unix://:secret@{tmp_path}/none", BrokerUnavailable, f"unix://{tmp_path}/none", "is it running")
    await fails("redis://no-such-host.invalid", BrokerUnavailable, "no-such-host.invalid")


@contextlib.asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[int]:
    port = free_port()
    async with serving(serve, port=port):
        yield port


async def test_what_listens_there_never_answers() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(mute) as port:
        for login in ("", ":secret@"):
            await fails(f"redis://{login}127.0.0.1:{port}", BrokerUnavailable, "no answer in time", connect_timeout=0.2)


async def test_what_listens_there_is_not_redis() -> None:
    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        await writer.drain()

    async with listening(web) as port:
        await fails(f"redis://:secret@127.0.0.1:{port}", BrokerUnavailable, "not Redis")


async def test_a_wrong_password_a_missing_one_and_an_unknown_user(server: Server) -> None:
    await fails(f"redis://:secret@127.0.0.1:{server.port}", BrokerDenied, "wrong user name or password")
    await fails(f"redis://nobody:secret@127.0.0.1:{server.port}", BrokerDenied, "wrong user name or password")
    await fails(f"redis://127.0.0.1:{server.port}", BrokerDenied, "password is needed")


async def test_a_user_that_may_not_do_what_we_need(server: Server) -> None:
    async with Address(server.url).wire() as admin:
        await admin.one("ACL", "SETUSER", "bob", "on", ">secret", "+@connection", "~*")
    await fails(f"redis://bob:secret@127.0.0.1:{server.port}", BrokerDenied, "+info")


async def test_an_old_server() -> None:
    server = Server("valkey")

    async def older(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The real server, but for one digit in what INFO says."""
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", server.port)

        async def forth() -> None:
            while data := await reader.read(65536):
                up_writer.write(data)
            up_writer.close()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(forth())
            while data := await up_reader.read(1_000_000):
                writer.write(data.replace(b"redis_version:7.", b"redis_version:6."))

    try:
        async with listening(older) as port:
            await fails(f"redis://:{server.password}@127.0.0.1:{port}", BrokerUnsuitable, "Redis 6.2", "7.0", "upgrade")
    finally:
        server.close()


async def test_a_cluster() -> None:
    server = Server("valkey", "cluster-enabled yes", f"cluster-port {free_port()}")
    try:
        await fails(server.tcp_url, BrokerUnsuitable, "Cluster", "single primary")
    finally:
        server.close()


async def test_an_eviction_policy_that_would_evict_queued_steps(server: Server) -> None:
    async with Address(server.url).wire() as admin:
        try:
            await admin.one("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
            await fails(server.tcp_url, BrokerUnsuitable, "volatile-lru", "CONFIG SET maxmemory-policy noeviction")
        finally:
            await admin.one("CONFIG", "SET", "maxmemory-policy", "noeviction")


@pytest.mark.parametrize("url", ["http://x", "redis://host:port", "redis://host/db", "unix://", "nonsense", "redis://h:99999"])
async def test_a_url_that_makes_no_sense_is_refused_before_anything_is_tried(url: str) -> None:
    with pytest.raises(InvalidSettings, match="REDIS_URL"):
        Address(url)


class Certificates:
    """An authority, a server's certificate and a client's, as files."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.ca = folder / "ca.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        self.server = self._issue(authority, folder / "server")
        self.client = self._issue(authority, folder / "client")
        self.other_ca = folder / "other.pem"
        trustme.CA().cert_pem.write_to_path(str(self.other_ca))

    def _issue(self, authority: trustme.CA, path: Path) -> tuple[str, str]:
        certificate = authority.issue_cert("localhost", "127.0.0.1")
        cert, key = str(path) + ".crt", str(path) + ".key"
        certificate.private_key_pem.write_to_path(key)
        for index, blob in enumerate(certificate.cert_chain_pems):
            blob.write_to_path(cert, append=index > 0)
        return cert, key


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@contextlib.asynccontextmanager
async def tls_server(certificates: Certificates, *, ask_client: bool) -> AsyncIterator[tuple[Server, int]]:
    """A real Redis that speaks TLS (the bundled Valkey is built without)."""
    port = free_port()
    cert, key = certificates.server
    options = [f"tls-port {port}", f"tls-cert-file {cert}", f"tls-key-file {key}", f"tls-ca-cert-file {certificates.ca}"]
    server = Server("redis", *options, f"tls-auth-clients {'yes' if ask_client else 'no'}")
    try:
        yield server, port
    finally:
        server.close()


async def test_tls_with_a_ca_file(certificates: Certificates) -> None:
    async with tls_server(certificates, ask_client=False) as (server, port):
        url = f"rediss://:{server.password}@localhost:{port}"
        assert await ping(url, redis_ca_file=str(certificates.ca)) == b"PONG"
        assert await ping(f"{url}?ssl_ca_certs={certificates.ca}") == b"PONG"
        await fails(url, BrokerUnavailable, "TLS failed", "SANDBOX_QUEUE_REDIS_CA_FILE")
        await fails(url, BrokerUnavailable, "TLS failed", redis_ca_file=str(certificates.other_ca))
        await fails(f"rediss://:{server.password}@localhost:{server.port}", BrokerUnavailable, "TLS", connect_timeout=2)


async def test_tls_with_a_client_certificate(certificates: Certificates) -> None:
    async with tls_server(certificates, ask_client=True) as (server, port):
        url = f"rediss://:{server.password}@localhost:{port}"
        cert, key = certificates.client
        ca = str(certificates.ca)
        assert await ping(url, redis_ca_file=ca, redis_cert_file=cert, redis_key_file=key) == b"PONG"
        with pytest.raises(BrokerUnavailable):
            await ping(url, redis_ca_file=ca)


async def test_a_missing_ca_file_is_named(certificates: Certificates) -> None:
    with pytest.raises((BrokerUnavailable, InvalidSettings), match=r"missing\.pem"):
        await ping("rediss://localhost:1", redis_ca_file="/missing.pem")
