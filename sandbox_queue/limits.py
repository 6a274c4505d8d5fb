"""Every number that bounds something, once. The worker and all backends use these; settings may lower or raise some.

Sizes are bytes, times are seconds, unless the name says otherwise.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
HOUR: Final = 3600.0
DAY: Final = 24 * HOUR

# --- what one Step may carry: checked before it is enqueued, and again by the worker
STEP_TIMEOUT: Final = 600.0
STEP_TIMEOUT_MAX: Final = DAY
ARGUMENT_MAX: Final = 128 * KIB - 1  # Linux refuses a longer single string (MAX_ARG_STRLEN, with its NUL)
ARGUMENTS_TOTAL_MAX: Final = 2 * MIB  # a quarter of the usual 8 MiB stack: beyond it execve says E2BIG
PATH_MAX: Final = 4095
NAME_MAX: Final = 255
WRITE_MAX: Final = 10 * MIB  # content or stdin of one step; larger files travel in chunks
READ_MAX: Final = 1 * MIB  # content of one result; larger files are paged
LIST_ENTRIES_MAX: Final = 1000
GREP_MATCHES_MAX: Final = 1000
GREP_ROW_MAX: Final = 240  # characters
DEPTH_MAX: Final = 64
CONTEXT_LINES_MAX: Final = 100
CONCURRENCY_MAX: Final = 16

# --- what one result may carry: a result is written by a sandbox, so the reader enforces these too
RESULT_STREAM_MAX: Final = 64 * KIB  # of stdout and of stderr, head and tail together
FAILURE_TAIL: Final = 8 * KIB
RESULT_WIRE_MAX: Final = 16 * MIB  # READ_MAX and both streams with every byte escaped by JSON fit twice

REPLY_MAX: Final = 48 * MIB  # of any reply of Redis to us; an honest one stays below RESULT_WIRE_MAX

# --- events
ENTRY_MAX: Final = 64 * KIB  # data of one stream entry
EVENTS_MAXLEN: Final = 10_000
EVENTS_BYTES: Final = 32 * MIB  # per sandbox; the oldest entries go first, and a reader sees that they went
WRITER_BUFFER: Final = 512 * KIB  # unsent output in the worker, beyond which the child waits in its pipe
OUTPUT_MAX: Final = 2 * 1024 * MIB  # of one step; beyond it output is read, counted and dropped, but for its tail
LINE_MAX: Final = 64 * KIB  # a longer line comes in pieces

# --- how long things are kept
QUEUED_TTL: Final = 7 * DAY  # a step that nobody started in that time is reported as lost
SENT_TTL: Final = 600.0  # how long a repeated attempt to enqueue is recognised; longer than anybody repeats it
RESULT_TTL: Final = HOUR  # arq's own default
EVENTS_TTL: Final = DAY  # after the last byte
CONTROL_TTL: Final = 30 * DAY  # outlives every sandbox: repeated step ids must stay known

# --- liveness
HEARTBEAT_EVERY: Final = 2.0
HEARTBEAT_TTL: Final = 10.0
LOOK_EVERY: Final = 5.0  # the fallback where a hint was lost: a look at the queue, at the result
ABANDONED_AFTER: Final = 600.0  # a worker whose launcher is gone and who gets no step either ends itself
FAREWELL_TTL: Final = 60.0  # how long a worker's last words, its exit code and reason, can be read
OUTAGE_MAX: Final = 600.0  # how long a worker goes on without its broker
