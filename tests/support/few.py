"""Some cases of a grid or some seeds of many, and all the others by `make test-long`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.support.pairwise import pairwise


def few(cases: Iterable[Any], *, all_of: Iterable[Any]) -> list[Any]:
    """For `parametrize`: all of them, and those that are no `cases` have the marks `slow` and
    `long`. A tuple is the values of several arguments."""
    kept, every = list(cases), list(all_of)
    assert all(case in every for case in kept), "a case of another grid"
    return [case if case in kept else _long(case) for case in every]


def pairs(**values: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """For `parametrize(*pairs(...))`: a grid, of which those cases are kept in which every value
    meets every value of any other argument."""
    kept = [tuple(case.values()) for case in pairwise(values)]
    return [*values], few(kept, all_of=itertools.product(*values.values()))


def _long(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=(pytest.mark.slow, pytest.mark.long))
