"""The tree of errors: as drawn, as exported, and what each one tells."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

import sandbox_queue
from sandbox_queue import errors
from sandbox_queue.errors import (
    BrokerDenied,
    BrokerError,
    BrokerUnavailable,
    BrokerUnsuitable,
    InvalidCursor,
    InvalidInput,
    InvalidSettings,
    InvalidSpec,
    InvalidStep,
    LaunchFailed,
    ResultExpired,
    SandboxError,
    SandboxExists,
    SandboxLost,
    SandboxNotFound,
    SandboxQueueError,
    StepCancelled,
    StepEnded,
    StepError,
    StepFailed,
    StepLost,
    StepNotFound,
)
from sandbox_queue.models import StepResult

RESULT = StepResult(step_id="build", sandbox_id="box-1", cause="exit", exit_code=2)

ONE_OF_EACH: list[SandboxQueueError] = [
    InvalidInput("field", "problem", "remedy"),
    InvalidStep("timeout", "is negative", "give seconds"),
    InvalidSpec("image", "is empty", "give an image"),
    InvalidCursor("cursor", "is none", "give one"),
    InvalidSettings("REDIS_URL", "is no URL", "write one"),
    BrokerError("is odd", url="redis://host:1/0"),
    BrokerUnavailable("is away", url="redis://host:1/0"),
    BrokerDenied("says no", url="redis://host:1/0"),
    BrokerUnsuitable("is too old", url="redis://host:1/0"),
    SandboxError("box-1", "is odd"),
    SandboxExists("box-1", "the id is taken"),
    SandboxNotFound("box-1", "nobody knows it"),
    SandboxLost("box-1", "out of memory"),
    LaunchFailed("box-1", "pulling the image", "no such image", "last words"),
    StepError("box-1", "build", "is odd"),
    StepNotFound("box-1", "build", "nobody knows it"),
    ResultExpired("box-1", "build", "kept no longer"),
    StepEnded(RESULT, "ended"),
    StepFailed(RESULT, "exit code 2"),
    StepCancelled(RESULT, "cancelled"),
    StepLost(RESULT, "lost"),
]
each_error = pytest.mark.parametrize("error", ONE_OF_EACH, ids=[type(error).__name__ for error in ONE_OF_EACH])


def classes() -> dict[str, type[SandboxQueueError]]:
    """Every public class that errors.py defines."""
    return {
        name: cls
        for name, cls in vars(errors).items()
        if inspect.isclass(cls)
        and issubclass(cls, SandboxQueueError)
        and cls.__module__ == errors.__name__
        and not name.startswith("_")
    }


def drawn() -> dict[str, tuple[str | None, list[str]]]:
    """The tree in the docstring: name -> (parent, the attributes that are named beside it)."""
    tree: dict[str, tuple[str | None, list[str]]] = {}
    path: list[str] = []
    for line in inspect.cleandoc(errors.__doc__ or "").splitlines():
        match = re.match(r"^([│ ]*[├└]── |)([A-Z]\w+)(?:\(\w+\))?(?:  +(.*))?$", line)
        if match:
            depth = len(match[1]) // 4
            del path[depth:]
            tree[match[2]] = (path[-1] if path else None, re.findall(r"`\.(\w+)`", match[3] or ""))
            path.append(match[2])
    return tree


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    by_class = {
        name: next((base.__name__ for base in cls.__bases__ if base.__name__ in classes()), None)
        for name, cls in classes().items()
    }
    assert {name: parent for name, (parent, _) in drawn().items()} == by_class
    assert by_class["SandboxQueueError"] is None


def test_every_error_has_an_example_here() -> None:
    assert {type(error) for error in ONE_OF_EACH} | {SandboxQueueError} == set(classes().values())


@each_error
def test_an_error_has_the_attributes_that_the_tree_promises(error: SandboxQueueError) -> None:
    tree, name = drawn(), type(error).__name__
    promised: list[str] = []
    at: str | None = name
    while at is not None:
        at, attributes = tree[at]
        promised += attributes
    assert promised
    for attribute in promised:
        assert getattr(error, attribute)


@each_error
def test_every_error_is_exported_and_caught_by_the_one_base(error: SandboxQueueError) -> None:
    assert getattr(sandbox_queue, type(error).__name__) is type(error)
    assert isinstance(error, sandbox_queue.SandboxQueueError)
    assert not isinstance(error, (OSError, RuntimeError))


def test_only_refused_input_is_a_value_error() -> None:
    names = {name for name, cls in classes().items() if issubclass(cls, ValueError)}
    assert names == {
        "InvalidInput",
        "InvalidStep",
        "InvalidSpec",
        "InvalidCursor",
        "InvalidSettings",
    }


@each_error
def test_an_error_survives_a_process_boundary(error: SandboxQueueError) -> None:
    """A process pool pickles what its workers raise; one that cannot be restored breaks the whole pool."""
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301  # of our own making
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InvalidStep("timeout", "is negative", "give seconds"), "timeout: is negative; give seconds"),
        (BrokerDenied("wrong password", url="redis://host:1/0"), "redis://host:1/0: wrong password"),
        (BrokerUnavailable("nobody answers"), "nobody answers"),
        (SandboxLost("box-1", "out of memory"), "sandbox box-1: out of memory"),
        (LaunchFailed("box-1", "pulling", "not found"), "sandbox box-1: launch failed while pulling: not found"),
        (LaunchFailed("box-1", "pulling", "not found", "log"), "sandbox box-1: launch failed while pulling: not found\nlog"),
        (StepNotFound("box-1", "build", "nobody knows it"), "step build of sandbox box-1: nobody knows it"),
        (StepFailed(RESULT, "exit code 2"), "step build of sandbox box-1: exit code 2"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_message_says_what_happened_and_to_whom(error: SandboxQueueError, message: str) -> None:
    assert str(error) == message


# --- the package's front page


def test_every_name_of_the_package_can_be_imported_and_is_listed() -> None:
    for name in sandbox_queue._MODULE_OF:
        assert getattr(sandbox_queue, name).__name__ == name
        assert name in dir(sandbox_queue)


def test_what_type_checkers_see_is_what_can_be_imported() -> None:
    """The names stand on that page twice: for type checkers, and for importing them when they are first used."""
    seen = set(
        re.findall(r"^    from sandbox_queue\.(\w+) import (\w+) as \2$", inspect.getsource(sandbox_queue), re.MULTILINE)
    )
    assert seen == {(module, name) for name, module in sandbox_queue._MODULE_OF.items()}


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Stepp'"):
        _ = sandbox_queue.Stepp


def test_the_package_exports_what_a_user_needs() -> None:
    needed = {
        "SandboxQueue",
        "Handle",
        "Step",
        "StepResult",
        "SandboxSpec",
        "Cursor",
        "Line",
        "Output",
        "Gap",
        "Started",
        "Finished",
    }
    assert needed | set(classes()) <= set(dir(sandbox_queue))
