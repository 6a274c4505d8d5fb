"""What is shipped: one import name, every module once, and nothing that an installation without extras lacks."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import sandbox_queue

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = {"sandbox_queue": "sandbox_queue", "workers": "sandbox_queue/workers", "backends": "sandbox_queue/backends"}


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without what git ignores: an old `build/` or `*.egg-info` cannot make good what is missing."""
    copy = tmp_path_factory.mktemp("checkout")
    listed = run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, listed):
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.exists():  # else it is deleted, and the deletion not committed yet
            target.write_bytes(source.read_bytes())
    return copy


@pytest.fixture(scope="session")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv with the wheel and what it requires, and nothing else: no extras, no development tools."""
    venv = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    run(sys.executable, "-m", "pip", "--python", venv / "bin/python", "install", "--no-deps", "--no-index", wheel)
    (site,) = venv.glob("lib/python*/site-packages")
    (ours,) = distributions(path=[str(site)])
    for required in requirements(ours):  # linked from here: it is as if pip had installed them, and needs no network
        for name in {file.parts[0] for file in required.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (site / name).symlink_to(Path(str(required.locate_file(name))))
    return venv


def build(kind: str, source: Path, place: Path) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", place, source)
    (built,) = place.iterdir()
    return built


def run(*command: str | Path) -> str:
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def requirements(of: Distribution, extras: frozenset[str] = frozenset({""})) -> list[Distribution]:
    """All that it needs, and all that those need."""
    found: dict[str, Distribution] = {}
    todo = [(of, extras)]
    while todo:
        needing, wanted = todo.pop()
        for requirement in map(Requirement, needing.requires or ()):
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in wanted):
                new = distribution(requirement.name)
                if requirement.name not in found or requirement.extras:
                    found[requirement.name] = new
                    todo.append((new, frozenset({"", *requirement.extras})))
    return list({new.metadata["Name"]: new for new in found.values()}.values())


def public_names() -> set[str]:
    """What type checkers see in `sandbox_queue/__init__.py`, and what its users therefore import."""
    tree = ast.parse(Path(sandbox_queue.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert len(names) == len(set(names)), "the wheel has a file twice"
        return {name: archive.read(name) for name in names}


def test_the_wheel_has_one_import_name(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in contents(wheel)}
    assert tops == {"sandbox_queue", f"sandbox_queue-{sandbox_queue.__version__}.dist-info"}


def test_the_wheel_has_every_module_once_and_the_types(wheel: Path, checkout: Path) -> None:
    modules = {
        f"{target}/{path.relative_to(checkout / source)}"
        for source, target in SHIPPED.items()
        for path in (checkout / source).rglob("*.py")  # which does not follow links to directories
    }
    code = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert "sandbox_queue/workers/loop.py" in code
    assert code == modules | {"sandbox_queue/py.typed"}


def test_the_wheel_says_who_it_is(wheel: Path) -> None:
    files = contents(wheel)
    info = f"sandbox_queue-{sandbox_queue.__version__}.dist-info"
    assert f"{info}/licenses/LICENSE" in files
    scripts = files[f"{info}/entry_points.txt"].decode()
    assert {line.split(" = ")[0] for line in scripts.splitlines() if " = " in line} == {
        "sandbox-launcher",
        "sandbox-queue",
        "sandbox-worker",
    }


def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    run("tar", "-xzf", sdist, "-C", tmp_path)
    (source,) = tmp_path.iterdir()
    again = build("wheel", source, tmp_path / "again")
    assert contents(again) == contents(wheel)


def test_importing_the_package_alone_imports_next_to_nothing(bare: Path) -> None:
    script = "import sys, sandbox_queue; print(sorted({'asyncio', 'msgspec', 'pydantic', 'redis'} & set(sys.modules)))"
    assert run(bare / "bin/python", "-I", "-c", script) == "[]\n"


def test_every_public_name_is_there_without_extras(bare: Path) -> None:
    names = public_names()
    assert "SandboxQueue" in names
    script = f"""
import importlib.util, sandbox_queue
for absent in ("aiodocker", "kubernetes", "pytest"):
    assert importlib.util.find_spec(absent) is None, absent
for name in {sorted(names)!r}:
    getattr(sandbox_queue, name)
    assert name in dir(sandbox_queue), name
"""
    run(bare / "bin/python", "-I", "-c", script)


def test_the_installed_command_works_without_extras(bare: Path) -> None:
    assert run(bare / "bin/sandbox-queue", "--version") == f"sandbox-queue {sandbox_queue.__version__}\n"
    assert '"check": "broker", "result": "ok"' in run(bare / "bin/sandbox-queue", "doctor", "--json")
