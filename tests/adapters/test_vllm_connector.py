"""Our class against vLLM's interface as recorded, without vLLM."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from ess.errors import Unavailable
from tests.adapters.vllm_stand_in import CONNECTOR, VERSIONS, connector

ROOT = Path(__file__).parents[2]

versions = pytest.mark.parametrize(
    "version", VERSIONS, ids=[version["commit"][:8] for version in VERSIONS]
)


def called(method: Any, owner: object) -> inspect.Signature:
    """As seen by a caller, without self or cls."""
    bound = method.__get__(owner if not isinstance(method, classmethod) else None, type(owner))
    return inspect.signature(bound)


@versions
def test_nothing_abstract_is_left(version: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = connector(monkeypatch, version).EssConnector
    assert not made.__abstractmethods__
    assert {base.__name__ for base in made.__mro__} > {"KVConnectorBase_V1", "SupportsHMA"}


@versions
def test_what_we_define_takes_the_recorded_parameters(
    version: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By position and by name: vLLM has called these either way."""
    made = connector(monkeypatch, version).EssConnector
    recorded = {**version["methods"], **version["hma"]}
    own = [name for name in vars(made) if name in recorded]
    assert set(version["abstract"]) | set(version["hma"]) < set(own)
    for name in own:
        names = [part for part in recorded[name][1:] if not part.startswith("*")]
        signature = called(vars(made)[name], object.__new__(made))
        signature.bind(*names)
        signature.bind(**dict.fromkeys(names))
        if recorded[name][-1] == "**kwargs":
            signature.bind(*names, an_argument_of_tomorrow=1)


@versions
def test_every_recorded_call_finds_a_method(version: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = connector(monkeypatch, version).EssConnector
    for name, count in version["calls"]:
        method = inspect.getattr_static(made, name)
        called(method, object.__new__(made)).bind(*range(count))


@versions
def test_a_method_of_ours_is_known_to_vllm_or_its_own(
    version: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that vLLM never calls would be a misspelling, or of another version."""
    made = connector(monkeypatch, version).EssConnector
    known = {name for each in VERSIONS for name in (*each["methods"], *each["hma"])}
    public = {name for name in vars(made) if not name.startswith("_")}
    assert public <= known


def test_without_vllm_the_module_says_what_it_is_for() -> None:
    sys.modules.pop(CONNECTOR, None)
    with pytest.raises(Unavailable, match=r"loaded by vLLM, .*No module named 'vllm'"):
        importlib.import_module(CONNECTOR)


def test_nothing_else_imports_vllm() -> None:
    importers = set()
    for path in (ROOT / "ess").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "vllm" for name in names):
                importers.add(path.relative_to(ROOT).as_posix())
            assert not {CONNECTOR} & set(names), f"{path} imports what only vLLM loads"
    assert importers == {"ess/adapters/vllm/connector.py"}
