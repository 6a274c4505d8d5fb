"""readFile, writeFile, listFiles and directoryTree on real files: what comes back, what is refused, what is left behind."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import os
import pickle
import random
import shutil
import stat
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_queue import limits
from sandbox_queue.models import Step, StepResult
from sandbox_queue.workers import write_file
from sandbox_queue.workers.files import FileError, perform
from sandbox_queue.workers.scan import NOISY, TEMPORARY
from tests.filebox import SECRET, Box, descriptors, meanwhile, refused, rows
from tests.kit import skip_without

BOM = b"\xef\xbb\xbf"


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    before = len(descriptors())
    yield box
    assert len(descriptors()) == before, "descriptors were left open"


@pytest.fixture(params=["anonymous", "named"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With temporary files that have no name, and as on file systems which know of no such thing."""
    if request.param == "named":
        monkeypatch.setattr(write_file, "ANONYMOUS", 0)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_not_a_file_step_is_our_mistake() -> None:
    with pytest.raises(TypeError, match="Run is not a file step"):
        perform(Step.run("true"), ["/"])


def test_a_file_error_survives_the_way_from_one_process_to_another() -> None:
    error = pickle.loads(pickle.dumps(FileError("notFound", "file not found: a")))  # noqa: S301  # of our own making
    assert (error.code, error.message, str(error)) == ("notFound", "file not found: a", "file not found: a")
    assert StepResult(cause="exit", exit_code=1, error_code=error.code).to_dict()["errorCode"] == "notFound"


# --- readFile


@pytest.mark.parametrize(
    "content",
    ["", "hello\n", "no newline", "\ufeffwith a mark\n", "a\r\nb\rc\n", "nul \0 inside", "ä€😀", "\n\n"],
    ids=repr,
)
def test_text_comes_back_as_it_is(box: Box, content: str) -> None:
    box.fill(f=content)
    outcome = box.read("f")
    assert (outcome.content, outcome.truncated, outcome.file_size, outcome.notes) == (content, False, len(content.encode()), [])


def test_bytes_come_back_in_base64(box: Box) -> None:
    data = BOM + bytes(range(256))
    box.fill(f=data)
    outcome = box.read("f", encoding="base64")
    assert base64.b64decode(outcome.content or "") == data
    assert outcome.file_size == len(data)


@pytest.mark.parametrize("data", [b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xc0\x80", "ä".encode("latin-1"), "a".encode("utf-16")])
def test_what_is_not_utf_8_is_refused_with_advice(box: Box, data: bytes) -> None:
    box.fill(f=data)
    message = "binary or non-UTF-8 content not supported: f; read it with encoding base64"
    refused("notText", message, lambda: box.read("f"))
    refused("notText", message, lambda: box.read("f", start_line=1))


def test_a_missing_file_a_directory_and_a_forbidden_file_are_told_apart(box: Box) -> None:
    (box.root / "d").mkdir()
    refused("notFound", "file not found: nope", lambda: box.read("nope"))
    refused("notFound", "file not found: d/nope/f", lambda: box.read("d/nope/f"))
    refused("isDirectory", "is a directory: d", lambda: box.read("d"))
    refused("isDirectory", "is a directory: .", lambda: box.read("."))


@pytest.fixture
def public_box() -> Iterator[Box]:
    """A box to which others find their way; those of pytest lie in a directory of one's own."""
    skip_without("root", os.geteuid() == 0, "only root can become somebody else")
    directory = Path(tempfile.mkdtemp(prefix="sq-test-"))
    directory.chmod(0o755)
    yield Box(directory)
    shutil.rmtree(directory)


def test_without_permission_the_message_says_so(public_box: Box) -> None:
    box = public_box
    box.fill(f="hello", **{"d/g": "hello"})
    (box.root / "f").chmod(0o600)
    (box.root / "d").chmod(0o700)
    with as_nobody():
        refused("permission", "permission denied: f", lambda: box.read("f"))
        refused("permission", "permission denied: d/g", lambda: box.read("d/g"))
        refused("permission", "permission denied: d", lambda: box.list_files("d"))
        refused("permission", "permission denied: new", lambda: box.write("new", "x"))
        assert box.names(max_depth=2) == ["d", "f"]
        assert box.list_files(max_depth=2).notes == ["1 left out: permission denied"]
        assert box.grep("hello").notes == ["2 left out: permission denied"]
    (box.root / "d").chmod(0o711)
    (box.root / "d/g").chmod(0o644)
    with as_nobody():
        assert box.text("d/g") == "hello", "a directory that may be passed through need not be readable"


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


# --- readFile: by lines

LINES = "one\ntwo\nthree\r\nfour\n"


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        (LINES, {"start_line": 1}, LINES),
        (LINES, {"start_line": 2}, "two\nthree\r\nfour\n"),
        (LINES, {"start_line": 2, "line_count": 1}, "two"),
        (LINES, {"start_line": 2, "line_count": 2}, "two\nthree\r"),
        (LINES, {"line_count": 1}, "one"),
        (LINES, {"line_count": 4}, "one\ntwo\nthree\r\nfour"),
        (LINES, {"line_count": 99}, LINES),
        (LINES, {"start_line": 5}, ""),
        (LINES, {"start_line": 99, "line_count": 5}, ""),
        ("a\nb", {"start_line": 2}, "b"),
        ("a\nb", {"start_line": 2, "line_count": 1}, "b"),
        ("", {"start_line": 1}, ""),
        ("", {"with_line_numbers": True}, ""),
        ("\n", {"start_line": 1, "line_count": 1}, ""),
        ("a\n\nb\n", {"line_count": 2, "with_line_numbers": True}, "1\ta\n2\t"),
        ("a\nb\n", {"with_line_numbers": True}, "1\ta\n2\tb\n"),
        ("a\nb\n", {"with_line_numbers": True, "line_count": 3}, "1\ta\n2\tb\n"),
        ("a\nb", {"with_line_numbers": True}, "1\ta\n2\tb"),
        ("x\n" * 10, {"with_line_numbers": True, "start_line": 9}, " 9\tx\n10\tx\n"),
        ("x\n" * 100, {"with_line_numbers": True, "start_line": 7, "line_count": 1}, "  7\tx"),
        ("\ufeffa\n", {"with_line_numbers": True}, "1\t\ufeffa\n"),
    ],
)
def test_lines_are_counted_from_one_and_numbered_on_demand(
    box: Box, content: str, options: dict[str, Any], expected: str
) -> None:
    box.fill(f=content)
    outcome = box.read("f", **options)
    assert outcome.content == expected
    assert (outcome.truncated, outcome.file_size) == (False, len(content.encode()))


@given(
    content=st.text(st.sampled_from("a\n\r ä"), max_size=30),
    start=st.integers(1, 8) | st.none(),
    count=st.integers(1, 8) | st.none(),
)
@settings(max_examples=150, deadline=None)
def test_lines_are_what_splitting_at_newlines_gives(
    tmp_path_factory: pytest.TempPathFactory, content: str, start: int | None, count: int | None
) -> None:
    box = Box(tmp_path_factory.mktemp("lines"))
    box.fill(f=content)
    first = (start or 1) - 1
    lines = content.split("\n")[first:][:count]
    assert box.text("f", start_line=start, line_count=count) == "\n".join(lines)


def test_lines_of_a_file_far_above_the_limit_can_be_read(box: Box) -> None:
    with (box.root / "big").open("w") as file:
        file.writelines(f"line {number}\n" for number in range(1, 500_001))
    size = (box.root / "big").stat().st_size
    assert size > 5 * limits.READ_MAX
    outcome = box.read("big", start_line=400_000, line_count=2, with_line_numbers=True)
    assert outcome.content == "400000\tline 400000\n400001\tline 400001"
    assert outcome.file_size == size
    assert box.text("big", start_line=500_000) == "line 500000\n"
    with pytest.raises(FileError, match=r"^these lines exceed 1 MB limit: \d+ bytes of big; ask for fewer$") as caught:
        box.read("big", start_line=2)
    assert caught.value.code == "tooLarge"


def test_numbers_count_towards_the_limit(box: Box) -> None:
    box.fill(f="\n" * limits.READ_MAX)
    assert len(box.text("f", start_line=1)) == limits.READ_MAX
    message = "these lines exceed 1 MB limit with their numbers: f; ask for fewer"
    refused("tooLarge", message, lambda: box.read("f", with_line_numbers=True))


# --- readFile: large files by ranges


def test_one_mebibyte_is_read_whole_and_a_byte_more_is_not(box: Box) -> None:
    box.fill(f="x" * limits.READ_MAX, g="x" * (limits.READ_MAX + 1))
    assert len(box.text("f")) == limits.READ_MAX
    message = "file exceeds 1 MB limit: g has 1048577 bytes; read it in ranges by offset, or by lines"
    refused("tooLarge", message, lambda: box.read("g"))
    refused("tooLarge", message, lambda: box.read("g", encoding="base64"))


def in_ranges(box: Box, path: str, encoding: str) -> Iterator[bytes]:
    """Read a file as a client would."""
    offset = 0
    while True:
        outcome = box.read(path, offset=offset, encoding=encoding)
        content = outcome.content or ""
        data = base64.b64decode(content) if encoding == "base64" else content.encode()
        assert len(data) <= limits.READ_MAX
        yield data
        offset += len(data)
        assert outcome.truncated == (offset < (outcome.file_size or 0))
        if not outcome.truncated:
            return


def test_a_large_file_is_read_in_ranges_of_bytes(box: Box) -> None:
    data = random.Random(1).randbytes(3 * limits.READ_MAX + 17)
    box.fill(f=data)
    parts = list(in_ranges(box, "f", "base64"))
    assert b"".join(parts) == data
    assert [len(part) for part in parts] == [limits.READ_MAX] * 3 + [17]


@pytest.mark.parametrize("character", ["ä", "€", "😀"])
@pytest.mark.parametrize("shift", range(4))
def test_ranges_of_text_end_between_characters(box: Box, character: str, shift: int) -> None:
    text = "x" * shift + character * (limits.READ_MAX // len(character.encode()) + 5)
    box.fill(f=text)
    parts = list(in_ranges(box, "f", "utf-8"))
    assert b"".join(parts).decode() == text
    assert len(parts) == 2
    assert len(parts[0]) > limits.READ_MAX - 4


def test_a_range_that_begins_within_a_character_is_refused(box: Box) -> None:
    box.fill(f="aä")
    refused(
        "notText",
        "offset 2 of f is within a UTF-8 character; move it, or use encoding base64",
        lambda: box.read("f", offset=2),
    )
    assert box.text("f", offset=1) == "ä"


def test_a_range_of_something_else_than_text_is_refused_rather_than_endless(box: Box) -> None:
    box.fill(f=b"x" * (limits.READ_MAX - 1) + b"\xff" * 10, g=b"x" * limits.READ_MAX + b"\xc3")
    for path in ("f", "g"):
        with pytest.raises(FileError, match="non-UTF-8"):
            list(in_ranges(box, path, "utf-8"))


def test_a_range_behind_the_end_is_empty(box: Box) -> None:
    box.fill(f="abc")
    for offset in (3, 4, 10**12, 2**62):
        outcome = box.read("f", offset=offset)
        assert (outcome.content, outcome.truncated, outcome.file_size) == ("", False, 3)


def test_a_file_that_claims_to_be_empty_is_read_nevertheless() -> None:
    outcome = perform(Step.read_file("/proc/sys/kernel/ostype"), ["/proc/sys"])
    assert (outcome.content, outcome.file_size) == ("Linux\n", 6)


# --- writeFile


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(
    "content",
    ["", "hello\n", "\ufeffwith a mark\r\n", b"\xff\x00", "x" * limits.WRITE_MAX],
    ids=lambda content: repr(content)[:20],
)
def test_what_was_written_is_there_byte_by_byte(box: Box, content: str | bytes) -> None:
    data = content.encode() if isinstance(content, str) else content
    for _ in range(2):
        outcome = box.write("f", content)
        assert (outcome.content, outcome.truncated, outcome.file_size, outcome.notes) == (None, False, len(data), [])
        assert (box.root / "f").read_bytes() == data
    assert box.everything() == {"f"}


def test_missing_directories_are_made(box: Box) -> None:
    box.write("a/b/c/f", "hello")
    assert (box.root / "a/b/c/f").read_text() == "hello"


def test_a_byte_order_mark_is_neither_added_nor_kept(box: Box) -> None:
    """A file is what the step says. Whoever wants the mark to stay reads it along with the text."""
    box.fill(f=BOM + b"old")
    box.write("f", "new")
    assert (box.root / "f").read_bytes() == b"new"
    box.write("f", "\ufeffnew")
    assert (box.root / "f").read_bytes() == BOM + b"new"


@pytest.mark.usefixtures("either_way")
def test_a_new_file_has_the_permissions_that_the_umask_leaves(box: Box) -> None:
    before = os.umask(0o027)
    try:
        box.write("a/f", "x")
    finally:
        os.umask(before)
    assert (mode_of(box.root / "a/f"), mode_of(box.root / "a")) == (0o640, 0o750)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("mode", [0o600, 0o755, 0o777, 0o444, 0o000])
def test_an_overwritten_file_keeps_its_permissions(box: Box, mode: int) -> None:
    box.fill(f="old")
    (box.root / "f").chmod(mode)
    box.write("f", "new")
    assert mode_of(box.root / "f") == mode
    box.write("f", "newer", offset=0, size=5, sha256=sha256(b"newer"))
    assert mode_of(box.root / "f") == mode
    assert (box.root / "f").read_text() == "newer"


@pytest.mark.usefixtures("either_way")
def test_an_overwritten_file_keeps_its_owner_but_not_the_right_to_run_as_him(box: Box) -> None:
    skip_without("root", os.geteuid() == 0, "only root can give files away")
    box.fill(f="old")
    os.chown(box.root / "f", 1234, 5678)
    (box.root / "f").chmod(0o6755)
    box.write("f", "new")
    status = (box.root / "f").stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1234, 5678, 0o755)


def test_who_may_not_give_files_away_becomes_the_owner(public_box: Box) -> None:
    box = public_box
    box.fill(f="old")
    box.root.chmod(0o777)
    with as_nobody():
        box.write("f", "new")
    status = (box.root / "f").stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (65534, 0o644)


def test_a_write_through_a_link_writes_the_target_and_leaves_the_link(box: Box) -> None:
    box.fill(**{"d/target": "old"})
    (box.root / "link").symlink_to("d/target")
    (box.root / "dangling").symlink_to("d/new")
    box.write("link", "new")
    box.write("dangling", "made")
    assert (box.root / "link").is_symlink()
    assert ((box.root / "d/target").read_text(), (box.root / "d/new").read_text()) == ("new", "made")


def test_another_name_of_the_file_keeps_the_old_content(box: Box) -> None:
    """What a hard link outside shares with a file inside is never written to."""
    os.link(box.outside / "secret", box.root / "f")
    box.write("f", "new")
    box.write("f", "newer", offset=0, size=5, sha256=sha256(b"newer"))
    assert (box.outside / "secret").read_text() == SECRET


@pytest.mark.parametrize("path", ["d", "d/", ".", "new/", "new/."])
def test_a_directory_is_not_written_to(box: Box, path: str) -> None:
    (box.root / "d").mkdir()
    refused("isDirectory", f"is a directory: {path}", lambda: box.write(path, "x"))
    refused("isDirectory", f"is a directory: {path}", lambda: box.write(path, "x", offset=0))
    assert box.everything() == {"d"}


def test_a_file_is_no_parent(box: Box) -> None:
    box.fill(f="old")
    refused("notDirectory", "not a directory: f/g", lambda: box.write("f/g", "x"))
    assert (box.root / "f").read_text() == "old"


def test_the_longest_name_can_be_written(box: Box) -> None:
    name = "x" * limits.NAME_MAX
    box.write(name, "whole")
    box.write(name, "chunk", offset=0, size=5, sha256=sha256(b"chunk"))
    assert (box.root / name).read_text() == "chunk"


def test_content_that_is_not_what_was_sent_is_refused(box: Box) -> None:
    box.fill(f="old")
    wrong = sha256(b"other")
    message = f"the content for f has the SHA-256 {sha256(b'new')}, not {wrong}"
    refused("mismatch", message, lambda: box.write("f", "new", size=3, sha256=wrong))
    assert (box.root / "f").read_text() == "old"
    assert box.write("f", "new", size=3, sha256=sha256(b"new")).file_size == 3


@pytest.mark.usefixtures("either_way")
def test_readers_see_the_old_file_or_the_new_one_and_never_a_part(box: Box) -> None:
    contents = ["a" * 300_000, "b" * 500_000]
    box.fill(f=contents[0])

    def write() -> None:
        for content in contents:
            box.write("f", content)

    seen: set[str] = set()
    with meanwhile(write):
        deadline = time.monotonic() + 0.7
        while time.monotonic() < deadline:
            seen.add(box.text("f"))
    assert seen == set(contents)


def test_a_writer_that_is_killed_leaves_the_old_file_and_nothing_else(box: Box) -> None:
    box.fill(f="old")
    skip_without("O_TMPFILE", bool(write_file.ANONYMOUS), "needs files without a name")
    for delay in range(0, 40, 4):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    box.write("f", "new" * 1_000_000)
            finally:
                os._exit(1)
        time.sleep(delay / 1000)
        os.kill(child, 9)
        os.waitpid(child, 0)
        assert (box.root / "f").read_text()[:3] in ("old", "new")
        assert (box.root / "f").stat().st_size in (3, 3_000_000)
    assert len(box.everything()) <= 2, "at most one, if it was killed between its last two calls"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Box]:
    """A box on a file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False, capture_output=True)
    skip_without("mount", mount.returncode == 0, "a small file system cannot be mounted")
    try:
        yield Box(disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.usefixtures("either_way")
def test_a_full_disk_leaves_the_old_file_and_no_other(small_disk: Box) -> None:
    small_disk.fill(f="old")
    content = "x" * (2 * limits.MIB)
    refused("noSpace", "no space left on device: f", lambda: small_disk.write("f", content))
    refused("noSpace", "no space left on device: f", lambda: small_disk.write("f", content, offset=0))
    assert (small_disk.root / "f").read_text() == "old"
    assert small_disk.everything() == {"f"}
    small_disk.write("f", "x" * 500_000)


# --- writeFile: large files by chunks

PARTS = [b"first \xff", b"second ", b"", b"third"]
WHOLE = b"".join(PARTS)


def send(box: Box, path: str, parts: list[bytes], *, leave_out: int = 0) -> None:
    """Write a file as a client would; without its last chunks on demand."""
    whole = b"".join(parts)
    offset = 0
    for number, part in enumerate(parts, 1):
        end = offset + len(part)
        last = {"size": len(whole), "sha256": sha256(whole)} if number == len(parts) else {}
        if number <= len(parts) - leave_out:
            assert box.write(path, part, offset=offset, **last).file_size == end
        offset = end


def test_chunks_become_a_file_all_at_once(box: Box) -> None:
    box.fill(**{"d/f": "old"})
    send(box, "d/f", PARTS, leave_out=1)
    assert (box.root / "d/f").read_text() == "old"
    assert (box.names(max_depth=2), box.tree().content) == (["d", "d/f"], "root/\n└── d/\n    └── f")
    assert rows(box.grep("first")) == [], "what is not complete is not there"
    send(box, "d/f", PARTS)
    assert (box.root / "d/f").read_bytes() == WHOLE
    assert box.everything() == {"d", "d/f"}


def test_a_file_of_thirty_mebibytes_arrives_in_chunks(box: Box) -> None:
    data = random.Random(2).randbytes(30 * limits.MIB + 5)
    parts = [data[at : at + limits.WRITE_MAX] for at in range(0, len(data), limits.WRITE_MAX)]
    send(box, "new/big", parts)
    assert sha256((box.root / "new/big").read_bytes()) == sha256(data)


def test_a_last_chunk_may_be_empty(box: Box) -> None:
    """For who learns that it was the last one only afterwards."""
    box.write("f", b"abc", offset=0)
    box.write("f", b"", offset=3, size=3, sha256=sha256(b"abc"))
    assert (box.root / "f").read_bytes() == b"abc"


def test_a_repeated_chunk_does_no_harm(box: Box) -> None:
    last: dict[str, Any] = {"offset": 6, "size": 9, "sha256": sha256(b"abcdefghi")}
    box.write("f", b"abc", offset=0)
    box.write("f", b"abc", offset=0)
    box.write("f", b"def", offset=3)
    box.write("f", b"abc", offset=0)
    box.write("f", b"def", offset=3)
    for _ in range(2):
        assert box.write("f", b"ghi", **last).file_size == 9
        assert (box.root / "f").read_bytes() == b"abcdefghi"
    assert box.everything() == {"f"}


def test_an_abandoned_upload_is_overwritten_by_the_next_one(box: Box) -> None:
    box.write("f", b"something much longer", offset=0)
    send(box, "f", PARTS)
    assert (box.root / "f").read_bytes() == WHOLE
    assert box.everything() == {"f"}


def test_uploads_to_different_files_do_not_meet(box: Box) -> None:
    box.write("f", b"one ", offset=0)
    box.write("g", b"two ", offset=0)
    box.write("f", b"1", offset=4, size=5, sha256=sha256(b"one 1"))
    box.write("g", b"2", offset=4, size=5, sha256=sha256(b"two 2"))
    assert ((box.root / "f").read_bytes(), (box.root / "g").read_bytes()) == (b"one 1", b"two 2")


def test_a_chunk_in_the_wrong_place_is_refused_and_the_upload_can_go_on(box: Box) -> None:
    box.fill(f="old")
    refused("wrongOffset", "no upload of f is under way: begin at offset 0, not 3", lambda: box.write("f", b"def", offset=3))
    assert box.everything() == {"f"}
    box.write("f", b"abc", offset=0)
    message = "offset 4 leaves a gap: the upload of f has 3 bytes so far"
    refused("wrongOffset", message, lambda: box.write("f", b"efg", offset=4))
    box.write("f", b"def", offset=3, size=6, sha256=sha256(b"abcdef"))
    assert (box.root / "f").read_bytes() == b"abcdef"


def test_chunks_that_are_not_the_announced_whole_are_thrown_away(box: Box) -> None:
    box.fill(f="old")
    box.write("f", b"abX", offset=0)
    right, wrong = sha256(b"abcdef"), sha256(b"abXdef")
    message = f"not written: f would have 6 bytes with the SHA-256 {wrong}, and not 6 with {right}"
    refused("mismatch", message, lambda: box.write("f", b"def", offset=3, size=6, sha256=right))
    assert (box.root / "f").read_text() == "old"
    assert box.everything() == {"f"}


def test_two_uploads_to_one_file_at_the_same_moment_do_not_mix(box: Box) -> None:
    box.write("f", b"abc", offset=0)
    (name,) = box.everything()
    with (box.root / name).open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused("changed", "another upload is writing: f", lambda: box.write("f", b"def", offset=3))
    box.write("f", b"def", offset=3, size=6, sha256=sha256(b"abcdef"))
    assert (box.root / "f").read_bytes() == b"abcdef"


@pytest.mark.timeout(10)
@pytest.mark.parametrize("trap", ["link", "hard link", "fifo", "other owner"])
def test_a_trap_under_the_name_of_the_temporary_file_catches_nobody(box: Box, trap: str) -> None:
    """Its name can be guessed by whoever runs in the same sandbox."""
    skip_without("root", trap != "other owner" or os.geteuid() == 0, "only root can give files away")
    place = box.root / (TEMPORARY.decode() + sha256(b"f")[:32])
    if trap == "link":
        place.symlink_to(box.outside / "secret")
    elif trap == "hard link":
        place.hardlink_to(box.outside / "secret")
    elif trap == "fifo":
        os.mkfifo(place)
    else:
        place.write_text("forged")
        os.chown(place, 1234, 1234)
    refused("wrongOffset", "no upload of f is under way: begin at offset 0, not 3", lambda: box.write("f", b"def", offset=3))
    send(box, "f", PARTS)
    assert (box.root / "f").read_bytes() == WHOLE
    assert (box.outside / "secret").read_text() == SECRET


# --- listFiles


def test_rows_tell_path_size_time_and_kind(box: Box) -> None:
    box.fill(f="hello", **{"d/g": ""})
    os.utime(box.root / "f", ns=(0, 1_700_000_000_123_456_789))
    os.utime(box.root / "d", ns=(0, 0))
    assert rows(box.list_files()) == [
        {"path": f"{box.root}/d", "mtime": "1970-01-01T00:00:00.000000Z", "is_directory": True},
        {"path": f"{box.root}/f", "size_bytes": 5, "mtime": "2023-11-14T22:13:20.123456Z", "is_directory": False},
    ]
    assert list(rows(box.list_files())[1]) == ["path", "size_bytes", "mtime", "is_directory"]


@pytest.mark.parametrize(
    ("seconds", "moment"),
    [(-1, "1969-12-31T23:59:59.000000Z"), (2**31, "2038-01-19T03:14:08.000000Z"), (2**33, "2242-03-16T12:56:32.000000Z")],
)
def test_odd_times_are_told_as_they_are(box: Box, seconds: int, moment: str) -> None:
    box.fill(f="")
    os.utime(box.root / "f", (seconds, seconds))
    assert rows(box.list_files())[0]["mtime"] == moment


def test_only_a_directory_can_be_listed(box: Box) -> None:
    box.fill(f="")
    for act in (box.list_files, box.tree):
        refused("notFound", "directory not found: nope", lambda act=act: act("nope"))  # type: ignore[misc]  # mypy infers no type for the default
        refused("notDirectory", "not a directory: f", lambda act=act: act("f"))  # type: ignore[misc]  # as above


def test_as_many_levels_as_asked_are_listed(box: Box) -> None:
    box.fill(**{"a/b/c": "", "a.b": "", ".hidden": ""})
    assert box.names() == [".hidden", "a", "a.b"]
    assert box.names(max_depth=2) == [".hidden", "a", "a.b", "a/b"]
    assert box.names("a", max_depth=64) == ["a/b", "a/b/c"]


def test_links_are_listed_and_not_followed(box: Box) -> None:
    (box.root / "out").symlink_to(box.outside)
    (box.root / "loop").symlink_to(".")
    (box.root / "dangling").symlink_to("nope")
    assert box.names(max_depth=5) == ["dangling", "loop", "out"]
    assert [row["is_directory"] for row in rows(box.list_files())] == [False] * 3


@pytest.mark.parametrize(
    ("sort_by", "names"),
    [("name", ["a", "b", "c", "d", "e"]), ("size", ["d", "b", "c", "a", "e"]), ("mtime", ["c", "a", "d", "e", "b"])],
)
def test_rows_are_sorted_the_largest_and_newest_first_and_equals_by_name(box: Box, sort_by: str, names: list[str]) -> None:
    box.fill(a="", b="22", c="22", d="333", **{"e/f": "4444"})
    for name, at in {"a": 20, "b": 10, "c": 30, "d": 20, "e": 20}.items():
        os.utime(box.root / name, (at, at))
    assert box.names(sort_by=sort_by) == names


def test_the_first_thousand_are_chosen_after_sorting(memory_box: Box) -> None:
    box = memory_box
    names = [f"{number:05}" for number in range(1500)]
    for name in random.Random(3).sample(names, len(names)):
        (box.root / name).write_bytes(b"x" * (1500 - int(name)))
        os.utime(box.root / name, (0, 10_000 - int(name)))
    for sort_by in ("name", "size", "mtime"):
        outcome = box.list_files(sort_by=sort_by)
        assert [row["path"] for row in rows(outcome)] == [f"{box.root}/{name}" for name in names[:1000]]
        assert (outcome.truncated, outcome.notes) == (True, ["directory truncated at 1000 entries"])


def test_exactly_a_thousand_entries_are_all(memory_box: Box) -> None:
    box = memory_box
    for number in range(1000):
        (box.root / str(number)).touch()
    outcome = box.list_files()
    assert (len(rows(outcome)), outcome.truncated, outcome.notes) == (1000, False, [])


@pytest.fixture
def memory_box() -> Iterator[Box]:
    """A box on a file system in memory, where thousands of files are made and removed in a moment."""
    skip_without("shm", Path("/dev/shm").is_dir(), "there is no file system in memory")
    directory = Path(tempfile.mkdtemp(prefix="sq-test-", dir="/dev/shm"))
    yield Box(directory)
    shutil.rmtree(directory)


def test_a_huge_directory_takes_no_more_memory_than_a_large_one(memory_box: Box) -> None:
    box = memory_box
    for number in range(30_000):
        os.close(os.open(box.root / str(number), os.O_CREAT | os.O_WRONLY))
    peaks = []
    for act in (box.list_files, box.tree):
        tracemalloc.start()
        outcome = act(".")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (outcome.truncated, outcome.notes) == (True, ["directory truncated at 1000 entries"])
    assert max(peaks) < 2 * limits.MIB, "all names together are more than that"


def test_long_paths_are_cut_where_the_result_would_become_too_large(box: Box) -> None:
    deep = box.root
    for _ in range(10):
        deep = deep / ("x" * 250)
    deep.mkdir(parents=True)
    for number in range(1000):
        (deep / f"{number:04}{'y' * 200}").touch()
    outcome = box.list_files(str(deep))
    kept = len(rows(outcome))
    assert 300 < kept < 1000
    assert (outcome.truncated, outcome.notes) == (True, [f"directory truncated at {kept} entries"])
    assert len((outcome.content or "").encode()) <= limits.READ_MAX
    StepResult.from_dict({"cause": "exit", "content": outcome.content})


def test_names_that_are_not_utf_8_are_shown_with_replacements(box: Box) -> None:
    for name in (b"caf\xe9", b"\xff\xfe", "gr\u00fcn".encode(), b'quote"\\', b"line\nbreak"):
        os.close(os.open(bytes(box.root) + b"/" + name, os.O_CREAT | os.O_WRONLY))
    shown = ["caf\ufffd", "gr\u00fcn", "line\nbreak", 'quote"\\', "\ufffd\ufffd"]
    assert box.names() == shown
    tree = box.tree().content or ""
    tree.encode()
    assert tree == 'root/\n├── caf\ufffd\n├── grün\n├── line\ufffdbreak\n├── quote"\\\n└── \ufffd\ufffd'


# --- directoryTree


def test_a_tree_has_directories_first_then_names_in_order(box: Box) -> None:
    box.fill(**{"b/z": "", "b/a/x": "", "B/f": "", "a.txt": "", "Z": "", "é": ""})
    (box.root / "empty").mkdir()
    (box.root / "link").symlink_to("b")
    expected = """\
root/
├── B/
│   └── f
├── b/
│   ├── a/
│   │   └── x
│   └── z
├── empty/
├── Z
├── a.txt
├── link
└── é"""
    outcome = box.tree()
    assert (outcome.content, outcome.truncated, outcome.notes) == (expected, False, [])
    assert box.tree("b/a").content == "a/\n└── x"
    assert box.tree("empty").content == "empty/"


def test_a_tree_is_four_levels_deep_unless_asked(box: Box) -> None:
    box.fill(**{"1/2/3/4/5": ""})
    assert (box.tree().content or "").splitlines()[-1].strip() == "└── 4/"
    assert box.tree(max_depth=1).content == "root/\n└── 1/"
    assert (box.tree(max_depth=5).content or "").splitlines()[-1].strip() == "└── 5"


def test_fourteen_noisy_directories_are_never_drawn_and_never_searched(box: Box) -> None:
    assert len(NOISY) == 14
    names = [name.decode() for name in NOISY]
    box.fill(**{f"{name}/f": "needle" for name in names}, **{"Build/f": "needle", "src/VENDOR/f": "needle", "src/g": "needle"})
    assert box.tree().content == "root/\n└── src/\n    └── g"
    assert [row["path"] for row in rows(box.grep("needle"))] == ["src/g"]
    assert len(box.names()) == 16, "a list has everything"
    assert box.tree("node_modules").content == "node_modules/\n└── f", "who asks for it by name, gets it"
    assert [row["path"] for row in rows(box.grep("needle", "vendor"))] == ["f"]


def test_a_file_with_a_noisy_name_is_an_ordinary_file(box: Box) -> None:
    box.fill(build="needle", **{".git": "gitdir: needle"})
    assert box.tree().content == "root/\n├── .git\n└── build"
    assert [row["path"] for row in rows(box.grep("needle"))] == [".git", "build"]


def test_a_gitignore_has_no_say(box: Box) -> None:
    box.fill(**{".gitignore": "*\n", ".ignore": "*\n", ".rgignore": "*\n", "f": "needle"})
    assert "f" in (box.tree().content or "")
    assert [row["path"] for row in rows(box.grep("needle"))] == ["f"]


def test_globs_leave_out_entries_by_name(box: Box) -> None:
    box.fill(**{"a.pyc": "", "a.py": "", "tests/t.py": "", "src/tests/x": "", "src/y.js": ""})
    assert box.tree(exclude_globs=["*.pyc", "tests"]).content == "root/\n├── src/\n│   └── y.js\n└── a.py"
    assert box.tree(exclude_globs=["*"]).content == "root/"
    assert box.tree(exclude_globs=["[!s]*", "*.{js,x}"]).content == "root/\n└── src/"
    with pytest.raises(FileError) as caught:
        box.tree(exclude_globs=["[z-a]"])
    assert caught.value.code == "invalidPattern"


def test_a_tree_ends_after_a_thousand_entries(box: Box) -> None:
    for number in range(3):
        (box.root / f"d{number}").mkdir()
        for name in range(400):
            (box.root / f"d{number}/{name}").touch()
    outcome = box.tree()
    lines = (outcome.content or "").splitlines()
    assert (len(lines), outcome.truncated, outcome.notes) == (1001, True, ["directory truncated at 1000 entries"])
    assert "d2/" in (outcome.content or "")
    assert len((box.tree(max_depth=1).content or "").splitlines()) == 4
