"""Values as they come back from fp8 storage: e4m3 with power-of-two scales, rounded up."""

from __future__ import annotations

import torch
from torch import Tensor

LATENT, BLOCK = 512, 128


def through_e4m3(x: Tensor) -> Tensor:
    blocks = x.unflatten(-1, (-1, BLOCK))
    limit = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    scale = torch.exp2(torch.ceil(torch.log2(limit)))
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def fp8_rows(rows: Tensor) -> Tensor:
    return torch.cat((through_e4m3(rows[:, :LATENT]), rows[:, LATENT:].bfloat16().float()), -1)


def fp8_index(x: Tensor) -> Tensor:
    return through_e4m3(x @ hadamard(x.shape[-1]))


def hadamard(dim: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * dim**-0.5


def mean_kl(exact: Tensor, other: Tensor) -> float:
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
