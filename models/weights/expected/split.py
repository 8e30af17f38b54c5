"""Which part of each tensor one rank of a parallel group holds.

Expert parallelism keeps whole experts, in contiguous runs. Tensor parallelism cuts projections by
heads, MLPs by width and vocabulary tables by rows; routed experts only when there is no expert
parallelism. Norms, gates, indexers and the latent projections are whole on every rank.

An fp8 weight carries one scale per 128 x 128 block. A cut inside a block would leave two ranks
with half a block each and no tensor-core layout that fits, so it is refused, by the tensor's name.
The last block of a side may be partial (576 rows): the end of the tensor is always a legal cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.models.weights.expected.shapes import Spec
from ess.models.weights.stored import QUANT_BLOCK
from ess.units import div_ceil

HEAD_TENSORS: Final = ("q_b_proj.weight", "kv_b_proj.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Rows or columns `begin`..`end` of a tensor, along `dim`."""

    dim: int
    begin: int
    end: int

    def scales(self) -> Window:
        """The same window over the blocks' scales; `begin` lies on a block's edge."""
        assert self.begin % QUANT_BLOCK == 0, "a window over blocks begins at a block"
        return Window(
            dim=self.dim,
            begin=self.begin // QUANT_BLOCK,
            end=div_ceil(self.end, QUANT_BLOCK),
        )

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        size = self.end - self.begin
        return tuple(size if dim == self.dim else side for dim, side in enumerate(whole))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One rank's place: `tp_rank` of `tp`, `ep_rank` of `ep`.

    `by_heads` cuts only what makes queries, keys and values of the heads: for ranks that share the
    attention of some tokens, and each do the rest of the layer for tokens of their own. `own` are
    the rank's experts by layer, where they are not the contiguous run of its place.
    """

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    by_heads: bool = False
    own: Mapping[int, frozenset[int]] | None = None

    def __post_init__(self) -> None:
        for name, size, rank in (
            ("tp", self.tp, self.tp_rank),
            ("ep", self.ep, self.ep_rank),
        ):
            if size < 1 or not 0 <= rank < size:
                raise BadInput(f"{name}_rank {rank} of {name} {size} does not exist")

    def check(self, config: ModelConfig) -> None:
        if self.own is None and config.expert_count % self.ep:
            raise BadInput(
                f"{config.expert_count} routed experts cannot be shared equally"
                f" by {self.ep} expert-parallel ranks"
            )

        if config.experts_stacked and self.ep > 1:
            raise BadInput(
                f"ep {self.ep} is not supported for {config.family}: its checkpoints have the"
                " experts of a layer in one tensor"
            )

    def holds(self, spec: Spec, *, expert_count: int) -> bool:
        """Is any part of this tensor on this rank?"""
        if spec.expert is None or self.ep == 1:
            return True
        if self.own is not None:
            assert spec.layer is not None, f"{spec.name} is of no layer"
            return spec.expert in self.own[spec.layer]
        share = expert_count // self.ep
        return spec.expert // share == self.ep_rank

    def window(self, spec: Spec, *, blocked: bool) -> Window | None:
        """This rank's part, or None for all of it. `blocked`: the stored weight is fp8."""
        if spec.cut is None or self.tp == 1 or (spec.expert is not None and self.ep > 1):
            return None
        if self.by_heads and not spec.name.endswith(HEAD_TENSORS):
            return None
        dim, part_count = spec.cut.dim, spec.cut.part_count
        side = spec.shape[dim]
        if part_count % self.tp:
            raise BadInput(
                f"tensor {spec.name!r} {list(spec.shape)} has {part_count} parts along dimension"
                f" {dim}: {self.tp} tensor-parallel ranks cannot share them equally"
            )
        step = side // self.tp
        if blocked and step % QUANT_BLOCK:
            raise BadInput(
                f"tensor {spec.name!r} {list(spec.shape)} cut {self.tp} ways along dimension {dim}"
                f" gives slices of {step}, which cut a {QUANT_BLOCK}-wide quantisation block"
            )
        return Window(dim=dim, begin=self.tp_rank * step, end=(self.tp_rank + 1) * step)
