"""The files of the tree as they would be committed, and what every rule asks of one."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPP = (".cpp", ".h", ".cu", ".cuh")
LINKED = ("models", "server", "bench")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def tracked() -> tuple[str, ...]:
    """Links as themselves."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return tuple(
        sorted(
            name for name in set(listing) if (ROOT / name).is_symlink() or (ROOT / name).is_file()
        )
    )


def texts(*suffixes: str) -> Iterator[tuple[str, str]]:
    for name in tracked():
        path = ROOT / name
        if not path.is_symlink() and name.endswith(suffixes):
            try:
                yield name, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                assert not name.endswith((".py", *CPP)), f"{name}: save it as UTF-8"


@functools.cache
def parsed(text: str) -> ast.Module:
    """Most rules look at every file's tree."""
    return ast.parse(text)


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(text)))


@functools.cache
def running_nodes(text: str) -> tuple[ast.AST, ...]:
    """All but those under TYPE_CHECKING."""
    if "TYPE_CHECKING" not in text:
        return nodes(text)
    silent = {
        inner
        for node in nodes(text)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    return tuple(node for node in nodes(text) if node not in silent)


def in_package(name: str) -> bool:
    return name.startswith(("ess/", *(f"{folder}/" for folder in LINKED)))


def package_texts() -> dict[str, str]:
    return {name: text for name, text in texts(".py") if in_package(name)}


def module_of(name: str) -> str:
    """The name by which a package's file is imported: server/http/app.py is ess.server.http.app."""
    parts = name.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(["ess", *parts] if parts[0] in LINKED else parts)


def functions(tree: ast.AST) -> Iterator[Function]:
    return (
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def line_count(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def layer_of(name: str) -> str:
    """The folder that import-linter's layers know: ess/pool, models."""
    return "/".join(name.split("/")[: 2 if name.startswith("ess/") else 1])


def folder_sizes() -> Counter[str]:
    return Counter(
        str(Path(name).parent)
        for name in tracked()
        if name.endswith(".py") and not name.endswith("__init__.py")
    )
