"""`sandbox-queue doctor`: look at everything that a run depends on; say what is wrong, why it matters and what to do."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from copy import copy
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Literal
from uuid import uuid4

from sandbox_queue.cli.output import Output

if TYPE_CHECKING:
    from sandbox_queue.broker import Address
    from sandbox_queue.settings import Settings
    from sandbox_queue.wire import Wire

HELP = "check everything that a run depends on, and say what to do about it"
EXAMPLES = """\
examples:
  sandbox-queue doctor
  sandbox-queue doctor --json | jq -r 'select(.result == "failed") | .fix'

The exit code is 1 if a check failed; warnings and notes leave it at 0.
"""

Result = Literal["ok", "note", "warning", "failed"]
STYLES: dict[Result, str] = {"ok": "green", "note": "dim", "warning": "yellow", "failed": "bold red"}
EXTRAS = {"docker": "aiodocker", "kubernetes": "kubernetes"}


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at and found; `fix` is empty where there is nothing to do."""

    check: str
    result: Result
    reason: str
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none but those of every command."""


async def run(args: argparse.Namespace, out: Output) -> int:
    """Print each check as soon as it is done."""
    failed = False
    async for check in all_checks():
        failed = failed or check.result == "failed"
        out.emit(asdict(check), (f"{check.result:<8} ", STYLES[check.result]), (f"{check.check:<12} ", "bold"), (check.reason, ""))
        if check.fix:
            out.say((f"{'':<22} fix: ", "dim"), (check.fix, ""))
    return int(failed)


async def all_checks() -> AsyncIterator[Check]:
    from sandbox_queue.errors import InvalidSettings
    from sandbox_queue.settings import load

    yield check_python()
    try:
        settings = load()
    except InvalidSettings as error:
        yield Check("settings", "failed", f"{error.field}: {error.problem}", error.remedy)
        return
    async for check in check_broker(settings):
        yield check
    for extra, module in EXTRAS.items():
        yield check_extra(extra, module, needed=settings.sandbox_type == extra)


def check_python() -> Check:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < (3, 11):
        return Check("python", "failed", found, "use Python 3.11 or newer")
    if sys.platform != "linux":
        return Check("python", "warning", f"{found}: sandboxes of your own need Linux", "use it as a client, or run on Linux")
    return Check("python", "ok", found)


async def check_broker(settings: Settings) -> AsyncIterator[Check]:
    from sandbox_queue.broker import Address, check
    from sandbox_queue.embedded import EmbeddedServer
    from sandbox_queue.errors import BrokerDenied, BrokerError, BrokerUnavailable, InvalidSettings

    async with AsyncExitStack() as stack:
        try:
            private = None if settings.redis_url else (await stack.enter_async_context(EmbeddedServer.start())).url
            address = Address.from_settings(settings, private)
            wire = await stack.enter_async_context(address.wire())
            info = await check(address, wire)
        except InvalidSettings as error:
            yield Check("broker", "failed", f"{error.field}: {error.problem}", error.remedy)
            return
        except BrokerError as error:
            fixes = {
                BrokerUnavailable: "start a broker there or correct REDIS_URL; unset it for a private server",
                BrokerDenied: "put a user and a password that it accepts into REDIS_URL",
            }
            yield Check("broker", "failed", str(error), fixes.get(type(error), "change the server as the reason says"))
            return
        flavour = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
        where = "private server, started for this process because REDIS_URL is not set" if private else str(address)
        yield Check("broker", "ok", f"{flavour}, {where}")
        yield Check("eviction", "ok", f"maxmemory-policy is {info.get('maxmemory_policy', 'unknown')}: no queued step is evicted")
        yield await check_default_user(address)
        yield await check_acl(wire)


async def check_default_user(address: Address) -> Check:
    """Log in as nobody: the answer that counts is the server's, not what its configuration seems to say."""
    from sandbox_queue.wire import ConnectionLost

    anonymous = copy(address)
    anonymous.username = anonymous.password = None
    try:
        async with anonymous.wire() as wire:
            await wire.connect()
            who = (await wire.one("ACL", "WHOAMI")).decode("utf-8", "replace")
    except ConnectionLost:
        return Check("default user", "ok", "nobody gets in without a password")
    return Check(
        "default user",
        "warning",
        f"anybody gets in as {who!r} without a password, so a sandbox can step around the limits of its own user",
        "CONFIG SET requirepass <password>, and put it into REDIS_URL",
    )


async def check_acl(wire: Wire) -> Check:
    """Make a user as a launcher would, and delete it again."""
    from sandbox_queue import acl
    from sandbox_queue.errors import BrokerDenied

    probe = f"doctor-{uuid4().hex[:12]}"
    try:
        await acl.grant(wire, probe)
        await acl.revoke(wire, probe)
    except BrokerDenied as error:
        return Check(
            "acl",
            "warning",
            f"{error}; sandboxes cannot have users of their own",
            "ACL SETUSER <our user> +acl|setuser +acl|deluser, or leave launching to a service that may",
        )
    return Check("acl", "ok", "may create and delete the users of sandboxes")


def check_extra(extra: str, module: str, *, needed: bool) -> Check:
    name, fix = f"{extra} extra", f"pip install 'sandbox-queue[{extra}]'"
    try:
        import_module(module)
        return Check(name, "ok", f"{module} {version(module)}")
    except PackageNotFoundError:
        return Check(name, "ok", f"{module}, of unknown version")
    except ModuleNotFoundError:
        if needed:
            return Check(name, "failed", f"SANDBOX_TYPE is {extra}, and {module} is not installed", fix)
        return Check(name, "note", f"{module} is not installed; only the {extra} backend needs it", fix)
    except Exception as error:  # noqa: BLE001  # whatever a broken installation raises on import: it is what we look for
        return Check(name, "failed", f"{module} is installed and cannot be imported: {type(error).__name__}: {error}", fix)
