from __future__ import annotations

import pytest
import torch

from ess.errors import BadInput
from ess.models.tiny.trainer.network import Network
from ess.models.tiny.trainer.optimiser import (
    Flats,
    Job,
    bind,
    jobs_of,
    orthogonalise,
    pieces_of,
    run_job,
    share_out,
    trained_pieces,
)
from ess.models.tiny.trainer.shape import ModelShape

CPU = torch.device("cpu")


def test_every_piece_has_one_job_and_every_job_one_worker() -> None:
    pieces = pieces_of(Network(ModelShape()))
    jobs = jobs_of(pieces)
    assert sorted(p.start for job in jobs for p in job.pieces) == [p.start for p in pieces]
    shares = share_out(jobs, 2)
    assert sorted(id(job) for share in shares for job in share) == sorted(id(job) for job in jobs)
    loads = [sum(job.cost for job in share) for share in shares]
    assert max(loads) < 1.3 * min(loads)
    with pytest.raises(BadInput, match="worker_count is 0"):
        share_out(jobs, 0)


def test_parts_of_training_are_disjoint_and_complete() -> None:
    shape = ModelShape()
    pieces = pieces_of(Network(shape))
    parts = [
        {piece.name for piece in trained_pieces(shape, pieces, part)}
        for part in ("trunk", "indexer", "mtp")
    ]
    assert sum(len(part) for part in parts) == len(set().union(*parts)) == len(pieces)
    both = {piece.name for piece in trained_pieces(shape, pieces, "all")}
    assert both == parts[0] | parts[1]


@pytest.mark.parametrize("size", [(3, 40, 24), (2, 24, 40)])
def test_muon_moves_by_near_orthogonal_matrices(size: tuple[int, int, int]) -> None:
    moves = orthogonalise(torch.randn(size, generator=torch.Generator().manual_seed(0)))
    assert moves.shape == size
    values = torch.linalg.svdvals(moves.float())
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_adam_is_torchs_own(small: ModelShape) -> None:
    torch.manual_seed(0)
    network = Network(small)
    flats = Flats.like(network, CPU)
    piece = next(p for p in pieces_of(network) if p.name == "model.norm.weight")
    job = Job("adam", (piece,), 1.0)
    theirs = torch.nn.Parameter(piece.view(flats.truth).clone())
    adam = torch.optim.Adam([theirs], lr=0.01, betas=(0.9, 0.95))
    for step in range(1, 5):
        grads = [torch.randn_like(flats.read) for _ in range(2)]
        theirs.grad = (piece.view(grads[0]).float() + piece.view(grads[1])) * 0.5
        adam.step()
        run_job(job, flats, grads, muon_rate=0.0, adam_rate=0.01, step=step, scale=0.5)
    torch.testing.assert_close(piece.view(flats.truth), theirs.detach())
    assert torch.equal(piece.view(flats.read), piece.view(flats.truth).bfloat16())


def test_a_step_lowers_the_loss(small: ModelShape) -> None:
    torch.manual_seed(0)
    network = Network(small)
    flats = Flats.like(network, CPU)
    network.bfloat16()
    network.cos, network.sin = network.cos.float(), network.sin.float()
    grads = torch.zeros_like(flats.read)
    bind(network, flats, grads)
    jobs = jobs_of(trained_pieces(small, pieces_of(network), "trunk"))
    tokens = torch.arange(40).repeat(2, 1) % 7
    losses = []
    for step in range(1, 41):
        hidden = network(tokens[:, :-1])
        logits = (hidden @ network.lm_head.weight.t()).float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        for job in jobs:
            run_job(job, flats, [grads], muon_rate=0.02, adam_rate=5e-3, step=step, scale=1.0)
        grads.zero_()
    assert losses[0] > 4.0
    assert losses[-1] < 0.7
