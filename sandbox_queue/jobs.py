"""arq's envelopes: a job on its way in, a result on its way out, both as JSON.

arq pickles by default; a sandbox is hostile, so nothing here executes or imports what it reads. `dumps` and `loads` are
what a stock `arq.Worker`, `ArqRedis` or `Job` needs to look at our queues or to feed them. The fields and key names are
arq's own, written out so that the worker need not import arq; a test compares them with the installed arq.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec

from sandbox_queue.errors import InvalidStep
from sandbox_queue.models import AnyStep, Step, StepResult
from sandbox_queue.records import explain

FUNCTION = "step"  # the name under which a stock arq.Worker registers its handler

dumps = msgspec.json.Encoder().encode
loads = msgspec.json.Decoder(dict[str, Any]).decode


class _Job(msgspec.Struct):
    t: int | None
    f: str
    a: Annotated[tuple[AnyStep, ...], msgspec.Meta(min_length=1, max_length=1)]
    k: dict[str, Any]
    et: int


class _Result(msgspec.Struct):
    t: int
    f: str
    a: tuple[str, ...]
    k: dict[str, Any]
    et: int
    s: bool
    r: StepResult
    st: int
    ft: int
    q: str
    id: str


class _StockResult(msgspec.Struct):
    """Only what we read. Unlike the rest it may come from a stock worker, whose `a` holds the whole step."""

    s: bool
    r: msgspec.Raw


_decode_job = msgspec.json.Decoder(_Job).decode
_decode_result = msgspec.json.Decoder(_StockResult).decode
_decode_step_result = msgspec.json.Decoder(StepResult).decode


def now_ms() -> int:
    """Wall-clock time, for people to read. Nothing is ordered by it."""
    return time.time_ns() // 1_000_000


def encode_job(step: Step) -> bytes:
    """The value of `arq:job:…`."""
    return dumps(_Job(t=None, f=FUNCTION, a=(step,), k={}, et=now_ms()))  # type: ignore[arg-type]  # a Step is always one of AnyStep


def decode_job(data: bytes) -> Step:
    """The Step in an arq job.

    Raises:
        InvalidStep: it is not one, and why.
    """
    try:
        return _decode_job(data).a[0]
    except msgspec.ValidationError as error:
        raise _explain_job(error, data) from None
    except (ValueError, RecursionError) as error:
        raise InvalidStep("job", f"is not JSON ({error})", "enqueue with our client or serializer") from None


def encode_result(job: str, queue: str, result: StepResult, started_ms: int) -> bytes:
    """The value of `arq:result:…`. arq would keep the job's arguments in it; the step id is enough."""
    finished = now_ms()
    return dumps(
        _Result(
            t=1,
            f=FUNCTION,
            a=(result.step_id,),
            k={},
            et=started_ms,
            s=True,
            r=result,
            st=started_ms,
            ft=finished,
            q=queue,
            id=job,
        )
    )


def decode_result(data: bytes, sandbox: str, step_id: str) -> StepResult:
    """The StepResult in an arq result. A malformed one becomes a result too, of cause `infra`: it fails one step."""
    try:
        envelope = _decode_result(data)
        result = _decode_step_result(envelope.r)
    except (ValueError, RecursionError) as error:
        problem = f"the sandbox left a malformed result ({error})"
        result = StepResult(cause="infra", error=problem[:1000])
    return msgspec.structs.replace(result, sandbox_id=sandbox, step_id=step_id)


def _explain_job(error: msgspec.ValidationError, data: bytes) -> Exception:
    if error.__cause__ is not None:
        return explain(error, Step, None)
    try:
        raw = loads(data)["a"][0]
        Step.from_dict(raw)
    except InvalidStep as precise:
        return precise
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, RecursionError):
        pass
    return InvalidStep("job", str(error), "enqueue one Step as the only argument")
