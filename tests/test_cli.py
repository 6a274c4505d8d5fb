"""The command line as its users meet it: started as a program, piped, in a terminal, against real servers."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sandbox_queue
from sandbox_queue.address import Address
from tests.kit import Server

START = "import sys; from sandbox_queue.cli import main; sys.exit(main())"  # what the console script does
RESULTS = {"ok", "note", "warning", "failed"}


def environment(**variables: str) -> dict[str, str]:
    """Ours, without what would configure a broker or colours, and with `variables`."""
    ours = re.compile(r"SANDBOX_|REDIS_URL|DOCKER_HOST|KUBERNETES_|NO_COLOR|FORCE_COLOR|COLUMNS")
    return {name: value for name, value in os.environ.items() if not ours.match(name)} | {"TERM": "xterm"} | variables


def command_line(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `sandbox-queue` with its output piped."""
    program = [sys.executable, "-c", START, *arguments]
    return subprocess.run(program, env=environment(**variables), capture_output=True, text=True, timeout=60)


def doctor(**variables: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """`doctor --json`: its exit code, its checks by name, and all that it printed."""
    ended = command_line("doctor", "--json", **variables)
    checks = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.stderr == ""
    assert all(set(check) == {"check", "result", "reason", "fix"} and check["result"] in RESULTS for check in checks)
    return ended.returncode, {check["check"]: check for check in checks}, ended.stdout


@pytest.fixture
def open_server() -> Iterator[Server]:
    """A server that lets anybody in, as a stock Redis does."""
    server = Server("valkey", "user default on nopass ~* &* +@all")
    yield server
    server.close()


@pytest.fixture
def evicting_server() -> Iterator[Server]:
    server = Server("valkey", "maxmemory-policy allkeys-lru")
    yield server
    server.close()


# --- the frame


def test_the_version_is_the_packages() -> None:
    ended = command_line("--version")
    assert (ended.returncode, ended.stdout) == (0, f"sandbox-queue {sandbox_queue.__version__}\n")


@pytest.mark.parametrize("arguments", [("--help",), ("doctor", "--help")])
def test_help_shows_examples(arguments: tuple[str, ...]) -> None:
    ended = command_line(*arguments)
    assert ended.returncode == 0
    assert "examples:\n  sandbox-queue doctor" in ended.stdout


def test_help_imports_nothing_heavy_and_is_there_at_once() -> None:
    heavy = {"asyncio", "msgspec", "pydantic", "redis", "rich"}
    script = f"""
import sys
from sandbox_queue.cli import main
try:
    main(["--help"])
except SystemExit:
    print(sorted({heavy!r} & set(sys.modules)), file=sys.stderr)
"""
    times: list[float] = []
    for _ in range(5):  # the best of five, and processor time: the machine may be busy, and a slow start is slow each time
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert ended.stderr == "[]\n"
    assert 0 < min(times) < 0.2


def test_no_command_or_a_wrong_one_is_wrong_usage() -> None:
    assert command_line().returncode == 2
    wrong = command_line("docter")
    assert wrong.returncode == 2
    assert "docter" in wrong.stderr


@pytest.mark.parametrize("arguments", [("--debug", "doctor"), ("doctor", "--debug")])
def test_an_unexpected_error_has_a_traceback_only_on_demand(arguments: tuple[str, ...]) -> None:
    script = "from sandbox_queue.cli import doctor, main\nimport sys\ndel doctor.look\nsys.exit(main(sys.argv[1:]))"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", script, *arguments]
        return subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=60)

    plain = run("doctor")
    assert plain.returncode == 1
    assert plain.stderr.count("\n") == 1
    assert "NameError" in plain.stderr
    assert "--debug" in plain.stderr
    assert "Traceback" in run(*arguments).stderr


def test_a_reader_that_leaves_early_causes_no_complaint() -> None:
    program = [sys.executable, "-c", START, "doctor"]
    with subprocess.Popen(program, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 1


# --- doctor


def test_doctor_is_content_with_nothing_configured() -> None:
    code, checks, _ = doctor()
    assert code == 0
    assert "private server" in checks["broker"]["reason"]
    assert {name: checks[name]["result"] for name in ("python", "broker", "eviction", "default-user", "acl")} == {
        "python": "ok",
        "broker": "ok",
        "eviction": "ok",
        "default-user": "ok",
        "acl": "ok",
    }


async def test_doctor_names_the_broker_without_its_password(server: Server) -> None:
    code, checks, printed = doctor(REDIS_URL=server.tcp_url)
    assert code == 0
    assert checks["broker"]["reason"].startswith({"valkey": "Valkey ", "redis": "Redis "}[server.flavour])
    assert f"redis://127.0.0.1:{server.port}/0" in checks["broker"]["reason"]
    assert server.password not in printed


async def test_doctor_leaves_nothing_behind(server: Server) -> None:
    doctor(REDIS_URL=server.url)
    async with Address(server.url).wire() as wire:
        assert await wire.one("KEYS", "*") == []
        assert await wire.one("ACL", "USERS") == [b"default"]


def test_doctor_warns_of_a_broker_that_lets_anybody_in(open_server: Server) -> None:
    code, checks, _ = doctor(REDIS_URL=f"unix://{open_server.directory}/s")
    assert code == 0
    assert checks["default-user"]["result"] == "warning"
    assert "requirepass" in checks["default-user"]["fix"]


def test_doctor_fails_on_a_broker_that_evicts(evicting_server: Server) -> None:
    code, checks, _ = doctor(REDIS_URL=evicting_server.url)
    assert code == 1
    assert checks["broker"]["result"] == "failed"
    assert "CONFIG SET maxmemory-policy noeviction" in checks["broker"]["reason"]


def test_doctor_says_what_to_do_when_nobody_answers() -> None:
    code, checks, _ = doctor(REDIS_URL="redis://:hidden@127.0.0.1:1/0")
    assert code == 1
    assert checks["broker"]["result"] == "failed"
    assert "hidden" not in str(checks)
    assert "REDIS_URL" in checks["broker"]["fix"]


async def test_doctor_tells_a_wrong_password_from_an_absent_broker(server: Server) -> None:
    code, checks, printed = doctor(REDIS_URL=f"redis://:guessed@127.0.0.1:{server.port}/0")
    assert code == 1
    assert "password" in checks["broker"]["fix"]
    assert "guessed" not in printed


@pytest.mark.parametrize(
    ("rights", "result", "fix"),
    [
        ("~* &* +@all -acl", "warning", "+acl|setuser"),
        ("~other:* &* +@all", "failed", "~control:*"),
    ],
)
async def test_doctor_finds_out_what_our_user_may_do(server: Server, rights: str, result: str, fix: str) -> None:
    async with Address(server.url).wire() as wire:
        await wire.one("ACL", "SETUSER", "service", "on", ">service-password", *rights.split())
    code, checks, _ = doctor(REDIS_URL=f"redis://service:service-password@127.0.0.1:{server.port}/0")
    assert checks["acl"]["result"] == result
    assert fix in checks["acl"]["fix"]
    assert code == int(result == "failed")


def test_doctor_names_the_variable_that_makes_no_sense() -> None:
    code, checks, _ = doctor(SANDBOX_QUEUE_CONNECT_TIMEOUT="soon")
    assert code == 1
    assert checks["settings"]["result"] == "failed"
    assert "SANDBOX_QUEUE_CONNECT_TIMEOUT" in checks["settings"]["reason"]


def test_an_extra_matters_to_whom_asks_for_its_backend(tmp_path: Path) -> None:
    """Shadowed, so that the outcome does not depend on what is installed: one extra is there but broken, one is fine."""
    (tmp_path / "aiodocker.py").write_text("raise RuntimeError('half an installation')")
    (tmp_path / "kubernetes.py").write_text("")
    code, checks, _ = doctor(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert checks["docker"]["result"] == "failed"
    assert "half an installation" in checks["docker"]["reason"]
    assert checks["kubernetes"]["result"] == "ok"

    (tmp_path / "aiodocker.py").write_text("raise ModuleNotFoundError('No module named aiodocker')")
    assert doctor(PYTHONPATH=str(tmp_path))[1]["docker"]["result"] == "note"
    code, checks, _ = doctor(PYTHONPATH=str(tmp_path), SANDBOX_TYPE="docker")
    assert (code, checks["docker"]["result"]) == (1, "failed")
    assert checks["docker"]["fix"] == "pip install 'sandbox-queue[docker]'"


def test_doctor_is_plain_when_piped() -> None:
    ended = command_line("doctor")
    assert ended.returncode == 0
    assert "\x1b" not in ended.stdout
    assert re.search(r"^ok +broker +Valkey|^ok +broker +Redis", ended.stdout, re.MULTILINE)


def test_doctor_is_coloured_in_a_terminal_with_the_same_words() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", START, "doctor"], env=environment(), stdout=theirs, stderr=theirs) as running:
        os.close(theirs)
        shown = read_to_end(ours).decode()
    assert running.returncode == 0
    assert "\x1b[32mok" in shown
    words = re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\r\n", "\n")
    assert words == command_line("doctor").stdout


def read_to_end(terminal: int) -> bytes:
    data = bytearray()
    try:
        while chunk := os.read(terminal, 4096):
            data += chunk
    except OSError:  # EIO: on Linux, the way in which a terminal says that nobody is left at the other end
        pass
    finally:
        os.close(terminal)
    return bytes(data)


# --- the other programs


def test_the_launcher_says_honestly_that_there_is_none_yet() -> None:
    program = [sys.executable, "-m", "sandbox_queue.workers.launcher"]
    ended = subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "no launcher yet" in ended.stderr
