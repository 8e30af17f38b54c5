"""Attention over prompts, as context modules were measured.

Sparse modules were measured with prefixes up to 160K tokens, in pieces of up to 8,192 tokens; dense
ones without prefixes, in pieces of up to 16,384. Longer pieces are extrapolated with the last
slope. A dense piece behind a prefix pays for its pairs at the rate between the module's two largest
sizes, and multiplies the prefix's rows out to keys and values again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ess.errors import BadInput
from ess.sim.operators.families import Family, Kind
from ess.sim.operators.silicon.bank import Bank
from ess.sim.operators.silicon.chip import Chip
from ess.sim.operators.silicon.choices import choices
from ess.sim.operators.silicon.host import PRODUCT_SHARE
from ess.sim.operators.silicon.selection import HEADS_MIN
from ess.sim.operators.stages import MicroBatch
from ess.sim.operators.tables import Surface

COUNTS: Final = (16, 4, 1)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Attention over prompts on one GPU with `heads` heads."""

    bank: Bank
    chip: Chip
    family: Family
    heads: int
    kv: str

    def us(self, shape: MicroBatch, kind: Kind) -> float:
        count = shape.prompt_count
        tokens, prefix = shape.prompt_tokens / count, shape.prompt_prefix
        if self.family.is_sparse:
            us = self._sparse_us(count, tokens, prefix, shares=not kind.has_indexer)
        else:
            us = self._dense_us(count, tokens, prefix)
        return self._scaled_us(us, count * tokens, tokens, prefix)

    def _sparse_us(self, count: int, tokens: float, prefix: int, *, shares: bool) -> float:
        """The time, from the measurements with the most prompts at once that fit."""
        model = self.family.table(shares=shares)
        for known in COUNTS:
            surface = self.bank.sparse_prompt.get((model, self.heads, self.kv, known))
            if surface is None or known > count:
                continue
            if tokens <= surface.curves[0].sizes[-1]:
                return count / known * surface.at(tokens, prefix)
        surface = self.bank.sparse_prompt.get((model, self.heads, self.kv, 1))
        if surface is None:
            shapes = [
                (kv, heads) for name, heads, kv, _ in self.bank.sparse_prompt if name == model
            ]
            measured = "; ".join(f"{heads} heads over {kv} rows" for kv, heads in choices(shapes))
            raise BadInput(
                f"{model}: prompts of {self.heads} heads over {self.kv} rows were not measured; "
                f"measured were {measured}"
            )
        return count * surface.at(tokens, prefix)

    def _dense_us(self, count: int, tokens: float, prefix: int) -> float:
        surface = self.bank.dense_prompt[max(self.heads, HEADS_MIN),]
        us = surface.at(tokens, count)
        if not prefix:
            return us
        layout, machine = self.family.layout, self.chip.machine
        expanded = layout.row.latent_dim * self.heads * (layout.nope_dim + layout.value_dim)
        again_us = 2 * prefix * expanded / (PRODUCT_SHARE * machine.fp8_rate)
        return us + count * (tokens * prefix * _pair_us(surface) + again_us)

    def _scaled_us(self, us: float, total: float, tokens: float, prefix: int) -> float:
        if not self.chip.is_scaled:
            return us
        layout = self.family.layout
        reach = prefix + tokens / 2
        rows = min(reach, layout.top_k) if self.family.is_sparse else reach
        pair = 2 * self.heads * (layout.nope_dim + layout.row.rope_dim + layout.value_dim)
        if self.family.is_sparse:
            pair = 2 * self.heads * (2 * layout.row.latent_dim + layout.row.rope_dim)
        index = layout.index
        scanned = 2 * index.head_count * index.key_dim * reach if index is not None else 0
        fp8 = total * (2 * self.family.projection_weights(self.heads) + scanned)
        return self.chip.us(us, fp8_flop=fp8, bf16_flop=total * rows * pair)


def _pair_us(surface: Surface) -> float:
    """Time of one query and one key: what doubling the longest single prompt adds beyond twice."""
    sizes = [curve.sizes[-1] for curve in surface.curves]
    longest = surface.curves[0].sizes[-1] if sizes else 0.0
    whole, half = surface.at(longest, 1), surface.at(longest / 2, 1)
    return max(0.0, whole - 2 * half) / (longest / 2) ** 2
