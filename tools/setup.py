"""Make `.venv` ready: `setup.py [GROUP …]` installs sandbox-queue editable, with those dependency groups.

Run by every make target, so it first asks whether there is anything to do. Uses nothing but the standard library, and
runs on a Debian whose Python comes without ensurepip: pip's wheel is then fetched from the package index.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # nothing is installed yet, and make runs this isolated from whatever PYTHONPATH says
from tools.fetch_pip import NoPip, fetch_pip  # noqa: E402  # as said

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "ready.json"  # what was installed, from what, and where
LOG = VENV / "setup.log"
ANY_PIP = (1, 0)
PIP_FOR_GROUPS = (25, 1)  # the first that knows --group
TAIL = 25


class SetupFailed(Exception):
    """What failed, and what to do."""


def main() -> int:
    known = read_stamp()
    groups = sorted({*sys.argv[1:], *known.get("groups", ())})
    wanted = {"root": str(ROOT), "digest": digest(), "groups": groups}
    if known == wanted and works(PYTHON):
        return 0
    try:
        make_venv(known)
        get_pip(PIP_FOR_GROUPS if groups else ANY_PIP)
        install(groups)
    except SetupFailed as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    STAMP.write_text(json.dumps(wanted))
    return 0


def digest() -> str:
    """Of what decides about the installation; a changed lint rule reinstalls nothing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    deciding = [project[name] for name in ("build-system", "project", "dependency-groups")] + [project["tool"]["setuptools"]]
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def read_stamp() -> dict[str, Any]:
    try:
        stamp: dict[str, Any] = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp


def works(python: Path) -> bool:
    """Whether the interpreter is still there: an upgrade of the system may have taken it away."""
    probe = "import sys; sys.exit(sys.version_info < (3, 11))"
    return python.exists() and subprocess.run([python, "-c", probe], capture_output=True).returncode == 0


def make_venv(known: dict[str, Any]) -> None:
    if VENV.exists() and (known.get("root", str(ROOT)) != str(ROOT) or not works(PYTHON)):
        print("setup: removing .venv, which was made elsewhere or whose Python is gone")
        shutil.rmtree(VENV)
    if not VENV.exists():
        version = ".".join(map(str, sys.version_info[:3]))
        with Stage(f"making .venv with Python {version} ({sys.executable})"):
            VENV.mkdir()
            run(sys.executable, "-m", "venv", "--without-pip", VENV)


def get_pip(needed: tuple[int, int]) -> None:
    if pip_version() == (0, 0) and find_spec("ensurepip") is not None:
        with contextlib.suppress(SetupFailed), Stage("adding the pip that comes with Python"):
            run(PYTHON, "-m", "ensurepip", "--upgrade")
    if pip_version() == (0, 0):
        with (
            Stage("fetching pip from the package index: this Python has none"),
            tempfile.TemporaryDirectory() as place,
        ):
            try:
                wheel = fetch_pip(Path(place))
            except NoPip as error:
                raise SetupFailed(f"{error}\nsetup: or let your system bring pip along: apt install python3-venv") from error
            run(PYTHON, wheel / "pip", "install", "--no-index", wheel)
    if pip_version() < needed:
        with Stage("upgrading pip"):
            run(PYTHON, "-m", "pip", "install", "--upgrade", f"pip>={'.'.join(map(str, needed))}")


def pip_version() -> tuple[int, int]:
    """(0, 0) if there is none."""
    asked = subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True, text=True)
    if asked.returncode != 0:
        return (0, 0)
    major, minor = (asked.stdout.split()[1] + ".0").split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)


def install(groups: list[str]) -> None:
    what = f"sandbox-queue and its tools ({', '.join(groups)}): a minute or so" if groups else "sandbox-queue: some seconds"
    with Stage(f"installing {what}"):
        options = [option for group in groups for option in ("--group", group)]
        run(PYTHON, "-m", "pip", "install", "--editable", ROOT, *options)


def run(*command: str | Path) -> None:
    """Run it into the log.

    Raises:
        SetupFailed: with the last lines of what it said.
    """
    with LOG.open("a") as log:
        ended = subprocess.run(list(map(str, command)), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    if ended.returncode != 0:
        tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-TAIL:])
        hint = "without a way to the package index: PIP_INDEX_URL may name a mirror, PIP_FIND_LINKS a folder of wheels"
        raise SetupFailed(f"failed: {' '.join(map(str, command))}\n{tail}\nsetup: {hint}\nsetup: all of it: {LOG}")


class Stage:
    """Says what is being done and, afterwards, for how long."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        print(f"setup: {self.what} …", end=" ", flush=True)
        self.started = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        print(f"{time.monotonic() - self.started:.0f} s" if kind is None else "failed", flush=True)


if __name__ == "__main__":
    sys.exit(main())
