"""The examples run, each as a program of its own, as a reader would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str) -> str:
    environment = {variable: value for variable, value in os.environ.items() if variable not in ("REDIS_URL", "FORCE_COLOR")}
    program = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_hello_shows_what_it_promises() -> None:
    shown = run("hello.py")
    followed, rest = shown.split("Read on from a cursor", 1)
    replayed, rest = rest.split("Enqueue the same step id again", 1)
    lines = [f"   stdout: line {number}" for number in range(1, 6)]
    assert [line for line in followed.splitlines() if "stdout" in line] == lines
    assert [line for line in replayed.splitlines() if "stdout" in line] == lines[3:]
    assert "Handle('hello-box', 'count') is the first one" in rest
    assert "cancelled: True; its result says: cancelled; daemon alive: False" in rest
    assert "ok: False; exit code 2" in rest
    assert '"text":"TODO: write a service"' in rest
