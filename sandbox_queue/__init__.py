"""sandbox-queue: run code you do not trust, step by step, somewhere safe.

Read in this order; one step passes each file once, always forward:

    settings · models · errors · limits     what can be said, and its bounds
    client · handle                         a service enqueues a Step and holds a Handle
    enqueue · keys · jobs                   one script puts it into Redis, as an arq job
    workers/loop                            the worker in the sandbox claims it, and finishes it
    events · stream · lines                 what it prints travels back, byte-exact
    results                                 whoever waits gets the result
    broker · embedded · wire · acl          the ground they stand on: Redis, and who may do what there

The names below are the public surface; everything is imported when first used, so that importing this package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox_queue.client import SandboxQueue as SandboxQueue
    from sandbox_queue.errors import BrokerDenied as BrokerDenied
    from sandbox_queue.errors import BrokerError as BrokerError
    from sandbox_queue.errors import BrokerUnavailable as BrokerUnavailable
    from sandbox_queue.errors import BrokerUnsuitable as BrokerUnsuitable
    from sandbox_queue.errors import InvalidCursor as InvalidCursor
    from sandbox_queue.errors import InvalidInput as InvalidInput
    from sandbox_queue.errors import InvalidSettings as InvalidSettings
    from sandbox_queue.errors import InvalidSpec as InvalidSpec
    from sandbox_queue.errors import InvalidStep as InvalidStep
    from sandbox_queue.errors import LaunchFailed as LaunchFailed
    from sandbox_queue.errors import ResultExpired as ResultExpired
    from sandbox_queue.errors import SandboxError as SandboxError
    from sandbox_queue.errors import SandboxExists as SandboxExists
    from sandbox_queue.errors import SandboxLost as SandboxLost
    from sandbox_queue.errors import SandboxNotFound as SandboxNotFound
    from sandbox_queue.errors import SandboxQueueError as SandboxQueueError
    from sandbox_queue.errors import StepCancelled as StepCancelled
    from sandbox_queue.errors import StepEnded as StepEnded
    from sandbox_queue.errors import StepError as StepError
    from sandbox_queue.errors import StepFailed as StepFailed
    from sandbox_queue.errors import StepLost as StepLost
    from sandbox_queue.errors import StepNotFound as StepNotFound
    from sandbox_queue.events import Cursor as Cursor
    from sandbox_queue.events import Finished as Finished
    from sandbox_queue.events import Gap as Gap
    from sandbox_queue.events import Line as Line
    from sandbox_queue.events import Output as Output
    from sandbox_queue.events import Started as Started
    from sandbox_queue.handle import Handle as Handle
    from sandbox_queue.models import SandboxSpec as SandboxSpec
    from sandbox_queue.models import Step as Step
    from sandbox_queue.models import StepResult as StepResult

__version__ = "0.1.0"

_HOME = {
    "client": ("SandboxQueue",),
    "handle": ("Handle",),
    "models": ("SandboxSpec", "Step", "StepResult"),
    "events": ("Cursor", "Finished", "Gap", "Line", "Output", "Started"),
    "errors": (
        "BrokerDenied",
        "BrokerError",
        "BrokerUnavailable",
        "BrokerUnsuitable",
        "InvalidCursor",
        "InvalidInput",
        "InvalidSettings",
        "InvalidSpec",
        "InvalidStep",
        "LaunchFailed",
        "ResultExpired",
        "SandboxError",
        "SandboxExists",
        "SandboxLost",
        "SandboxNotFound",
        "SandboxQueueError",
        "StepCancelled",
        "StepEnded",
        "StepError",
        "StepFailed",
        "StepLost",
        "StepNotFound",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
