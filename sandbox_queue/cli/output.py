"""Where commands print: in colour on a terminal, plain when piped, one JSON object per line when asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Span = tuple[str, str]  # some text, and its style in rich's words; "" for none


class Output:
    """Standard output, for people or for programs. Errors and logs go to standard error, always as text."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._coloured = not as_json and sys.stdout.isatty()

    def emit(self, data: Mapping[str, Any], *line: Span) -> None:
        """One thing: `data` for programs, `line` for people. It is out when this returns: a reader may be waiting."""
        if self._as_json:
            print(json.dumps(data, ensure_ascii=False), flush=True)
        else:
            self.say(*line)

    def say(self, *line: Span) -> None:
        """A line for people only."""
        if self._as_json:
            return
        if not self._coloured:
            print("".join(text for text, _ in line), flush=True)
            return
        from rich.text import Text  # only a terminal pays for it

        self._console.print(Text.assemble(*line), soft_wrap=True)

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        return Console(highlight=False)
