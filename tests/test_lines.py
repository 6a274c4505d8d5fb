"""Lines out of bytes that arrive in any pieces: the same text as of the whole, in bounded memory."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sandbox_queue import limits
from sandbox_queue.lines import LineSplitter

Split = list[tuple[str, int, bool]]

many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Mostly what makes trouble: endings, characters of every length, whole and torn.
bites = st.sampled_from(
    [b"\n", b"\r", b"\r\n", b"\0", b"a", b"xyz", "é".encode(), "€".encode(), "😀".encode()]
    + ["😀".encode()[:n] for n in (1, 2, 3)]
    + ["€".encode()[1:], b"\x80", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5", b"\xff", b"\xf0\x80\x80\x80", b"\xe2\x28\xa1"]
)
data = st.lists(bites | st.binary(max_size=3), max_size=40).map(b"".join)


def split(pieces: Iterable[bytes], line_max: int = limits.LINE_MAX) -> Split:
    splitter = LineSplitter(line_max)
    lines: Split = []
    for piece in pieces:
        lines += splitter.feed(piece)
    return lines + list(splitter.flush())


def cut(whole: bytes, places: Iterable[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(whole) + 1) for place in places}), len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(edges)]


def expected(whole: bytes) -> Split:
    """The plain way: decode everything, then split at newlines."""
    *complete, last = whole.split(b"\n")
    texts = whole.decode("utf-8", "replace").split("\n")
    lines: Split = [(text.removesuffix("\r"), len(raw) + 1, True) for raw, text in zip(complete, texts, strict=False)]
    return lines + ([(texts[-1], len(last), False)] if last else [])


@many
@given(data, st.lists(st.integers(0, 200), max_size=8))
@example("😀".encode() * 3, list(range(13)))
@example(b"a\r\nb\r\n", [2, 5])
@example(b"\xe2\x82\n\xac", [2, 3])
def test_the_pieces_do_not_matter(whole: bytes, places: list[int]) -> None:
    """However the bytes arrive, the lines are those of the whole, decoded at once with `errors="replace"`."""
    assert split(cut(whole, places)) == expected(whole)


@many
@given(data, st.lists(st.integers(0, 200), max_size=8), st.integers(4, 12))
@example("€".encode() * 4, [], 4)
@example("😀".encode() * 4, [1, 6, 11], 5)
@example(b"\xf0\x80\x80\x80" * 3, [2], 4)
@example(b"abcd\r\n", [5], 4)
def test_a_line_that_comes_in_parts_is_the_same_text_when_they_are_joined(
    whole: bytes, places: list[int], line_max: int
) -> None:
    lines = split(cut(whole, places), line_max)
    joined = "".join(text + ("\n" if complete else "") for text, _, complete in lines)
    assert joined == whole.decode("utf-8", "replace").replace("\r\n", "\n")
    assert sum(size for _, size, _ in lines) == len(whole)
    assert all(size <= line_max + 1 for _, size, _ in lines)
    assert lines == split([whole], line_max), "where it is cut does not depend on the pieces"


@many
@given(data, st.lists(st.integers(0, 200), max_size=8), st.integers(4, 12), st.integers(0, 40))
def test_whoever_begins_after_a_line_gets_the_rest(whole: bytes, places: list[int], line_max: int, taken: int) -> None:
    """A reader resumes at the byte after the line it saw last, also after a part of a long one."""
    lines = split(cut(whole, places), line_max)
    used = sum(size for _, size, _ in lines[:taken])
    assert split([whole[used:]], line_max) == lines[taken:]


@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_a_character_cut_at_any_byte_stays_whole(character: str) -> None:
    raw = f"a{character}b\n".encode()
    for place in range(len(raw)):
        assert split([raw[:place], raw[place:]]) == [(f"a{character}b", len(raw), True)]
    assert split([bytes([byte]) for byte in raw]) == [(f"a{character}b", len(raw), True)]


@pytest.mark.parametrize("before", range(5))
def test_a_character_is_not_torn_where_a_long_line_is(before: int) -> None:
    raw = b"x" * before + "😀".encode() * 3
    for text, size, _ in split([raw], line_max=5):
        assert "\ufffd" not in text
        assert len(text.encode()) == size


@pytest.mark.parametrize("pieces", [[b"a\r\nb\r\n"], [b"a\r", b"\nb\r", b"\n"], [b"a", b"\r", b"\n", b"b", b"\r\n"]], ids=repr)
def test_a_carriage_return_before_the_newline_belongs_to_the_ending(pieces: list[bytes]) -> None:
    assert split(pieces) == [("a", 3, True), ("b", 3, True)]


def test_a_carriage_return_elsewhere_is_text() -> None:
    assert split([b"10%\r20%\r\r\nx\r"]) == [("10%\r20%\r", 10, True), ("x\r", 2, False)]


@pytest.mark.parametrize("character", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_only_a_newline_ends_a_line(character: str) -> None:
    """`str.splitlines` would cut here; terminals and `grep` do not."""
    assert [text for text, _, _ in split([f"a{character}b\n".encode()])] == [f"a{character}b"]


def test_nul_and_invalid_bytes_are_kept_and_replaced() -> None:
    assert split([b"a\0b\n", b"\xff\xfe\n", b"\xc3", b"\n", b"\xa9"]) == [
        ("a\0b", 4, True),
        ("\ufffd\ufffd", 3, True),
        ("\ufffd", 2, True),
        ("\ufffd", 1, False),
    ]


def test_empty_input_has_no_lines_and_empty_lines_are_lines() -> None:
    assert split([]) == split([b""]) == split([b"", b""]) == []
    assert split([b"\n\n"]) == [("", 1, True), ("", 1, True)]


def test_a_last_line_without_newline_comes_with_the_flush_and_once() -> None:
    splitter = LineSplitter()
    assert list(splitter.feed(b"a\nb")) == [("a", 2, True)]
    assert splitter.pending == 1
    assert list(splitter.flush()) == [("b", 1, False)]
    assert list(splitter.flush()) == []
    assert splitter.pending == 0


@many
@given(data, st.lists(st.integers(0, 200), max_size=8), st.integers(4, 12))
def test_every_byte_is_either_given_out_or_pending(whole: bytes, places: list[int], line_max: int) -> None:
    splitter = LineSplitter(line_max)
    fed = given_out = 0
    for piece in cut(whole, places):
        fed += len(piece)
        given_out += sum(size for _, size, _ in splitter.feed(piece))
        assert given_out + splitter.pending == fed
        assert splitter.pending <= line_max


def test_a_limit_without_room_for_a_character_is_refused() -> None:
    with pytest.raises(ValueError, match="line_max"):
        LineSplitter(3)


def test_a_line_of_a_hundred_megabytes_passes_through_little_memory() -> None:
    """It comes in parts of at most the limit, and no more than a few of them are ever held."""
    piece, times = b"x" * limits.ENTRY_MAX, 1600
    splitter = LineSplitter()
    total = longest = 0
    tracemalloc.start()
    try:
        for _ in range(times):
            for text, size, complete in splitter.feed(piece):
                assert not complete
                assert len(text) == size
                total += size
                longest = max(longest, size)
        total += sum(size for _, size, _ in splitter.flush())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == times * len(piece) > 100_000_000
    assert longest == limits.LINE_MAX
    assert peak < 8 * limits.LINE_MAX


def test_an_entry_of_nothing_but_newlines_is_as_many_empty_lines() -> None:
    lines = list(LineSplitter().feed(b"\n" * limits.ENTRY_MAX))
    assert lines == [("", 1, True)] * limits.ENTRY_MAX
