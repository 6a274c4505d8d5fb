"""What a Step, a StepResult and a SandboxSpec accept, refuse, show and look like on the wire."""

from __future__ import annotations

import base64
import copy
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sandbox_queue import limits
from sandbox_queue.errors import InvalidInput, InvalidSpec, InvalidStep, StepCancelled, StepEnded, StepFailed, StepLost
from sandbox_queue.models import (
    KINDS,
    DirectoryTree,
    Grep,
    ListFiles,
    ReadFile,
    Run,
    SandboxSpec,
    Shutdown,
    Step,
    StepResult,
    Usage,
    WriteFile,
)

SECRET = "hunter2-s3cret"
LONE_SURROGATE = "caf\ud800"
NEW: Any = Step  # the constructors, for calls that a type checker would refuse


def refused(build: Callable[[], object], field: str, kind: type[InvalidInput] = InvalidStep) -> InvalidInput:
    """Assert that `build` is refused, by whom and for which field, in words that help."""
    with pytest.raises(InvalidInput) as caught:
        build()
    error = caught.value
    assert type(error) is kind
    assert error.field == field
    assert error.problem
    assert error.remedy
    assert str(error) == f"{error.field}: {error.problem}; {error.remedy}"
    assert len(str(error)) < 1000, "a message is for reading"
    assert isinstance(error, ValueError), "callers that know nothing of us catch ValueError"
    return error


def wire(kind: str = "run", /, **fields: Any) -> dict[str, Any]:
    """A step as a peer would send it."""
    required: dict[str, dict[str, Any]] = {
        "run": {"command": "true"},
        "readFile": {"path": "a"},
        "writeFile": {"path": "a", "content": ""},
        "listFiles": {"path": "."},
        "grep": {"path": ".", "pattern": "x"},
        "directoryTree": {"path": "."},
    }
    return {"kind": kind, "schemaVersion": 1, **required.get(kind, {}), **fields}


# --- the constructors

EVERY_KIND: list[tuple[Step, dict[str, Any]]] = [
    (Step.run("a | b"), {"kind": "run", "command": "/bin/sh", "args": ["-c", "a | b"]}),
    (Step.run(["make", "test"]), {"kind": "run", "command": "make", "args": ["test"]}),
    (Step.run(("make",)), {"kind": "run", "command": "make"}),
    (
        Step.run(
            ["cat"],
            env={"A": "1", "GONE": None},
            cwd="/tmp/x",
            timeout=1.5,
            stdin=b"\xff\x00",
            user="1000:100",
            kill_background=True,
            step_id="build-1",
        ),
        {
            "kind": "run",
            "stepId": "build-1",
            "workingDirectory": "/tmp/x",
            "timeoutSeconds": 1.5,
            "command": "cat",
            "env": {"A": "1", "GONE": None},
            "user": "1000:100",
            "stdin": "/wA=",
            "killBackground": True,
        },
    ),
    (Step.read_file("a"), {"kind": "readFile", "path": "a"}),
    (
        Step.read_file("a", start_line=3, line_count=2, with_line_numbers=True),
        {"kind": "readFile", "path": "a", "startLine": 3, "lineCount": 2, "withLineNumbers": True},
    ),
    (
        Step.read_file("a", offset=7, encoding="base64"),
        {"kind": "readFile", "path": "a", "offset": 7, "encoding": "base64"},
    ),
    (Step.write_file("a", "é"), {"kind": "writeFile", "path": "a", "content": "é"}),
    (
        Step.write_file("a", b"\xff", offset=9),
        {"kind": "writeFile", "path": "a", "content": "/w==", "encoding": "base64", "offset": 9},
    ),
    (
        Step.write_file("a", "b", size=1, sha256="0" * 64),
        {"kind": "writeFile", "path": "a", "content": "b", "size": 1, "sha256": "0" * 64},
    ),
    (Step.list_files(), {"kind": "listFiles", "path": "."}),
    (
        Step.list_files("src", max_depth=2, sort_by="mtime"),
        {"kind": "listFiles", "path": "src", "maxDepth": 2, "sortBy": "mtime"},
    ),
    (Step.grep("TODO"), {"kind": "grep", "path": ".", "pattern": "TODO"}),
    (
        Step.grep("x", "src", glob="*.py", head_limit=5, context_before=1, context_after=2, output_mode="count"),
        {
            "kind": "grep",
            "path": "src",
            "pattern": "x",
            "glob": "*.py",
            "headLimit": 5,
            "contextBefore": 1,
            "contextAfter": 2,
            "outputMode": "count",
        },
    ),
    (Step.directory_tree(), {"kind": "directoryTree", "path": "."}),
    (
        Step.directory_tree("src", max_depth=2, exclude_globs=["*.pyc", ".git"]),
        {"kind": "directoryTree", "path": "src", "maxDepth": 2, "excludeGlobs": ["*.pyc", ".git"]},
    ),
    (Step.shutdown(step_id="bye"), {"kind": "shutdown", "stepId": "bye"}),
]
each_kind = pytest.mark.parametrize(("step", "on_the_wire"), EVERY_KIND, ids=[repr(step)[:50] for step, _ in EVERY_KIND])


@each_kind
def test_a_step_on_the_wire_has_camel_case_names_a_version_and_no_defaults(step: Step, on_the_wire: dict[str, Any]) -> None:
    assert json.loads(msgspec.json.encode(step)) == {"schemaVersion": 1, **on_the_wire}


@each_kind
def test_to_dict_holds_nothing_but_json_types(step: Step, on_the_wire: dict[str, Any]) -> None:
    """What `json.loads` gives back is the same object: no tuples, no bytes, no subclasses of dict."""
    assert step.to_dict() == json.loads(json.dumps(step.to_dict())) == {"schemaVersion": 1, **on_the_wire}
    assert type(step.to_dict().get("env", {})) is dict


@each_kind
def test_from_dict_takes_back_what_to_dict_gave(step: Step, on_the_wire: dict[str, Any]) -> None:
    assert Step.from_dict(step.to_dict()) == step
    assert type(step).from_dict({"schemaVersion": 1, **on_the_wire}) == step


@each_kind
def test_steps_are_picklable_and_copyable(step: Step, on_the_wire: dict[str, Any]) -> None:
    """A service may hand steps to a process pool; the wire itself never carries a pickle."""
    assert pickle.loads(pickle.dumps(step)) == step  # noqa: S301  # of our own making
    assert copy.deepcopy(step) == copy.copy(step) == step


@each_kind
def test_steps_are_immutable_and_hashable(step: Step, on_the_wire: dict[str, Any]) -> None:
    twin = Step.from_dict({"schemaVersion": 1, **on_the_wire})
    assert twin is not step
    assert {step: "found"}[twin] == "found"
    with pytest.raises(AttributeError):
        step.timeout = 1.0  # type: ignore[misc]  # the point of this test


def test_every_kind_of_step_is_covered_above() -> None:
    assert {type(step) for step, _ in EVERY_KIND} == set(KINDS.values())
    assert set(KINDS) == {"run", "readFile", "writeFile", "listFiles", "grep", "directoryTree", "shutdown"}


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (Step.run("x"), Run),
        (Step.read_file("x"), ReadFile),
        (Step.write_file("x", ""), WriteFile),
        (Step.list_files(), ListFiles),
        (Step.grep("x"), Grep),
        (Step.directory_tree(), DirectoryTree),
        (Step.shutdown(), Shutdown),
    ],
)
def test_each_constructor_makes_its_own_kind_with_the_documented_defaults(step: Step, kind: type[Step]) -> None:
    assert type(step) is kind
    assert (step.schema_version, step.step_id, step.cwd, step.timeout) == (1, None, "/work", 600.0)


def test_a_string_is_for_the_shell_and_a_sequence_is_the_argv() -> None:
    assert (Step.run("a 'b c'").command, Step.run("a 'b c'").args) == ("/bin/sh", ("-c", "a 'b c'"))
    assert (Step.run(["a", "b c"]).command, Step.run(["a", "b c"]).args) == ("a", ("b c",))


def test_stdin_given_as_text_is_sent_as_utf_8() -> None:
    assert Step.run("cat", stdin="é").stdin == "é".encode()
    assert Step.run("cat", stdin="").stdin == b""


@pytest.mark.parametrize(
    "content", [b"\xff\x00", bytearray(b"\xff\x00"), memoryview(b"\xff\x00")], ids=["bytes", "bytearray", "view"]
)
def test_bytes_to_write_travel_as_base64(content: Any) -> None:
    step = Step.write_file("a", content)
    assert (step.encoding, base64.b64decode(step.content)) == ("base64", b"\xff\x00")


def test_a_uid_may_be_given_as_a_number() -> None:
    assert Step.run("id", user=1000).user == "1000"


def test_the_environment_is_the_steps_own_and_cannot_be_changed_through_it() -> None:
    given: dict[str, str | None] = {"A": "1"}
    step = Step.run("env", env=given)
    given["A"] = "2"
    assert step.env == {"A": "1"}
    env: Any = step.env
    changes: list[tuple[str, tuple[object, ...]]] = [
        ("update", ({"A": "3"},)),
        ("__setitem__", ("A", "3")),
        ("pop", ("A",)),
        ("popitem", ()),
        ("clear", ()),
        ("setdefault", ("B", "3")),
        ("__delitem__", ("A",)),
        ("__ior__", ({"A": "3"},)),
    ]
    for method, arguments in changes:
        with pytest.raises(TypeError, match="immutable"):
            getattr(env, method)(*arguments)
    assert step.env == {"A": "1"}


# --- refusals: command and arguments


@pytest.mark.parametrize("command", ["", "  \n", [], (), None, 5, b"ls", bytearray(b"ls"), {}, {"ls"}, [""]], ids=repr)
def test_a_step_without_a_command_is_refused(command: Any) -> None:
    refused(lambda: NEW.run(command), "command")


def test_the_empty_command_is_told_from_one_of_the_wrong_type() -> None:
    assert refused(lambda: Step.run([]), "command").problem == "is empty"
    assert "bytes" in refused(lambda: NEW.run(b"ls"), "command").problem


@pytest.mark.parametrize(
    ("command", "field"),
    [
        ("echo \0", "args[1]"),
        (["a\0"], "command"),
        (["a", "b", "\0c"], "args[1]"),
        (["a", "x" * (limits.ARGUMENT_MAX + 1)], "args[0]"),
        (["a", "é" * (limits.ARGUMENT_MAX // 2 + 1)], "args[0]"),
        (["a", *["x" * limits.ARGUMENT_MAX] * 17], "args"),
        ("echo " + LONE_SURROGATE, "args[1]"),
        ([LONE_SURROGATE], "command"),
        (["a", 5], "args"),
        (["a", None], "args"),
        (["a", b"b"], "args"),
        ([b"a"], "command"),
    ],
    ids=[
        "NUL in a shell command",
        "NUL in the program",
        "NUL in an argument",
        "too long",
        "too long in UTF-8",
        "too long together",
        "lone surrogate in a shell command",
        "lone surrogate in the program",
        "number",
        "None",
        "bytes",
        "bytes for the program",
    ],
)
def test_an_argument_that_no_program_could_be_given_is_refused(command: Any, field: str) -> None:
    refused(lambda: NEW.run(command), field)


def test_the_longest_argument_that_linux_takes_is_accepted() -> None:
    assert len(Step.run(["a", "x" * limits.ARGUMENT_MAX]).args[0]) == limits.ARGUMENT_MAX


# --- refusals: environment

BAD_ENVIRONMENTS: list[tuple[Any, str]] = [
    ({"A=B": SECRET}, "env"),
    ({f"TOKEN={SECRET}": ""}, "env"),
    ({"": SECRET}, "env"),
    ({"A\0": SECRET}, "env"),
    ({"TOKEN": SECRET + "\0"}, "env['TOKEN']"),
    ({"TOKEN": SECRET + LONE_SURROGATE}, "env['TOKEN']"),
    ({"TOKEN": SECRET * limits.ARGUMENT_MAX}, "env['TOKEN']"),
    ({"TOKEN": SECRET, "N": 5}, "env"),
    ({5: SECRET}, "env"),
    ({"TOKEN": SECRET.encode()}, "env"),
    ([f"TOKEN={SECRET}"], "env"),
    (f"TOKEN={SECRET}", "env"),
]


@pytest.mark.parametrize(
    ("env", "field"),
    BAD_ENVIRONMENTS,
    ids=[
        "equals sign in a name",
        "a whole assignment as the name",
        "empty name",
        "NUL in a name",
        "NUL in a value",
        "lone surrogate",
        "too long",
        "number as value",
        "number as name",
        "bytes",
        "list",
        "str",
    ],
)
def test_a_bad_environment_is_refused_without_telling_its_values(env: Any, field: str) -> None:
    """Values are passwords and tokens as often as not, and error messages end up in logs."""
    error = refused(lambda: NEW.run("env", env=env), field)
    assert SECRET not in str(error)
    assert SECRET not in repr(error)


@pytest.mark.parametrize("field", ["workingDirectory", "timeoutSeconds", "stepId", "user", "noSuchField"])
def test_an_error_in_another_field_does_not_tell_the_environment(field: str) -> None:
    wrong: dict[str, Any] = {field: -1}
    error = refused(lambda: Step.from_dict(wire(env={"TOKEN": SECRET}, **wrong)), field)
    assert SECRET not in str(error)


def test_a_long_name_of_a_variable_does_not_make_a_long_message() -> None:
    refused(lambda: Step.run("env", env={"A=" * 100_000: ""}), "env")


def test_repr_shows_the_names_of_variables_and_never_their_values() -> None:
    for record in (Step.run("env", env={"TOKEN": SECRET}), SandboxSpec.build(env={"TOKEN": SECRET})):
        for text in (repr(record), str(record), f"{record}", repr([record])):
            assert "TOKEN" in text
            assert SECRET not in text


def test_repr_shows_what_differs_from_the_defaults_and_cuts_what_is_long() -> None:
    assert repr(Step.run(["ls"], timeout=5)) == "Run(timeout=5.0, command='ls')"
    assert repr(Step.shutdown()) == "Shutdown()"
    assert repr(StepResult(cause="exit", exit_code=0)) == "StepResult(cause='exit', exit_code=0)"
    text = repr(Step.write_file("a", "x" * 100_000))
    assert len(text) < 200
    assert "100002 characters" in text


# --- refusals: paths, ids, times


@pytest.mark.parametrize(
    "path",
    ["", "a\0b", "x" * 256, "é" * 128, "/" + "a/" * 2048, LONE_SURROGATE, 5, b"a", ["a"]],
    ids=["empty", "NUL", "long name", "long name in UTF-8", "too long", "lone surrogate", "number", "bytes", "list"],
)
@pytest.mark.parametrize(
    "build",
    [
        NEW.read_file,
        lambda path: NEW.write_file(path, ""),
        NEW.list_files,
        lambda path: NEW.grep("x", path),
        NEW.directory_tree,
    ],
    ids=["read_file", "write_file", "list_files", "grep", "directory_tree"],
)
def test_a_path_that_no_file_has_is_refused(build: Callable[[Any], Step], path: Any) -> None:
    refused(lambda: build(path), "path")


@pytest.mark.parametrize("path", ["x" * 255, "/" + "a/" * 2047, "..", "/", "a//b", " ", "é" * 127])
def test_odd_paths_that_a_file_can_have_are_accepted(path: str) -> None:
    """Whether it stays in the allowed directories is for the worker to find out, after symbolic links."""
    assert Step.read_file(path).path == path


@pytest.mark.parametrize(
    "cwd", ["work", "./work", "~", "", "/a\0", "/" + "x" * 256, "/" + "a/" * 2048, "/" + LONE_SURROGATE, 5, b"/work"], ids=repr
)
def test_a_working_directory_must_be_an_absolute_path(cwd: Any) -> None:
    refused(lambda: NEW.run("ls", cwd=cwd), "cwd")


def test_a_relative_working_directory_comes_with_the_absolute_one_it_may_have_meant() -> None:
    assert "/work/src" in refused(lambda: Step.run("ls", cwd="src"), "cwd").remedy


@pytest.mark.parametrize(
    "timeout",
    [0, -1, -0.0, math.nan, math.inf, -math.inf, limits.STEP_TIMEOUT_MAX + 1, 1e308, 10**400, "5", True, b"5", [5]],
    ids=lambda value: repr(value)[:20],
)
def test_a_timeout_must_be_a_time(timeout: Any) -> None:
    refused(lambda: NEW.run("ls", timeout=timeout), "timeout")
    refused(lambda: Step.from_dict(wire(timeoutSeconds=timeout)), "timeoutSeconds")


@pytest.mark.parametrize("timeout", [1, 0.001, limits.STEP_TIMEOUT_MAX])
def test_timeouts_up_to_a_day_are_accepted(timeout: float) -> None:
    assert Step.run("ls", timeout=timeout).timeout == timeout


@pytest.mark.parametrize(
    "step_id",
    ["", "17", "0", "a b", "a/b", "a:b", "a\n", "17\n", "\n", "é", "٣", "a" * 129, "a\0", LONE_SURROGATE, 17, b"a"],
    ids=lambda value: repr(value)[:20],
)
def test_a_step_id_that_could_be_taken_for_something_else_is_refused(step_id: Any) -> None:
    """Digits alone are sequence numbers; the rest would not fit into keys, URLs or command lines."""
    refused(lambda: NEW.run("ls", step_id=step_id), "step_id")
    refused(lambda: NEW.shutdown(step_id=step_id), "step_id")


@pytest.mark.parametrize("step_id", ["a", "17a", "-1", ".", "1.0", "A_b-c.9", "a" * 128])
def test_step_ids_of_the_callers_are_accepted(step_id: str) -> None:
    assert Step.run("ls", step_id=step_id).step_id == step_id


@pytest.mark.parametrize(
    "user", ["", "-1", -1, "a b", "1:2:3", "root\n", "a" * 33, "1:", ":1", "٣", True, 1.5, b"root"], ids=repr
)
def test_a_user_is_a_name_or_ids(user: Any) -> None:
    refused(lambda: NEW.run("id", user=user), "user")


@pytest.mark.parametrize("user", ["root", "www-data", "1000", "1000:1000", "_apt"])
def test_users_are_accepted_by_name_and_by_ids(user: str) -> None:
    assert Step.run("id", user=user).user == user


# --- refusals: content


@pytest.mark.parametrize(
    "content",
    [
        "x" * (11 * limits.MIB),
        b"x" * (11 * limits.MIB),
        "x" * (limits.WRITE_MAX + 1),
        b"x" * (limits.WRITE_MAX + 1),
        "é" * (6 * limits.MIB),
    ],
    ids=["11 MiB text", "11 MiB bytes", "a character too many", "a byte too many", "too much in UTF-8"],
)
def test_content_above_ten_mebibytes_is_refused_and_chunks_are_proposed(content: str | bytes) -> None:
    error = refused(lambda: Step.write_file("a", content), "content")
    assert str(limits.WRITE_MAX) in error.problem
    assert "chunks" in error.remedy


@pytest.mark.parametrize(
    "content",
    ["x" * limits.WRITE_MAX, b"\xff" * limits.WRITE_MAX, "é" * (limits.WRITE_MAX // 2)],
    ids=["text", "bytes", "UTF-8"],
)
def test_exactly_ten_mebibytes_are_accepted(content: str | bytes) -> None:
    assert Step.write_file("a", content).content


@pytest.mark.parametrize("content", ["=", "a", "YQ", "YQ==\n", " YQ==", "YQ==YQ==", "é", "Y-_="], ids=repr)
def test_content_that_is_not_base64_is_refused_where_base64_is_announced(content: str) -> None:
    refused(lambda: Step.from_dict(wire("writeFile", content=content, encoding="base64")), "content")


@pytest.mark.parametrize("content", [5, ["a"], {"a": 1}, LONE_SURROGATE], ids=repr)
def test_content_of_the_wrong_type_is_refused(content: Any) -> None:
    refused(lambda: NEW.write_file("a", content), "content")


def test_content_is_required() -> None:
    refused(lambda: NEW.write_file("a", None), "content")


@pytest.mark.parametrize(
    "stdin",
    [b"x" * (limits.WRITE_MAX + 1), "x" * (limits.WRITE_MAX + 1), LONE_SURROGATE, 5, ["a"]],
    ids=["bytes", "text", "lone surrogate", "number", "list"],
)
def test_stdin_that_cannot_be_sent_is_refused(stdin: Any) -> None:
    refused(lambda: NEW.run("cat", stdin=stdin), "stdin")


def test_ten_mebibytes_of_stdin_are_accepted() -> None:
    assert len(Step.run("cat", stdin=b"x" * limits.WRITE_MAX).stdin or b"") == limits.WRITE_MAX


@pytest.mark.parametrize("stdin", ["*", "YQ", "YQ==\n", "é"], ids=repr)
def test_stdin_on_the_wire_must_be_base64(stdin: str) -> None:
    refused(lambda: Step.from_dict(wire(stdin=stdin)), "stdin")


def test_the_size_and_digest_of_a_whole_file_come_together_and_with_its_last_chunk() -> None:
    digest = "0" * 64
    assert Step.write_file("a", "abc", offset=5, size=8, sha256=digest).size == 8
    refused(lambda: Step.write_file("a", "abc", sha256=digest), "size")
    refused(lambda: Step.write_file("a", "abc", size=3), "sha256")
    refused(lambda: Step.write_file("a", "abc", offset=5, size=9, sha256=digest), "size")


def test_lines_and_bytes_cannot_be_asked_for_at_once() -> None:
    refused(lambda: Step.read_file("a", start_line=1, offset=1), "start_line")
    refused(lambda: Step.read_file("a", line_count=1, encoding="base64"), "start_line")


# --- refusals: every other field, its type and its bounds

WRONG: list[tuple[str, str, Any]] = [
    ("run", "killBackground", 1),
    ("run", "killBackground", "yes"),
    ("run", "args", "a b"),
    ("run", "args", {"a": 1}),
    ("run", "stepId", []),
    ("readFile", "encoding", "latin-1"),
    ("readFile", "encoding", 8),
    ("readFile", "offset", -1),
    ("readFile", "offset", 1.5),
    ("readFile", "offset", "0"),
    ("readFile", "startLine", 0),
    ("readFile", "startLine", True),
    ("readFile", "lineCount", 0),
    ("readFile", "lineCount", "2"),
    ("readFile", "withLineNumbers", 1),
    ("writeFile", "encoding", "utf-16"),
    ("writeFile", "offset", -1),
    ("writeFile", "offset", []),
    ("writeFile", "size", -1),
    ("writeFile", "size", "0"),
    ("writeFile", "sha256", "0" * 63),
    ("writeFile", "sha256", "G" * 64),
    ("writeFile", "sha256", "0" * 64 + "\n"),
    ("writeFile", "sha256", 0),
    ("listFiles", "maxDepth", 0),
    ("listFiles", "maxDepth", limits.DEPTH_MAX + 1),
    ("listFiles", "maxDepth", "1"),
    ("listFiles", "sortBy", "colour"),
    ("listFiles", "sortBy", 1),
    ("grep", "pattern", ""),
    ("grep", "pattern", "x" * 4097),
    ("grep", "pattern", 5),
    ("grep", "pattern", LONE_SURROGATE),
    ("grep", "glob", ""),
    ("grep", "glob", "x" * 1025),
    ("grep", "glob", ["*"]),
    ("grep", "glob", LONE_SURROGATE),
    ("grep", "headLimit", 0),
    ("grep", "headLimit", limits.GREP_MATCHES_MAX + 1),
    ("grep", "headLimit", "5"),
    ("grep", "contextBefore", -1),
    ("grep", "contextBefore", limits.CONTEXT_LINES_MAX + 1),
    ("grep", "contextAfter", -1),
    ("grep", "contextAfter", None),
    ("grep", "outputMode", "json"),
    ("grep", "outputMode", 0),
    ("directoryTree", "maxDepth", 0),
    ("directoryTree", "excludeGlobs", "*.pyc"),
    ("directoryTree", "excludeGlobs", [""]),
    ("directoryTree", "excludeGlobs", [5]),
    ("directoryTree", "excludeGlobs", ["*"] * 101),
    ("directoryTree", "excludeGlobs", [LONE_SURROGATE]),
    ("shutdown", "schemaVersion", 2),
    ("shutdown", "schemaVersion", 0),
    ("shutdown", "schemaVersion", "1"),
    ("shutdown", "schemaVersion", None),
]


@pytest.mark.parametrize(
    ("kind", "field", "value"), WRONG, ids=[f"{kind}.{field}={value!r:.20}" for kind, field, value in WRONG]
)
def test_a_field_with_a_wrong_value_is_refused_by_its_wire_name(kind: str, field: str, value: Any) -> None:
    refused(lambda: Step.from_dict(wire(kind, **{field: value})), field)


def test_the_fields_of_every_kind_are_covered_above() -> None:
    """A field that is added must say in these tests what it refuses."""
    elsewhere = {"command", "env", "user", "stdin", "path", "content", "workingDirectory", "timeoutSeconds"}
    for kind, cls in KINDS.items():
        common = set(Step.__struct_encode_fields__)
        tested = {field for of, field, _ in WRONG if of == kind} | elsewhere | common
        assert set(cls.__struct_encode_fields__) <= tested


def test_errors_name_the_field_as_the_caller_wrote_it() -> None:
    """`cwd` for Python, `workingDirectory` for whoever sent JSON, whichever check it was that refused."""
    refused(lambda: NEW.list_files(max_depth=0), "max_depth")
    refused(lambda: Step.from_dict(wire("listFiles", maxDepth=0)), "maxDepth")
    refused(lambda: Step.run("x", cwd="relative"), "cwd")
    refused(lambda: Step.from_dict(wire(workingDirectory="relative")), "workingDirectory")
    refused(lambda: Step.from_dict(wire("readFile", startLine=1, offset=1)), "startLine")


# --- refusals: kinds and unknown fields


@pytest.mark.parametrize("kind", ["dance", "Run", "", 5, None, [], {}, True], ids=repr)
def test_an_unknown_kind_is_refused_with_the_list_of_kinds(kind: Any) -> None:
    error = refused(lambda: Step.from_dict({"kind": kind}), "kind")
    assert all(known in error.remedy for known in KINDS)


def test_a_step_without_a_kind_is_refused() -> None:
    refused(lambda: Step.from_dict({"command": "true"}), "kind")


@pytest.mark.parametrize("data", [None, [], [1], "run", 5, b"{}"], ids=repr)
def test_what_is_not_an_object_is_refused(data: Any) -> None:
    """`Step.from_dict(json.loads(body))` meets every JSON value there is."""
    refused(lambda: Step.from_dict(data), "Step")


def test_an_unknown_field_is_refused_with_the_one_it_may_have_meant() -> None:
    error = refused(lambda: Step.from_dict(wire(timeoutSecond=5)), "timeoutSecond")
    assert "'timeoutSeconds'" in error.remedy
    assert "Run" in error.problem


def test_an_unknown_field_that_resembles_none_is_refused_with_the_list_of_fields() -> None:
    error = refused(lambda: Step.from_dict(wire("listFiles", zzz=5)), "zzz")
    assert "maxDepth" in error.remedy
    assert "max_depth" not in error.remedy


def test_a_long_unknown_field_does_not_make_a_long_message() -> None:
    with pytest.raises(InvalidStep) as caught:
        Step.from_dict({**wire(), "z" * 100_000: 1})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("kind", "field"), [("run", "path"), ("readFile", "content"), ("listFiles", "pattern"), ("shutdown", "command")]
)
def test_a_field_of_another_kind_is_refused(kind: str, field: str) -> None:
    error = refused(lambda: Step.from_dict(wire(kind, **{field: "x"})), field)
    assert KINDS[kind].__name__ in error.problem


@pytest.mark.parametrize(
    ("kind", "field"), [("run", "command"), ("readFile", "path"), ("writeFile", "content"), ("grep", "pattern")]
)
def test_a_missing_field_is_named(kind: str, field: str) -> None:
    data = wire(kind)
    del data[field]
    assert "missing" in refused(lambda: Step.from_dict(data), field).problem


def test_another_schema_version_is_refused_with_the_one_that_is_spoken() -> None:
    error = refused(lambda: Step.from_dict(wire(schemaVersion=2)), "schemaVersion")
    assert "1" in error.remedy


def test_a_step_of_a_peer_that_leaves_the_version_out_is_version_one() -> None:
    assert Step.from_dict({"kind": "shutdown"}) == Step.shutdown()


# --- SandboxSpec


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("id", value)
            for value in ("", "abc", "-abc", "abc-", "a" * 64, "a.bc", "a:bc", "a*bc", "a bc", "abcd\n", "äbcd", 5)
        ),
        *(("image", value) for value in ("", " x", "-x", "a\n", "x" * 513, "a b", "a;b", 5)),
        *(("env", value) for value in ({"A=B": "x"}, {"": "x"}, {"A\0": "x"}, {"A": None}, {"A": 5}, ["A=1"])),
        *(("env['A']", value) for value in ({"A": "x\0"}, {"A": LONE_SURROGATE})),
        *(("labels", value) for value in ({"a": 5}, {str(n): "" for n in range(65)}, "a=b")),
        ("labels['a']", {"a": LONE_SURROGATE}),
        *(("workdir", value) for value in ("work", "", "/a\0", "/a\n\0", "/" + "x" * 256, "/" + "a/" * 2048, 5)),
        *(("user", value) for value in ("a b", "root\n", -1)),
        *(("concurrency", value) for value in (0, -1, limits.CONCURRENCY_MAX + 1, 1.5, "2", True)),
        *(("max_lifetime", value) for value in (0, -1, math.nan, math.inf, "5")),
        *(("idle_ttl", value) for value in (0, -1, math.nan, math.inf, "5")),
        ("schema_version", 2),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_spec_that_no_backend_could_launch_is_refused(field: str, value: Any) -> None:
    refused(lambda: SandboxSpec.build(**{field.partition("[")[0]: value}), field, InvalidSpec)


@pytest.mark.parametrize("env", [{"A=B": SECRET}, {"TOKEN": SECRET, "N": 5}, {f"TOKEN={SECRET}": ""}, [SECRET]], ids=repr)
def test_a_refused_spec_does_not_tell_its_environment(env: Any) -> None:
    assert SECRET not in str(refused(lambda: SandboxSpec.build(env=env), "env", InvalidSpec))


def test_an_unknown_field_of_a_spec_is_refused() -> None:
    error = refused(lambda: SandboxSpec.build(imagee="x"), "imagee", InvalidSpec)
    assert "'image'" in error.remedy
    refused(lambda: SandboxSpec.from_dict({"max_lifetime": 5}), "max_lifetime", InvalidSpec)


@pytest.mark.parametrize("sandbox", ["abcd", "box-1", "A_b-9", "a" * 63, "0000"])
def test_sandbox_ids_are_accepted(sandbox: str) -> None:
    assert SandboxSpec.build(id=sandbox).id == sandbox


def test_a_spec_on_the_wire_has_units_in_its_names_and_no_defaults() -> None:
    spec = SandboxSpec.build(image="python:3.12", id="box-1", env={"A": "1"}, max_lifetime=60, idle_ttl=5.5)
    data = {
        "schemaVersion": 1,
        "image": "python:3.12",
        "id": "box-1",
        "env": {"A": "1"},
        "maxLifetimeSeconds": 60.0,
        "idleTtlSeconds": 5.5,
    }
    assert json.loads(msgspec.json.encode(spec)) == spec.to_dict() == data
    assert SandboxSpec.from_dict(data) == spec
    assert SandboxSpec.build().to_dict() == {"schemaVersion": 1}


def test_specs_are_immutable_hashable_and_picklable() -> None:
    spec = SandboxSpec.build(image="python:3.12", env={"A": "1"}, labels={"team": "x"})
    assert {spec, SandboxSpec.from_dict(spec.to_dict())} == {spec}
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec  # noqa: S301  # of our own making
    with pytest.raises(AttributeError):
        spec.image = "other"  # type: ignore[misc]  # the point of this test
    labels: Any = spec.labels
    with pytest.raises(TypeError):
        labels["team"] = "y"


# --- StepResult


def test_a_result_on_the_wire_has_units_in_its_names_and_no_defaults() -> None:
    result = StepResult(
        step_id="a",
        sandbox_id="box-1",
        cause="timeout",
        signal=9,
        timed_out=True,
        duration=1.5,
        stdout_size=3,
        usage=Usage(user=0.5, system=0.25, max_rss=4096),
        oom_kills=1,
        first_event_id="1-0",
        last_event_id="2-0",
    )
    data = {
        "schemaVersion": 1,
        "stepId": "a",
        "sandboxId": "box-1",
        "cause": "timeout",
        "signal": 9,
        "timedOut": True,
        "durationSeconds": 1.5,
        "stdoutSize": 3,
        "usage": {"userSeconds": 0.5, "systemSeconds": 0.25, "maxRssBytes": 4096},
        "oomKills": 1,
        "firstEventId": "1-0",
        "lastEventId": "2-0",
    }
    assert json.loads(msgspec.json.encode(result)) == result.to_dict() == data
    assert StepResult.from_dict(data) == result
    assert StepResult(cause="lost").to_dict() == {"schemaVersion": 1, "cause": "lost"}


def test_results_are_immutable_hashable_and_picklable() -> None:
    result = StepResult(cause="exit", exit_code=0, usage=Usage(user=1.0))
    assert {result, StepResult.from_dict(result.to_dict())} == {result}
    assert pickle.loads(pickle.dumps(result)) == copy.deepcopy(result) == result  # noqa: S301  # of our own making
    with pytest.raises(AttributeError):
        result.exit_code = 0  # type: ignore[misc]  # the point of this test


def test_unknown_fields_of_a_result_are_ignored_and_a_newer_version_is_read() -> None:
    """A newer worker may have written them; an older client still wants to know how the step ended."""
    result = StepResult.from_dict(
        {"schemaVersion": 7, "cause": "exit", "exitCode": 3, "mood": "good", "usage": {"gpuSeconds": 1}}
    )
    assert (result.exit_code, result.schema_version, result.usage) == (3, 7, Usage())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cause", "magic"),
        ("cause", None),
        ("exitCode", -1),
        ("exitCode", 256),
        ("exitCode", "0"),
        ("exitCode", 0.5),
        ("signal", 0),
        ("signal", 65),
        ("timedOut", 1),
        ("durationSeconds", -1),
        ("durationSeconds", math.nan),
        ("error", "x" * (2 * limits.FAILURE_TAIL + 1)),
        ("stdout", "x" * (2 * limits.RESULT_STREAM_MAX + 1)),
        ("stderr", "x" * (2 * limits.RESULT_STREAM_MAX + 1)),
        ("stdout", 5),
        ("content", "x" * (2 * limits.READ_MAX + 1)),
        ("errorCode", "magic"),
        ("fileSize", -1),
        ("fileSize", 2**63),
        ("truncated", "no"),
        ("stdoutSize", -1),
        ("stdoutSize", 2**63),
        ("stderrSize", 1.5),
        ("usage", []),
        ("usage", {"userSeconds": -1}),
        ("usage", {"maxRssBytes": -1}),
        ("oomKills", -1),
        ("survivors", "many"),
        ("survivors", 2**63),
        ("firstEventId", ""),
        ("firstEventId", "1"),
        ("firstEventId", "-1-0"),
        ("firstEventId", "1-0\n"),
        ("firstEventId", "18446744073709551616-0"),
        ("lastEventId", "0-99999999999999999999"),
        ("lastEventId", "٣-٣"),
        ("stepId", "x" * 129),
        ("sandboxId", "x" * 64),
        ("schemaVersion", 0),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_hostile_result_is_bounded(field: str, value: Any) -> None:
    """A sandbox wrote it: sizes, numbers and ids that no honest worker writes are refused by whoever reads."""
    refused(lambda: StepResult.from_dict({"cause": "exit", field: value}), field, InvalidInput)


def test_a_result_without_a_cause_is_refused() -> None:
    refused(lambda: StepResult.from_dict({"exitCode": 0}), "cause", InvalidInput)


@pytest.mark.parametrize(
    ("result", "ok"),
    [
        (StepResult(cause="exit", exit_code=0), True),
        (StepResult(cause="exit", exit_code=1), False),
        (StepResult(cause="exit"), False),
        (StepResult(cause="signal", signal=9), False),
        (StepResult(cause="timeout", exit_code=0, timed_out=True), False),
        (StepResult(cause="cancelled", exit_code=0), False),
        (StepResult(cause="oom"), False),
        (StepResult(cause="lost"), False),
        (StepResult(cause="rejected"), False),
        (StepResult(cause="infra"), False),
    ],
    ids=repr,
)
def test_only_a_command_that_ended_by_itself_with_zero_is_ok(result: StepResult, ok: bool) -> None:
    assert result.ok is ok
    if ok:
        assert result.check() is result
        return
    with pytest.raises(StepEnded) as caught:
        result.check()
    expected = {"cancelled": StepCancelled, "lost": StepLost}.get(result.cause, StepFailed)
    assert type(caught.value) is expected
    assert caught.value.result is result


def test_a_failed_check_says_which_step_of_which_sandbox_and_ends_with_its_last_words() -> None:
    stderr = "x" * 100_000 + "\nsegfault at line 9\n"
    result = StepResult(step_id="build", sandbox_id="box-1", cause="exit", exit_code=2, stdout="noise", stderr=stderr)
    with pytest.raises(StepFailed) as caught:
        result.check()
    error = caught.value
    assert (error.sandbox_id, error.step_id) == ("box-1", "build")
    assert str(error).startswith("step build of sandbox box-1: exit code 2\n")
    assert str(error).endswith("segfault at line 9")
    assert len(str(error)) < limits.FAILURE_TAIL + 100


@pytest.mark.parametrize(
    ("result", "description"),
    [
        (StepResult(cause="exit", exit_code=3), "exit code 3"),
        (StepResult(cause="exit", exit_code=3, stdout="only this\n"), "exit code 3\nonly this"),
        (StepResult(cause="exit", exit_code=3, stdout="a", stderr="b"), "exit code 3\nb"),
        (StepResult(cause="signal", signal=11), "killed by signal 11"),
        (StepResult(cause="timeout", duration=1.5), "timed out after 1.5 s"),
        (StepResult(cause="oom"), "killed: out of memory"),
        (StepResult(cause="oom", error="limit 64 MiB"), "killed: out of memory: limit 64 MiB"),
        (StepResult(cause="lost", error="the node is gone"), "lost: the node is gone"),
        (StepResult(cause="rejected", error="no such kind", stderr="no such kind"), "rejected: no such kind"),
    ],
    ids=repr,
)
def test_describe_says_how_it_ended_and_what_it_printed_last(result: StepResult, description: str) -> None:
    assert result.describe() == description
