from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from ess.errors import BadInput
from ess.models.tiny.trainer import stages, team, train
from ess.models.tiny.trainer.optimiser import pieces_of, trained_pieces
from ess.models.tiny.trainer.shape import ModelShape
from ess.models.tiny.trainer.team import Common, Team, gather_common, sample

SHORT = tuple(dataclasses.replace(stage, length=24, rows=2, parts=2) for stage in stages.STAGES)


@pytest.fixture
def tokens_path(tmp_path: Path) -> Path:
    path = tmp_path / "train.npy"
    np.save(path, np.random.default_rng(0).integers(2, 96, 3000).astype(np.uint16))
    return path


def _common(shape: ModelShape, tokens_path: Path, seed: int = 0) -> Common:
    return gather_common(
        shape=shape,
        tokens_path=str(tokens_path),
        seed=seed,
        worker_count=1,
        device=torch.device("cpu"),
    )


def test_an_epoch_shows_every_window_once() -> None:
    tokens = np.arange(1001, dtype=np.uint16)
    seen = [sample(tokens, length=50, seed=3, at=at) for at in range(19 * 2)]
    starts = [int(window[0]) for window in seen]
    for epoch in (starts[:19], starts[19:]):
        assert len({start // 50 for start in epoch}) == 19
        assert len({start % 50 for start in epoch}) == 1
    assert starts[:19] != starts[19:]
    assert all(window.size == 51 and int(window[-1]) <= 1000 for window in seen)
    with pytest.raises(BadInput, match="9 tokens are too few"):
        sample(tokens[:9], length=50, seed=0, at=0)


def test_every_stage_moves_what_it_trains_and_nothing_else(
    small: ModelShape, tokens_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "STAGES", SHORT)
    common = _common(small, tokens_path)
    workers = Team(common)
    torch.nn.init.normal_(workers.worker.network.lm_head.weight)
    pieces = pieces_of(workers.worker.network)
    for at, stage in enumerate(SHORT):
        before = common.flats.truth.clone()
        number = workers.step(stage_at=at, step=0, first=at * 4, rates=(0.02, 2e-3))
        assert np.isfinite(number)
        moved = {
            piece.name
            for piece in pieces
            if not torch.equal(piece.view(before), piece.view(common.flats.truth))
        }
        trained = {piece.name for piece in trained_pieces(small, pieces, stage.trains)}
        assert moved <= trained
        assert len(moved) > 0.8 * len(trained)
        assert not any(grad.any() for grad in common.grads)
    workers.close()


def test_a_state_continues_as_if_nothing_had_happened(
    small: ModelShape, tokens_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "STAGES", SHORT)
    common = _common(small, tokens_path)
    workers = Team(common)
    for step in range(2):
        workers.step(stage_at=0, step=step, first=4 * step, rates=(0.02, 2e-3))
    place = train.TrainingPlace(step=2, sequences=8, active_s=1.5)
    train.save_state(tmp_path / "state.safetensors", common, place)
    again = _common(small, tokens_path, seed=9)
    assert train.load_state(tmp_path / "state.safetensors", again) == place
    other = Team(again)
    again.seed = common.seed
    for each in (workers, other):
        each.step(stage_at=0, step=2, first=8, rates=(0.02, 2e-3))
    for one, two in zip(common.flats.tensors(), again.flats.tensors(), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(common.biases, again.biases)
    assert not (tmp_path / "state.partial").exists()


def test_a_foreign_state_is_refused(small: ModelShape, tokens_path: Path, tmp_path: Path) -> None:
    common = _common(small, tokens_path)
    train.save_state(tmp_path / "state.safetensors", common, train.TrainingPlace())
    wider = _common(dataclasses.replace(small, hidden=64), tokens_path)
    before = wider.flats.truth.clone()
    with pytest.raises(BadInput, match="weights, need"):
        train.load_state(tmp_path / "state.safetensors", wider)
    assert torch.equal(before, wider.flats.truth)
    with pytest.raises(BadInput, match="2 workers on cuda"):
        gather_common(
            shape=small,
            tokens_path=str(tokens_path),
            seed=0,
            worker_count=2,
            device=torch.device("cuda"),
        )
