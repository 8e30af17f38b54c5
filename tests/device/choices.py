"""Draws, chances and uploads on the pretended device, beside those of the host."""

from __future__ import annotations

import math
import re

import pytest
import torch

from ess.door.device.memory.uploads import Download
from ess.engine.step.underway.uploads import TURNS, Upload
from ess.engine.tokens.device_draw import NOT_A_NUMBER, Drawing, draw_all
from ess.engine.tokens.draw import draw
from ess.engine.tokens.logprobs import block_chances, chance_block, chances
from ess.engine.tokens.sampling import Sampling
from ess.kernels import backend, cut
from ess.kernels.calls import Draws
from tests.device.kernels import Kernels
from tests.support.pretended import DEVICE, RACES, without_waits

VOCABULARY = 700
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.7, seed=-3, min_p=0.2),
    Sampling(temperature=1.3, seed=1 << 63, top_k=1),
    Sampling(temperature=1.3, seed=(1 << 64) - 1, top_k=300, top_p=0.6),
    Sampling(temperature=0.5, top_p=0.3),
    Sampling(temperature=2.0, top_k=5000, min_p=0.01),
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(backend, "_cuda", Kernels)
    backend._ops.cache_clear()
    yield
    backend._ops.cache_clear()


def logits(count: int, *, seed: int = 0) -> torch.Tensor:
    """With ties, and with tokens that may not be drawn."""
    made = torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    rounded = (made * 4).round() / 4
    rounded[:, 7] = -torch.inf
    return rounded


@pytest.mark.parametrize("kept", [SAMPLINGS, SAMPLINGS[:1], SAMPLINGS[:3], SAMPLINGS[3:]])
def test_draws_are_those_of_the_host(kept):
    samplings = [sampling for sampling in kept for _ in range(40)]
    positions = [1 + 17 * query for query in range(len(samplings))]
    rows = logits(len(samplings))
    drawing, there = Drawing(len(samplings), DEVICE), rows.to(DEVICE)
    at = torch.tensor(positions).to(DEVICE)
    with without_waits():
        drawn = draw_all(there, drawing.columns(samplings), at)
    assert drawn.cpu().tolist() == draw(rows, samplings, positions).tolist()
    assert torch.equal(there.cpu(), rows)


def test_logits_that_are_no_numbers_are_told():
    rows = logits(3)
    rows[1, 3] = math.nan
    drawing = Drawing(3, DEVICE)
    drawn = draw_all(rows.to(DEVICE), drawing.columns(SAMPLINGS[:3]), torch.arange(3).to(DEVICE))
    assert [token == NOT_A_NUMBER for token in drawn.tolist()] == [False, True, False]


def test_the_watch_for_races_sees_what_a_draw_writes():
    scores, draws = logits(3).to(DEVICE), Draws(*torch.ones(3, 3, dtype=torch.long).to(DEVICE))
    with RACES.watched() as races:
        tokens = torch.zeros(3, dtype=torch.long).to(DEVICE)
        cut.draw(scores, draws, tokens)
        assert races() == []
        with torch.cuda.stream(torch.cuda.Stream()):
            _ = tokens + 1
        [race] = races()
    assert re.search(r"add on .* reads what \S+ draw on compute writes,", race)


def test_columns_go_up_again_only_for_another_batch():
    drawing = Drawing(4, DEVICE)
    first = drawing.columns(SAMPLINGS[:2])
    assert drawing.columns(SAMPLINGS[:2]) is first
    assert drawing.columns(SAMPLINGS[1:3]) is not first
    assert drawing.columns(SAMPLINGS[1:3]).parts.cpu()[:, 2].tolist() == pytest.approx([0.0, 0.2])


@pytest.mark.parametrize("top_count", [0, 1, 20])
def test_chances_are_those_of_the_host(top_count):
    rows, tokens = logits(5, seed=1), [1, 2, 3, 4, 600]
    there = rows.to(DEVICE), torch.tensor(tokens).to(DEVICE)
    with without_waits():
        said = Download(chance_block(*there, top_count))
    told, wanted = block_chances(said.read().tolist()), chances(rows, tokens, top_count)
    for mine, theirs in zip(told, wanted, strict=True):
        assert mine.rank == theirs.rank
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-6)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


def test_an_upload_keeps_its_address_and_turns():
    upload = Upload((3, 2), torch.int64, DEVICE)
    made = []
    for turn in range(2 * TURNS):
        with without_waits():
            there = upload.put([(turn, 1), (2, turn)])
        made.append(there.data_ptr())
        assert there.tolist() == [[turn, 1], [2, turn]]
    assert len(set(made)) == 1
