"""Muon for matrices and Adam for the rest, over flat tensors that processes can share.

One flat bf16 tensor is what the network reads, one flat fp32 tensor is the truth it is rounded
from. Every parameter belongs to one job; a job is one optimiser step for parameters of one matrix
shape (Muon, whose Newton-Schulz runs batched over them) or for all the others (Adam).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from ess.errors import BadInput
from ess.models.tiny.trainer.shape import ModelShape

MUON_MOMENTUM: Final = 0.95
MUON_DECAY: Final = 0.01
ADAM_BETAS: Final = (0.9, 0.95)
ADAM_EPS: Final = 1e-8
JOB_MATRICES_MAX: Final = 40
ROW_STACKS: Final = {"gate_up": 2, "kv_b_proj.weight": ModelShape().head_count}
NEWTON_SCHULZ: Final = ((3.4445, -4.7750, 2.0315),) * 5


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter inside the flat tensors."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.count].view(self.shape)


@dataclass(frozen=True, slots=True)
class Job:
    """Pieces that are stepped together; `cost` is only for sharing jobs out."""

    rule: str
    pieces: tuple[Piece, ...]
    cost: float


def pieces_of(network: nn.Module) -> list[Piece]:
    pieces, start = [], 0
    for name, weight in network.named_parameters():
        pieces.append(Piece(name, start, tuple(weight.shape)))
        start += weight.numel()
    return pieces


def _matrix_shape(piece: Piece) -> tuple[int, int] | None:
    """The matrices Muon sees in a piece: gate and up apart, kv_b head by head."""
    if len(piece.shape) < 2 or any(
        part in piece.name for part in ("embed", "lm_head", "gate.weight", "weights_proj")
    ):
        return None
    rows, columns = piece.shape[-2:]
    stacked = next((n for end, n in ROW_STACKS.items() if piece.name.endswith(end)), 1)
    return rows // stacked, columns


def jobs_of(pieces: list[Piece]) -> list[Job]:
    """Muon jobs by matrix shape, cut to at most 40 matrices, and one Adam job."""
    by_shape: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    plain: list[Piece] = []
    for piece in pieces:
        shape = _matrix_shape(piece)
        if shape is None:
            plain.append(piece)
        else:
            by_shape[shape].append(piece)
    jobs = [Job("adam", tuple(plain), 20.0 * sum(piece.count for piece in plain))]
    for (rows, columns), group in by_shape.items():
        per_piece = max(group[0].count // (rows * columns), 1)
        step = max(JOB_MATRICES_MAX // per_piece, 1)
        for at in range(0, len(group), step):
            part = tuple(group[at : at + step])
            elements = sum(piece.count for piece in part)
            jobs.append(
                Job("muon", part, 40.0 * elements + elements * 15 * min(rows, columns) / 50)
            )
    return jobs


def share_out(jobs: list[Job], worker_count: int) -> list[list[Job]]:
    """The longest job first, always to the least loaded worker."""
    if worker_count < 1:
        raise BadInput(f"worker_count is {worker_count}, must be positive")
    shares: list[list[Job]] = [[] for _ in range(worker_count)]
    for job in sorted(jobs, key=lambda job: -job.cost):
        min(shares, key=lambda share: sum(held.cost for held in share)).append(job)
    return shares


def orthogonalise(matrices: Tensor) -> Tensor:
    """Newton-Schulz towards the nearest orthogonal matrix, batched [n, rows, columns], bf16."""
    x = matrices.bfloat16()
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).to(x.dtype) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-2, -1).contiguous()
    for a, b, c in NEWTON_SCHULZ:
        square = x @ x.transpose(-2, -1)
        x = a * x + (b * square + c * (square @ square)) @ x
    result: Tensor = x.transpose(-2, -1) if tall else x
    return result


@dataclass(slots=True)
class Flats:
    """All that training changes: `read` is rounded from `truth`; `first` and `second` moments."""

    read: Tensor
    truth: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def like(cls, network: nn.Module, device: torch.device) -> Flats:
        truth = torch.cat([weight.detach().float().flatten() for weight in network.parameters()])
        truth = truth.to(device)
        return cls(truth.bfloat16(), truth, torch.zeros_like(truth), torch.zeros_like(truth))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.read, self.truth, self.first, self.second


def bind(network: nn.Module, flats: Flats, grads: Tensor) -> None:
    """Make parameters and their gradients views of the flat tensors."""
    for piece, (_, weight) in zip(pieces_of(network), network.named_parameters(), strict=True):
        weight.data = piece.view(flats.read)
        weight.grad = piece.view(grads)


@torch.no_grad()
def run_job(
    job: Job,
    flats: Flats,
    grads: list[Tensor],
    *,
    muon_rate: float,
    adam_rate: float,
    step: int,
    scale: float,
) -> None:
    if job.rule == "muon":
        _muon(job, flats, grads, muon_rate, scale)
    else:
        _adam(job, flats, grads, adam_rate, step, scale)


def _gradient(piece: Piece, grads: list[Tensor], scale: float) -> Tensor:
    total = piece.view(grads[0]).float()
    for other in grads[1:]:
        total = total + piece.view(other)
    return total * scale


def _muon(job: Job, flats: Flats, grads: list[Tensor], rate: float, scale: float) -> None:
    shape = _matrix_shape(job.pieces[0])
    assert shape is not None
    steps = []
    for piece in job.pieces:
        gradient = _gradient(piece, grads, scale)
        momentum = piece.view(flats.first)
        momentum.mul_(MUON_MOMENTUM).add_(gradient)
        steps.append(gradient.add_(momentum, alpha=MUON_MOMENTUM).view(-1, *shape))
    moves = orthogonalise(torch.cat(steps)).float()
    length = rate * max(1.0, shape[0] / shape[1]) ** 0.5
    counts = [part.shape[0] for part in steps]
    for piece, move in zip(job.pieces, torch.split(moves, counts), strict=True):
        truth = piece.view(flats.truth)
        truth.mul_(1 - MUON_DECAY * rate).add_(move.reshape(piece.shape), alpha=-length)
        piece.view(flats.read).copy_(truth)


def _adam(
    job: Job, flats: Flats, grads: list[Tensor], rate: float, step: int, scale: float
) -> None:
    slow, fast = 1 - ADAM_BETAS[0] ** step, 1 - ADAM_BETAS[1] ** step
    for piece in job.pieces:
        gradient = _gradient(piece, grads, scale)
        first, second = piece.view(flats.first), piece.view(flats.second)
        first.lerp_(gradient, 1 - ADAM_BETAS[0])
        second.mul_(ADAM_BETAS[1]).addcmul_(gradient, gradient, value=1 - ADAM_BETAS[1])
        truth = piece.view(flats.truth)
        truth.addcdiv_(first / slow, (second / fast).sqrt_().add_(ADAM_EPS), value=-rate)
        piece.view(flats.read).copy_(truth)


def trained_pieces(shape: ModelShape, pieces: list[Piece], part: str) -> list[Piece]:
    """The pieces a stage trains: the trunk, the trunk with indexers, indexers alone, or MTP."""
    mtp = f"model.layers.{shape.layer_count}."

    def wanted(name: str) -> bool:
        if part == "mtp":
            return name.startswith(mtp)
        if name.startswith(mtp):
            return False
        return {"trunk": ".indexer." not in name, "indexer": ".indexer." in name, "all": True}[part]

    return [piece for piece in pieces if wanted(piece.name)]
