"""`sandbox-worker`: the entrypoint inside a sandbox.

It consumes its own sandbox's queue and nothing else. By hand, against any Redis:

    SANDBOX_QUEUE_REDIS_PASSWORD=… sandbox-worker --sandbox-id box-1 --redis-url redis://sandbox-box-1@host:6379

Exit codes: 0 after a shutdown step or SIGTERM, 2 when abandoned or misused, 3 on an unexpected error; the reason is on
stderr and, for a minute, where the heartbeat was.
"""

from __future__ import annotations

from sandbox_queue.workers import lean  # isort: skip  # before anything that imports redis

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

from sandbox_queue import __version__, limits
from sandbox_queue.address import Address
from sandbox_queue.errors import BrokerError, InvalidInput, InvalidSettings
from sandbox_queue.models import SandboxSpec
from sandbox_queue.workers import kernel
from sandbox_queue.workers.loop import Abandoned, Loop
from sandbox_queue.workers.process import environment
from sandbox_queue.workers.reaper import Reaper
from sandbox_queue.workers.runner import WORK, Runner

log = logging.getLogger("sandbox_queue.worker")

EXIT_DONE, EXIT_ABANDONED, EXIT_ERROR = 0, 2, 3
FORWARDED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, connect, work; never returns."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        SandboxSpec.build(id=options.sandbox_id)
        address = _address(options)
    except InvalidInput as error:
        parser.error(str(error))
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if options.verbose else logging.INFO,
        format=f"%(asctime)s %(levelname)s [{options.sandbox_id[:16]}] %(name)s: %(message)s",
    )
    memory = kernel.OwnMemory()
    kernel.protect_secrets()
    if not kernel.adopt_orphans() and sys.platform == "linux":
        log.warning("cannot become subreaper: daemons that steps leave behind may escape")
    lean.all_is_imported()
    sys.exit(asyncio.run(_work(address, options, memory)))


async def _work(address: Address, options: argparse.Namespace, memory: kernel.OwnMemory) -> int:
    current = asyncio.current_task()
    events = asyncio.get_running_loop()
    async with Reaper() as reaper, address.wire() as wire, address.wire() as waiting:
        runner = Runner(
            reaper,
            memory,
            inherited=environment(os.environb),
            work_dir=options.work_dir,
            roots=options.root or [options.work_dir, "/tmp"],  # noqa: S108  # the sandbox's, not ours
            output_max=options.output_max,
        )
        loop = Loop(
            wire,
            waiting,
            options.sandbox_id,
            runner,
            concurrency=options.concurrency,
            result_ttl=options.result_ttl,
            patience=options.patience,
            abandoned_after=options.abandoned_after,
            memory=memory,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            events.add_signal_handler(number, current.cancel if current else sys.exit)
        for number in FORWARDED:
            events.add_signal_handler(number, runner.forward, number)
        try:
            await loop.run()
            code, reason = EXIT_DONE, "a shutdown step was finished"
        except asyncio.CancelledError:
            code, reason = EXIT_DONE, "terminated by a signal"
        except BaseExceptionGroup as group:
            error = _first(group)
            code = EXIT_ABANDONED if isinstance(error, Abandoned) else EXIT_ERROR
            reason = f"{error}" if isinstance(error, (Abandoned, BrokerError)) else f"unexpected: {error!r}"
            if not isinstance(error, (Abandoned, BrokerError)):
                log.error("unexpected error", exc_info=error)
        log.info("exit %d: %s", code, reason)
        await loop.say_farewell(code, reason)
        return code


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _address(options: argparse.Namespace) -> Address:
    """Where to connect. A password on the command line would stand in `/proc/1/cmdline` for every step to read."""
    if not options.redis_url:
        raise InvalidSettings("--redis-url", "is missing", "give it, or set REDIS_URL")
    on_command_line = options.redis_url != _env("REDIS_URL", os.environ.get("REDIS_URL", ""))
    address = Address(
        options.redis_url,
        username=_env("REDIS_USERNAME") or None,
        password=_env("REDIS_PASSWORD") or None,
        ca_file=_env("REDIS_CA_FILE") or None,
        cert_file=_env("REDIS_CERT_FILE") or None,
        key_file=_env("REDIS_KEY_FILE") or None,
    )
    if on_command_line and address.has_password_in_url:
        raise InvalidSettings(
            "--redis-url",
            "has a password, which every process in the sandbox could read in /proc",
            "set SANDBOX_QUEUE_REDIS_PASSWORD instead",
        )
    return address


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sandbox-worker", description="Consume the steps of one sandbox.", epilog="Every option has an environment "
        "variable: SANDBOX_QUEUE_ and its name in capitals. The password of the sandbox's Redis user comes by "
        "SANDBOX_QUEUE_REDIS_PASSWORD only.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"sandbox-worker {__version__}")
    sandbox = _env("SANDBOX_ID")
    parser.add_argument("--sandbox-id", "--job-id", metavar="ID", default=sandbox, required=not sandbox, help="whose queue")
    parser.add_argument(
        "--redis-url",
        metavar="URL",
        default=_env("REDIS_URL", os.environ.get("REDIS_URL", "")),
        help="the broker, without password",
    )
    parser.add_argument("--work-dir", metavar="D", default=_env("WORK_DIR", WORK), help=f"what steps call {WORK}")
    roots = [root for root in _env("ROOTS").split(os.pathsep) if root]
    parser.add_argument("--root", metavar="D", action="append", default=roots, help="a directory that file steps may touch")
    parser.add_argument("--concurrency", type=int, metavar="N", default=int(_env("CONCURRENCY", "1")), help="steps at a time")
    parser.add_argument("--verbose", action="store_true", default=bool(_env("VERBOSE")), help="log more")
    for name, default, text in (
        ("result-ttl", limits.RESULT_TTL, "seconds for which results are kept"),
        ("patience", limits.OUTAGE_MAX, "seconds to go on without the broker"),
        ("abandoned-after", limits.ABANDONED_AFTER, "seconds without launcher and step after which to exit"),
    ):
        variable = name.replace("-", "_").upper()
        parser.add_argument(f"--{name}", type=float, metavar="S", default=float(_env(variable, str(default))), help=text)
    parser.add_argument(
        "--output-max", type=int, metavar="BYTES", default=int(_env("OUTPUT_MAX", str(limits.OUTPUT_MAX))), help="of one step"
    )
    return parser


def _env(name: str, default: str = "") -> str:
    return os.environ.get(f"SANDBOX_QUEUE_{name}", "") or default


if __name__ == "__main__":
    main()
