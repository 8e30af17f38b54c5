"""What an installation gives: one import name, the sources, and a base that needs no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support import kept_objects, own_python

ROOT = Path(__file__).resolve().parent.parent

REFUSE = """
import importlib.metadata, re, sys

def closure(names):
    found, left = set(), list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or ():
            if "extra ==" not in line:
                left.append(re.match(r"[\\w.-]+", line)[0])
    return found

base = closure(sys.argv[1].split())
owners = importlib.metadata.packages_distributions()
plain = lambda name: re.sub(r"[-_.]+", "-", name).lower()
refused = {top for top, dists in owners.items() if not base & set(map(plain, dists))} - {"ess"}
assert "torch" in refused and "numpy" not in refused, sorted(refused)

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"{name} is not in the base installation", name=name)

sys.meta_path.insert(0, Refuse())
"""


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def torch_free_modules() -> list[str]:
    """As the import contract lists them; a package includes all its modules."""
    contracts = project()["tool"]["importlinter"]["contracts"]
    listed = next(each for each in contracts if each.get("forbidden_modules") == ["torch"])
    modules = []
    for name in listed["source_modules"]:
        folder = ROOT / name.replace(".", "/")
        inner = sorted(folder.rglob("*.py")) if folder.is_dir() else []
        modules += [name, *(module_name(path) for path in inner if not is_program(path))]
    return modules


def is_program(path: Path) -> bool:
    """A package's own file counts by itself; a child process is a program, not a module."""
    return path.stem == "__init__" or path.stem.endswith("_child")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def run_bare(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Python in which only the base dependencies can be imported."""
    base = " ".join(name.split(">")[0] for name in project()["project"]["dependencies"])
    return own_python.python("-c", REFUSE + code, base, cwd=cwd, timeout_s=300)


def test_the_base_installation_imports_what_needs_no_torch(tmp_path: Path) -> None:
    names = torch_free_modules()
    assert {"ess.layout", "ess.trace", "ess.trace.reader", "ess.server.commands.cli"} <= set(names)
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)\n"
    done = run_bare(code, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "call",
    [
        "ess.server.commands.cli:--help",
        "ess.server.commands.cli:version --json",
        "ess.server.commands.cli:layout deepseek-v3.2",
        "ess.server.commands.cli:plan --ctx 32k --batch 64",
        "ess.bench.cli:--help",
        "ess.bench.cli:trace --smoke --json",
        "ess.bench.cli:paper --smoke --json",
    ],
)
def test_console_scripts_run_without_torch(call: str, tmp_path: Path) -> None:
    home, _, arguments = call.partition(":")
    done = run_bare(f"from {home} import main\nsys.exit(main({arguments.split()!r}))", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("home", ["ess", "ess.server.commands.cli", "ess.bench.cli"])
def test_a_command_runs_as_a_module_too(home: str, tmp_path: Path) -> None:
    code = (
        f"import runpy\nsys.argv[1:] = ['--help']\nrunpy.run_module({home!r}, run_name='__main__')"
    )
    done = run_bare(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_refusal_refuses(tmp_path: Path) -> None:
    done = run_bare("import torch", tmp_path)
    assert done.returncode != 0
    assert "torch is not in the base installation" in done.stderr


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    code = """
from ess.server.commands.cli import main as ess
from ess.bench.cli import main as bench
assert ess(["--help"]) == bench(["--help"]) == 0
heavy = {"numpy", "torch", "ess.layout", "ess.bench.harness.report"} & set(sys.modules)
assert not heavy, heavy
"""
    done = run_bare(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_extension_lists_every_source_and_header() -> None:
    """A header that `depends` lacks is not in the sdist; an optional extension fails softly."""
    (extension,) = project()["tool"]["setuptools"]["ext-modules"]
    for key, suffix in (("sources", "cpp"), ("depends", "h")):
        folders = ("csrc/cpu", "csrc/residency")
        paths = (path for name in folders for path in (ROOT / name).rglob(f"*.{suffix}"))
        there = sorted(str(path.relative_to(ROOT)) for path in paths)
        assert extension.get(key) == there, f"pyproject.toml, ext-modules: {key} must be {there}"


def copy_tree(target: Path) -> None:
    """The tree as it would be committed: links stay links, nothing that was built comes along."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listing.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_symlink() or source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def packaged(source: Path) -> set[str]:
    """The names in a wheel of all files of the package but trainers and kept measurements."""
    inner = {name: f"ess/{name}" for name in ("models", "server", "bench", "csrc")} | {"ess": "ess"}
    files = {
        f"{name}/{path.relative_to(source / folder)}"
        for folder, name in inner.items()
        for path in (source / folder).rglob("*")
        if path.is_file()
    }
    return {file for file in files if "/trainer/" not in file and "/bench/results/" not in file}


@pytest.mark.slow
def test_a_wheel_made_through_the_sdist_has_one_import_name(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    copy_tree(source)
    described = source / "pyproject.toml"  # what is compiled matters here, and not how well
    described.write_text(described.read_text().replace('"-O3"', '"-O0"'))
    compiler = f"{sys.executable} {kept_objects.__file__}"
    python(
        ["-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(source)],
        CC=compiler,
        CXX=compiler,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ess"}
    for inner in ("models", "server", "bench", "trace", "pool", "kernels"):
        assert f"ess/{inner}/__init__.py" in names
    absent = packaged(source) - set(names)
    assert not absent, f"the wheel lacks {sorted(absent)}"
    assert any(name.startswith("ess/_native") for name in names)
    assert not [name for name in names if "/trainer/" in name], "the trainer is not in the wheel"
    python(
        [
            *("-m", "pip", "install", "-q", "--no-compile", "--no-deps", "--no-index"),
            *("--target", str(target), wheel),
        ]
    )
    code = (
        "import sys, ess.server.commands.cli, ess._native\n"
        "print(ess.__file__); print(ess._native.__file__)"
    )
    printed = python(["-c", code], PYTHONPATH=str(target), cwd=tmp_path)
    assert all(line.startswith(str(target)) for line in printed.splitlines()), printed
    scripts = {path.name for path in (target / "bin").iterdir()}
    assert scripts == {"ess", "ess-bench"}


def python(arguments: list[str | Path], cwd: Path | None = None, **changes: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
