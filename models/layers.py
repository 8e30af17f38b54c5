"""What every family is made of: named weights, norms, linear maps, rotary positions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.calls import Angles
from ess.kernels.cpu import native, step
from ess.kernels.cpu.stage import Stage, Turns, Values, look_at_turns
from ess.layout import RopeStyle
from ess.models.config import ModelConfig
from ess.models.config_json.rope import Rope
from ess.models.weights.kept import Fp8Weight, Weight, plain

TensorSource = Callable[[str], Weight]
WEIGHT_DTYPES: Final = (torch.float32, torch.bfloat16)
KEPT_LEAST: Final = 1 << 10
KEPT_MAX: Final = 1 << 17
"""Positions of which angles are kept."""


class Source:
    """Weights by name below a prefix; shape and dtype are checked here and nowhere else."""

    def __init__(self, tensor: TensorSource, prefix: str = "") -> None:
        self._tensor = tensor
        self._prefix = prefix

    def under(self, part: str) -> Source:
        return Source(self._tensor, f"{self._prefix}{part}.")

    def take(self, name: str, *shape: int) -> Weight:
        full_name = self._prefix + name
        weight = self._tensor(full_name)
        if tuple(weight.shape) != shape:
            raise BadInput(f"{full_name} has shape {tuple(weight.shape)}, expected {shape}")
        if isinstance(weight, Tensor) and weight.dtype not in WEIGHT_DTYPES:
            raise BadInput(f"{full_name} is {weight.dtype}, expected float32 or bfloat16")
        return weight

    def weight(self, name: str, out_dim: int, in_dim: int) -> Weight:
        """For products only: in blocks of fp8 where it is kept so."""
        return self.take(f"{name}.weight", out_dim, in_dim)

    def matrix(self, name: str, out_dim: int, in_dim: int) -> Tensor:
        return plain(self.weight(name, out_dim, in_dim))

    def vector(self, name: str, dim: int) -> Tensor:
        """Norm weights and biases are kept in float32, in whatever type the file has them."""
        return self.values(name, dim)

    def table(self, name: str, *shape: int) -> Tensor:
        """Whole numbers."""
        full_name = self._prefix + name
        held = plain(self._tensor(full_name))
        if tuple(held.shape) != shape or held.is_floating_point():
            shown = f"{held.dtype} {tuple(held.shape)}"
            raise BadInput(f"{full_name} is {shown}, expected whole numbers {shape}")
        return held.long()

    def values(self, name: str, *shape: int) -> Tensor:
        return plain(self.take(name, *shape)).float()


def linear(x: Tensor, weight: Weight) -> Tensor:
    """The product in the type of the weights; what comes out goes on in float32."""
    if isinstance(weight, Fp8Weight):
        return weight.times(x)
    weight = plain(weight)
    return F.linear(x.to(weight.dtype), weight).float()


def linear_f32(x: Tensor, weight: Weight) -> Tensor:
    """The product as `linear` makes it, but with sums that a device does not round to bfloat16:
    of two tokens' logits that are near each other it would make one number, and the lower id would
    be drawn. Compiled stages of a CPU round none."""
    if not isinstance(weight, Tensor) or not weight.is_cuda or weight.dtype != torch.bfloat16:
        return linear(x, weight)
    return torch.mm(x.to(weight.dtype), weight.t(), out_dtype=torch.float32)


def keep_sums_whole(device: torch.device) -> None:
    """From now on this process adds up torch's products on a device in float32, of float32 as they
    are.

    Torch by itself promises neither. NVIDIA's images set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE: factors
    in float32, as a router has them, then lose 13 of their 23 bits. And where few tokens leave
    multiprocessors idle, cuBLAS adds up parts of a product of bfloat16 apart, and may round them to
    bfloat16.
    """
    if device.type != "cpu":
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


class Norm:
    """The norm of a layer's input."""

    def __init__(self, source: Source, dim: int, eps: float) -> None:
        self._weight = source.vector("weight", dim)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._weight, self._eps)

    def in_stage(self, stage: Stage, values: Values) -> Values:
        return stage.norm(values, self._weight, self._eps)


@dataclass(frozen=True)
class Rotation:
    """cos and sin of some positions, float32 [tokens, rope_dim / 2], and the positions."""

    cos: Tensor
    sin: Tensor
    positions: Tensor

    @functools.cached_property
    def turns(self) -> Turns:
        """For compiled stages."""
        return look_at_turns(self.cos, self.sin)

    def part(self, which: slice) -> Rotation:
        return Rotation(self.cos[which], self.sin[which], self.positions[which])

    def still(self) -> Rotation:
        """For layers that turn nothing."""
        return Rotation(self.cos[:, :0], self.sin[:, :0], self.positions)

    @property
    def angles(self) -> Angles:
        """For ops that finish what a projection gives."""
        return Angles(self.cos, self.sin)


class RotaryPositions:
    def __init__(
        self, config: ModelConfig, device: torch.device, factors: Tensor | None = None
    ) -> None:
        """`factors` are a model's own, of its frequencies. `kept` are cosines and sines of all
        positions until now: [positions, 2, rope_dim / 2]."""
        self._frequencies = rope_frequencies(config).to(device)
        if factors is not None:
            self._frequencies = self._frequencies * factors
        self._scale = config.rope.rotation_scale
        self.kept = self._frequencies.new_empty(0, 2, len(self._frequencies))

    def at(self, positions: Tensor) -> Rotation:
        """The rotation at these positions, which lie on the device that this was made for. On a CPU
        they are computed once and looked up from then on."""
        if positions.is_cpu and positions.dtype == torch.int32 and native.available():
            kept = step.turns(self.kept, positions)
            if kept is None and (longest := int(positions.max())) < KEPT_MAX:
                self._keep(longest)
                kept = step.turns(self.kept, positions)
            if kept is not None:
                return Rotation(*kept, positions)
        return self._computed(positions)

    def _keep(self, longest: int) -> None:
        count = max(KEPT_LEAST, 1 << longest.bit_length())
        rotation = self._computed(torch.arange(count, dtype=torch.int32))
        self.kept = torch.stack([rotation.cos, rotation.sin], dim=1)

    def _computed(self, positions: Tensor) -> Rotation:
        angles = positions.float()[:, None] * self._frequencies
        return Rotation(angles.cos() * self._scale, angles.sin() * self._scale, positions)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """YaRN keeps the fast dimensions, divides the slow ones by `factor`, blends between them.

    Where `low` is above `high`, or either outside of the dimensions, the ramp still is the straight
    line through both: that is what transformers computes, bit by bit.
    """
    rope, dim = config.rope, config.rope_dim
    periods = rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    plain = 1.0 / periods
    if rope.kind == "default":
        return plain
    low, high = _ramp_ends(rope, dim)
    ramp = (torch.arange(dim // 2).float() - low) / (high - low or 0.001)
    fast = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * periods) * (1 - fast) + plain * fast


def _ramp_ends(rope: Rope, dim: int) -> tuple[float, float]:
    """The pair that makes beta_fast turns within the trained length, and that of beta_slow."""

    def pair(turns: float) -> float:
        length = rope.positions_trained / (turns * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)


def rotate(x: Tensor, rotation: Rotation, style: RopeStyle) -> Tensor:
    """Turn the pairs of the last dimension of x [tokens, ..., rope_dim], in float32.

    A pair is (2i, 2i + 1) when interleaved, (i, i + dim / 2) when half-split; the result keeps the
    layout of the input, so interleaved keys stay as DeepSeek's cache format stores them.
    """
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (x.shape[-1] // 2,)
    cos, sin = rotation.cos.view(shape), rotation.sin.view(shape)
    y = x.float()
    if style == "half":
        a, b = y.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    a, b = y[..., 0::2], y[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)


def rotate_part(x: Tensor, rotation: Rotation, style: RopeStyle, *, at: int, dim: int) -> Tensor:
    """x with only the `dim` values from `at` on rotated."""
    before, turned, after = torch.split(x, [at, dim, x.shape[-1] - at - dim], -1)
    return torch.cat((before, rotate(turned, rotation, style), after), -1)
