"""Step, StepResult and SandboxSpec: what a service asks for, and what it gets back.

A Step is one of seven kinds. Each kind has its own class, so that a field which means nothing for it is an error rather
than silence; users write `Step.run(…)`, `Step.read_file(…)` and never need the classes. Next stop: `jobs.py`, which puts
a Step into arq's envelope.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field

from sandbox_queue import limits
from sandbox_queue.errors import InvalidInput, InvalidSpec, InvalidStep, StepCancelled, StepFailed, StepLost
from sandbox_queue.records import EMPTY, Record

SCHEMA_VERSION = 1

# What `cause` may say. `exit` and `signal` are the command's doing, the others say who else ended it.
Cause = Literal["exit", "signal", "timeout", "cancelled", "oom", "lost", "rejected", "infra"]
Encoding = Literal["utf-8", "base64"]
# Why a file step failed. Closed: a client may act on it, and a sandbox cannot make up a new one.
ErrorCode = Literal[
    "notFound",
    "isDirectory",
    "notDirectory",
    "notRegular",
    "outsideRoots",
    "permission",
    "notText",
    "tooLarge",
    "wrongOffset",
    "mismatch",
    "changed",
    "invalidPattern",
    "noSpace",
    "io",
]

SandboxId = Annotated[
    str,
    Meta(
        pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_-]{2,61}[a-zA-Z0-9]$(?!\n)",
        description="4 to 63 letters, digits, '-' or '_', with a letter or digit at both ends",
    ),
]
User = Annotated[
    str,
    Meta(
        pattern=r"^([0-9]{1,10}(:[0-9]{1,10})?|[A-Za-z_][A-Za-z0-9_.-]{0,31})$(?!\n)",
        description="a user name, a uid or 'uid:gid'",
    ),
]
StepId = Annotated[
    str,
    Meta(
        pattern=r"^(?=[^\n]*[^0-9\n])[A-Za-z0-9._-]{1,128}$(?!\n)",
        description="1 to 128 letters, digits, '.', '_' or '-', not digits alone (those are sequence numbers)",
    ),
]
Seconds = Annotated[
    float,
    Meta(gt=0, le=limits.STEP_TIMEOUT_MAX, description=f"seconds, more than 0 and at most {limits.STEP_TIMEOUT_MAX:g}"),
]
Path = Annotated[str, Meta(min_length=1, description="a path; a relative one is resolved against the working directory")]
Glob = Annotated[str, Meta(min_length=1, max_length=1024, description="a glob such as '*.py' or 'src/**'")]
ContextLines = Annotated[
    int, Meta(ge=0, le=limits.CONTEXT_LINES_MAX, description=f"a number of lines, 0 to {limits.CONTEXT_LINES_MAX}")
]
Depth = Annotated[int, Meta(ge=1, le=limits.DEPTH_MAX, description=f"a number of levels, 1 to {limits.DEPTH_MAX}")]


def _current_version() -> Literal[1]:
    return 1


class Step(Record, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag=lambda n: n[0].lower() + n[1:]):
    """One thing to do in a sandbox. Immutable; made by the constructors below, each of which validates.

    Raises (all constructors):
        InvalidStep: names the field, what is wrong with it and what to give instead.
    """

    invalid: ClassVar[type[InvalidInput]] = InvalidStep

    # A factory, not a plain default: the version then stands on the wire even though defaults are left out.
    schema_version: Annotated[Literal[1], Meta(description="1, the version that this release speaks")] = field(
        default_factory=_current_version
    )
    step_id: StepId | None = None
    cwd: Annotated[str, Meta(description="an absolute directory such as '/work'")] = field(
        name="workingDirectory", default="/work"
    )
    timeout: Seconds = field(name="timeoutSeconds", default=limits.STEP_TIMEOUT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.timeout):
            raise InvalidStep("timeout", f"{self.timeout} is not a time", "give seconds as a finite number")
        _check_path("cwd", self.cwd)
        if not self.cwd.startswith("/"):
            raise InvalidStep("cwd", f"{self.cwd!r} is relative", f"give an absolute path such as '/work/{self.cwd}'")
        path = getattr(self, "path", None)
        if path is not None:
            _check_path("path", path)

    @staticmethod
    def run(
        command: str | Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
        user: str | int | None = None,
        kill_background: bool = False,
        step_id: str | None = None,
    ) -> Run:
        """Run a command: a `str` is given to `sh -c`, a sequence is the argv itself, without any shell.

        `env` overlays the container's environment, and a value of None removes that variable. `user` is a name, a
        uid or `"uid:gid"`. `kill_background` ends what the command left running, rather than counting it.
        """
        if isinstance(command, str):
            program, args = "/bin/sh", ["-c", command]
            if not command.strip():
                raise InvalidStep("command", "is empty", "give a shell command, or a sequence such as ['make', 'test']")
        elif isinstance(command, Sequence) and command and not isinstance(command, (bytes, bytearray)):
            program, *args = command
        else:
            problem = "is empty" if command in ([], ()) else f"is of type {type(command).__name__}"
            raise InvalidStep("command", problem, "give a shell command as str, or a sequence such as ['make', 'test']")
        return Run.build(
            command=program,
            args=args,
            env=dict(env) if isinstance(env, Mapping) else env,
            cwd=cwd,
            timeout=timeout,
            stdin=_encode(stdin) if isinstance(stdin, str) else stdin,
            user=str(user) if isinstance(user, int) and not isinstance(user, bool) else user,
            kill_background=kill_background,
            step_id=step_id,
        )

    @staticmethod
    def read_file(
        path: str,
        *,
        start_line: int | None = None,
        line_count: int | None = None,
        with_line_numbers: bool = False,
        offset: int | None = None,
        encoding: Encoding | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        step_id: str | None = None,
    ) -> ReadFile:
        """Read a file, up to 1 MiB of it: by lines (`start_line` counts from 1), or by bytes from `offset`.

        A larger file is read in ranges: ask again with `offset` moved by the bytes that came, while the result is
        `truncated`. Its `file_size` says how many there are in all. No range ends within a UTF-8 character.
        """
        return ReadFile.build(
            path=path,
            start_line=start_line,
            line_count=line_count,
            with_line_numbers=with_line_numbers,
            offset=offset,
            encoding=encoding,
            cwd=cwd,
            timeout=timeout,
            step_id=step_id,
        )

    @staticmethod
    def write_file(
        path: str,
        content: str | bytes,
        *,
        offset: int | None = None,
        size: int | None = None,
        sha256: str | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        step_id: str | None = None,
    ) -> WriteFile:
        """Write a file whole, atomically; parents are made. bytes travel as base64 and arrive as they are.

        A file above 10 MiB is written in chunks, one step after another: each has its `offset`, and the last one also
        the `size` and the hexadecimal `sha256` of the whole. Until these have been verified, nobody sees any of it.
        """
        if isinstance(content, (bytes, bytearray, memoryview)):
            text, encoding = base64.b64encode(content).decode("ascii"), "base64"
        else:
            text, encoding = content, "utf-8"
        return WriteFile.build(
            path=path,
            content=text,
            encoding=encoding,
            offset=offset,
            size=size,
            sha256=sha256,
            cwd=cwd,
            timeout=timeout,
            step_id=step_id,
        )

    @staticmethod
    def list_files(
        path: str = ".",
        *,
        max_depth: int | None = None,
        sort_by: Literal["name", "size", "mtime"] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        step_id: str | None = None,
    ) -> ListFiles:
        """List a directory, 1000 entries at most; one level deep unless `max_depth` says otherwise."""
        return ListFiles.build(path=path, max_depth=max_depth, sort_by=sort_by, cwd=cwd, timeout=timeout, step_id=step_id)

    @staticmethod
    def grep(
        pattern: str,
        path: str = ".",
        *,
        glob: str | None = None,
        head_limit: int | None = None,
        context_before: int | None = None,
        context_after: int | None = None,
        output_mode: Literal["content", "filesWithMatches", "count"] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        step_id: str | None = None,
    ) -> Grep:
        """Search files for a regular expression."""
        return Grep.build(
            pattern=pattern,
            path=path,
            glob=glob,
            head_limit=head_limit,
            context_before=context_before,
            context_after=context_after,
            output_mode=output_mode,
            cwd=cwd,
            timeout=timeout,
            step_id=step_id,
        )

    @staticmethod
    def directory_tree(
        path: str = ".",
        *,
        max_depth: int | None = None,
        exclude_globs: Sequence[str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        step_id: str | None = None,
    ) -> DirectoryTree:
        """Draw a directory as a tree, four levels deep unless `max_depth` says otherwise."""
        return DirectoryTree.build(
            path=path, max_depth=max_depth, exclude_globs=exclude_globs, cwd=cwd, timeout=timeout, step_id=step_id
        )

    @staticmethod
    def shutdown(*, step_id: str | None = None) -> Shutdown:
        """End the worker after the steps that were enqueued before this one."""
        return Shutdown.build(step_id=step_id)

    @classmethod
    def _wire_type(cls) -> Any:
        return AnyStep if cls is Step else cls

    @classmethod
    def _wire_class(cls, data: Any) -> type[Step]:
        """The class that `data` means to be, for naming its fields in an error."""
        kind = data.get("kind") if cls is Step and isinstance(data, dict) else None
        return KINDS.get(kind, cls) if isinstance(kind, str) else cls

    @classmethod
    def _known_tags(cls) -> str:
        return f"give one of {', '.join(KINDS)}"


class Run(Step, frozen=True, kw_only=True):
    """Run a program."""

    secret: ClassVar[frozenset[str]] = frozenset({"env"})

    command: Annotated[str, Meta(min_length=1, description="the program: a path, or a name that PATH resolves")]
    args: Annotated[tuple[str, ...], Meta(description="the arguments, each a str")] = ()
    env: Annotated[dict[str, str | None], Meta(description="names and values, both str; None removes a variable")] = EMPTY
    user: User | None = None
    stdin: Annotated[bytes, Meta(description="the bytes for standard input (base64 on the wire)")] | None = None
    kill_background: Annotated[bool, Meta(description="True to end what the command leaves running")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_argument("command", self.command)
        for index, argument in enumerate(self.args):
            _check_argument(f"args[{index}]", argument)
        for name, value in self.env.items():
            _check_variable("env", name, value or "", InvalidStep)
        total = sum(map(_byte_size, (self.command, *self.args))) + sum(
            _byte_size(k) + _byte_size(v or "") for k, v in self.env.items()
        )
        if total > limits.ARGUMENTS_TOTAL_MAX:
            raise InvalidStep(
                "args",
                f"command line and environment are {total} bytes, more than Linux starts a program with",
                "pass the data by stdin or write_file",
            )
        if self.stdin is not None and len(self.stdin) > limits.WRITE_MAX:
            raise InvalidStep(
                "stdin", f"is {len(self.stdin)} bytes, the limit is {limits.WRITE_MAX}", "upload a file and redirect from it"
            )


class ReadFile(Step, frozen=True, kw_only=True):
    """Read a file."""

    path: Path
    encoding: Annotated[Encoding, Meta(description="'utf-8', or 'base64' for content that is not text")] = "utf-8"
    offset: Annotated[int, Meta(ge=0, description="a byte offset, 0 or more")] | None = None
    start_line: Annotated[int, Meta(ge=1, description="a line number, 1 or more")] | None = None
    line_count: Annotated[int, Meta(ge=1, description="a number of lines, 1 or more")] | None = None
    with_line_numbers: Annotated[bool, Meta(description="True to put its number before each line")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        by_lines = self.start_line is not None or self.line_count is not None or self.with_line_numbers
        if by_lines and (self.offset is not None or self.encoding == "base64"):
            raise InvalidStep("start_line", "lines and bytes were both asked for", "give lines, or offset and base64")


class WriteFile(Step, frozen=True, kw_only=True):
    """Write a file, or one chunk of it."""

    path: Path
    content: Annotated[str, Meta(description="the content as text, or base64 with encoding='base64'")]
    encoding: Annotated[Encoding, Meta(description="'utf-8', or 'base64' for content that is not text")] = "utf-8"
    offset: Annotated[int, Meta(ge=0, description="a byte offset, 0 or more")] | None = None
    size: Annotated[int, Meta(ge=0, description="the size of the whole file, in bytes, together with sha256")] | None = None
    sha256: (
        Annotated[
            str,
            Meta(
                pattern=r"^[0-9a-f]{64}$(?!\n)",
                description="the SHA-256 of the whole file, 64 digits 0-9a-f, together with size",
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        super().__post_init__()
        size = _byte_size(self.content, "content")
        if self.encoding == "base64":
            try:
                size = len(binascii.a2b_base64(self.content, strict_mode=True))
            except ValueError as error:
                raise InvalidStep("content", f"is not base64 ({error})", "encode it, or use encoding='utf-8'") from None
        if size > limits.WRITE_MAX:
            raise InvalidStep(
                "content",
                f"is {size} bytes, the limit of one step is {limits.WRITE_MAX}",
                f"write it in chunks: offset=0, then offset={limits.WRITE_MAX} …, the last one with size and sha256",
            )
        if (self.size is None) != (self.sha256 is None):
            missing = "size" if self.size is None else "sha256"
            raise InvalidStep(missing, "is missing", "size and sha256 of the whole file come together, with its last chunk")
        if self.size is not None and self.size != (self.offset or 0) + size:
            raise InvalidStep(
                "size", f"{self.size} is not where this chunk ends", "only the last chunk has it: offset plus its bytes"
            )


class ListFiles(Step, frozen=True, kw_only=True):
    """List a directory."""

    path: Path
    max_depth: Depth = 1
    sort_by: Annotated[Literal["name", "size", "mtime"], Meta(description="'name', 'size' or 'mtime'")] = "name"


class Grep(Step, frozen=True, kw_only=True):
    """Search files for a regular expression."""

    path: Path
    pattern: Annotated[str, Meta(min_length=1, max_length=4096, description="a regular expression, 4096 characters at most")]
    glob: Glob | None = None
    head_limit: Annotated[
        int, Meta(ge=1, le=limits.GREP_MATCHES_MAX, description=f"a number of matches, 1 to {limits.GREP_MATCHES_MAX}")
    ] = limits.GREP_MATCHES_MAX
    context_before: ContextLines = 0
    context_after: ContextLines = 0
    output_mode: Annotated[
        Literal["content", "filesWithMatches", "count"], Meta(description="'content', 'filesWithMatches' or 'count'")
    ] = "content"

    def __post_init__(self) -> None:
        super().__post_init__()
        _byte_size(self.pattern, "pattern")
        _byte_size(self.glob or "", "glob")


class DirectoryTree(Step, frozen=True, kw_only=True):
    """Draw a directory as a tree."""

    path: Path
    max_depth: Depth = 4
    exclude_globs: Annotated[
        tuple[Glob, ...], Meta(max_length=100, description="globs of names to leave out, 100 at most")
    ] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for glob in self.exclude_globs:
            _byte_size(glob, "exclude_globs")


class Shutdown(Step, frozen=True, kw_only=True):
    """End the worker."""


AnyStep = Run | ReadFile | WriteFile | ListFiles | Grep | DirectoryTree | Shutdown
KINDS: dict[Any, type[Step]] = {
    cls.__struct_config__.tag: cls for cls in (Run, ReadFile, WriteFile, ListFiles, Grep, DirectoryTree, Shutdown)
}

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Amount = Annotated[float, Meta(ge=0)]
EventId = Annotated[str, Meta(pattern=r"^[0-9]{1,20}-[0-9]{1,20}$(?!\n)")]
Tail = Annotated[str, Meta(max_length=2 * limits.RESULT_STREAM_MAX)]


class Usage(Record, frozen=True, kw_only=True):
    """What the step's processes used, as the kernel counted it."""

    user: Amount = field(name="userSeconds", default=0.0)
    system: Amount = field(name="systemSeconds", default=0.0)
    max_rss: Annotated[int, Meta(ge=0)] | None = field(name="maxRssBytes", default=None)


class StepResult(Record, frozen=True, kw_only=True):
    """How a step ended. A sandbox wrote this: it is a claim, bounded and checked for shape, but a claim.

    `exit_code` is None unless the process was reaped by the worker; there is no default exit code anywhere.
    `stdout` and `stderr` hold at most 64 KiB each, head and tail; the exact bytes come from the events.
    """

    schema_version: Annotated[int, Meta(ge=1)] = field(default_factory=_current_version)
    step_id: Annotated[str, Meta(max_length=128)] = ""
    sandbox_id: Annotated[str, Meta(max_length=63)] = ""
    cause: Cause
    exit_code: Annotated[int, Meta(ge=0, le=255)] | None = None
    signal: Annotated[int, Meta(ge=1, le=64)] | None = None
    timed_out: bool = False
    duration: Amount = field(name="durationSeconds", default=0.0)
    error: Annotated[str, Meta(max_length=2 * limits.FAILURE_TAIL)] | None = None
    error_code: ErrorCode | None = None
    stdout: Tail = ""
    stderr: Tail = ""
    content: Annotated[str, Meta(max_length=2 * limits.READ_MAX)] | None = None
    file_size: Count | None = None
    truncated: bool = False
    stdout_size: Count | None = None
    stderr_size: Count | None = None
    usage: Usage | None = None
    oom_kills: Count = 0
    survivors: Count = 0
    first_event_id: EventId | None = None
    last_event_id: EventId | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("first_event_id", "last_event_id"):
            if max(map(int, (getattr(self, name) or "0-0").split("-"))) >= 2**64:
                raise InvalidInput(name, "is beyond what Redis counts", "give an id of a stream entry")

    @property
    def ok(self) -> bool:
        """Whether the step did what it was asked for: it ended by itself, with exit code 0."""
        return self.cause == "exit" and self.exit_code == 0

    def check(self) -> StepResult:
        """Return the result itself if it is `ok`.

        Raises:
            StepFailed: the command failed; the message ends with the tail of its output.
            StepCancelled: somebody cancelled it.
            StepLost: its worker vanished.
        """
        if self.ok:
            return self
        kind = {"cancelled": StepCancelled, "lost": StepLost}.get(self.cause, StepFailed)
        raise kind(self, self.describe())

    def describe(self) -> str:
        """One line on how it ended, followed by the tail of what it printed."""
        how = {
            "exit": f"exit code {self.exit_code}",
            "signal": f"killed by signal {self.signal}",
            "timeout": f"timed out after {self.duration:g} s",
            "oom": "killed: out of memory",
        }.get(self.cause, self.cause)
        message = f"{how}: {self.error}" if self.error else how
        tail = (self.stderr or self.stdout)[-limits.FAILURE_TAIL :].rstrip()
        return f"{message}\n{tail}" if tail and tail not in message else message


class SandboxSpec(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sandbox is made from. `SandboxSpec.build(image=…)` validates; the same fields are keywords of `launch`."""

    invalid: ClassVar[type[InvalidInput]] = InvalidSpec
    secret: ClassVar[frozenset[str]] = frozenset({"env"})

    schema_version: Annotated[Literal[1], Meta(description="1, the version that this release speaks")] = field(
        default_factory=_current_version
    )
    image: (
        Annotated[
            str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}$(?!\n)", description="an image such as 'python:3.12'")
        ]
        | None
    ) = None
    id: SandboxId | None = None
    env: Annotated[dict[str, str], Meta(description="names and values, both str")] = EMPTY
    labels: Annotated[dict[str, str], Meta(max_length=64, description="names and values, both str, 64 at most")] = EMPTY
    workdir: Annotated[str, Meta(pattern=r"^/[^\0]*$(?!\n)", description="an absolute directory such as '/work'")] = "/work"
    user: User | None = None
    concurrency: Annotated[
        int, Meta(ge=1, le=limits.CONCURRENCY_MAX, description=f"steps at a time, 1 to {limits.CONCURRENCY_MAX}")
    ] = 1
    max_lifetime: Annotated[float, Meta(gt=0, description="seconds after which it is ended, whatever it does")] | None = field(
        name="maxLifetimeSeconds", default=None
    )
    idle_ttl: Annotated[float, Meta(gt=0, description="seconds without a step after which it is ended")] | None = field(
        name="idleTtlSeconds", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for field_name in ("env", "labels"):
            for name, value in getattr(self, field_name).items():
                _check_variable(field_name, name, value, InvalidSpec)
        _check_path("workdir", self.workdir, InvalidSpec)
        for name in ("max_lifetime", "idle_ttl"):
            if not math.isfinite(getattr(self, name) or 0):
                raise InvalidSpec(name, "is not a time", "leave it out for no limit")


Invalid = type[InvalidInput]


def _check_variable(field_name: str, name: str, value: str, invalid: Invalid) -> None:
    """A name and value of an environment. An error shows no value, nor what follows '=' in a name: it may be a secret."""
    if not name or "=" in name or "\0" in name:
        head, equals, _ = name[:80].partition("=")
        shown = head + (equals and "=…")
        raise invalid(field_name, f"{shown!r} cannot be a variable's name", "use a name without '=' and NUL")
    _check_argument(f"{field_name}[{name!r}]", f"{name}={value}", invalid)


def _check_argument(name: str, text: str, invalid: Invalid = InvalidStep) -> None:
    if "\0" in text:
        raise invalid(name, "contains a NUL byte", "no program can be given one: use stdin or a file")
    if _byte_size(text, name, invalid) > limits.ARGUMENT_MAX:
        raise invalid(name, f"is longer than the {limits.ARGUMENT_MAX} bytes that Linux accepts", "use stdin or write_file")


def _check_path(name: str, path: str, invalid: Invalid = InvalidStep) -> None:
    if not path:
        raise invalid(name, "is empty", "give a path, '.' for the working directory")
    if "\0" in path:
        raise invalid(name, "contains a NUL byte", "no file has such a name")
    sizes = [_byte_size(part, name, invalid) for part in path.split("/")]
    if sum(sizes) + len(sizes) - 1 > limits.PATH_MAX or max(sizes) > limits.NAME_MAX:
        raise invalid(name, f"is longer than a path may be ({limits.PATH_MAX} bytes, {limits.NAME_MAX} a name)", "shorten it")


def _byte_size(text: str, name: str = "args", invalid: Invalid = InvalidStep) -> int:
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise invalid(name, "has a lone surrogate, which UTF-8 cannot carry", "give bytes, or valid text") from None


def _encode(text: str) -> bytes:
    _byte_size(text, "stdin")
    return text.encode()
