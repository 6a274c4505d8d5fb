"""What can go wrong with *us*. What a user's command did is a `StepResult`, never an exception of its own accord.

SandboxQueueError
├── InvalidInput(ValueError)      refused before anything was started; `.field`, `.problem`, `.remedy`
│   ├── InvalidStep
│   ├── InvalidSpec
│   ├── InvalidCursor
│   └── InvalidSettings
├── BrokerError                   Redis or Valkey; `.url` carries no password
│   ├── BrokerUnavailable         nobody answers, or no longer
│   ├── BrokerDenied              it answers, and refuses us: password, permission
│   └── BrokerUnsuitable          it answers, and cannot do the job: version, Cluster, eviction policy
├── SandboxError                  `.sandbox_id`
│   ├── SandboxExists
│   ├── SandboxNotFound
│   ├── SandboxLost               it died; the message says of what
│   └── LaunchFailed              `.phase`, `.reason`, `.log_tail`
└── StepError                     `.sandbox_id`, `.step_id`
    ├── StepNotFound              no such step
    │   └── ResultExpired         there was one, and its result was kept no longer
    └── StepEnded                 raised by `StepResult.check()`; `.result`
        ├── StepFailed            the command failed: exit code, signal, timeout, out of memory
        ├── StepCancelled
        └── StepLost              it may have run, in part or wholly; it is never run again by itself
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandbox_queue.models import StepResult


class SandboxQueueError(Exception):
    """Base of everything that this package raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        return _revive, (type(self), self.args, self.__dict__)


class InvalidInput(SandboxQueueError, ValueError):
    """Input that was refused before anything was started."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{field}: {problem}; {remedy}")


class InvalidStep(InvalidInput):
    """A Step that cannot be run as it stands."""


class InvalidSpec(InvalidInput):
    """A SandboxSpec that no backend could launch."""


class InvalidCursor(InvalidInput):
    """A cursor that this package did not make."""


class InvalidSettings(InvalidInput):
    """A setting or environment variable with a value that has no meaning."""


class BrokerError(SandboxQueueError):
    """The broker cannot be used. `url` is safe to print: it never carries the password."""

    def __init__(self, message: str, *, url: str = "") -> None:
        self.url = url
        super().__init__(f"{url}: {message}" if url else message)


class BrokerUnavailable(BrokerError):
    """Nobody answers at that address, or no longer."""


class BrokerDenied(BrokerError):
    """The broker answers but refuses this user: wrong password, or a command is not permitted."""


class BrokerUnsuitable(BrokerError):
    """The broker answers but lacks something that the queue depends on."""


class SandboxError(SandboxQueueError):
    """Something about one sandbox."""

    def __init__(self, sandbox_id: str, message: str) -> None:
        self.sandbox_id = sandbox_id
        super().__init__(f"sandbox {sandbox_id}: {message}")


class SandboxExists(SandboxError):
    """The id is taken, or was used not long ago."""


class SandboxNotFound(SandboxError):
    """No sandbox of that id is known."""


class SandboxLost(SandboxError):
    """The sandbox died while it was needed."""


class LaunchFailed(SandboxError):
    """The sandbox did not come up; everything that had been started was removed again."""

    def __init__(self, sandbox_id: str, phase: str, reason: str, log_tail: str = "") -> None:
        self.phase = phase
        self.reason = reason
        self.log_tail = log_tail
        tail = f"\n{log_tail}" if log_tail else ""
        super().__init__(sandbox_id, f"launch failed while {phase}: {reason}{tail}")


class StepError(SandboxQueueError):
    """Something about one step."""

    def __init__(self, sandbox_id: str, step_id: str, message: str) -> None:
        self.sandbox_id = sandbox_id
        self.step_id = step_id
        super().__init__(f"step {step_id} of sandbox {sandbox_id}: {message}")


class StepNotFound(StepError):
    """No step of that id was ever enqueued for that sandbox."""


class ResultExpired(StepNotFound):
    """The step has ended, and its result was kept no longer."""


class StepEnded(StepError):
    """The step ended in a way that `StepResult.check()` does not accept."""

    def __init__(self, result: StepResult, message: str) -> None:
        self.result = result
        super().__init__(result.sandbox_id, result.step_id, message)


class StepFailed(StepEnded):
    """The command failed. The message ends with the last lines that it printed."""


class StepCancelled(StepEnded):
    """Somebody cancelled the step."""


class StepLost(StepEnded):
    """Its worker vanished. It may have run, in part or wholly; it is never run again by itself."""


def _revive(kind: type[SandboxQueueError], args: tuple[object, ...], state: dict[str, object]) -> SandboxQueueError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
