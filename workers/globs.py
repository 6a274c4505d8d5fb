"""Globs and regular expressions that a step gave, checked and made ready. One dialect of globs, whoever searches.

`*` and `?` stop at a slash, `**` does not; `[a-z]`, `[!a-z]` and `{a,b}` are what they are in a shell; a backslash takes a
meaning away. A glob without a slash is about the name, at any depth; one with a slash is about the whole relative path.
"""

from __future__ import annotations

import re
import warnings

from sandbox_queue.workers.outcome import FileError


def compiled(pattern: str, flags: re.RegexFlag = re.NOFLAG, *, source: str | None = None) -> re.Pattern[str]:
    """Compile a regular expression; `source` is what the user wrote, if that is something else.

    Raises:
        FileError: `invalidPattern`, with what is wrong with it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Python may come to read differently one day is no news for the user
        try:
            return re.compile(pattern, flags)
        except (re.error, OverflowError, RecursionError) as error:
            problem = error.msg if isinstance(error, re.error) else str(error)
            raise FileError("invalidPattern", f"invalid pattern: {problem}: {(source or pattern)[:80]}") from None


def compiled_glob(glob: str) -> re.Pattern[str]:
    """The regular expression whose `fullmatch` says whether a relative path fits.

    Raises:
        FileError: `invalidPattern`; there is, for one, no such range as `[z-a]`.
    """
    path = glob[1:] if glob.startswith("./") else glob
    regex = "" if "/" in path.rstrip("/") else "(?:.*/)?"
    tokens = list(_TOKEN.finditer(path.lstrip("/") + ("**" if path.endswith("/") else "")))
    braces = _are_balanced([token[0] for token in tokens])
    depth = 0
    for token in tokens:
        depth += {"{": 1, "}": -1}.get(token[0], 0) if braces else 0
        regex += _translate(token, braces=braces, inside=depth > 0)
    return compiled(regex, re.DOTALL, source=glob)


_TOKEN = re.compile(r"\*\*/|\*\*|\[(?P<negated>[!^])?(?P<set>\]?[^\]]*)\]|\\(?P<literal>.)|.", re.DOTALL)
_WILD = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def _translate(token: re.Match[str], *, braces: bool, inside: bool) -> str:
    text = token[0]
    if text in _WILD:
        return _WILD[text]
    if token["set"] is not None:
        members = re.sub(r"[\\\[\]&~|^]", r"\\\g<0>", token["set"])
        return f"[^/{members}]" if token["negated"] else f"[{members}]"
    if braces and text in "{}":
        return "(?:" if text == "{" else ")"
    if inside and text == ",":
        return "|"
    return re.escape(token["literal"] or text)


def _are_balanced(tokens: list[str]) -> bool:
    """Whether braces come in pairs; if not, they are characters like others."""
    depth = 0
    for token in tokens:
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            return False
    return depth == 0
