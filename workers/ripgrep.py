"""Which lines match, said by ripgrep: faster than Python, and in time linear in the text whatever the pattern.

Python's `re` decides what a pattern means. ripgrep's regular expressions are another dialect, so it gets a pattern only if
both read all of it alike, and a text only if both see the same characters in it. For whatever else, and whenever ripgrep
does not end as it should, Python searches; so does it where there is no ripgrep at all.

It reads from memory and is given no environment. Should we be killed, it has no more than one batch left to read.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

OPTIONS = (
    "--no-config",
    "--color=never",
    "--line-number",
    "--no-filename",
    "--no-heading",
    "--max-columns=1",  # the numbers are all we want; the lines we have
    "--text",
    "--encoding=none",
    "--threads=1",
)


@dataclass(frozen=True, slots=True)
class Common:
    """A pattern that means the same in both dialects; if it has classes or ignores case, for ASCII text only."""

    pattern: str
    ascii_only: bool

    def fits(self, content: str) -> bool:
        return not self.ascii_only or content.isascii()


# What the two have in common, on single lines: no lookaround, no reference, nothing possessive, no flag but a leading (?i),
# no set operations, no quantifier on an anchor, no `\B` (on an empty line they differ), no newline.
_ESCAPE = r"\\[\\.+*?()|\[\]{}^$#&~/tfvrdDwWsS-]"
_CHARACTER = r"[^\\\[\](){}.*+?|^$\n\0]"
_MEMBER = rf"(?:(?!\\S){_ESCAPE}|[^\\\[\]^&~\n\0-](?:-[^\\\[\]^&~\n\0-])?)"
_SET = rf"\[\^?-?{_MEMBER}+-?\]"
_REPEAT = r"(?:[*+?]|\{\d{1,3}(?:,\d{0,3})?\})\??"
_TOKEN = re.compile(
    rf"\((?:\?:|(?!\?))|\||(?:\^|\$|\\b)(?![*+?{{])|(?:\)|\.|{_CHARACTER}|{_ESCAPE}|{_SET})(?:{_REPEAT})?(?![*+?{{])"
)
_CLASS = re.compile(r"\\[dDwWsSb]")
_SPACES = r"\s\x1c-\x1f"


def common(pattern: str) -> Common | None:
    """The pattern as ripgrep may have it, or None if only Python can be asked."""
    ignore_case = pattern.startswith("(?i)")
    position = len("(?i)") if ignore_case else 0
    tokens: list[str] = []
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None:
            return None
        tokens.append(token[0])
        position = token.end()
    if not _are_anchors_outermost(tokens) or (ignore_case and not pattern.isascii()):
        return None
    ascii_only = ignore_case or any(_CLASS.search(token.replace(r"\\", "")) for token in tokens)
    return Common(("(?i)" if ignore_case else "") + "".join(map(_translate, tokens)), ascii_only)


def _are_anchors_outermost(tokens: Sequence[str]) -> bool:
    """Whether `^` begins an alternative of the whole and `$` ends one. Elsewhere ripgrep misses some lines: try `\\b^`."""
    depth = 0
    for before, this, after in zip(["|", *tokens], tokens, [*tokens[1:], "|"], strict=False):
        depth += this.startswith("(") - this.startswith(")")
        if (this == "^" and (depth or before != "|")) or (this == "$" and (depth or after != "|")):
            return False
    return True


def search(pattern: Common, contents: Mapping[int, str], enough: int | None) -> Mapping[int, Sequence[int]]:
    """The numbers of the matching lines of each content, which ends in a newline; nothing if ripgrep cannot say.

    With `enough`, it stops after so many lines in all.
    """
    program = find_program()
    if program is None or not contents:
        return {}
    limit = [] if enough is None else [f"--max-count={enough}"]
    output = _run([program, *OPTIONS, *limit, "-e", pattern.pattern, "-"], "".join(contents.values()).encode())
    if output is None:
        return {}
    *lines, end = output.split(b"\n")
    try:
        return _assign((int(line.partition(b":")[0]) for line in lines), contents) if not end else {}
    except ValueError:  # whatever PATH calls rg, that was not ripgrep
        return {}


def _assign(numbers: Iterable[int], contents: Mapping[int, str]) -> Mapping[int, Sequence[int]]:
    """Turn numbers of lines in all contents together into numbers of lines in each."""
    found = {index: array("L") for index in contents}
    indices = list(contents)
    starts = list(accumulate((content.count("\n") for content in contents.values()), initial=0))
    last = 0
    for number in numbers:
        if not last < number <= starts[-1]:
            raise ValueError("no such line")
        last = number
        at = bisect_right(starts, number - 1) - 1
        found[indices[at]].append(number - starts[at])
    return found


@functools.cache
def find_program() -> str | None:
    """ripgrep, if PATH has it; looked for once."""
    names = [os.path.join(directory, "rg") for directory in os.get_exec_path()] if hasattr(os, "memfd_create") else []
    return next((name for name in names if os.access(name, os.X_OK)), None)


def _run(command: Sequence[str], text: bytes) -> bytes | None:
    """What the program prints; None if it failed in whatever way."""
    try:
        with open(os.memfd_create("grep"), "w+b") as memory:
            memory.write(text)
            memory.seek(0)
            done = subprocess.run(
                command, stdin=memory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}, cwd="/", check=False
            )
    except OSError:
        return None
    return done.stdout if done.returncode == (0 if done.stdout else 1) else None


def _translate(token: str) -> str:
    """Let `\\s` and `\\S` mean what they mean for Python, which counts the separators of ASCII as spaces."""
    if token.startswith("["):
        return re.sub(r"\\.", lambda escape: _SPACES if escape[0] == r"\s" else escape[0], token)
    for escape, replacement in ((r"\s", f"[{_SPACES}]"), (r"\S", f"[^{_SPACES}]")):
        if token.startswith(escape):
            return replacement + token[len(escape) :]
    return token
