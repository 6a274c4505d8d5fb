"""What is made from the code is up to date, and is what it says it is."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from sandbox_queue import SandboxSpec, Step, StepResult
from sandbox_queue.settings import Settings
from tools.generate import ROOT, SCHEMAS, generated

STEPS: list[Step] = [
    Step.run("make test", env={"CI": "1", "HOME": None}, stdin=b"\0\xff", user=1000, kill_background=True, step_id="a-1"),
    Step.run(["true"]),
    Step.read_file("notes.txt", start_line=3, line_count=10, with_line_numbers=True),
    Step.write_file("image.png", b"\x89PNG", offset=0),
    Step.list_files(max_depth=3, sort_by="mtime"),
    Step.grep("TODO", glob="*.py", head_limit=5, context_before=1, output_mode="filesWithMatches"),
    Step.directory_tree(exclude_globs=[".git"]),
    Step.shutdown(),
]


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((ROOT / name).read_text()))


def test_every_committed_file_is_what_the_code_says() -> None:
    stale = [name for name, text in generated().items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]
    assert not stale, f"out of date: {', '.join(stale)}; run `make generate` and commit what it wrote"


def test_no_schema_is_left_over() -> None:
    assert {f"schemas/{path.name}" for path in (ROOT / "schemas").iterdir()} == set(SCHEMAS)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_is_valid_json_schema(name: str) -> None:
    Draft202012Validator.check_schema(json.loads((ROOT / name).read_text()))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: type(step).__name__)
def test_the_schema_accepts_every_kind_of_step(step: Step) -> None:
    validator("schemas/step.json").validate(json.loads(msgspec.json.encode(step)))


@pytest.mark.parametrize(
    "step",
    [
        {},
        {"kind": "dance"},
        {"kind": "run"},
        {"kind": "run", "command": ""},
        {"kind": "run", "command": "true", "colour": "red"},
        {"kind": "run", "command": "true", "timeoutSeconds": 0},
        {"kind": "run", "command": "true", "stepId": "17"},
        {"kind": "run", "command": "true", "schemaVersion": 2},
        {"kind": "run", "command": "true", "user": "root; reboot"},
        {"kind": "readFile", "path": "a", "startLine": 0},
        {"kind": "shutdown", "path": "a"},
    ],
    ids=str,
)
def test_the_schema_rejects_what_the_code_rejects(step: dict[str, Any]) -> None:
    assert not validator("schemas/step.json").is_valid(step)
    with pytest.raises(ValueError, match=r"."):
        Step.from_dict(step)


def test_the_result_schema_lets_a_newer_peer_say_more() -> None:
    result = StepResult(cause="exit", exit_code=0, stdout="hello", last_event_id="1-0").to_dict()
    schema = validator("schemas/step-result.json")
    schema.validate({**result, "somethingNew": 1})
    assert not schema.is_valid({**result, "cause": "boredom"})
    assert not schema.is_valid({**result, "exitCode": 256})


def test_the_spec_schema_knows_a_good_sandbox_from_a_bad_one() -> None:
    spec = SandboxSpec.build(image="python:3.12", id="pipe-42", env={"A": "b"}, idle_ttl=60).to_dict()
    schema = validator("schemas/sandbox-spec.json")
    schema.validate(spec)
    assert not schema.is_valid({**spec, "id": "-"})
    assert not schema.is_valid({**spec, "concurrency": 1000})
    assert not schema.is_valid({**spec, "hostPath": "/"})


def test_every_setting_says_its_default_and_why() -> None:
    page = (ROOT / "docs/settings.md").read_text()
    for name, field in Settings.model_fields.items():
        assert f"SANDBOX_QUEUE_{name.upper()}`" in page
        assert field.description, f"{name} has no docstring"
        assert "Default" in field.description, f"{name}: its docstring names no default"
