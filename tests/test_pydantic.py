"""Our types in a user's pydantic models and FastAPI routes, without any adapter of the user's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Body, FastAPI
from pydantic import BaseModel, TypeAdapter, ValidationError

from sandbox_queue.models import KINDS, ReadFile, Run, SandboxSpec, Step, StepResult, Usage

STEP = Step.run(["make", "test"], env={"A": "1", "GONE": None}, stdin=b"\xff\x00", timeout=5, step_id="build")
RESULT = StepResult(step_id="build", sandbox_id="box-1", cause="exit", exit_code=0, duration=0.5, usage=Usage(user=0.25))
SPEC = SandboxSpec.build(image="python:3.12", id="box-1", env={"A": "1"}, idle_ttl=60)


class Order(BaseModel):
    """A user's model."""

    step: Step
    spec: SandboxSpec | None = None
    results: list[StepResult] = []


ORDER = Order(step=STEP, spec=SPEC, results=[RESULT])


# --- models


def test_instances_are_taken_as_they_are() -> None:
    assert ORDER.step is STEP
    assert ORDER.spec is SPEC
    assert ORDER.results[0] is RESULT


def test_dicts_with_wire_names_are_validated() -> None:
    order = Order.model_validate({"step": STEP.to_dict(), "spec": SPEC.to_dict(), "results": [RESULT.to_dict()]})
    assert order == ORDER
    assert type(order.step) is Run


def test_json_is_validated() -> None:
    text = json.dumps({"step": STEP.to_dict(), "results": [RESULT.to_dict()]})
    assert Order.model_validate_json(text) == Order(step=STEP, results=[RESULT])


def test_a_dump_is_made_of_wire_names_and_can_be_validated_again() -> None:
    for dump in (ORDER.model_dump(), ORDER.model_dump(mode="json"), json.loads(ORDER.model_dump_json())):
        assert dump == {"step": STEP.to_dict(), "spec": SPEC.to_dict(), "results": [RESULT.to_dict()]}
        assert Order.model_validate(dump) == ORDER
    assert Order.model_validate_json(ORDER.model_dump_json()) == ORDER


def test_a_model_can_be_copied_deeply() -> None:
    assert ORDER.model_copy(deep=True) == ORDER


@pytest.mark.parametrize("step", [Step.read_file("a"), Step.grep("x", glob="*.py"), Step.shutdown()], ids=repr)
def test_every_kind_of_step_fits_a_field_of_type_step(step: Step) -> None:
    assert Order.model_validate_json(Order(step=step).model_dump_json()).step == step


def test_a_field_can_be_narrowed_to_one_kind_of_step() -> None:
    adapter = TypeAdapter(ReadFile)
    assert adapter.validate_python({"kind": "readFile", "path": "a"}) == Step.read_file("a")
    with pytest.raises(ValidationError, match="kind"):
        adapter.validate_python(STEP.to_dict())
    with pytest.raises(ValidationError, match="ReadFile"):
        adapter.validate_python(STEP)


@pytest.mark.parametrize(
    ("step", "complaint"),
    [
        ({"kind": "run", "command": "x", "timeoutSeconds": -1}, "timeoutSeconds: .*; give seconds, more than 0"),
        ({"kind": "run", "command": "x", "workingDirectory": "relative"}, "'relative' is relative; give an absolute path"),
        ({"kind": "run", "command": "x", "comand": "y"}, "comand: is not a field of Run; did you mean 'command'"),
        ({"kind": "dance"}, "kind: invalid value 'dance'; give one of run, readFile"),
        ({"kind": ["run"]}, "kind: "),
        ({"kind": {}}, "kind: "),
        ({}, "kind: is missing"),
        (5, "expected a Step or its dict, got int"),
        ([], "expected a Step or its dict, got list"),
        (None, "expected a Step or its dict, got NoneType"),
        (RESULT, "expected a Step or its dict, got StepResult"),
    ],
    ids=repr,
)
def test_what_is_not_a_step_is_a_validation_error_in_our_words(step: Any, complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint) as caught:
        Order.model_validate({"step": step})
    assert [error["loc"] for error in caught.value.errors()] == [("step",)]


def test_errors_of_specs_and_results_are_validation_errors_too() -> None:
    with pytest.raises(ValidationError) as caught:
        Order.model_validate({"step": STEP, "spec": {"concurrency": 0}, "results": [RESULT, {"cause": "magic"}]})
    assert {error["loc"][:1] for error in caught.value.errors()} == {("spec",), ("results",)}


def test_a_model_shows_no_value_of_the_environment() -> None:
    order = Order(step=Step.run("env", env={"TOKEN": "hunter2"}), spec=SandboxSpec.build(env={"TOKEN": "hunter2"}))
    assert "hunter2" not in repr(order)


# --- JSON Schema


def references(schema: Any) -> Iterator[str]:
    """Every `$ref` in a schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for value in schema.values():
            yield from references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from references(item)


def resolve(document: Any, reference: str) -> Any:
    """What a reference names, in its own document."""
    assert reference.startswith("#/")
    for part in reference.removeprefix("#/").split("/"):
        document = document[part]
    return document


def kinds_of(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The members of a Step's schema, by their kind."""
    members = {member["properties"]["kind"]["enum"][0]: member for member in schema["anyOf"]}
    assert len(members) == len(schema["anyOf"])
    return members


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_a_model_with_our_types_has_a_json_schema_without_dangling_references(mode: Any) -> None:
    schema = Order.model_json_schema(mode=mode)
    for reference in references(schema):
        assert resolve(schema, reference)


def test_the_json_schema_of_a_step_describes_each_kind_by_its_wire_names() -> None:
    members = kinds_of(Order.model_json_schema()["properties"]["step"])
    assert set(members) == set(KINDS)
    for kind, cls in KINDS.items():
        assert set(members[kind]["properties"]) == {"kind", *cls.__struct_encode_fields__}
        assert members[kind]["additionalProperties"] is False
    run = members["run"]
    assert "command" in run["required"]
    assert "seconds" in run["properties"]["timeoutSeconds"]["description"]


def test_a_narrowed_field_has_the_schema_of_that_kind() -> None:
    schema = TypeAdapter(ReadFile).json_schema()
    assert set(schema["properties"]) == {"kind", *ReadFile.__struct_encode_fields__}


def test_the_json_schema_of_a_result_lists_the_causes() -> None:
    schema = TypeAdapter(StepResult).json_schema()
    assert {"exit", "timeout", "oom", "lost"} <= set(schema["properties"]["cause"]["enum"])
    assert "userSeconds" in json.dumps(schema["properties"]["usage"])


# --- FastAPI


@pytest.fixture
async def api() -> AsyncIterator[httpx.AsyncClient]:
    """A user's service. `Body()` is needed: FastAPI takes what is no pydantic model for a query parameter.

    Not FastAPI's TestClient: which HTTP library that one wants changes with its releases.
    """
    app = FastAPI()

    @app.post("/steps")
    def take_step(step: Annotated[Step, Body()]) -> StepResult:
        return StepResult(step_id=step.step_id or "", cause="exit", exit_code=0)

    @app.post("/echo", response_model=Step)
    def echo(step: Annotated[Step, Body()]) -> Any:
        return step

    @app.post("/orders")
    def take_order(order: Order) -> list[StepResult]:
        return order.results

    @app.post("/specs", response_model=SandboxSpec | None)
    def take_spec(spec: Annotated[SandboxSpec, Body()]) -> Any:
        return spec.to_dict()

    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        yield client


async def test_a_step_is_a_request_body_and_a_result_is_a_response(api: httpx.AsyncClient) -> None:
    answer = await api.post("/steps", json=STEP.to_dict())
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"schemaVersion": 1, "stepId": "build", "cause": "exit", "exitCode": 0}


async def test_a_step_comes_back_from_a_route_as_it_was_sent(api: httpx.AsyncClient) -> None:
    answer = await api.post("/echo", json=STEP.to_dict())
    assert answer.status_code == 200, answer.text
    assert Step.from_dict(answer.json()) == STEP


async def test_our_types_nest_in_bodies_and_responses(api: httpx.AsyncClient) -> None:
    answer = await api.post("/orders", json=ORDER.model_dump(mode="json"))
    assert answer.status_code == 200, answer.text
    assert answer.json() == [RESULT.to_dict()]


async def test_a_response_model_accepts_the_dict_of_a_spec(api: httpx.AsyncClient) -> None:
    answer = await api.post("/specs", json=SPEC.to_dict())
    assert answer.status_code == 200, answer.text
    assert answer.json() == SPEC.to_dict()


@pytest.mark.parametrize(
    "body", [{"kind": "run"}, {"kind": "run", "command": "x", "timeoutSeconds": 0}, {"kind": []}, {}, [], 5, None], ids=repr
)
async def test_a_bad_body_is_the_clients_mistake_and_not_ours(api: httpx.AsyncClient, body: Any) -> None:
    """422 with our message; an exception that pydantic does not know would have been a 500."""
    answer = await api.post("/steps", json=body)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"][0] == "body"


async def test_openapi_describes_our_types_without_dangling_references(api: httpx.AsyncClient) -> None:
    document = (await api.get("/openapi.json")).json()
    found = list(references(document))
    assert found
    for reference in found:
        assert resolve(document, reference)
    body = document["paths"]["/steps"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(kinds_of(resolve(document, body["$ref"]) if "$ref" in body else body)) == set(KINDS)
