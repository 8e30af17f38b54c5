"""In low precision DA and NONE part at near ties alone: with NONE's choices DA stays beside it."""

from __future__ import annotations

import functools

import pytest
import torch

from ess.bench.engine.precision import SERVED, Models, apart, excerpts_of, read
from ess.bench.harness.text import token_ids
from ess.models.load import load_model
from tests.model.forced import Runs, run
from tests.support.built import needs_native

pytestmark = [
    pytest.mark.slow,
    needs_native,
]
CONTEXT, TOKENS = 2112, 40


@functools.cache
def runs() -> Runs:
    return run(lines(), tokens=TOKENS, mode="da")


def lines() -> list[list[int]]:
    return [list(line) for line in excerpts_of(token_ids()[0], CONTEXT, count=2, tokens=TOKENS)]


def test_who_watches_changes_no_bit() -> None:
    """NONE runs in one native call there, and op by op here; a stage is cut at the router."""
    models: Models = {"bf16": load_model(form="bf16")}
    made = read(models, {SERVED: ("none", "da")}, lines(), tokens=TOKENS)
    assert torch.equal(runs().none, made[SERVED, "none"])
    assert torch.equal(runs().other, made[SERVED, "da"])


def test_with_the_choices_of_none_little_is_left() -> None:
    turned = sum(
        int((runs().by_none.rows[place] != runs().by_other.rows[place]).any(1).sum())
        for place in runs().by_none.rows
    )
    assert turned > 0, "no near tie turned: this says nothing"
    distance = apart(runs().none, runs().forced)
    assert distance.mean < 1e-4
    assert float(distance.kl.max()) < 5e-3
    assert not any(lead > 0.1 for lead in distance.leads)
