"""The public door: few names, each found where the map says, documented and typed."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import ess

NAMES_MAX = 25


def for_type_checkers(source: str) -> dict[str, str]:
    """Name -> module of every import under TYPE_CHECKING."""
    homes = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                assert isinstance(statement, ast.ImportFrom), ast.unparse(statement)
                homes |= {alias.name: statement.module for alias in statement.names}
    return homes


def test_the_three_lists_are_one() -> None:
    assert ess.__all__ == sorted(ess.__all__)
    assert set(ess.__all__) == set(ess._HOME)
    assert for_type_checkers(Path(ess.__file__).read_text()) == ess._HOME
    assert sorted([*ess.__all__, "__version__"]) == dir(ess)


def test_the_door_is_narrow() -> None:
    assert len(ess.__all__) <= NAMES_MAX


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        ess.Nothing  # noqa: B018


@pytest.mark.parametrize("name", ess.__all__)
def test_a_public_name_is_documented_and_typed(name: str) -> None:
    thing = getattr(ess, name)
    home = importlib.import_module(ess._HOME[name])
    assert thing is getattr(home, name)
    assert undocumented(thing) == []
    assert untyped(thing) == []


def undocumented(thing: object) -> list[str]:
    """A dataclass writes its signature as its doc; that is not a document."""
    name = getattr(thing, "__name__", repr(thing))
    own = thing.__doc__ or ""
    return [name] if not own.strip() or own.startswith(f"{name}(") else []


def untyped(thing: object) -> list[str]:
    """Parameters and results without a type, over the callable or the public part of a class."""
    members = [(thing.__name__, thing)] if inspect.isfunction(thing) else public_functions(thing)
    missing = []
    for name, function in members:
        signature = inspect.signature(function)
        for parameter in list(signature.parameters.values()):
            if parameter.name not in ("self", "cls") and parameter.annotation is parameter.empty:
                missing.append(f"{name}({parameter.name})")
        if signature.return_annotation is signature.empty:
            missing.append(f"{name} -> ?")
    return missing


def public_functions(owner: object) -> list[tuple[str, object]]:
    listed = []
    for name, member in vars(owner).items():
        inner = member.fget if isinstance(member, property) else member
        function = getattr(inner, "__func__", inner)
        if inspect.isfunction(function) and (not name.startswith("_") or name == "__init__"):
            listed.append((name, function))
    return listed


def test_the_checks_catch() -> None:
    class Bare:
        def act(self, count): ...

    assert undocumented(Bare) == ["Bare"]
    assert untyped(Bare) == ["act(count)", "act -> ?"]
