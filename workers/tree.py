"""Everything a step has started, however it tried to get away: sessions of its own, double forks, an empty environment.

As subreaper the worker is an ancestor of all of it. So what belongs to a step is what is below the worker now, less what
was there when the step began (the baseline: what earlier steps left running) and what those have started since. Where
several steps run at once, an orphan is claimed by the step whose session it is in; one in a session of its own cannot be
told apart, and is left to whichever step runs alone again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import NamedTuple

from sandbox_queue.workers.kernel import children, has_children
from sandbox_queue.workers.reaper import Reaper

KILL_PATIENCE = 10.0  # for processes that cannot die just now, in the middle of a disk's or NFS' answer


class Process(NamedTuple):
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    started: int  # clock ticks since boot


class Forest:
    """The trees of all steps that run at the moment, and what former ones left standing."""

    def __init__(self, reaper: Reaper) -> None:
        self.reaper = reaper
        self.trees: set[Tree] = set()
        self._left: frozenset[Process] = frozenset()  # all that was below us at the last look
        self._left_children: frozenset[int] | None = frozenset()  # our children at that time

    def plant(self) -> Tree:
        """To be called just before a step's leader is started; `Tree.fell` when the step is over."""
        self._look()
        tree = Tree(self, self._left, self._left_children)
        self.trees.add(tree)
        return tree

    def _look(self) -> None:
        """Looking at every process of the machine takes milliseconds, so that is only done when our children have
        changed: whatever is new below us is a new child, or below one that we know."""
        now = children() if has_children() else frozenset[int]()
        if now is None or now != self._left_children:
            self._left = _below(os.getpid(), {}) if now != frozenset() else frozenset()
            self._left_children = now


class Tree:
    """The processes of one step."""

    def __init__(self, forest: Forest, baseline: frozenset[Process], baseline_children: frozenset[int] | None) -> None:
        self.leader: int | None = None
        self._baseline_children = baseline_children
        self._forest = forest
        self._reaper = forest.reaper
        self._baseline = baseline

    def fell(self) -> None:
        """The step is over: what is left of it is nobody's, and part of the next one's baseline."""
        self._forest.trees.discard(self)

    def members(self) -> frozenset[Process]:
        """What is alive of it now."""
        if not has_children():
            return frozenset()
        now = children()
        if now is not None and self._baseline_children is not None and now <= self._baseline_children:
            return frozenset()
        spared = {process.pid: process.started for process in self._baseline}
        others = {tree.leader for tree in self._forest.trees if tree is not self and tree.leader is not None}
        return _below(os.getpid(), spared, others, self.leader)

    async def end(self, grace: float) -> frozenset[Process]:
        """TERM, `grace` seconds, KILL, until nothing of it is left; returns what could not be killed, normally nothing."""
        if sys.platform != "linux":
            return await self._end_group(grace)
        if grace > 0:
            for process in self.members():
                _send(process, signal.SIGTERM)
                _send(process, signal.SIGCONT)  # a stopped process does not even notice TERM
            deadline = time.monotonic() + grace
            while self.members() and time.monotonic() < deadline:
                await self._reaper.something_ended(within=min(0.05, max(deadline - time.monotonic(), 0.001)))
        return await self._kill()

    async def _kill(self) -> frozenset[Process]:
        """Stop everything, looking again until a look finds nothing new, then kill. Killing at once would lose the race
        against a fork bomb: each death makes room for a birth, a stopped process keeps its place."""
        deadline = time.monotonic() + KILL_PATIENCE
        while (members := self.members()) and time.monotonic() < deadline:
            stopped: set[Process] = set()
            while fresh := members - stopped:
                for process in fresh:
                    _send(process, signal.SIGSTOP)
                stopped |= fresh
                members = self.members()
            for process in stopped:
                _send(process, signal.SIGKILL)
            await self._reaper.something_ended(within=0.01)
        return members

    async def _end_group(self, grace: float) -> frozenset[Process]:
        """Without /proc there is the leader's process group, and no more."""
        for number, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, 1.0)):
            if self.leader is not None and (wait or number == signal.SIGKILL):
                self.forward(number)
                await self._reaper.something_ended(within=wait)
        return frozenset()

    def forward(self, number: int) -> None:
        """Signal the leader's process group, and only that."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.leader is not None:
                os.killpg(self.leader, number)


def _below(
    root: int, spared: dict[int, int], others: set[int] | frozenset[int] = frozenset(), leader: int | None = None
) -> frozenset[Process]:
    """All living processes below `root`, except the spared ones and `others`, and everything below these."""
    children: dict[int, list[_Stat]] = {}
    for stat in _table():
        children.setdefault(stat.parent, []).append(stat)
    found: dict[int, Process] = {}
    front = [root]
    while front:
        parent = front.pop()
        for stat in children.get(parent, ()):
            if spared.get(stat.pid) == stat.started or stat.pid in others or stat.pid in found:
                continue
            if others and parent == root and stat.pid != leader and stat.session != leader:
                continue
            found[stat.pid] = Process(stat.pid, stat.started)
            front.append(stat.pid)
    return frozenset(found.values())


class _Stat(NamedTuple):
    pid: int
    parent: int
    session: int
    started: int


def _table() -> list[_Stat]:
    """Every living process that we can see."""
    with contextlib.suppress(OSError), os.scandir("/proc") as entries:
        return [stat for entry in entries if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None]
    return []


def _stat(pid: int) -> _Stat | None:
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # The name stands in parentheses and may hold anything, parentheses too: fields are counted from the last one.
        fields = os.read(fd, 4096).rpartition(b")")[2].split()
    except OSError:
        return None
    finally:
        os.close(fd)
    state, threads = fields[0], int(fields[17])
    # A zombie is dead, but one whose main thread alone has ended, leaving others at work, says Z as well.
    if state in (b"Z", b"X") and threads <= 1:
        return None
    return _Stat(pid, parent=int(fields[1]), session=int(fields[3]), started=int(fields[19]))


def _send(process: Process, number: int) -> None:
    """Signal exactly this process, never a later one that was given its pid."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(process.pid)
        try:
            stat = _stat(process.pid)
            if stat is not None and stat.started == process.started:
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)
