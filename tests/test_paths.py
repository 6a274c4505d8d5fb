"""Where paths lead: relative to the working directory, through links, and never out of the allowed directories."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_queue.models import Step
from sandbox_queue.workers.files import FileError, perform
from sandbox_queue.workers.paths import LINKS_MAX
from tests.filebox import SECRET, Box, descriptors, exchange, meanwhile, refused, rows

RACE = 0.6  # seconds for each race


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    before = len(descriptors())
    yield box
    assert len(descriptors()) == before, "descriptors were left open"


def outside(box: Box, path: str) -> tuple[str, str]:
    return "outsideRoots", f"outside the allowed directories: {path} (allowed: {box.root})"


# --- relative and absolute


@pytest.mark.parametrize("path", ["a/b/f", "./a/b/f", "a//b/./f", "a/b/../b/f", "a/../a/b/f", "../root/a/b/f"])
def test_a_relative_path_is_resolved_against_the_working_directory(box: Box, path: str) -> None:
    box.fill(**{"a/b/f": "hello"})
    assert box.text(path) == "hello"


def test_every_kind_of_step_resolves_relative_paths_against_its_working_directory(box: Box) -> None:
    box.fill(**{"a/b/f": "hello"})
    roots = [str(box.root)]
    cwd = str(box.root / "a")
    assert perform(Step.read_file("b/f", cwd=cwd), roots).content == "hello"
    assert [row["path"] for row in rows(perform(Step.list_files("b", cwd=cwd), roots))] == [f"{box.root}/a/b/f"]
    assert [row["path"] for row in rows(perform(Step.grep("hello", cwd=cwd), roots))] == ["b/f"]
    assert perform(Step.directory_tree(cwd=cwd), roots).content == "a/\n└── b/\n    └── f"
    perform(Step.write_file("b/g", "new", cwd=cwd), roots)
    assert (box.root / "a/b/g").read_text() == "new"


def test_an_absolute_path_needs_no_working_directory(box: Box) -> None:
    box.fill(f="hello")
    assert perform(Step.read_file(f"{box.root}/f", cwd="/no/such/place"), [str(box.root)]).content == "hello"
    refused("notFound", "file not found: f", lambda: perform(Step.read_file("f", cwd=f"{box.root}/nope"), [str(box.root)]))


def test_a_name_is_bytes_and_text_is_their_utf_8(box: Box) -> None:
    box.fill(**{"späße/日本": "hello"})
    assert box.text("späße/日本") == "hello"


@pytest.mark.parametrize("path", ["f/", "f/.", "f/x", "f/.."])
def test_a_file_is_not_a_directory(box: Box, path: str) -> None:
    box.fill(f="hello")
    refused("notDirectory", f"not a directory: {path}", lambda: box.read(path))


def test_dots_behind_what_does_not_exist_lead_nowhere(box: Box) -> None:
    """As for the kernel, and unlike for `os.path.normpath`: nobody knows what `nope` will be."""
    box.fill(f="hello")
    refused("notFound", "file not found: nope/../f", lambda: box.read("nope/../f"))


# --- roots


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/etc/nope",
        "/nope",
        "/",
        "..",
        "../outside/secret",
        "../outside/nope",
        "../rootless",
        "/proc/self/environ",
    ],
)
def test_outside_the_roots_nothing_is_told_not_even_whether_it_exists(box: Box, path: str) -> None:
    for act in (box.read, box.list_files, box.tree, lambda p: box.write(p, "x"), lambda p: box.grep("x", p)):
        refused(*outside(box, path), lambda act=act: act(path))  # type: ignore[misc]  # mypy infers no type for the default


def test_there_may_be_several_roots_and_links_from_one_to_another(box: Box, tmp_path: Path) -> None:
    box.fill(f="hello")
    (box.root / "link").symlink_to(box.outside / "secret")
    step = Step.read_file("link", cwd=str(box.root))
    assert perform(step, [str(box.root), str(box.outside)]).content == SECRET
    message = f"outside the allowed directories: link (allowed: {box.root}, /nope)"
    refused("outsideRoots", message, lambda: perform(step, [str(box.root), "/nope"]))


def test_a_root_may_itself_be_a_link(box: Box, tmp_path: Path) -> None:
    """As /tmp is on macOS."""
    box.fill(f="hello")
    (tmp_path / "alias").symlink_to(box.root)
    for path in (f"{tmp_path}/alias/f", f"{box.root}/f"):
        for root in (f"{tmp_path}/alias", str(box.root)):
            assert perform(Step.read_file(path), [root]).content == "hello"


def test_a_root_that_does_not_exist_yet_is_made_by_a_write(box: Box, tmp_path: Path) -> None:
    root = f"{tmp_path}/later/work"
    refused("notFound", "directory not found: .", lambda: perform(Step.list_files(cwd=root), [root]))
    perform(Step.write_file("a/f", "hello", cwd=root), [root])
    assert perform(Step.read_file("a/f", cwd=root), [root]).content == "hello"


def test_a_root_that_cannot_be_resolved_allows_nothing(box: Box, tmp_path: Path) -> None:
    """Were it cut where the walk ended, it would allow more than it says."""
    (tmp_path / "loop").symlink_to("loop")
    step = Step.read_file(f"{box.outside}/secret")
    for root in (f"{tmp_path}/loop/x", f"{box.outside}/secret/x"):
        with pytest.raises(FileError, match="outside the allowed"):
            perform(step, [root])


# --- links


def test_links_that_stay_inside_are_followed_wherever_they_stand(box: Box) -> None:
    box.fill(**{"a/b/f": "hello"})
    (box.root / "relative").symlink_to("a/b/f")
    (box.root / "absolute").symlink_to(box.root / "a")
    (box.root / "a/up").symlink_to("../a/b")
    (box.root / "out-and-in").symlink_to("../outside/../root/a")
    for path in ("relative", "absolute/b/f", "a/up/f", "absolute/up/../b/f", "out-and-in/b/f"):
        assert box.text(path) == "hello"
    assert box.names("absolute") == ["a/b", "a/up"]


@pytest.mark.parametrize("target", ["../outside", "{outside}", "/", "a/../../outside", "/proc/self/root", "/proc/self/cwd/.."])
def test_links_that_lead_out_are_refused_at_any_place_in_the_path(box: Box, target: str) -> None:
    (box.root / "a").mkdir()
    (box.root / "link").symlink_to(target.format(outside=box.outside))
    for path in ("link", "link/secret", f"link{box.outside}/secret", "a/../link/x"):
        for act in (box.read, box.list_files, box.tree, lambda p: box.write(p, "x"), lambda p: box.grep("x", p)):
            with pytest.raises(FileError) as caught:
                act(path)
            assert caught.value.code == "outsideRoots"
    assert (box.outside / "secret").read_text() == SECRET
    assert sorted(path.name for path in box.outside.iterdir()) == ["secret"]


def test_the_magic_links_of_proc_are_read_as_text_and_lead_nowhere_else(box: Box) -> None:
    box.fill(f="hello")
    directory = os.open(box.outside, os.O_RDONLY)
    try:
        for path in (
            f"/proc/self/fd/{directory}/secret",
            f"/proc/{os.getpid()}/root/etc/passwd",
            "/proc/self/exe",
            "/dev/stdin",
        ):
            with pytest.raises(FileError) as caught:
                box.read(path)
            assert caught.value.code == "outsideRoots"
        assert box.text(f"/proc/self/root{box.root}/f") == "hello", "that is an ordinary way to an allowed file"
    finally:
        os.close(directory)


def test_a_chain_of_links_is_followed_as_far_as_the_kernel_would(box: Box) -> None:
    box.fill(l0="hello")
    for number in range(1, LINKS_MAX + 2):
        (box.root / f"l{number}").symlink_to(f"l{number - 1}")
    assert box.text(f"l{LINKS_MAX}") == "hello" == (box.root / f"l{LINKS_MAX}").read_text()
    refused("io", f"too many links: l{LINKS_MAX + 1}", lambda: box.read(f"l{LINKS_MAX + 1}"))
    (box.root / "loop").symlink_to("loop")
    refused("io", "too many links: loop/x", lambda: box.write("loop/x", ""))


def test_a_dangling_link_is_a_missing_file_inside_and_nothing_at_all_outside(box: Box) -> None:
    (box.root / "inside").symlink_to("nope")
    (box.root / "outside").symlink_to(box.outside / "nope")
    refused("notFound", "file not found: inside", lambda: box.read("inside"))
    refused(*outside(box, "outside"), lambda: box.read("outside"))
    refused(*outside(box, "outside"), lambda: box.write("outside", "x"))
    assert not (box.outside / "nope").exists()


def test_a_path_of_a_thousand_names_is_walked_or_refused_but_leaves_nothing_open(box: Box) -> None:
    with pytest.raises(FileError) as caught:
        box.read("/".join("a" * 1000))
    assert caught.value.code == "notFound"


# --- what is no regular file


@pytest.mark.timeout(10)
def test_fifos_sockets_and_devices_are_refused_at_once(box: Box) -> None:
    os.mkfifo(box.root / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(box.root / "socket"))
        (box.root / "link").symlink_to("fifo")
        names = ["fifo", "socket", "link"]
        if os.geteuid() == 0:
            os.mknod(box.root / "zero", 0o600 | 0o020000, os.makedev(1, 5))
            names.append("zero")
        for name in names:
            for act in (box.read, lambda p: box.write(p, "x"), lambda p: box.grep("x", p)):
                refused("notRegular", f"not a regular file: {name}", lambda act=act, name=name: act(name))  # type: ignore[misc]  # as above
        assert box.grep("x").content == "[]"


@pytest.mark.timeout(10)
def test_looking_at_a_fifo_does_not_wake_the_one_who_waits_at_its_other_end(box: Box) -> None:
    os.mkfifo(box.root / "fifo")
    opened = threading.Event()

    def write() -> None:
        descriptor = os.open(box.root / "fifo", os.O_WRONLY)  # waits for a reader
        opened.set()
        os.close(descriptor)

    writer = threading.Thread(target=write)
    writer.start()
    refused("notRegular", "not a regular file: fifo", lambda: box.read("fifo"))
    box.grep("x")
    assert not opened.wait(0.1)
    os.close(os.open(box.root / "fifo", os.O_RDONLY | os.O_NONBLOCK))
    writer.join()


# --- races: another process replaces things as fast as it can


def test_a_link_swapped_during_a_read_does_not_lead_out(box: Box) -> None:
    box.fill(**{"in/secret": "harmless"})
    (box.root / "d").symlink_to("in")
    (box.root / "e").symlink_to(box.outside)
    seen: dict[str, int] = {}
    with meanwhile(lambda: exchange(box.root / "d", box.root / "e")):
        deadline = time.monotonic() + RACE
        while time.monotonic() < deadline:
            try:
                result = box.text("d/secret")
            except FileError as error:
                result = error.code
            seen[result] = seen.get(result, 0) + 1
    assert seen.keys() == {"harmless", "outsideRoots"}, f"both sides of the race were to be seen: {seen}"


def test_a_directory_swapped_for_a_link_does_not_lead_out_whatever_the_step(box: Box) -> None:
    box.fill(**{"d/secret": "harmless"})
    (box.root / "e").symlink_to(box.outside)
    inside: set[str] = set()
    with meanwhile(lambda: exchange(box.root / "d", box.root / "e")):
        deadline = time.monotonic() + 2 * RACE
        while time.monotonic() < deadline:
            for act in (
                lambda: box.text("d/secret"),
                lambda: box.grep(".", "d").content,
                lambda: box.grep(".").content,
                lambda: box.list_files(max_depth=2).content,
                lambda: box.tree("d").content,
                lambda: box.write("d/new", "written"),
            ):
                try:
                    inside.add(str(act()))
                except FileError as error:
                    inside.add(error.code)
    assert not any(SECRET in text or str(box.outside) in text for text in inside)
    assert {"harmless", "outsideRoots"} <= inside, "both sides of the race were to be seen"
    assert sorted(path.name for path in box.outside.iterdir()) == ["secret"]


def test_a_file_swapped_for_a_link_is_neither_read_nor_written_through(box: Box) -> None:
    box.fill(f="harmless")

    def replace() -> None:
        (box.root / "next").symlink_to(box.outside / "secret")
        (box.root / "next").rename(box.root / "f")
        (box.root / "next").write_text("harmless")
        (box.root / "next").rename(box.root / "f")

    seen: set[str] = set()
    with meanwhile(replace):
        deadline = time.monotonic() + RACE
        while time.monotonic() < deadline:
            for act in (lambda: box.text("f"), lambda: box.grep("h").content, lambda: box.write("f", "harmless")):
                try:
                    seen.add(str(act()))
                except FileError as error:
                    seen.add(error.code)
    assert not any(SECRET in text for text in seen)
    assert (box.outside / "secret").read_text() == SECRET
    assert {"harmless", "outsideRoots"} <= seen


def test_a_directory_moved_away_does_not_take_dots_along(box: Box) -> None:
    """`..` is a step back on our own trail: the kernel's `..` of a moved directory is wherever it went."""
    box.fill(**{"a/b/f": "x", "secret": "harmless"})
    (box.outside / "deep").mkdir()

    def move() -> None:
        (box.root / "a/b").rename(box.outside / "deep/b")
        (box.outside / "deep/b").rename(box.root / "a/b")

    seen: set[str] = set()
    with meanwhile(move):
        deadline = time.monotonic() + RACE
        while time.monotonic() < deadline:
            try:
                seen.add(box.text("a/b/../../secret"))
            except FileError as error:
                seen.add(error.code)
    assert seen <= {"harmless", "notFound"}
