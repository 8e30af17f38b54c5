"""Chained drafts against the un-absorbed module; speculative greedy against plain greedy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ess.engine.layers.batch import Batch
from ess.engine.step import way
from ess.engine.step.runner import Runner
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.models.model import Model
from ess.models.plain import Plain
from tests.model.test_engine import engine, prompt, run
from tests.support import checkpoints
from tests.support.checkpoints import small
from tests.support.few import few
from tests.support.greedy import Drafter, PlainDrafter, greedy, greedy_mtp
from tests.support.unabsorbed import Unabsorbed

RAWS = [checkpoints.TINY_V32, checkpoints.TINY_GLM]


@pytest.fixture(params=RAWS, ids=["deepseek_v32", "glm_moe_dsa"])
def raw(request: pytest.FixtureRequest) -> dict[str, Any]:
    document: dict[str, Any] = request.param
    return document


@pytest.mark.parametrize("length", [6, 40], ids=["dense", "sparse"])
@pytest.mark.parametrize("shares", [False, True])
def test_chained_drafts_equal_the_unabsorbed_module(
    raw: dict[str, Any], length: int, shares: bool
) -> None:
    raw = {**raw, "index_share_for_mtp_iteration": shares}
    model = checkpoints.model(raw)
    reference = Unabsorbed(raw, checkpoints.tensors(model.config))
    for seed in range(3):
        tokens = checkpoints.tokens(length, 128, seed=seed)
        outcome = Plain(model).run(tokens)
        known = int(outcome.logits[-1].argmax())
        drafts = PlainDrafter(model).draft([*tokens[1:], known], outcome.hidden, 5)
        assert drafts == reference.drafts(tokens, known, 5)


def test_sharing_the_selection_changes_late_drafts(raw: dict[str, Any]) -> None:
    """Otherwise the test above could not tell the two ways apart."""
    differ = 0
    for seed in range(4):
        tokens = checkpoints.tokens(40, 128, seed=seed)
        drafts = []
        for shares in (False, True):
            model = checkpoints.model(raw, mtp_shares_selection=shares)
            hidden = Plain(model).run(tokens).hidden
            drafts.append(PlainDrafter(model).draft([*tokens[1:], 3], hidden, 8))
        assert drafts[0][0] == drafts[1][0]
        differ += drafts[0] != drafts[1]
    assert differ > 0


@pytest.mark.parametrize(
    ("family", "length", "mode"),
    few(
        [("v32", 9, "none"), ("v32", 9, "dba"), ("glm", 9, "resident"), ("glm", 90, "dba")],
        all_of=(
            (*at, mode)
            for at in (("v32", 9), ("glm", 9), ("glm", 90))
            for mode in ("none", "dba", "resident")
        ),
    ),
)
def test_the_engine_s_drafts_are_those_of_the_plain_module(
    family: str, length: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each step all of them. GLM's passes share the first one's selection; where each selects
    for itself, the engine attends to the rows of guesses beside a selection, not within it."""
    model, text, told = small(family, layer_count=3), prompt(length), list[list[int]]()

    def draft(runner: Runner, batch: Batch, hidden: Tensor, following: Tensor, last: Any, n: int):
        made = way.drafts_of_a_step(runner, batch, hidden, following, last, n)
        text.extend(following[: last[0] + 1].tolist())
        plain = PlainDrafter(model)
        wanted = plain.draft(text[1:], Plain(model).run(text[:-1]).hidden, n)
        told.append(wanted)
        assert made[0].tolist() == wanted, len(told)
        return made

    monkeypatch.setattr(way, "drafts_of_a_step", way.draft, raising=False)
    monkeypatch.setattr(way, "draft", draft)
    eng = engine(family, mtp=4, modes=mode, chunks=30)
    request = eng.add(text.copy(), Sampling(tokens_max=12))
    run(eng)
    assert request.output == text[length:][:12]
    assert len(told) >= 3
    assert len(set(map(tuple, told))) > 1


class Prompter:
    """Knows the true continuation; says something else wherever `wrong` says so."""

    def __init__(self, model: Model, truth: list[int], wrong: list[bool]) -> None:
        self._own = PlainDrafter(model)
        self._truth = truth
        self._wrong = wrong
        self._at = 0
        self.rows = self._own.layer.rows

    def draft(self, tokens: Sequence[int], hidden: torch.Tensor, count: int) -> list[int]:
        self._own.draft(tokens, hidden, count)
        self._at += len(tokens) if self._at else 1
        true = self._truth[self._at : self._at + count]
        wrong = self._wrong[self._at : self._at + count]
        return [(t + w) % 128 for t, w in zip(true, wrong, strict=True)]


def steps_needed(wrong: list[bool], count: int, verified: int) -> int:
    """Each step yields one token and all drafts before the first wrong one."""
    at, step_count = 1, 0
    while at < count:
        drafts = wrong[at : at + verified - 1]
        at += 1 + (drafts.index(True) if True in drafts else len(drafts))
        step_count += 1
    return step_count


@pytest.mark.parametrize(
    ("at", "verified"),
    few([(0, 1), (1, 2), (0, 3), (1, 5)], all_of=itertools.product(range(2), (1, 2, 3, 5))),
)
def test_greedy_with_mtp_equals_greedy(at: int, verified: int) -> None:
    model = checkpoints.model(RAWS[at])
    prompt = checkpoints.tokens(40, 128, seed=7)
    expected = greedy(model, prompt, 24)
    tokens, _ = greedy_mtp(model, prompt, 24, verified=verified)
    assert tokens == expected


@pytest.mark.parametrize("verified", [2, 4])
def test_greedy_with_good_and_bad_drafts(raw: dict[str, Any], verified: int) -> None:
    """Some drafts are accepted, some are not; the tokens and the module's rows stay true."""
    model = checkpoints.model(raw)
    prompt = checkpoints.tokens(40, 128, seed=7)
    truth = greedy(model, prompt, 40)
    wrong = [number % 5 == 0 for number in range(40)]
    drafter: Drafter = Prompter(model, truth, wrong)
    tokens, step_count = greedy_mtp(model, prompt, 24, verified=verified, drafter=drafter)
    assert tokens == truth[:24]
    assert step_count == steps_needed(wrong, 24, verified)
    assert isinstance(drafter, Prompter)
    fresh = PlainDrafter(model)
    known = [*prompt[1:], *truth][: drafter.rows.length]
    hidden = Plain(model).run([*prompt, *truth]).hidden[: len(known)]
    fresh.draft(known, hidden, 1)
    assert torch.allclose(fresh.layer.rows.filled, drafter.rows.filled, atol=1e-5)


def test_what_cannot_run_is_refused(raw: dict[str, Any]) -> None:
    model = checkpoints.model({**raw, "num_nextn_predict_layers": 0})
    with pytest.raises(BadInput, match="has no MTP module"):
        PlainDrafter(model)
    with pytest.raises(BadInput, match="verified is 0"):
        greedy_mtp(model, [1], 3, verified=0)
    with pytest.raises(BadInput, match=r"tokens -1\.\.128 are outside 0\.\.127"):
        Plain(model).run([-1, 128])
    with pytest.raises(BadInput, match="no tokens"):
        Plain(model).run([])
