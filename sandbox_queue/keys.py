"""Every Redis name on one page: what it is, who writes it, how long it lives, and what a sandbox may do with it.

The sandbox's Redis user is computed from this table (`acl_rules`), never written by hand: a row's `commands` are all that
it may do with that row's keys, each row being a selector of its own, so that a command allowed on one key does not leak
to another. A row without commands is out of its reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from sandbox_queue import limits

SEQ_DIGITS: Final = 12  # arq orders equal scores by name, so the sequence number is padded


@dataclass(frozen=True, slots=True)
class Key:
    """One row of the table. `pattern` has `{s}` for the sandbox and, where there is one key per step, ends in `*`."""

    name: str
    pattern: str
    type: Literal["string", "list", "hash", "zset", "stream", "channel"]
    what: str
    writer: str
    ttl: float | None
    access: Literal["none", "R", "W", "RW"] = "none"
    commands: tuple[str, ...] = ()

    def of(self, sandbox: str, seq: int | None = None) -> str:
        """The key of that sandbox, and of that step where there is one per step."""
        return self.for_suffix(sandbox, "" if seq is None else f"{seq:0{SEQ_DIGITS}d}")

    def for_suffix(self, sandbox: str, suffix: str) -> str:
        """The key whose last part somebody else chose: a job id of stock arq's, a random token."""
        if (suffix == "") == self.pattern.endswith("*"):
            raise ValueError(f"{self.name}: a last part is {'out of place' if suffix else 'missing'}")
        return self.pattern.replace("{s}", sandbox).replace("*", suffix)


# fmt: off
# name, pattern, type, what it is; who writes it, seconds it lives, what a sandbox may do with it, by which commands
JOB: Final = Key("job", "arq:job:{s}:*", "string", "arq's job: one Step",
    "client", limits.QUEUED_TTL, "RW", ("get", "del"))
QUEUE: Final = Key("queue", "sandbox:{s}:queue", "zset", "arq's queue of this sandbox",
    "client", limits.QUEUED_TTL + limits.DAY, "RW", ("zrange", "zrem"))
IN_PROGRESS: Final = Key("in-progress", "arq:in-progress:{s}:*", "string", "the claim: who started it",
    "worker", limits.QUEUED_TTL, "RW", ("set", "del"))
RESULT: Final = Key("result", "arq:result:{s}:*", "string", "arq's result; the first writer wins",
    "worker", limits.RESULT_TTL, "W", ("set",))
WAKE: Final = Key("wake", "sandbox:{s}:wake", "list", "a hint without content: look",
    "client", limits.QUEUED_TTL, "RW", ("blpop",))
CANCEL: Final = Key("cancel", "sandbox:{s}:cancel", "hash", "number of a cancelled step -> grace in seconds",
    "client", limits.QUEUED_TTL, "R", ("hmget",))
EVENTS: Final = Key("events", "sandbox:{s}:events", "stream", "what the steps print",
    "worker", limits.EVENTS_TTL, "W", ("xadd", "xtrim", "expire"))
HEARTBEAT: Final = Key("heartbeat", "sandbox:{s}:heartbeat", "string", "liveness of the worker, and its last words",
    "worker", limits.HEARTBEAT_TTL, "RW", ("set",))
LEASE: Final = Key("lease", "sandbox:{s}:lease", "string", "a launcher looks after this sandbox",
    "launcher", limits.ABANDONED_AFTER, "R", ("exists",))
DONE: Final = Key("done", "sandbox:{s}:done", "channel", "number of a step whose result is there",
    "worker", None, "W", ("publish",))
INPUT: Final = Key("input", "sandbox:{s}:input:*", "list", "reserved for interactive input",
    "client", limits.EVENTS_TTL, "R")
SEQUENCE: Final = Key("sequence", "control:{s}:sequence", "hash", "last step number, last score",
    "client", limits.CONTROL_TTL)
STEPS: Final = Key("steps", "control:{s}:steps", "hash", "step id of the caller's -> number",
    "client", limits.CONTROL_TTL)
SENT: Final = Key("sent", "control:{s}:sent:*", "string", "attempt to enqueue -> number",
    "client", limits.SENT_TTL)
ACL: Final = Key("acl", "control:{s}:acl", "string", "SHA-256 of the sandbox's password",
    "launcher", limits.CONTROL_TTL)
# fmt: on

TABLE: Final = (
    JOB, QUEUE, IN_PROGRESS, RESULT, WAKE, CANCEL, EVENTS, HEARTBEAT, LEASE, DONE, INPUT, SEQUENCE, STEPS, SENT, ACL,
)  # fmt: skip

# What redis-py needs to open a connection, and what frames a transaction. None of these touches a key.
CONNECTION_COMMANDS: Final = ("auth", "hello", "ping", "select", "client|setname", "multi", "exec", "discard")


def acl_user(sandbox: str) -> str:
    """The name of the Redis user of that sandbox."""
    return f"sandbox-{sandbox}"


def acl_rules(sandbox: str, password_sha256: str) -> list[str]:
    """The arguments of `ACL SETUSER` that give a sandbox what the table allows, and nothing else."""
    rules = ["reset", "on", f"#{password_sha256}", *(f"+{command}" for command in CONNECTION_COMMANDS)]
    for key in TABLE:
        if not key.commands:
            continue
        pattern = key.pattern.replace("{s}", sandbox)
        where = f"resetchannels &{pattern}" if key.type == "channel" else f"%{key.access}~{pattern}"
        rules.append(f"({where} {' '.join(f'+{command}' for command in key.commands)})")
    return rules


def job_id(sandbox: str, seq: int) -> str:
    """arq's id of that step."""
    return f"{sandbox}:{seq:0{SEQ_DIGITS}d}"


def default_step_id(suffix: str) -> str:
    """The step id of a job whose step names none: its number, or whatever somebody else made up instead of one."""
    return suffix.lstrip("0") or "0" if suffix.isascii() and suffix.isdigit() else suffix
