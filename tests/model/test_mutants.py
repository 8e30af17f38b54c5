"""A sample of some modules' mutants in every full run; the whole campaign by hand."""

from __future__ import annotations

import os

import pytest

from tests.support import forked
from tests.support.few import few

SAMPLED = (
    ("ess.kernels.merge", "ess.overlap.dba"),
    ("ess.overlap.tbo", "ess.pool.pages"),
    ("ess.pool.budget", "ess.pool.lru.specification"),
)
"""Those of a line share a process, and with it what their tests import. All tests of a module run
before its mutants: those of the first line are quick."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "count"), few([(SAMPLED[0], 5)], all_of=[(each, 5) for each in SAMPLED])
)
def test_most_mutants_die(modules: tuple[str, ...], count: int) -> None:
    given = [word for name in modules for word in ("--module", name)]
    sample = ("--sample", f"{count}", "--seed", "3", "--floor", "0.9")
    printed = forked.run("engine", "-m", "tests.model.mutants", *given, *sample, env=os.environ)
    assert all(f"{name}: " in printed for name in modules), printed
