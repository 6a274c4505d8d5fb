"""`sandbox-queue`: one module per command, all of one shape; this one finds the command and turns errors into sentences.

A command is a module in `COMMANDS` with `HELP` (one line), `EXAMPLES`, `add_arguments(parser)` and `async run(args, out)`,
which returns the exit code: 0 all is well, 1 it is not, 2 wrong usage. A command imports what is heavy inside `run`, so
that `--help` is there at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from sandbox_queue import __version__
from sandbox_queue.cli import doctor
from sandbox_queue.cli.output import Output

DESCRIPTION = "Run code you do not trust, step by step, in sandboxes that a queue feeds."
EXAMPLES = """\
examples:
  sandbox-queue doctor                               is everything there that a run needs?
  REDIS_URL=redis://:secret@host:6379/0 sandbox-queue doctor --json

Settings come from the environment: see docs/settings.md. Without REDIS_URL, a private server is started while needed.
"""


class Command(Protocol):
    """What a module of this package offers."""

    @property
    def HELP(self) -> str: ...  # noqa: N802  # a constant of the module; as a property it may be a literal

    @property
    def EXAMPLES(self) -> str: ...  # noqa: N802  # the same

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    async def run(self, args: argparse.Namespace, out: Output) -> int: ...


COMMANDS: dict[str, Command] = {"doctor": doctor}


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return run(COMMANDS[args.command], args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `sandbox-queue … | head`: whoever read us has gone, and Python would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # the top of the program: a sentence for the user, the traceback on demand
        if args.debug:
            raise
        print(f"sandbox-queue: {explain(error)}", file=sys.stderr)
        return 1


def run(command: Command, args: argparse.Namespace) -> int:
    import asyncio
    import logging

    logging.basicConfig(level=logging.DEBUG if args.debug else logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return asyncio.run(command.run(args, Output(as_json=args.json)))


def explain(error: Exception) -> str:
    from sandbox_queue.errors import SandboxQueueError

    if isinstance(error, SandboxQueueError):
        return str(error)
    return f"this should not have happened: {type(error).__name__}: {error} (--debug shows where)"


def build_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("sandbox-queue", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"sandbox-queue {__version__}")
    parser.add_argument("--debug", action="store_true", help="log everything; errors with their traceback")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name, help=command.HELP, description=command.HELP, epilog=command.EXAMPLES, formatter_class=raw
        )
        sub.add_argument("--json", action="store_true", help="one JSON object per line")
        # Accepted on either side of the command; without SUPPRESS, its absence here would undo its presence there.
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        command.add_arguments(sub)
    return parser
