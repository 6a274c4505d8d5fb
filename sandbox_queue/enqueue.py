"""The trusted side's two scripts: put a Step into a sandbox's queue, and cancel one.

Plain `enqueue_job` orders by the client's clock and runs a repeated id twice; here Redis' own clock and counter decide, in
one atomic step. The worker cannot use scripts (its user may not), so whatever it does is in `workers/loop.py`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from redis import exceptions as redis_errors

from sandbox_queue import jobs, keys, limits
from sandbox_queue.models import Step, StepResult
from sandbox_queue.wire import Argument, Wire

_ENQUEUE = """
local steps, sequence, queue, wake, sent = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local prefix, digits, step_id, job = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local job_ttl, queue_ttl, control_ttl, sent_ttl = ARGV[5], ARGV[6], ARGV[7], ARGV[8]

local known
if step_id ~= '' then known = redis.call('HGET', steps, step_id) else known = redis.call('GET', sent) end
if known then return {tonumber(known), 0, 0} end
local seq, id
repeat  -- a stock arq client may have used a number of its own choice: pass over it
  seq = redis.call('HINCRBY', sequence, 'seq', 1)
  id = prefix .. string.format('%0' .. digits .. 'd', seq)
until redis.call('EXISTS', 'arq:job:' .. id, 'arq:result:' .. id) == 0
local time = redis.call('TIME')
local score = math.max(time[1] * 1000 + math.floor(time[2] / 1000), tonumber(redis.call('HGET', sequence, 'score') or 0))
redis.call('HSET', sequence, 'score', string.format('%d', score))
redis.call('EXPIRE', sequence, control_ttl)
if step_id ~= '' then
  redis.call('HSET', steps, step_id, seq)
  redis.call('EXPIRE', steps, control_ttl)
else
  redis.call('SET', sent, seq, 'EX', sent_ttl)
end
redis.call('SET', 'arq:job:' .. id, job, 'EX', job_ttl)
redis.call('ZADD', queue, string.format('%d', score), id)
redis.call('EXPIRE', queue, queue_ttl)
-- A worker looks at the queue whenever it finishes a step, so a hint is for one that has room for more.
if redis.call('ZCARD', queue) <= tonumber(ARGV[9]) then
  redis.call('RPUSH', wake, '1')
  redis.call('LTRIM', wake, -1, -1)
  redis.call('EXPIRE', wake, queue_ttl)
end
return {seq, 1, score}
"""

_CANCEL = """
local job, result, progress, queue, cancel, wake = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local events, done = KEYS[7], KEYS[8]
local id, seq, grace, record, result_ttl, cancel_ttl, now = unpack(ARGV)

if redis.call('EXISTS', result) == 1 then return 'ended' end
if redis.call('EXISTS', progress) == 1 then
  redis.call('HSET', cancel, seq, grace)
  redis.call('EXPIRE', cancel, cancel_ttl)
  redis.call('RPUSH', wake, '1')
  redis.call('LTRIM', wake, -1, -1)
  redis.call('EXPIRE', wake, cancel_ttl)
  return 'running'
end
if not redis.call('ZSCORE', queue, id) then return 'unknown' end
redis.call('ZREM', queue, id)
redis.call('DEL', job)
redis.call('SET', result, record, 'EX', result_ttl)
redis.call('PUBLISH', done, seq)
-- For readers that wait at the stream. A sandbox may have ruined its own stream: they then find the result by looking.
if redis.call('EXISTS', events) == 1 then
  redis.pcall('XADD', events, '*', 'step', seq, 'kind', 'ended', 'at', now)
end
return 'cancelled'
"""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where an enqueued step stands. `accepted_ms` is Redis' clock when it was accepted, 0 for a repeated step id."""

    seq: int
    step_id: str
    created: bool
    accepted_ms: int


class Script:
    """A Lua script by its digest, sent whole only to a server that does not know it yet."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def run(self, wire: Wire, names: list[str], arguments: list[Argument]) -> Any:
        try:
            return await wire.one("EVALSHA", self._digest, len(names), *names, *arguments)
        except redis_errors.NoScriptError:
            return await wire.one("EVAL", self._source, len(names), *names, *arguments)


_enqueue_script = Script(_ENQUEUE)
_cancel_script = Script(_CANCEL)


async def enqueue(wire: Wire, sandbox: str, step: Step, *, token: str) -> Ticket:
    """Put a step into the queue; one whose id is known already is not put there again.

    Raises:
        ConnectionLost: it may or may not have been accepted. Repeat it with the same `token`: it is accepted once.
    """
    per_sandbox = (keys.STEPS, keys.SEQUENCE, keys.QUEUE, keys.WAKE)
    seq, created, score = await _enqueue_script.run(
        wire,
        [*(key.of(sandbox) for key in per_sandbox), keys.SENT.for_suffix(sandbox, token)],
        [
            f"{sandbox}:",
            keys.SEQ_DIGITS,
            step.step_id or "",
            jobs.encode_job(step),
            round(limits.QUEUED_TTL),
            round(keys.QUEUE.ttl or 0),
            round(limits.CONTROL_TTL),
            round(limits.SENT_TTL),
            limits.CONCURRENCY_MAX,
        ],
    )
    return Ticket(seq=seq, step_id=step.step_id or str(seq), created=bool(created), accepted_ms=score)


async def cancel(wire: Wire, sandbox: str, seq: int, step_id: str, *, grace: float, result_ttl: float) -> str:
    """Ask for a step's end. `cancelled`: it was still queued and never ran. `running`: its worker has been told.
    `ended`: it had ended before. `unknown`: there is no such step any more."""
    per_step = (keys.JOB, keys.RESULT, keys.IN_PROGRESS)
    per_sandbox = (keys.QUEUE, keys.CANCEL, keys.WAKE, keys.EVENTS, keys.DONE)
    now = jobs.now_ms()
    result = StepResult(step_id=step_id, sandbox_id=sandbox, cause="cancelled", error="cancelled before it was started")
    job = keys.job_id(sandbox, seq)
    record = jobs.encode_result(job, keys.QUEUE.of(sandbox), result, started_ms=now)
    answer: bytes = await _cancel_script.run(
        wire,
        [*(key.of(sandbox, seq) for key in per_step), *(key.of(sandbox) for key in per_sandbox)],
        [job, seq, f"{grace:g}", record, round(result_ttl), round(limits.QUEUED_TTL), now],
    )
    return answer.decode()


async def find(wire: Wire, sandbox: str, step_id: str) -> int | None:
    """The number of a step by its id: the caller's own, or the number itself."""
    if step_id.isascii() and step_id.isdigit():
        return int(step_id) if len(step_id) <= keys.SEQ_DIGITS else None
    known = await wire.one("HGET", keys.STEPS.of(sandbox), step_id)
    return int(known) if known is not None else None
