"""Documents that run: what README and docs/ show is executed, and prints what they say.

A fence opened with ```console run is a dialogue: every `$` line runs in a shell at the root, and
the lines below it must be what it printed, `...` standing for anything. Of a ```console without
`run` only the existence of targets, subcommands and options is checked. Every ```python block runs
on its own.
"""

from __future__ import annotations

import doctest
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ess

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\((?!https?://)([^)#]*)#([^)]+)\)")
SCRIPTS = {"ess": "ess.server.commands.cli", "ess-bench": "ess.bench.cli"}


def blocks(language: str, mark: str = "") -> list:
    listed = []
    for document in DOCUMENTS:
        for number, match in enumerate(FENCE.finditer(document.read_text())):
            if match[1] == language and match[2].strip() == mark:
                name = f"{document.relative_to(ROOT)}-{number}"
                listed.append(pytest.param(match[3], id=name))
    return listed


def dialogue(text: str) -> list[tuple[str, str]]:
    """(command, expected output) pairs."""
    first, *turns = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not first.strip(), f"a dialogue begins with a $ line, not with {first!r}"
    return [(turn.partition("\n")[0], turn.partition("\n")[2]) for turn in turns]


def matches(expected: str, printed: str) -> bool:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(expected.strip(), printed.strip(), flags)


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `ess`, `ess-bench` and `python` are those of this tree."""
    folder = tmp_path_factory.mktemp("bin")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for name, home in SCRIPTS.items():
        script = folder / name
        script.write_text(
            f"#!{sys.executable}\nfrom {home} import main\nraise SystemExit(main())\n"
        )
        script.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}


@pytest.mark.parametrize("text", blocks("console", "run"))
def test_a_dialogue_prints_what_it_shows(text: str, shell: dict[str, str]) -> None:
    for command, expected in dialogue(text):
        done = subprocess.run(
            command, shell=True, cwd=ROOT, env=shell, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert matches(expected, done.stdout), f"{command} printed\n{done.stdout}"


@pytest.mark.parametrize("text", blocks("console"))
def test_a_command_that_is_shown_exists(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command, _ in dialogue(text):
        name, *arguments = shlex.split(command, comments=True)
        if name in SCRIPTS:
            main = importlib.import_module(SCRIPTS[name]).main
            assert main([*arguments, "--help"]) == 0, f"{command}\n{capsys.readouterr().err}"
            known = set(re.findall(r"(?<![\w-])--?\w[\w.-]*", capsys.readouterr().out))
            unknown = {each for each in arguments if each.startswith("-")} - known
            assert not unknown, f"{command}: {unknown} is not an option"
        elif name == ".":
            assert arguments == [".venv/bin/activate"], f"{command}: the environment is .venv"
        else:
            assert name == "make", f"{command}: documents show make, ess and ess-bench"


@pytest.mark.parametrize("text", blocks("python"))
def test_a_python_block_runs(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(text, "<document>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_in_documents_exist(document: Path) -> None:
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|\$ |^)make ([\w-]+)", document.read_text(), re.MULTILINE))
    assert named <= known, f"{named - known} are no targets of the Makefile"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    broken = [
        link
        for link in LINK.findall(FENCE.sub("", document.read_text()))
        if not (document.parent / link).exists()
    ]
    assert not broken, f"{broken} in {document.name}: no such file"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_anchors_name_a_heading(document: Path) -> None:
    text = FENCE.sub("", document.read_text())
    lost = [
        f"{file}#{anchor}"
        for file, anchor in ANCHOR.findall(text)
        if anchor not in anchors(document.parent / file if file else document)
    ]
    assert not lost, f"{document.name} links to {lost}: no such heading"


def anchors(document: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_console_blocks_are_marked_or_plain() -> None:
    marks = {
        (match[1], match[2].strip())
        for document in DOCUMENTS
        for match in FENCE.finditer(document.read_text())
    }
    assert marks <= {("console", "run"), ("console", ""), ("python", ""), ("", ""), ("text", "")}


def test_the_tree_in_the_readme_is_the_tree() -> None:
    readme = (ROOT / "README.md").read_text()
    tree = re.search(r"^```text\n(ess/.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert tree is not None, "the README lost its annotated tree"
    shown = set(re.findall(r"^(?:  )?([\w./-]+/)(?=\s)", tree[1], re.MULTILINE))
    missing = {
        name for name in shown if not ((ROOT / name).is_dir() or (ROOT / "ess" / name).is_dir())
    }
    assert not missing, f"the README shows {missing}, which do not exist"
    there = {f"{path.parent.name}/" for path in (ROOT / "ess").glob("*/__init__.py")}
    assert there <= shown, f"the README does not show {there - shown}"


def doctest_modules() -> list[str]:
    """Modules with an example in them; only these are imported."""
    folders = ("ess", "models", "server", "bench")
    names = []
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        if ">>> " in path.read_text():
            inner = path.relative_to(ROOT).with_suffix("").parts
            names.append(".".join(inner if inner[0] == "ess" else ("ess", *inner)))
    return sorted({name.removesuffix(".__init__") for name in names})


@pytest.mark.parametrize("name", doctest_modules())
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0, f"{name} has >>> outside a docstring"
    assert result.failed == 0


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    changelog = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changelog is not None
    assert ess.__version__ == project["version"] == changelog[1]


def test_the_changelog_has_the_three_headings() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    headings = re.findall(r"^### (.+)$", newest, re.MULTILINE)
    assert headings == ["Features", "Safety and performance", "Not yet"]


def test_records_of_decisions_say_what_would_reverse_them() -> None:
    records = sorted((ROOT / "docs" / "adr").glob("*.md"))
    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))
    for path in records:
        text = path.read_text()
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings == ["Context", "Options", "Decision", "What would reverse it"], path.name
        assert text.count("\n") <= 40, f"{path.name}: at most 40 lines"


def test_the_checks_catch() -> None:
    assert matches("total ... bytes", "total 12 bytes\n")
    assert not matches("total 13 bytes", "total 12 bytes\n")
    assert dialogue("$ a\nx\n$ b\n") == [("a", "x\n"), ("b", "")]
    with pytest.raises(AssertionError, match="begins with a"):
        dialogue("a\n$ b\n")
