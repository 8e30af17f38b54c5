"""`ess.kernels.received`, on the host."""

from __future__ import annotations

from torch import Tensor

from ess.kernels.experts import swiglu


def take_received(tokens: Tensor, lines: Tensor, ends: Tensor, out: Tensor) -> None:
    count = int(ends[-1])
    out[:count] = tokens[lines[:count]]


def gate_received(both: Tensor, ends: Tensor, limit: float, out: Tensor) -> None:
    count = int(ends[-1])
    out[:count] = swiglu(both[:count].float(), limit).to(out.dtype)


def add_received(made: Tensor, places: Tensor, weights: Tensor, out: Tensor) -> None:
    """What is not here has not been written, so it is not even multiplied by 0."""
    total = out.new_zeros(out.shape).float()
    for at, weight in zip(places.T, weights.T, strict=True):
        line = made[at.clamp_min(0)].float() * weight[:, None]
        total += line.where(at[:, None] >= 0, 0.0)
    out.copy_(total)
