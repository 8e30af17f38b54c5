"""Prompts that were not computed, and selections in place of those of random weights.

Rows and keys are one page of noise, repeated. Index logits and top-k run in full, and are paid for;
their result is replaced by the calibrated selections of `ess.sim.locality`, because a random
indexer would select other rows for each query, which no working set holds. A query's position
determines its selection, so all ways to decode get the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from ess.bench.engine.arms.decode_arm import DecodeArm
from ess.bench.harness.prefix import Prefix, Segment, key_bytes
from ess.bench.worker.random_model import layout_of
from ess.door import Offload
from ess.engine.requests.request import Request
from ess.kernels.backend import ops
from ess.kernels.calls import Backend, IndexQueries
from ess.kernels.ops import Ops
from ess.models.model import Model
from ess.sim.locality.selections import LayerProfile, LayerStream, RequestLoad
from ess.units import PAGE_ROWS, div_ceil

QUERIES: Final = PAGE_ROWS
"""Drawn selections: for the queries of a prompt's last page, then again for its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise(Prefix):
    """Its one segment is a page, which is put everywhere unchanged."""

    def rows(self, layer: int, length: int) -> Tensor:
        page = self.segments[0].rows[layer]
        return page.repeat(div_ceil(length, PAGE_ROWS), 1)[:length]

    def keys(self, group: int, length: int) -> Tensor:
        page = self.segments[0].keys[group]
        return page.repeat(div_ceil(length, PAGE_ROWS), 1)[:length]


def noise(model: Model, context: int) -> Noise:
    layout, kernels = layout_of(model.config), ops("cpu")
    assert layout.index is not None, "a layout without index keys"
    draws = torch.Generator().manual_seed(0)
    rows = torch.empty((PAGE_ROWS, layout.row_bytes), dtype=torch.uint8)
    values = torch.randn(PAGE_ROWS, model.config.row_dim, generator=draws)
    kernels.encode_rows(values, layout.row, rows)
    keys = torch.randn(PAGE_ROWS, layout.index.key_dim, generator=draws)
    page = Segment(
        tokens=tuple(
            torch.randint(model.config.vocab_size, (PAGE_ROWS,), generator=draws).tolist()
        ),
        rows=(rows,) * layout.layer_total,
        keys=(key_bytes(kernels, keys, layout),) * layout.group_count,
    )
    return Noise(
        model=model, layout=layout, segments=(page,), length=context, text="noise", seconds=0.0
    )


class Drawn:
    """A `Backend` whose selections are drawn, by where a layer's keys lie: int32 [QUERIES, k]."""

    def __init__(self, real: Backend, held: Mapping[int, Tensor]) -> None:
        self._real, self._held = real, held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def index_top_k(self, call: IndexQueries, out: Tensor) -> None:
        self._real.index_top_k(call, out)
        self._draw(call, out)

    def index_scored(self, call: IndexQueries, out: Tensor) -> Tensor:
        """The drawn positions' logits are raised above all others of their query: a row's rank
        then follows how often it is drawn."""
        logits = self._real.index_scored(call, out)
        self._draw(call, out)
        unseen = torch.arange(logits.shape[1], device=logits.device) >= call.lengths[:, None]
        least = logits.masked_fill(unseen, torch.inf).amin(1, keepdim=True)
        greatest = logits.masked_fill(unseen, -torch.inf).amax(1, keepdim=True)
        raised = torch.where(out >= 0, 2 * (greatest - least), 0.0)
        return logits.scatter_add_(1, out.clamp(min=0).long(), raised)

    def _draw(self, call: IndexQueries, out: Tensor) -> None:
        """Selects the drawn positions; pads have no length, and select nothing."""
        lengths = call.lengths
        drawn = self._held[call.pages.data_ptr()].index_select(0, lengths.remainder(QUERIES))
        out.copy_(torch.where(drawn < lengths[:, None], drawn, -1))


def tables(offload: Offload, context: int, device: torch.device) -> dict[int, Tensor]:
    """The selections by address of a layer's keys, all positions below `context`."""
    layout = offload.layout
    load = RequestLoad(context=context, step_count=1, query_count=1, top_k=layout.top_k)
    profile = LayerProfile()
    if context < 2 * profile.hot:
        profile = LayerProfile(hot=context // 2, cold=layout.top_k // 16, drift=1.0)
    made = {}
    for layer in (group[0] for group in layout.groups):
        selected = LayerStream(load, profile, layer=layer).windows(QUERIES)
        on_device = torch.from_numpy(selected).to(device)
        made[offload.memory(layer).key_pages.data_ptr()] = on_device
    return made


class DrawnArm(DecodeArm):
    def _enter(self, prefix: Prefix) -> list[Request]:
        """Replaces selections from the first prompt on."""
        runner, least = self.engine.runner, min(self.shape.lengths()) - PAGE_ROWS - 1
        held = tables(self.offload, least, runner.model.device)
        runner.ops = Ops(runner.ops.name, cast(Backend, Drawn(runner.ops.backend, held)))
        return super()._enter(prefix)
