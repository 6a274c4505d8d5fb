"""`python -m benchmarks [table …] [--quick] [--json]`: run the tables, print them, exit with 1 if a bar was missed."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable
from importlib import import_module
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from benchmarks.ground import Ground
from benchmarks.rounds import Table, Verdict, play

TABLES = ("queue", "output", "latency", "stall", "steps", "reaction", "end_to_end", "start")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="table", help=f"which of {', '.join(TABLES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, for a first impression")
    parser.add_argument("--json", action="store_true", help="every figure of every round as JSON, instead of tables")
    options = parser.parse_args()
    if unknown := set(options.tables) - set(TABLES):
        parser.error(f"no such table: {', '.join(sorted(unknown))}")
    names = options.tables or TABLES
    tables = asyncio.run(_run(names, quick=options.quick, show=None if options.json else _show))
    if options.json:
        json.dump([_as_dict(table) for table in tables], sys.stdout, indent=2)
    return 0 if all(verdict.met for table in tables for verdict in table.verdicts()) else 1


async def _run(names: tuple[str, ...], *, quick: bool, show: Callable[[Table], None] | None) -> list[Table]:
    errors = Console(stderr=True)
    tables: list[Table] = []
    async with Ground.prepare() as ground:
        with errors.status("…") as status:
            for name in names:
                table: Table = import_module(f"benchmarks.{name}").table(ground, quick)
                await play(table, ground.clean, status.update)
                tables.append(table)
                if show is not None:
                    show(table)
    return tables


def _show(table: Table) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    grid = Grid(title=f"{table.name}: {table.title}\nmedian of {table.rounds} rounds (lowest to highest)", title_justify="left")
    grid.add_column("")
    for metric in table.metrics:
        grid.add_column(metric.heading, justify="right")
    for row in (contestant.name for contestant in table.contestants):
        cells = []
        for metric in table.metrics:
            values = table.values(row, metric.key)
            shown = [f"{value:,.{metric.decimals}f}" for value in (median(values), min(values), max(values))] if values else []
            cells.append(f"{shown[0]}\n({shown[1]} to {shown[2]})" if len(values) > 1 else (shown or ["-"])[0])
        grid.add_row(row, *cells)
    console.print(grid)
    for verdict in table.verdicts():
        colour, word = ("green", "met   ") if verdict.met else ("red", "missed")
        console.print(f"[{colour}]{word}[/] {_describe(table, verdict)}", highlight=False)
    console.print()


def _describe(table: Table, verdict: Verdict) -> str:
    bar = verdict.bar
    heading = next(metric.heading for metric in table.metrics if metric.key == bar.metric)
    against = f" of {' or '.join(bar.against)}" if bar.against else ""
    what = f"{bar.row}, {heading}: {verdict.value:,.2f} ({verdict.lowest:,.2f} to {verdict.highest:,.2f})"
    return f"{what}{against}, wanted {bar.sign} {bar.limit:g}"


def _as_dict(table: Table) -> dict[str, Any]:
    verdicts = [{**dataclasses.asdict(verdict), "met": verdict.met} for verdict in table.verdicts()]
    return {"table": table.name, "title": table.title, "figures": table.figures, "bars": verdicts}


if __name__ == "__main__":
    sys.exit(main())
