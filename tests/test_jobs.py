"""arq's envelopes, written by us: equal to arq's own, exact for every value, and deaf to whatever is not JSON."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from arq import constants
from arq.jobs import deserialize_job, deserialize_result, serialize_job, serialize_result
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sandbox_queue import jobs, keys, limits
from sandbox_queue.errors import InvalidStep
from sandbox_queue.models import Cause, Encoding, Step, StepResult, Usage

STEP = Step.run(["make", "test"], env={"A": "1"}, stdin=b"\xff\x00", timeout=5)
RESULT = StepResult(step_id="build", sandbox_id="box-1", cause="exit", exit_code=0, stdout="é\0\u2028", duration=0.5)
DEEP = b"[" * 100_000 + b"]" * 100_000  # beyond what a recursive decoder survives

# A busy machine is no failure: no deadlines.
few = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
many = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# --- the same as arq's


def test_our_job_is_what_arq_would_have_written() -> None:
    ours = jobs.encode_job(STEP)
    theirs = serialize_job(jobs.FUNCTION, (STEP,), {}, None, json.loads(ours)["et"], serializer=jobs.dumps)
    assert ours == theirs


def test_arq_reads_our_job() -> None:
    job = deserialize_job(jobs.encode_job(STEP), deserializer=jobs.loads)
    assert (job.function, job.kwargs) == (jobs.FUNCTION, {})
    assert Step.from_dict(job.args[0]) == STEP


@pytest.mark.parametrize("argument", [STEP, STEP.to_dict()], ids=["a Step", "its dict"])
def test_we_read_arqs_job(argument: Any) -> None:
    assert jobs.decode_job(serialize_job("step", (argument,), {}, 1, 1_700_000_000_000, serializer=jobs.dumps)) == STEP


def test_our_result_is_what_arq_would_have_written() -> None:
    ours = jobs.encode_result("box-1:000000000001", "sandbox:box-1:queue", RESULT, 1_700_000_000_000)
    theirs = serialize_result(
        jobs.FUNCTION,
        (RESULT.step_id,),
        {},
        1,
        1_700_000_000_000,
        True,
        RESULT,
        1_700_000_000_000,
        json.loads(ours)["ft"],
        "",
        "sandbox:box-1:queue",
        "box-1:000000000001",
        serializer=jobs.dumps,
    )
    assert ours == theirs


def test_arq_reads_our_result() -> None:
    info = deserialize_result(jobs.encode_result("box-1:1", "q", RESULT, 1_700_000_000_000), deserializer=jobs.loads)
    assert (info.success, info.queue_name, info.job_id, *info.args) == (True, "q", "box-1:1", "build")
    assert StepResult.from_dict(info.result) == RESULT
    assert info.start_time <= info.finish_time


def test_we_read_arqs_result() -> None:
    data = serialize_result("step", (STEP,), {}, 1, 1, True, RESULT, 1, 2, "", "q", "box-1:1", serializer=jobs.dumps)
    assert data is not None
    assert jobs.decode_result(data, "box-1", "build") == RESULT


def test_a_result_keeps_the_step_id_and_not_the_whole_step() -> None:
    """arq would keep ten megabytes of arguments for an hour."""
    assert json.loads(jobs.encode_result("j", "q", RESULT, 0))["a"] == ["build"]


def test_our_key_names_are_arqs() -> None:
    assert keys.JOB.of("box-1", 7) == constants.job_key_prefix + keys.job_id("box-1", 7)
    assert keys.IN_PROGRESS.of("box-1", 7) == constants.in_progress_key_prefix + keys.job_id("box-1", 7)
    assert keys.RESULT.of("box-1", 7) == constants.result_key_prefix + keys.job_id("box-1", 7)
    for key in keys.TABLE:
        assert key.pattern.startswith(("arq:", "sandbox:{s}", "control:{s}")), "a prefix of arq's, or our own"


def test_job_ids_sort_as_their_numbers_do() -> None:
    """arq orders jobs of the same millisecond by name."""
    numbers = [1, 2, 9, 10, 99, 999, 1000, 99_999, 100_000, 10**9, 10**12 - 1]
    assert sorted(keys.job_id("box-1", n) for n in numbers) == [keys.job_id("box-1", n) for n in numbers]


@pytest.mark.parametrize(
    ("suffix", "step_id"),
    [("000000000017", "17"), ("000000000000", "0"), ("17", "17"), ("mine", "mine"), ("٣", "٣"), ("", ""), ("-1", "-1")],
)
def test_a_step_without_an_id_is_called_by_its_number(suffix: str, step_id: str) -> None:
    assert keys.default_step_id(suffix) == step_id


def test_a_number_of_absurd_length_is_no_reason_to_fail() -> None:
    assert keys.default_step_id("1" * 5000)


def test_a_key_wants_its_last_part_exactly_where_there_is_one() -> None:
    with pytest.raises(ValueError, match="missing"):
        keys.JOB.of("box-1")
    with pytest.raises(ValueError, match="out of place"):
        keys.QUEUE.of("box-1", 1)


# --- every value comes back

texts = st.text(st.characters(exclude_categories=["Cs"]))
arguments = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=50)
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0="), min_size=1, max_size=20)
paths = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=60)
step_ids = st.none() | st.from_regex(r"[A-Za-z0-9._-]{0,60}[A-Za-z._-][A-Za-z0-9._-]{0,60}", fullmatch=True)
common: dict[str, Any] = {
    "step_id": step_ids,
    "cwd": st.none() | paths.map(lambda path: "/" + path),
    "timeout": st.none() | st.floats(0, limits.STEP_TIMEOUT_MAX, exclude_min=True),
}
counts = st.none() | st.integers(1, 2**40)
globs = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
encodings: st.SearchStrategy[Encoding] = st.sampled_from(["utf-8", "base64"])

steps: dict[str, st.SearchStrategy[Step]] = {
    "run": st.builds(
        Step.run,
        st.lists(arguments, max_size=4).map(lambda args: ["make", *args]) | arguments.map(lambda text: "x" + text),
        env=st.dictionaries(names, st.none() | arguments, max_size=3),
        stdin=st.none() | st.binary() | texts,
        user=st.none() | st.integers(0, 2**32 - 1) | st.sampled_from(["root", "1:2", "_apt"]),
        kill_background=st.booleans(),
        **common,
    ),
    "readFile by lines": st.builds(
        Step.read_file, paths, start_line=counts, line_count=counts, with_line_numbers=st.booleans(), **common
    ),
    "readFile by bytes": st.builds(
        Step.read_file, paths, offset=st.none() | st.integers(0, 2**62), encoding=encodings, **common
    ),
    "writeFile": st.builds(Step.write_file, paths, texts | st.binary(), offset=st.none() | st.integers(0, 2**62), **common),
    "listFiles": st.builds(
        Step.list_files,
        paths,
        max_depth=st.none() | st.integers(1, 64),
        sort_by=st.sampled_from(["name", "size", "mtime"]),
        **common,
    ),
    "grep": st.builds(
        Step.grep,
        texts.filter(bool),
        paths,
        glob=st.none() | globs,
        head_limit=st.none() | st.integers(1, 1000),
        context_before=st.integers(0, 100),
        context_after=st.integers(0, 100),
        output_mode=st.sampled_from(["content", "filesWithMatches", "count"]),
        **common,
    ),
    "directoryTree": st.builds(
        Step.directory_tree,
        paths,
        max_depth=st.none() | st.integers(1, 64),
        exclude_globs=st.lists(globs, max_size=3),
        **common,
    ),
    "shutdown": st.builds(Step.shutdown, step_id=step_ids),
}

causes: st.SearchStrategy[Cause] = st.sampled_from(
    ["exit", "signal", "timeout", "cancelled", "oom", "lost", "rejected", "infra"]
)
sizes = st.integers(0, 2**63 - 1)
amounts = st.floats(0, 1e12)
event_ids = st.none() | st.builds("{}-{}".format, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
results: st.SearchStrategy[StepResult] = st.builds(
    StepResult,
    step_id=step_ids.map(lambda text: text or "1"),
    sandbox_id=st.just("box-1"),
    cause=causes,
    exit_code=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 64),
    timed_out=st.booleans(),
    duration=amounts,
    error=st.none() | texts,
    stdout=texts,
    stderr=texts,
    content=st.none() | texts,
    truncated=st.booleans(),
    stdout_size=st.none() | sizes,
    stderr_size=st.none() | sizes,
    usage=st.none() | st.builds(Usage, user=amounts, system=amounts, max_rss=st.none() | sizes),
    oom_kills=sizes,
    survivors=sizes,
    first_event_id=event_ids,
    last_event_id=event_ids,
)


@pytest.mark.parametrize("kind", steps)
@few
@given(st.data())
def test_every_step_comes_back_as_it_was_sent(kind: str, drawn: st.DataObject) -> None:
    step = drawn.draw(steps[kind])
    data = jobs.encode_job(step)
    assert jobs.decode_job(data) == step
    assert jobs.decode_job(jobs.dumps(json.loads(data))) == step, "it is plain JSON, that any library may re-write"


@pytest.mark.parametrize("kind", steps)
@few
@given(st.data())
def test_every_step_comes_back_from_its_dict(kind: str, drawn: st.DataObject) -> None:
    step = drawn.draw(steps[kind])
    assert Step.from_dict(json.loads(json.dumps(step.to_dict()))) == step


@many
@given(results)
def test_every_result_comes_back_as_it_was_sent(result: StepResult) -> None:
    data = jobs.encode_result("box-1:1", "q", result, 0)
    assert jobs.decode_result(data, "box-1", result.step_id) == result
    assert StepResult.from_dict(json.loads(data)["r"]) == result


def test_the_longest_step_and_result_come_back() -> None:
    step = Step.write_file("a", b"\xff" * limits.WRITE_MAX)
    assert jobs.decode_job(jobs.encode_job(step)) == step
    worst = "\x01" * limits.RESULT_STREAM_MAX  # six bytes each, in JSON
    result = StepResult(sandbox_id="b", step_id="1", cause="exit", stdout=worst, stderr=worst, content="\x01" * limits.READ_MAX)
    data = jobs.encode_result("j", "q", result, 0)
    assert len(data) <= limits.RESULT_WIRE_MAX
    assert jobs.decode_result(data, "b", "1") == result


# --- whatever else comes

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=12,
)
step_like = st.fixed_dictionaries(
    {"kind": st.sampled_from(["run", "readFile", "grep", "shutdown"]) | anything},
    optional=dict.fromkeys(
        ("command", "args", "env", "path", "content", "pattern", "timeoutSeconds", "schemaVersion", "x"), anything
    ),
)
job_like = st.fixed_dictionaries(
    {},
    optional={
        "t": st.none() | anything,
        "f": st.just("step") | anything,
        "a": st.lists(step_like | anything, max_size=2) | anything,
        "k": st.just({}) | anything,
        "et": st.integers() | anything,
    },
)
result_like = st.fixed_dictionaries(
    {},
    optional={
        "s": st.booleans() | anything,
        "r": anything
        | st.fixed_dictionaries(
            {"cause": causes | anything},
            optional=dict.fromkeys(
                ("exitCode", "stdout", "usage", "firstEventId", "stdoutSize", "schemaVersion", "stepId"), anything
            ),
        ),
    },
)
garbage = st.binary() | anything.map(lambda value: json.dumps(value).encode())


@many
@given(garbage | job_like.map(lambda job: json.dumps(job).encode()))
@example(pickle.dumps({"t": None, "f": "step", "a": ({"kind": "shutdown"},), "k": {}, "et": 1}))
@example(b"")
@example(b'{"t":null,"f":"\xff","a":[{"kind":"shutdown"}],"k":{},"et":1}')
@example(b'{"t":null,"f":"step","a":[{"kind":"run","command":"\xff"}],"k":{},"et":1}')
@example(b'{"t":null,"f":"step","a":[{"kind":"run","command":"\\ud800"}],"k":{},"et":1}')
@example(b'{"t":null,"f":"step","a":[{"kind":[]}],"k":{},"et":1}')
@example(b'{"t":null,"f":"step","a":[[]],"k":{},"et":1}')
def test_whatever_is_given_as_a_job_is_a_step_or_is_refused(data: bytes) -> None:
    try:
        step = jobs.decode_job(data)
    except InvalidStep as refusal:
        complete = bool(refusal.problem and refusal.remedy)
    else:
        complete = jobs.decode_job(jobs.encode_job(step)) == step
    assert complete


@pytest.mark.parametrize(
    "data",
    [
        DEEP,
        b'{"t":null,"f":"step","a":[{"kind":"shutdown"}],"k":{"x":' + DEEP + b'},"et":1}',
        b'{"t":null,"f":"step","a":[{"kind":"run","command":"x","env":' + DEEP + b'}],"k":{},"et":1}',
        b'{"t":null,"f":"step","a":[' + DEEP + b'],"k":{},"et":1}',
        b'{"zzz":' + DEEP + b"}",
    ],
    ids=["all", "keyword arguments", "a field", "the step", "unknown field"],
)
def test_a_job_that_is_nested_too_deeply_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidStep):
        jobs.decode_job(data)


@pytest.mark.parametrize(
    ("job", "field"),
    [
        ({"a": [{"kind": "run", "command": "x", "timeoutSeconds": -1}]}, "timeoutSeconds"),
        ({"a": [{"kind": "run", "command": "x", "zzz": 1}]}, "zzz"),
        ({"a": [{"kind": "dance"}]}, "kind"),
        ({"a": [{"kind": "run", "command": "a\0"}]}, "command"),
        ({"a": []}, "job"),
        ({"a": [{"kind": "shutdown"}, {"kind": "shutdown"}]}, "job"),
        ({}, "job"),
    ],
    ids=repr,
)
def test_a_refused_job_says_which_field_is_wrong(job: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidStep) as caught:
        jobs.decode_job(json.dumps({"t": None, "f": "step", "k": {}, "et": 1, **job}).encode())
    assert caught.value.field == field


@many
@given(garbage | result_like.map(lambda result: json.dumps(result).encode()))
@example(pickle.dumps({"s": True, "r": {"cause": "exit", "exitCode": 0}}))
@example(b"")
@example(b'{"s":true,"r":{"cause":"exit","stdout":"\xff"}}')
@example(b'{"s":true,"r":{"cause":"exit","stdout":"\\ud800"}}')
@example(b'{"s":false,"r":"unable to serialize result"}')
@example(b'{"s":true,"r":{"cause":"exit","durationSeconds":1e999}}')
@example(b'{"s":true,"r":{"cause":"exit","usage":{"maxRssBytes":' + b"9" * 5000 + b"}}}")
def test_whatever_a_sandbox_leaves_as_a_result_is_a_result_of_that_step(data: bytes) -> None:
    """One malformed entry fails one step, never the process that reads it."""
    result = jobs.decode_result(data, "box-1", "build")
    assert (result.sandbox_id, result.step_id) == ("box-1", "build")
    assert result.cause != "infra" or result.error or data
    assert StepResult.from_dict(result.to_dict()) == result, "and it can be passed on"


@pytest.mark.parametrize(
    "data",
    [
        DEEP,
        b'{"s":true,"r":' + DEEP + b"}",
        b'{"s":true,"x":' + DEEP + b',"r":{"cause":"exit"}}',
        b'{"s":true,"r":{"cause":"exit","x":' + DEEP + b"}}",
    ],
    ids=["all", "the result", "beside the result", "in the result"],
)
def test_a_result_that_is_nested_too_deeply_fails_its_own_step(data: bytes) -> None:
    assert jobs.decode_result(data, "box-1", "build").cause == "infra"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"junk",
        b"[]",
        b"{}",
        b'{"s":true,"r":{}}',
        b'{"s":false,"r":"unable to serialize result"}',
        pickle.dumps({"s": True}),
    ],
)
def test_a_malformed_result_is_the_sandboxs_failure_and_says_so(data: bytes) -> None:
    result = jobs.decode_result(data, "box-1", "build")
    assert (result.cause, result.ok, result.exit_code) == ("infra", False, None)
    assert "malformed result" in (result.error or "")


def test_a_sandbox_cannot_write_a_result_in_the_name_of_another() -> None:
    forged = StepResult(step_id="other", sandbox_id="box-2", cause="exit", exit_code=0)
    result = jobs.decode_result(jobs.encode_result("j", "q", forged, 0), "box-1", "build")
    assert (result.sandbox_id, result.step_id) == ("box-1", "build")


# --- no pickle


class _Bomb:
    """Raises where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('unpickled')",)


def test_a_pickle_is_never_loaded() -> None:
    bomb = pickle.dumps({"t": None, "f": "step", "a": (_Bomb(),), "k": {}, "et": 1, "s": True, "r": _Bomb()})
    with pytest.raises(SystemExit, match="unpickled"):
        pickle.loads(bomb)  # noqa: S301  # the bomb works
    with pytest.raises(InvalidStep, match="not JSON"):
        jobs.decode_job(bomb)
    assert jobs.decode_result(bomb, "box-1", "build").cause == "infra"


def test_what_we_write_is_json_in_utf_8() -> None:
    job = json.loads(jobs.encode_job(STEP).decode("utf-8"))
    assert set(job) == {"t", "f", "a", "k", "et"}
    result = json.loads(jobs.encode_result("j", "q", RESULT, 0).decode("utf-8"))
    assert set(result) == {"t", "f", "a", "k", "et", "s", "r", "st", "ft", "q", "id"}
