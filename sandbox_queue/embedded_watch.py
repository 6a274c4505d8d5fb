"""The watcher of an embedded server: `embedded_watch.py PIPE DIRECTORY PROGRAM CONFIG`, started by `embedded.py`.

It is the server's parent, so that nobody else's pid can be meant when it kills, and it imports next to nothing, so that it
is up in a few milliseconds. The end of the pipe means that the owner is gone. Should the watcher itself be killed, the
kernel ends the server (PR_SET_PDEATHSIG, Linux only; it is bound to the parent *thread*, of which there is one here).
"""

import os
import signal
import sys


def main() -> None:
    pipe, directory, program, config = int(sys.argv[1]), *sys.argv[2:5]
    watcher = os.getpid()
    server = os.fork()
    if server == 0:
        os.close(pipe)
        log = os.open(os.path.join(directory, "log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        die_with_parent(watcher)
        os.execv(program, [program, config])
    signal.signal(signal.SIGCHLD, lambda *_: note_death(server, directory))
    note_death(server, directory)  # it may have died before that line
    while os.read(pipe, 1):
        pass
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        os.kill(server, signal.SIGKILL)  # it keeps nothing on disk: there is nothing to wait for
        os.waitpid(server, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
    remove(directory)


def die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)


def note_death(server: int, directory: str) -> None:
    """Tell the owner, which may be waiting for the server to come up, that it will not."""
    try:
        if os.waitpid(server, os.WNOHANG)[0]:
            os.close(os.open(os.path.join(directory, "ended"), os.O_CREAT, 0o600))
    except ChildProcessError:
        pass


def remove(directory: str) -> None:
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


main()
