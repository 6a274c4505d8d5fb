"""grep by ripgrep and grep by Python: each does what it should, and both do the same."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sandbox_queue import limits
from sandbox_queue.models import StepResult
from sandbox_queue.workers import ripgrep
from sandbox_queue.workers.files import FileError, Outcome
from sandbox_queue.workers.globs import compiled_glob
from sandbox_queue.workers.grep import FILE_MAX
from tests.filebox import SECRET, Box, descriptors, refused, rows
from tests.kit import skip_without

RG = shutil.which("rg")


def need_ripgrep() -> None:
    skip_without("ripgrep", RG is not None, "ripgrep is not installed")


def choose(searcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have grep find ripgrep in PATH, or not."""
    monkeypatch.setenv("PATH", "/nowhere" if searcher == "python" else os.environ["PATH"])
    ripgrep.find_program.cache_clear()


@pytest.fixture(params=["ripgrep", "python"])
def box(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    """A box whose grep is done by the one, and by the other."""
    if request.param == "ripgrep":
        need_ripgrep()
    with monkeypatch.context() as patch:
        choose(request.param, patch)
        box = Box(tmp_path)
        before = len(descriptors())
        yield box
        assert len(descriptors()) == before, "descriptors were left open"
    ripgrep.find_program.cache_clear()


def found(outcome: Outcome) -> list[str]:
    """Rows in short: `path:line:text`, with a dash instead of colons for context."""
    marks = {"match": ":", "context": "-"}
    return ["{path}{mark}{line}{mark}{text}".format(mark=marks[row["kind"]], **row) for row in rows(outcome)]


# --- rows


def test_a_match_is_a_row_with_path_line_text_and_kind(box: Box) -> None:
    box.fill(**{"src/a.py": "import os\n\nneedle = 1\n", "b.txt": "a needle here"})
    assert rows(box.grep("needle")) == [
        {"path": "b.txt", "line": 1, "text": "a needle here", "kind": "match"},
        {"path": "src/a.py", "line": 3, "text": "needle = 1", "kind": "match"},
    ]
    assert [row["path"] for row in rows(box.grep("needle", "src"))] == ["a.py"], "relative to what was searched"


def test_files_and_counts_have_rows_of_their_own(box: Box) -> None:
    box.fill(a="x\nx x\ny\n", b="y\n", c="x")
    assert rows(box.grep("x", output_mode="filesWithMatches")) == [{"path": "a"}, {"path": "c"}]
    assert rows(box.grep("x", output_mode="count")) == [{"path": "a", "count": 2}, {"path": "c", "count": 1}]


def test_nothing_found_is_no_error(box: Box) -> None:
    box.fill(a="x")
    outcome = box.grep("needle")
    assert (outcome.content, outcome.truncated, outcome.notes) == ("[]", False, [])


def test_files_are_in_the_order_of_their_paths(box: Box) -> None:
    names = ["B/z", "a/b/c", "a/b.txt", "a.txt", "a-b", "Z", "é", "_"]
    box.fill(**dict.fromkeys(names, "x"))
    shown = [row["path"] for row in rows(box.grep("x"))]
    assert shown == sorted(names, key=lambda name: name.encode().split(b"/"))


def test_a_single_file_is_searched_under_its_own_name_whatever_the_glob(box: Box) -> None:
    box.fill(**{"vendor/a.txt": "needle"})
    (box.root / "link").symlink_to("vendor/a.txt")
    for path, name in (("vendor/a.txt", "a.txt"), (f"{box.root}/vendor/a.txt", "a.txt"), ("link", "link")):
        assert rows(box.grep("needle", path, glob="*.py")) == [{"path": name, "line": 1, "text": "needle", "kind": "match"}]
        assert rows(box.grep("needle", path, output_mode="filesWithMatches")) == [{"path": name}]


def test_what_does_not_exist_cannot_be_searched(box: Box) -> None:
    refused("notFound", "file not found: nope", lambda: box.grep("x", "nope"))


def test_long_lines_are_cut_after_240_characters(box: Box) -> None:
    box.fill(f="ä" * 240 + "\n" + "ä" * 241 + "\n" + "x" * 500_000 + "needle\n")
    assert [row["text"] for row in rows(box.grep("ä"))] == ["ä" * 240, "ä" * 240 + "…"]
    assert [row["text"] for row in rows(box.grep("needle"))] == ["x" * 240 + "…"], "a match may lie beyond what is shown"


# --- limits


def test_the_limit_counts_matches_and_says_when_there_are_more(box: Box) -> None:
    box.fill(a="x\n" * 3, b="x\n" * 3)
    for limit, lines in ((1, 1), (3, 3), (4, 4), (6, 6), (7, 6)):
        outcome = box.grep("x", head_limit=limit)
        assert len(rows(outcome)) == lines
        assert outcome.truncated == (limit < 6)
        assert outcome.notes == ([f"grep truncated at {limit} matches"] if limit < 6 else [])
    for mode in ("count", "filesWithMatches"):
        outcome = box.grep("x", head_limit=1, output_mode=mode)
        assert ([row["path"] for row in rows(outcome)], outcome.notes) == (["a"], ["grep truncated at 1 matches"])
        assert not box.grep("x", head_limit=2, output_mode=mode).truncated


def test_a_thousand_matches_are_the_most(box: Box) -> None:
    box.fill(a="x\n" * 999, b="y\nx\nx\n")
    outcome = box.grep("x")
    assert (len(rows(outcome)), outcome.notes) == (1000, ["grep truncated at 1000 matches"])
    assert rows(outcome)[-1] == {"path": "b", "line": 2, "text": "x", "kind": "match"}
    assert rows(box.grep("x", output_mode="count"))[0]["count"] == 999


def test_context_around_many_matches_is_cut_where_the_result_would_become_too_large(box: Box) -> None:
    line = "y" * 230 + "\n"
    for number in range(9):
        box.fill(**{str(number): (line * 40 + "x\n") * 100})
    outcome = box.grep("x", context_before=40)
    matches = sum(row["kind"] == "match" for row in rows(outcome))
    assert 50 < matches < 200
    assert (outcome.truncated, outcome.notes) == (True, [f"grep truncated at {matches} matches"])
    StepResult.from_dict({"cause": "exit", "content": outcome.content})


def test_more_text_than_one_batch_is_searched_to_the_end(box: Box) -> None:
    for number in range(8):
        box.fill(**{str(number): f"{'filler ' * 20}\n" * 6_500 + f"needle {number}\n"})
    assert found(box.grep("needle")) == [f"{number}:6501:needle {number}" for number in range(8)]
    assert found(box.grep("needle", head_limit=5)) == [f"{number}:6501:needle {number}" for number in range(5)]


# --- context

TEN = "".join(f"{number}\n" for number in range(1, 11))


@pytest.mark.parametrize(
    ("pattern", "before", "after", "expected"),
    [
        ("5", 0, 0, ["f:5:5"]),
        ("5", 2, 1, ["f-3-3", "f-4-4", "f:5:5", "f-6-6"]),
        ("1$", 1, 1, ["f:1:1", "f-2-2"]),
        ("10", 1, 5, ["f-9-9", "f:10:10"]),
        ("[35]", 1, 1, ["f-2-2", "f:3:3", "f-4-4", "f:5:5", "f-6-6"]),
        ("[34]", 1, 1, ["f-2-2", "f:3:3", "f:4:4", "f-5-5"]),
        ("[38]", 1, 1, ["f-2-2", "f:3:3", "f-4-4", "f-7-7", "f:8:8", "f-9-9"]),
        ("[25]", 0, 5, ["f:2:2", "f-3-3", "f-4-4", "f:5:5", "f-6-6", "f-7-7", "f-8-8", "f-9-9", "f-10-10"]),
    ],
)
def test_context_is_shown_once_however_close_the_matches_are(
    box: Box, pattern: str, before: int, after: int, expected: list[str]
) -> None:
    box.fill(f=TEN)
    assert found(box.grep(pattern, context_before=before, context_after=after)) == expected


def test_context_does_not_reach_into_the_next_file_nor_count_as_a_match(box: Box) -> None:
    box.fill(a=TEN, b=TEN)
    outcome = box.grep("10", context_before=1, context_after=3, head_limit=2)
    assert found(outcome) == ["a-9-9", "a:10:10", "b-9-9", "b:10:10"]
    assert not outcome.truncated
    assert found(box.grep("[56]", "a", context_after=2, head_limit=1)) == ["a:5:5", "a-6-6", "a-7-7"], (
        "beyond the limit: context"
    )


# --- which files


def test_binary_files_are_left_out_by_their_first_nul(box: Box) -> None:
    box.fill(a=b"needle\0", b=b"x" * 100_000 + b"\0needle", c="needle", d="needle".encode("utf-16"))
    assert found(box.grep("needle")) == ["c:1:needle"]
    assert box.grep("needle", "a").content == "[]"


def test_bytes_that_are_not_utf_8_are_replaced_and_the_rest_is_searched(box: Box) -> None:
    box.fill(f=b"caf\xe9 needle\nneedle \xff\xfe\n\xe9\n")
    assert found(box.grep("needle")) == ["f:1:caf\ufffd needle", "f:2:needle \ufffd\ufffd"]
    assert found(box.grep("^.$")) == ["f:3:\ufffd"]


def test_line_ends_of_windows_are_line_ends_and_marks_are_text(box: Box) -> None:
    box.fill(f=b"\xef\xbb\xbfone\r\ntwo\r\nth\rree")
    assert found(box.grep("two$")) == ["f:2:two"]
    assert found(box.grep("^one$")) == []
    assert found(box.grep("h.r")) == ["f:3:th\rree"]


def test_files_above_a_million_bytes_are_left_out_and_the_answer_says_so(box: Box) -> None:
    box.fill(large="needle\n" + "x" * (FILE_MAX - 6), full="needle\n" + "x" * (FILE_MAX - 7))
    outcome = box.grep("needle")
    assert ([row["path"] for row in rows(outcome)], outcome.truncated) == (["full"], False)
    assert outcome.notes == box.grep("needle", "large").notes == ["1 left out: too large to search"]


def test_links_are_not_followed_below_what_is_searched(box: Box) -> None:
    box.fill(**{"d/f": "needle"})
    (box.root / "file").symlink_to("d/f")
    (box.root / "directory").symlink_to("d")
    (box.root / "secret").symlink_to(box.outside / "secret")
    (box.root / "loop").symlink_to(".")
    assert found(box.grep("needle|secret")) == ["d/f:1:needle"]
    assert SECRET not in str(box.grep(".").content)


def test_hidden_files_are_files(box: Box) -> None:
    box.fill(**{".env": "needle", ".github/workflows/ci.yml": "needle"})
    assert [row["path"] for row in rows(box.grep("needle"))] == [".env", ".github/workflows/ci.yml"]


def test_names_that_are_not_utf_8_are_searched_and_shown_with_replacements(box: Box) -> None:
    (box.root / os.fsdecode(b"caf\xe9")).write_text("needle")
    assert found(box.grep("needle")) == ["caf\ufffd:1:needle"]


def test_directories_too_deep_to_be_honest_are_left_out(box: Box) -> None:
    directory = box.root / "/".join(["d"] * limits.DEPTH_MAX)
    directory.mkdir(parents=True)
    (directory.parent / "f").write_text("needle")
    (directory / "f").write_text("needle")
    outcome = box.grep("needle")
    assert (len(rows(outcome)), outcome.notes) == (1, ["1 left out: too deep"])


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("*.py", ["a.py", "src/b.py", "src/sub/c.py"]),
        ("/*.py", ["a.py"]),
        ("./*.py", ["a.py"]),
        ("**/*.py", ["a.py", "src/b.py", "src/sub/c.py"]),
        ("src/*.py", ["src/b.py"]),
        ("src/**", ["src/b.py", "src/d.ts", "src/sub/c.py", "src/sub/e.tsx"]),
        ("src/", ["src/b.py", "src/d.ts", "src/sub/c.py", "src/sub/e.tsx"]),
        ("src/**/*.py", ["src/b.py", "src/sub/c.py"]),
        ("**/sub/*", ["src/sub/c.py", "src/sub/e.tsx"]),
        ("*.{ts,tsx}", ["src/d.ts", "src/sub/e.tsx"]),
        ("?.py", ["a.py", "src/b.py", "src/sub/c.py"]),
        ("[ab].py", ["a.py", "src/b.py"]),
        ("[!ab].py", ["src/sub/c.py"]),
        ("!*.py", ["[x]", "src/d.ts", "src/sub/e.tsx"]),
        (r"\[x\]", ["[x]"]),
        ("[[]x]", ["[x]"]),
        ("sub", []),
        ("*.PY", []),
    ],
)
def test_globs_choose_files(box: Box, glob: str, names: list[str]) -> None:
    box.fill(**dict.fromkeys(["a.py", "src/b.py", "src/sub/c.py", "src/d.ts", "src/sub/e.tsx", "[x]"], "needle"))
    assert [row["path"] for row in rows(box.grep("needle", glob=glob))] == names


@pytest.mark.parametrize(
    ("glob", "path", "fits"),
    [
        ("a{b,c}d", "abd", True),
        ("a{b,{c,d}}", "ad", True),
        ("a{b", "a{b", True),
        ("a}b{", "a}b{", True),
        ("a,b", "a,b", True),
        ("{a,b}/*", "b/x", True),
        ("[a-c]x", "bx", True),
        ("[^a-c]x", "bx", False),
        ("a[!b]c", "a/c", False),
        ("[]]", "]", True),
        ("[", "[", True),
        ("[\\]", "\\", True),
        ("a.c", "abc", False),
        ("*", "a\nb", True),
        ("**", "a/b/c", True),
        ("a/**/b", "a/b", True),
        ("a/**/b", "a/x/y/b", True),
        ("a/**/b", "ab", False),
    ],
)
def test_globs_mean_what_they_mean_in_a_shell(glob: str, path: str, fits: bool) -> None:
    assert (compiled_glob(glob).fullmatch(path) is not None) is fits


# --- patterns


@pytest.mark.parametrize(
    "pattern", ["(", "[", "*", "a**", "(?P<n>a)(?P<n>b)", "[b-a]", "a{2,1}", r"\1", "(?z)", r"\p{L}", "(" * 3000]
)
def test_a_pattern_that_python_refuses_is_refused(box: Box, pattern: str) -> None:
    """So whether there is ripgrep makes no difference; `\\p{L}` for one it would have taken."""
    box.fill(f="x")
    with pytest.raises(FileError) as caught:
        box.grep(pattern)
    assert caught.value.code == "invalidPattern"
    assert caught.value.message.startswith("invalid pattern: ")
    assert len(caught.value.message) < 300


def test_a_refusal_says_what_is_wrong(box: Box) -> None:
    refused("invalidPattern", "invalid pattern: missing ), unterminated subpattern: a(b", lambda: box.grep("a(b"))
    refused("invalidPattern", "invalid pattern: bad character range z-a: [z-a]", lambda: box.grep("x", glob="[z-a]"))


@pytest.mark.parametrize(
    ("pattern", "lines"),
    [
        (r"(\w)\1", ["aa"]),
        ("a(?!a)", ["aa", "ab", "Ab a"]),
        ("(?<=A)b", ["Ab a"]),
        ("a++b", ["ab"]),
        (r"\Aa", ["aa", "ab"]),
        (r"b\Z", ["ab"]),
        (r"[[]", ["["]),
        (r"\x61b", ["ab"]),
        ("(?i)AB", ["ab", "Ab a"]),
        ("(?i:A)b", ["ab", "Ab a"]),
        ("(?x) a # comment\n b", ["ab"]),
        (r"a\nb", []),
        ("a\nb", []),
        (r"[^a]$", ["ab", "[", "é"]),
        (r"^\W$", ["["]),
        (r"^\w$", ["é"]),
        ("^$", [""]),
        ("$^", [""]),
        (r"\B", ["aa", "ab", "Ab a", "["]),
    ],
)
def test_python_decides_what_a_pattern_means(box: Box, pattern: str, lines: list[str]) -> None:
    box.fill(f="aa\nab\nAb a\n[\n\né\n")
    assert [row["text"] for row in rows(box.grep(pattern))] == lines


def test_a_pattern_may_look_like_an_option(box: Box) -> None:
    box.fill(f="--files\n")
    assert found(box.grep("--files")) == ["f:1:--files"]
    assert found(box.grep("-")) == ["f:1:--files"]


# --- ripgrep itself

COMMON = [
    "foo",
    "a.c",
    "a|b",
    "^a",
    "b$",
    "^$",
    "^a$|^b$",
    "(?i)foo",
    r"\bfoo\b",
    r"\d+",
    r"[^\w\s]",
    "a{2,3}?",
    "(a|b)*c",
    r"def \w+\(",
    "[a-z_]+",
    "é",
    "a#b c",
]
PYTHON_ONLY = [
    *("a++", "(?=a)", "(?P<n>a)", r"\1", r"\B", r"\A", "a{,2}", "[a&&b]", "[[a]", "[a-c--b]", "]", "}", "{", r"\x41", r"\n"),
    *("a\nb", "$^", r"\b^", "(^a)", "(a$)", "(?i)é", r"[\S]", "(?s)a", r"\<a"),
]


@pytest.mark.parametrize("pattern", COMMON)
def test_what_both_dialects_have_goes_to_ripgrep(pattern: str) -> None:
    assert ripgrep.common(pattern) is not None


@pytest.mark.parametrize("pattern", PYTHON_ONLY)
def test_what_only_python_has_does_not(pattern: str) -> None:
    assert ripgrep.common(pattern) is None


def test_ripgrep_is_looked_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    need_ripgrep()
    ripgrep.find_program.cache_clear()
    first = ripgrep.find_program()
    assert first == RG
    monkeypatch.setenv("PATH", "/nowhere")
    assert ripgrep.find_program() == first
    ripgrep.find_program.cache_clear()
    assert ripgrep.find_program() is None
    ripgrep.find_program.cache_clear()


def test_ripgrep_does_the_work_where_it_can() -> None:
    need_ripgrep()
    pattern = ripgrep.common(r"\bfoo")
    assert pattern is not None
    contents = {0: "", 3: "foo\nbar\nfoo\n", 5: "bar\n", 6: "\n\nfoo\n", 7: ""}
    result = ripgrep.search(pattern, contents, None)
    assert {index: list(numbers) for index, numbers in result.items()} == {0: [], 3: [1, 3], 5: [], 6: [3], 7: []}
    assert list(ripgrep.search(pattern, contents, 2)[6]) == []


@pytest.mark.parametrize(
    "script",
    [
        "exit 2",
        "exit 0",
        "echo nonsense",
        "echo 1:; exit 2",
        "echo 999999:",
        "echo -5:",
        "kill -9 $$",
        "printf '\\377'",
        "cat; exit 0",
    ],
)
def test_a_program_that_only_claims_to_be_ripgrep_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/rg").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bin/rg").chmod(0o755)
    box = Box(tmp_path)
    box.fill(f="a\nneedle\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    ripgrep.find_program.cache_clear()
    try:
        assert found(box.grep("needle")) == ["f:2:needle"]
    finally:
        ripgrep.find_program.cache_clear()


def test_what_calls_itself_ripgrep_learns_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PATH is the sandbox's, and the worker's environment holds its password."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/rg").write_text(f"#!/bin/sh\n/usr/bin/env > {tmp_path}/seen; ls /proc/self/fd > {tmp_path}/open; exit 1\n")
    (tmp_path / "bin/rg").chmod(0o755)
    box = Box(tmp_path)
    box.fill(f="needle")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PASSWORD", "hunter2")
    ripgrep.find_program.cache_clear()
    kept = os.open(box.outside / "secret", os.O_RDONLY)
    os.set_inheritable(kept, True)
    try:
        assert box.grep("needle").content == "[]", "it was asked: it said that nothing matches"
    finally:
        ripgrep.find_program.cache_clear()
        os.close(kept)
    assert "hunter2" not in (tmp_path / "seen").read_text()
    assert str(kept) not in (tmp_path / "open").read_text().split()


@pytest.mark.timeout(30)
def test_a_catastrophic_pattern_ends_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's `re` cannot be interrupted; the runner therefore calls us in a process that it kills."""
    box = Box(tmp_path)
    box.fill(f="a" * 200 + "!\n")
    choose("python", monkeypatch)
    before = box.everything()
    child = os.fork()
    if child == 0:
        try:
            box.grep("(a+)+$")
        finally:
            os._exit(1)
    time.sleep(0.3)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    ripgrep.find_program.cache_clear()
    assert os.WTERMSIG(status) == signal.SIGKILL, "it was still searching"
    assert box.everything() == before


@pytest.mark.timeout(30)
def test_ripgrep_finds_such_a_pattern_harmless(tmp_path: Path) -> None:
    need_ripgrep()
    ripgrep.find_program.cache_clear()
    box = Box(tmp_path)
    box.fill(f="a" * 200 + "!\n" + "a" * 200 + "\n")
    assert [row["line"] for row in rows(box.grep("(a+)+$"))] == [2]


# --- both do the same

LINE = st.text(st.sampled_from("ab1_ -A.\t\x0b\x1c\r"), max_size=8)
ANY_LINE = st.text(st.sampled_from("abk_ Aä€²\u0301\u212a\x85\u2028"), max_size=8)
CONTENTS = st.lists(LINE, max_size=6).map("\n".join) | st.lists(LINE | ANY_LINE, max_size=6).map("\n".join)
BYTES = CONTENTS.map(str.encode) | st.binary(max_size=20)
NAMES = st.sampled_from(["a", "a.py", "b.py", "B", "d/a.py", "d/e/f.txt", "d-e", "dist/x", "d.py", ".h", "é"])
TREES = st.dictionaries(NAMES, BYTES, max_size=5)

CLASSES = [r"\w", r"\W", r"\d", r"\D", r"\s", r"\S", "[ab]", "[^a]", "[a-c_]", r"[\w-]", r"[^\s]", r"[^\W_]", "."]
ATOM = st.sampled_from(["a", "b", "1", "_", " ", "-", "A", "ä", "k", "#", r"\.", r"\t", *CLASSES])
EDGE = st.sampled_from(["^", "$", r"\b", r"\B", ""])
REPEAT = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{0,2}?", "{1,}", "{0}"])


def combined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.builds("{}{}{}".format, st.sampled_from(["(", "(?:"]), parts, st.just(")"))
    return (
        st.builds("{}{}".format, parts, parts)
        | st.builds("{}|{}".format, parts, parts)
        | group
        | st.builds("{}{}".format, group, REPEAT)
    )


PIECE = ATOM | EDGE | st.builds("{}{}".format, ATOM, REPEAT)
PATTERNS = st.builds("{}{}".format, st.sampled_from(["", "(?i)"]), st.recursive(PIECE, combined, max_leaves=6))
WILD_PATTERNS = st.text(st.sampled_from(r"ab1._-^$|()[]{}*+?\dwsWSbB,:!=<&~ "), min_size=1, max_size=10)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "glob": st.sampled_from(["*.py", "**", "d/*", "!a*", "*.{py,txt}"]),
        "head_limit": st.integers(1, 4),
        "context_before": st.integers(0, 2),
        "context_after": st.integers(0, 2),
        "output_mode": st.sampled_from(["content", "filesWithMatches", "count"]),
    },
)


@pytest.mark.timeout(60)
@given(tree=TREES, pattern=PATTERNS | WILD_PATTERNS, options=OPTIONS)
@settings(max_examples=150, deadline=None)
def test_both_searchers_give_the_same_answer(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, bytes], pattern: str, options: dict[str, Any]
) -> None:
    need_ripgrep()
    assume(pattern)
    box = Box(tmp_path_factory.mktemp("trees"))
    for name, content in tree.items():
        (box.root / name).parent.mkdir(parents=True, exist_ok=True)
        (box.root / name).write_bytes(content)
    answers: list[tuple[object, ...]] = []
    for searcher in ("ripgrep", "python"):
        with pytest.MonkeyPatch.context() as patch:
            choose(searcher, patch)
            try:
                outcome = box.grep(pattern, **options)
                answers.append((outcome.content, outcome.truncated, tuple(outcome.notes)))
            except FileError as error:
                answers.append((error.code, error.message))
    ripgrep.find_program.cache_clear()
    shutil.rmtree(box.root.parent)
    assert answers[0] == answers[1]


@pytest.mark.timeout(60)
@given(contents=st.lists(CONTENTS, min_size=1, max_size=8), patterns=st.lists(PATTERNS | WILD_PATTERNS, min_size=4, max_size=4))
@settings(max_examples=100, deadline=None)
def test_ripgrep_sees_the_lines_that_python_sees(contents: list[str], patterns: list[str]) -> None:
    """Without the way round by files, so that there is time for many patterns."""
    need_ripgrep()
    texts = {index: content + "\n" for index, content in enumerate(contents)}
    for pattern in patterns:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                regex = re.compile(pattern)
        except re.error:
            continue
        if (common := ripgrep.common(pattern)) is None:
            continue
        fit = {index: text for index, text in texts.items() if common.fits(text)}
        expected = {
            index: [number for number, line in enumerate(text.split("\n")[:-1], 1) if regex.search(line)]
            for index, text in fit.items()
        }
        numbers = ripgrep.search(common, fit, None)
        if numbers:  # nothing: it does not know this one, and Python will do it
            assert {index: list(found) for index, found in numbers.items()} == expected
