"""A pytest plugin: of a function's cases one in SAMPLED_EVERY is run, at least one.

Cases are chosen whose values of arguments were chosen the least often in their file. If it were
simply each fifth case, a grid with five values of an argument would show a single value of it.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from typing import Any

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    every, met = int(os.environ.get("SAMPLED_EVERY", "1")), Counter[tuple[str, ...]]()
    functions = defaultdict[str, list[Any]](list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    kept = set[str]()
    for cases in functions.values():
        for _ in range(-(-len(cases) // every)):
            chosen = max(cases, key=lambda case: sum(1 / (1 + met[v]) for v in values(case)))
            cases.remove(chosen)
            kept.add(chosen.nodeid)
            met.update(values(chosen))
    items[:] = [item for item in items if item.nodeid in kept]


def values(case: Any) -> list[tuple[str, ...]]:
    given = case.callspec.params if hasattr(case, "callspec") else {}
    return [(str(case.path), argument, repr(value)) for argument, value in given.items()]
