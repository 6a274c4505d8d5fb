"""The Redis user of a sandbox: what it may do is what its worker does, and nothing else.

The sandbox is hostile and holds this user's password. Every refusal here is a real command on a real connection of that
user; what it is allowed is compared with what a worker at work was seen to send.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis import exceptions as redis_errors

from sandbox_queue import acl, keys, limits
from sandbox_queue.address import Address
from sandbox_queue.client import SandboxQueue
from sandbox_queue.errors import BrokerDenied
from sandbox_queue.keys import Key
from sandbox_queue.models import Step, StepResult
from sandbox_queue.stream import EventWriter
from sandbox_queue.wire import Command, ConnectionLost, Wire
from sandbox_queue.workers.loop import Running
from tests.conftest import SANDBOX
from tests.kit import Server, script_of, wait_until, worker_address, working

USER = keys.acl_user(SANDBOX)
STRANGERS = ("box-2", "box-10", "box-1x", "box-1-1", "xbox-1")  # some of whose names begin or end like ours


def name_of(key: Key, sandbox: str) -> str:
    return key.of(sandbox, 1) if key.pattern.endswith("*") else key.of(sandbox)


def attempt(command: str, key: str) -> Command:
    """A well-formed call of that command on that key."""
    rest: dict[str, tuple[Any, ...]] = {
        "append": ("x",),
        "blpop": (0.001,),
        "expire": (100,),
        "hget": ("x",),
        "hmget": ("x",),
        "hset": ("x", "y"),
        "lrange": (0, -1),
        "publish": ("1",),
        "rpush": ("x",),
        "set": ("x", "EX", 100),
        "spublish": ("1",),
        "xadd": ("*", "x", "y"),
        "xrange": ("-", "+"),
        "xtrim": ("MAXLEN", 0),
        "zadd": (0, "x"),
        "zrange": (0, -1),
        "zrem": ("x",),
    }
    return (command.upper(), key, *rest.get(command, ()))


BY_TYPE = {
    "string": ("get", "set", "append"),
    "list": ("lrange", "rpush", "blpop"),
    "hash": ("hget", "hmget", "hset"),
    "zset": ("zrange", "zadd", "zrem"),
    "stream": ("xrange", "xadd", "xtrim"),
    "channel": ("publish", "subscribe", "psubscribe", "spublish", "ssubscribe"),
}
GRANTED = {(command, key.name) for key in keys.TABLE for command in key.commands}


@pytest.fixture
async def intruder(worker: Address) -> AsyncIterator[Wire]:
    """A connection of the sandbox's own user, in hostile hands."""
    async with worker.wire() as wire:
        yield wire


async def refused(wire: Wire, *command: Any) -> None:
    with pytest.raises(redis_errors.NoPermissionError):
        await wire.one(*command)


# --- what is out of reach


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("key", keys.TABLE, ids=[key.name for key in keys.TABLE])
async def test_the_keys_of_other_sandboxes_are_out_of_reach(intruder: Wire, key: Key, stranger: str) -> None:
    commands = dict.fromkeys((*BY_TYPE[key.type], *key.commands, *(("del", "expire") if key.type != "channel" else ())))
    for command in commands:
        await refused(intruder, *attempt(command, name_of(key, stranger)))


OUT_OF_REACH = [key for key in keys.TABLE if key.access == "none" or not key.commands]


@pytest.mark.parametrize("key", OUT_OF_REACH, ids=[key.name for key in OUT_OF_REACH])
async def test_what_the_table_does_not_grant_is_out_of_reach_for_its_own_sandbox_too(intruder: Wire, key: Key) -> None:
    for command in (*BY_TYPE[key.type], "del", "expire", "get"):
        await refused(intruder, *attempt(command, name_of(key, SANDBOX)))


def test_everything_under_control_is_among_what_is_out_of_reach() -> None:
    control = {key.name for key in keys.TABLE if key.pattern.startswith("control:")}
    assert control
    assert control <= {key.name for key in OUT_OF_REACH}


JOB, QUEUE, RESULT = (name_of(key, SANDBOX) for key in (keys.JOB, keys.QUEUE, keys.RESULT))
CHANNEL, FOREIGN_CHANNEL = keys.DONE.of(SANDBOX), keys.DONE.of("box-2")

FORBIDDEN: list[Command] = [
    # scripts: an endless loop in one of them would stop Redis for everyone
    ("EVAL", "return 1", 0),
    ("EVAL", "while true do end", 1, JOB),
    ("EVAL_RO", "return 1", 0),
    ("EVALSHA", "0" * 40, 0),
    ("EVALSHA_RO", "0" * 40, 0),
    ("FUNCTION", "LIST"),
    ("FUNCTION", "LOAD", "#!lua name=x\nredis.register_function('x', function() end)"),
    ("FUNCTION", "FLUSH"),
    ("FCALL", "x", 0),
    ("FCALL_RO", "x", 0),
    ("SCRIPT", "LOAD", "return 1"),
    ("SCRIPT", "FLUSH"),
    ("SCRIPT", "KILL"),
    # looking around
    ("KEYS", "*"),
    ("KEYS", f"sandbox:{SANDBOX}:*"),
    ("SCAN", 0),
    ("SCAN", 0, "MATCH", f"sandbox:{SANDBOX}:*"),
    ("RANDOMKEY",),
    ("DBSIZE",),
    ("INFO",),
    ("COMMAND",),
    ("OBJECT", "ENCODING", JOB),
    ("MEMORY", "USAGE", JOB),
    ("TYPE", JOB),
    ("EXISTS", JOB),
    ("SLOWLOG", "GET"),
    ("LATENCY", "LATEST"),
    ("MONITOR",),
    # administration
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "requirepass", ""),
    ("ACL", "WHOAMI"),
    ("ACL", "LIST"),
    ("ACL", "SETUSER", USER, "allkeys"),
    ("ACL", "GETUSER", USER),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("CLIENT", "LIST"),
    ("CLIENT", "PAUSE", 100_000),
    ("CLIENT", "UNPAUSE"),
    ("CLIENT", "TRACKING", "ON"),
    ("CLIENT", "NO-EVICT", "ON"),
    ("CLIENT", "REPLY", "OFF"),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("SWAPDB", 0, 1),
    ("SHUTDOWN", "NOSAVE"),
    ("SAVE",),
    ("BGSAVE",),
    ("BGREWRITEAOF",),
    ("REPLICAOF", "NO", "ONE"),
    ("PSYNC", "?", -1),
    ("MODULE", "LIST"),
    ("FAILOVER", "ABORT"),
    # what others hear, and listening to others
    ("SUBSCRIBE", CHANNEL),
    ("SUBSCRIBE", FOREIGN_CHANNEL),
    ("PSUBSCRIBE", "*"),
    ("PSUBSCRIBE", f"sandbox:{SANDBOX}:*"),
    ("SSUBSCRIBE", CHANNEL),
    ("PUBLISH", FOREIGN_CHANNEL, "1"),
    ("PUBLISH", "__keyspace@0__:x", "1"),
    ("SPUBLISH", CHANNEL, "1"),
    ("PUBSUB", "CHANNELS"),
    # feeding its own queue, or changing what was put into it
    ("SET", JOB, "x"),
    ("SET", JOB, "x", "XX"),
    ("APPEND", JOB, "x"),
    ("SETRANGE", JOB, 0, "x"),
    ("GETDEL", JOB),
    ("GETEX", JOB, "PERSIST"),
    ("PERSIST", JOB),
    ("RENAME", JOB, name_of(keys.IN_PROGRESS, SANDBOX)),
    ("COPY", JOB, RESULT),
    ("ZADD", QUEUE, 0, f"{SANDBOX}:000000000009"),
    ("ZINCRBY", QUEUE, 1, "x"),
    ("DEL", QUEUE),
    ("SET", QUEUE, "x"),
    ("HSET", keys.CANCEL.of(SANDBOX), "1", "5"),
    ("DEL", keys.CANCEL.of(SANDBOX)),
    ("RPUSH", keys.WAKE.of(SANDBOX), "1"),
    # a result is written, never read back or removed
    ("GET", RESULT),
    ("SET", RESULT, "x", "GET"),
    ("DEL", RESULT),
    ("DEL", keys.EVENTS.of(SANDBOX)),
    ("XREAD", "STREAMS", keys.EVENTS.of(SANDBOX), "0"),
    ("XGROUP", "CREATE", keys.EVENTS.of(SANDBOX), "g", "0"),
    # arq's set of jobs to abort belongs to everybody
    ("ZADD", "arq:abort", 0, "x"),
    ("ZRANGE", "arq:abort", 0, -1),
    ("ZREM", "arq:abort", "x"),
    ("DEL", "arq:abort"),
    ("GET", "arq:queue"),
    ("SET", "anything", "x"),
    # several keys at once, one of which is another's
    ("DEL", JOB, name_of(keys.JOB, "box-2")),
    ("BLPOP", keys.WAKE.of(SANDBOX), keys.WAKE.of("box-2"), 0.001),
]


@pytest.mark.parametrize("command", FORBIDDEN, ids=lambda command: " ".join(map(str, command))[:50])
async def test_a_sandbox_may_not(intruder: Wire, command: Command) -> None:
    await refused(intruder, *command)


async def test_a_forbidden_command_is_refused_inside_a_transaction_too(intruder: Wire) -> None:
    with pytest.raises(redis_errors.NoPermissionError):
        await intruder.transaction(("GET", JOB), ("GET", name_of(keys.JOB, "box-2")))
    with pytest.raises(redis_errors.NoPermissionError):
        await intruder.transaction(("GET", JOB), ("CONFIG", "GET", "*"))


async def test_no_command_is_allowed_but_those_of_the_table_and_of_the_connection(queue: SandboxQueue, worker: Address) -> None:
    """Every command that this server knows, DEBUG and the commands of later versions included, is asked for."""
    admin = queue.broker.wire
    allowed = set()
    for name, arity, *rest in await admin.one("COMMAND"):
        subcommands = rest[-1] if rest and isinstance(rest[-1], list) else []
        for full, size in [(sub[0], sub[1]) for sub in subcommands] or [(name, arity)]:
            words = full.decode().split("|")
            verdict = await admin.one("ACL", "DRYRUN", USER, *words, *["x"] * (abs(size) - len(words)))
            if b"no permissions to run" not in verdict:
                allowed.add(full.decode())
    always = {"quit", "reset"}  # no server refuses these to anybody
    assert allowed - always == {*keys.CONNECTION_COMMANDS, *(command for command, _ in GRANTED)}


async def test_a_command_that_one_key_allows_is_not_allowed_on_another(queue: SandboxQueue, worker: Address) -> None:
    """Each row of the table is a selector of its own: GET on jobs does not make results readable."""
    admin = queue.broker.wire
    commands = sorted({command for command, _ in GRANTED} - {"publish"})
    allowed = set()
    for key in keys.TABLE:
        if key.type != "channel":
            for command in commands:
                verdict = await admin.one("ACL", "DRYRUN", USER, *attempt(command, name_of(key, SANDBOX)))
                if verdict == b"OK":
                    allowed.add((command, key.name))
    assert allowed == {(command, row) for command, row in GRANTED if command != "publish"}


# --- what a worker does


async def monitored(server: Server, started: asyncio.Event, marker: str) -> list[tuple[str, list[str]]]:
    """Every command that the server carries out until it sees `marker`: who sent it, and its words."""
    seen: list[tuple[str, list[str]]] = []
    reader, writer = await asyncio.open_unix_connection(str(server.directory / "s"), limit=16 * limits.MIB)
    with contextlib.closing(writer):
        writer.write(f"AUTH {server.password}\r\nMONITOR\r\n".encode())
        assert [await reader.readline(), await reader.readline()] == [b"+OK\r\n", b"+OK\r\n"]
        started.set()
        while True:
            line = (await reader.readline()).decode()
            match = re.match(r'^\+[\d.]+ \[\d+ (\S+)\] (".*")\r\n$', line)
            assert match, line
            words = [word.replace('\\"', '"') for word in re.findall(r'"((?:[^"\\]|\\.)*)"', match[2])]
            if marker in words:
                return seen
            seen.append((match[1], words))


def row_of(key: str) -> str:
    rows = [row.name for row in keys.TABLE if fnmatch.fnmatchcase(key, row.pattern.replace("{s}", SANDBOX))]
    assert len(rows) == 1, f"{key} is in {len(rows)} rows of the table"
    return rows[0]


async def test_a_worker_uses_all_that_the_table_grants_and_nothing_else(
    server: Server, queue: SandboxQueue, worker: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start, steps with and without output, a flood that trims, a cancelled step, a malformed one, shutdown."""
    defaults = EventWriter.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "budget", 1000)  # bytes of output, beyond which it is trimmed
    admin = queue.broker.wire
    await admin.one("ACL", "LOG", "RESET")
    # By TCP, since MONITOR tells connections apart by their port; the client stays on the Unix socket.
    address = Address(f"redis://127.0.0.1:{server.port}/0", username=worker.username, password=worker.password)
    running = asyncio.Event()

    async def handler(step: Running) -> StepResult:
        if script_of(step.step) == "sleep":
            running.set()
            await asyncio.Event().wait()
        for stream in ("stdout", "stderr"):
            await step.output.write("stdout" if stream == "stdout" else "stderr", b"x" * 2000)
        return StepResult(cause="exit", exit_code=0)

    started = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        monitor = tasks.create_task(monitored(server, started, "the end"))
        await started.wait()
        async with working(address, SANDBOX, handler, heartbeat_every=0.05, heartbeat_ttl=0.5):
            for _ in range(3):
                assert (await (await queue.enqueue(SANDBOX, Step.run("print")))).ok
            sleeper = await queue.enqueue(SANDBOX, Step.run("sleep"))
            await running.wait()
            assert await sleeper.cancel()
            assert (await (await queue.enqueue(SANDBOX, Step.shutdown()))).ok
            await wait_until(lambda: _is_gone(admin, keys.HEARTBEAT.of(SANDBOX)), "the worker has ended")
        await admin.one("ECHO", "the end")
    by_worker = [words for who, words in monitor.result() if who.startswith("127.0.0.1:")]
    on_connection = {
        "|".join(words[:2]).lower() if words[0].upper() == "CLIENT" else words[0].lower() for words in by_worker
    } & {*keys.CONNECTION_COMMANDS}
    on_keys = {
        (words[0].lower(), row_of(words[1])) for words in by_worker if words[0].lower() not in on_connection | {"client"}
    }
    assert {"multi", "exec", "client|setname"} <= on_connection
    assert on_keys == GRANTED
    assert await admin.one("ACL", "LOG") == [], "nothing was refused"


async def _is_gone(admin: Wire, key: str) -> bool:
    return bool(await admin.one("EXISTS", key) == 0)


async def test_a_reserved_row_grants_nothing_yet() -> None:
    assert keys.INPUT.commands == ()
    assert not any("input" in rule for rule in keys.acl_rules(SANDBOX, "0" * 64))


# --- the life of the user


async def log_in(address: Address) -> bytes:
    async with address.wire() as wire:
        answer: bytes = await wire.one("PING")
        return answer


async def test_a_granted_user_logs_in_with_its_password_and_no_other(
    queue: SandboxQueue, server: Server, worker: Address
) -> None:
    assert await log_in(worker) == b"PONG"
    for password in ("", "x", server.password):
        with pytest.raises((ConnectionLost, redis_errors.AuthenticationError)):
            await log_in(Address(f"unix://{server.directory}/s", username=USER, password=password))


async def test_the_password_is_stored_nowhere_in_clear(queue: SandboxQueue, worker: Address) -> None:
    admin = queue.broker.wire
    assert worker.password is not None
    assert len(worker.password) >= 32
    known = repr(await admin.one("ACL", "LIST")) + repr(await admin.one("GET", keys.ACL.of(SANDBOX)))
    assert worker.password not in known
    assert f"user {USER} on" in known
    assert "nopass" not in known.split(f"user {USER} ")[1].split("user ")[0]


async def test_granting_again_replaces_the_password(queue: SandboxQueue, server: Server, worker: Address) -> None:
    again = await worker_address(queue.broker.wire, server, SANDBOX)
    assert again.password != worker.password
    assert await log_in(again) == b"PONG"
    with pytest.raises(ConnectionLost):
        await log_in(worker)


async def test_a_user_that_was_deleted_is_restored_with_its_password(queue: SandboxQueue, worker: Address) -> None:
    admin = queue.broker.wire
    before = await admin.one("ACL", "GETUSER", USER)
    await admin.one("ACL", "DELUSER", USER)
    with pytest.raises(ConnectionLost):
        await log_in(worker)
    assert await acl.restore(admin, SANDBOX)
    assert await log_in(worker) == b"PONG"
    assert await admin.one("ACL", "GETUSER", USER) == before


async def test_restoring_a_user_that_is_there_does_not_disturb_its_connections(queue: SandboxQueue, intruder: Wire) -> None:
    mine = await intruder.one("PING")
    assert await acl.restore(queue.broker.wire, SANDBOX)
    assert await intruder.one("PING") == mine
    assert await intruder.one("GET", JOB) is None


async def test_nothing_is_restored_for_a_sandbox_that_was_granted_nothing(queue: SandboxQueue) -> None:
    assert not await acl.restore(queue.broker.wire, SANDBOX)
    assert USER.encode() not in await queue.broker.wire.one("ACL", "USERS")


@pytest.mark.parametrize("own_server", [("appendonly yes",)], indirect=True)
async def test_a_user_is_restored_after_a_restart_of_the_server(own_server: Server) -> None:
    async with Address(own_server.url).wire() as admin:
        address = await worker_address(admin, own_server, SANDBOX)
        assert await log_in(address) == b"PONG"
    own_server.restart()
    with pytest.raises(ConnectionLost):
        await log_in(address)
    async with Address(own_server.url).wire() as admin:
        assert await acl.restore(admin, SANDBOX)
        assert await log_in(address) == b"PONG"


async def test_a_server_that_lost_everything_has_no_user_to_restore(own_server: Server) -> None:
    async with Address(own_server.url).wire() as admin:
        await acl.grant(admin, SANDBOX)
    own_server.restart()
    async with Address(own_server.url).wire() as admin:
        assert not await acl.restore(admin, SANDBOX)


async def test_revoking_closes_every_connection_of_the_sandbox(queue: SandboxQueue, worker: Address) -> None:
    admin = queue.broker.wire
    async with worker.wire() as idle, worker.wire() as blocked:
        await idle.one("PING")
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(_outcome(blocked, "BLPOP", keys.WAKE.of(SANDBOX), 0))
            await wait_until(lambda: _connections(admin, "cmd=blpop"), "the sandbox waits for a hint")
            assert len(await _connections(admin, "")) == 2
            await acl.revoke(admin, SANDBOX)
            assert isinstance(await waiting, ConnectionLost)
        assert await _connections(admin, "") == []
        with pytest.raises(ConnectionLost):
            await idle.one("PING")
    assert USER.encode() not in await admin.one("ACL", "USERS")
    assert not await acl.restore(admin, SANDBOX), "what was revoked does not come back"


async def test_revoking_twice_or_for_nobody_is_no_error(queue: SandboxQueue, worker: Address) -> None:
    for _ in range(2):
        await acl.revoke(queue.broker.wire, SANDBOX)
    await acl.revoke(queue.broker.wire, "box-2")


async def test_revoking_one_sandbox_leaves_the_others_alone(queue: SandboxQueue, server: Server, worker: Address) -> None:
    other = await worker_address(queue.broker.wire, server, "box-10")
    await acl.revoke(queue.broker.wire, SANDBOX)
    assert await log_in(other) == b"PONG"


async def test_a_broker_that_does_not_let_us_manage_users_says_what_to_grant(queue: SandboxQueue, server: Server) -> None:
    await queue.broker.wire.one("ACL", "SETUSER", "clerk", "on", ">clerk", "~*", "&*", "+@all", "-acl")
    async with Address(f"unix://{server.directory}/s", username="clerk", password="clerk").wire() as clerk:
        with pytest.raises(BrokerDenied, match=r"box-1.*\+acl\|setuser"):
            await acl.grant(clerk, SANDBOX)
        with pytest.raises(BrokerDenied, match=r"\+acl\|"):
            await acl.revoke(clerk, SANDBOX)


@pytest.mark.parametrize("own_server", [("acl-pubsub-default allchannels",)], indirect=True)
async def test_a_server_that_is_generous_with_channels_does_not_widen_the_grant(own_server: Server) -> None:
    """Redis 6 allowed every channel by default, and some servers are still configured so."""
    async with Address(own_server.url).wire() as admin:
        address = await worker_address(admin, own_server, SANDBOX)
    async with address.wire() as intruder:
        await intruder.one("PUBLISH", CHANNEL, "1")
        await refused(intruder, "PUBLISH", FOREIGN_CHANNEL, "1")


async def _outcome(wire: Wire, *command: Any) -> Any:
    try:
        return await wire.one(*command)
    except ConnectionLost as error:
        return error


async def _connections(admin: Wire, having: str) -> list[str]:
    clients = (await admin.one("CLIENT", "LIST")).decode().splitlines()
    return [client for client in clients if f"user={USER} " in client + " " and having in client]
