"""Interleaved rounds: each round measures every contestant once, in an order that rotates.

A shared machine is fast for a minute and slow for the next. So contestants are compared within a round, where both had the
same minute: a ratio is taken per round, and the median of those ratios is what a bar is held against.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

Figures = dict[str, float]  # metric -> value, from one measurement


@dataclass(frozen=True)
class Metric:
    """A column: its key in `Figures`, its heading, and how many decimals are worth printing."""

    key: str
    heading: str
    decimals: int = 0


@dataclass(frozen=True)
class Contestant:
    """A row: something that can be measured once, from a clean server to a stopped process."""

    name: str
    measure: Callable[[], Awaitable[Figures]]


@dataclass(frozen=True)
class Bar:
    """What must hold: a metric of one row, by itself or as a ratio to the best of other rows in the same round."""

    row: str
    metric: str
    sign: Literal["<=", ">="]
    limit: float
    against: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """A bar, the figure that it was held against, and whether it was met."""

    bar: Bar
    value: float
    lowest: float
    highest: float

    @property
    def met(self) -> bool:
        """Whether the figure is on the right side of the limit."""
        return self.value <= self.bar.limit if self.bar.sign == "<=" else self.value >= self.bar.limit


@dataclass
class Table:
    """One benchmark. `figures` fills up with one entry per row and round."""

    name: str
    title: str
    metrics: list[Metric]
    contestants: list[Contestant]
    bars: list[Bar]
    rounds: int
    figures: dict[str, list[Figures]] = field(default_factory=dict)

    def values(self, row: str, metric: str) -> list[float]:
        """That metric of that row, round by round."""
        return [figures[metric] for figures in self.figures[row] if metric in figures]

    def verdicts(self) -> list[Verdict]:
        """Every bar with the median of what it is about."""
        return [self._judge(bar) for bar in self.bars]

    def _judge(self, bar: Bar) -> Verdict:
        values = self.values(bar.row, bar.metric)
        if bar.against:
            best = min if bar.sign == "<=" else max
            theirs = [best(rivals) for rivals in zip(*(self.values(row, bar.metric) for row in bar.against), strict=True)]
            values = [mine / other for mine, other in zip(values, theirs, strict=True)]
        return Verdict(bar, median(values), min(values), max(values))


async def play(table: Table, clean: Callable[[], Awaitable[None]], progress: Callable[[str], None]) -> None:
    """Measure all contestants in all rounds, each on a server that `clean` has emptied."""
    for number in range(table.rounds):
        turn = number % len(table.contestants)
        for contestant in (*table.contestants[turn:], *table.contestants[:turn]):
            progress(f"{table.name}: round {number + 1} of {table.rounds}, {contestant.name}")
            await clean()
            table.figures.setdefault(contestant.name, []).append(await contestant.measure())


def percentiles(seconds: Iterable[float], prefix: str = "") -> Figures:
    """The median and the 99th percentile, in milliseconds."""
    ordered = sorted(seconds)
    at_99 = ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]
    return {f"{prefix}p50": median(ordered) * 1000, f"{prefix}p99": at_99 * 1000}
