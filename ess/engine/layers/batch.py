"""Between the model and the door: what a step's layers share, and the calls that both sides need.

Queries become selections here, codes become attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ess.door import Offload, Step
from ess.engine.layers import units
from ess.engine.layers.beside import Carried
from ess.engine.step.warmth import HitCounter
from ess.kernels.merge import Partial
from ess.kernels.ops import Ops
from ess.layout import IndexCodec, ModelLayout
from ess.models.decoder import DecoderLayer
from ess.models.indexer import last_positions
from ess.models.layers import Rotation
from ess.models.model import Model
from ess.models.mtp import Mtp
from ess.overlap.policy import Vector
from ess.units import PAGE_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What the host has decided of a step before its first layer.

    `counts` are the queries of each sequence. Of a step that is padded they are those of its
    bucket: equally many for every sequence, and some sequences more than there are. So a part may
    end within a sequence; its queries are appended and resolved in their order all the same.
    Every request has `queries_per_request` queries, pads too, or it is 1: the same counts of a
    bucket may hold either kind of step. `splits`: layers with experts run in two halves.
    `is_timed`: events between the stages are part of what is queued.
    """

    counts: tuple[int, ...]
    queries_per_request: int
    vector: Vector
    verified_layer: int | None
    splits: bool
    is_timed: bool


@dataclass(frozen=True, slots=True)
class Places:
    """Where the queries of a batch stand: their angles, their new rows, their lines of the page
    tables, and what they may select from."""

    rotation: Rotation
    row_ids: Tensor
    page_table: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, step: Step, rotate: Callable[[Tensor], Rotation]) -> Places:
        positions = torch.as_tensor(step.positions)
        assert positions.shape == (step.query_count,), f"{positions.shape[0]} positions"
        row_ids, lengths = torch.as_tensor(step.row_ids), torch.as_tensor(step.query_stop)
        return cls(rotate(positions), row_ids, step.page_table, lengths)

    def part(self, which: slice) -> Places:
        lists = self.row_ids[which], self.page_table[which], self.lengths[which]
        return Places(self.rotation.part(which), *lists)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What all layers of a step share. Attention that is `balanced` fills a device, and its bits
    follow from the batch. `carried` are the states of its sequences, where they have some.

    `places` are `given`, or made when they are first asked for: layers that run in one native call
    do without."""

    offload: Offload
    step: Step
    course: Course
    ops: Ops
    rotate: Callable[[Tensor], Rotation]
    given: Places | None = None
    scale: float
    warmth: HitCounter
    balanced: bool
    carried: Carried | None = None
    located: dict[int, Tensor | None] = field(default_factory=dict)
    selected: dict[int, dict[range, Tensor]] = field(default_factory=dict)

    @property
    def layout(self) -> ModelLayout:
        return self.offload.layout

    @functools.cached_property
    def places(self) -> Places:
        return self.given or Places.of(self.step, self.rotate)

    @property
    def rotation(self) -> Rotation:
        return self.places.rotation

    @property
    def lengths(self) -> Tensor:
        return self.places.lengths

    def unit_keys(self, layer: DecoderLayer, given: Tensor) -> Tensor:
        assert self.carried is not None, "units without a state"
        return self.carried.unit_keys(layer, given)


class Shared(Protocol):
    """The parts of a batch or a prompt chunk that the stages of a layer need."""

    @property
    def layout(self) -> ModelLayout: ...
    @property
    def ops(self) -> Ops: ...
    @property
    def rotation(self) -> Rotation: ...
    def unit_keys(self, layer: DecoderLayer, given: Tensor) -> Tensor:
        """A key for each token, made of what tokens give to the keys of their units."""


def queries(batch: Shared, layer: DecoderLayer, query: Tensor) -> Tensor:
    if not batch.ops.has_stages():
        return layer.mla.queries(query, layer.turning(batch.rotation))
    compiled = layer.compiled(batch.layout)
    return compiled.queries(query, batch.rotation, threads=compute_threads())


def back(batch: Shared, layer: DecoderLayer, hidden: Tensor, attended: Tensor) -> Tensor:
    """Attended latents -> the layer's output. Where the experts are divided these are tokens of
    prompts: those of a decode batch are exchanged in stages."""
    if not batch.ops.has_stages() or layer.is_divided:
        hidden = layer.output(hidden, attended)
        del attended  # the largest array of a layer: experts work in its memory
        return layer.mlp(hidden, "chunk")
    return layer.compiled(batch.layout).back(hidden, attended, threads=compute_threads())


def values(batch: Shared, layer: DecoderLayer, attended: Tensor) -> Tensor:
    """Attended latents -> values, of a rank that has some of the heads."""
    if not batch.ops.has_stages():
        return layer.mla.values(attended)
    return layer.compiled(batch.layout).values(attended, threads=compute_threads())


def join(batch: Shared, mtp: Mtp, embedded: Tensor, finished: Tensor) -> Tensor:
    """Next tokens' embeddings and finished states -> the input of the MTP module's layer."""
    if not batch.ops.has_stages():
        return mtp.join(embedded, finished)
    [joined] = mtp.join_stage([embedded, finished], threads=compute_threads())
    return joined


def ended(batch: Shared, model: Model, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The last layer's output -> finished hidden states, logits."""
    if not batch.ops.has_stages():
        finished = model.finish(hidden)
        return finished, model.logits(finished)
    finished, logits = model.ending([hidden], threads=compute_threads())
    return finished, logits


def compute_threads() -> int:
    """Native calls follow torch, so that one setting rules both."""
    return torch.get_num_threads()


def select(
    batch: Batch,
    layer: int,
    queries: Tensor,
    weights: Tensor,
    which: slice | list[int] | Tensor | None,
    *,
    scored: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The selection of the queries that `which` names, of all for None: logits over the index
    pages, then top-k. If `scored`, also all the logits that it chose among."""
    table, lengths, codec = _contexts(batch, which)
    assert len(queries) == len(lengths), f"{len(queries)} queries, {len(lengths)} lengths"
    pages = batch.offload.memory(layer).key_pages
    if batch.layout.select_unit > 1:
        chosen, scores = units.select(batch.layout, queries, weights, pages, table, lengths)
        return chosen, scores if scored else None
    given = queries, weights, pages, table, lengths, codec
    is_spread = isinstance(which, list | Tensor)
    form: dict[str, Any] = {
        "k": batch.layout.top_k,
        "threads": compute_threads(),
        "queries_per_request": 1 if is_spread else batch.course.queries_per_request,
    }
    if scored:
        return batch.ops.index_scored(*given, **form)
    return batch.ops.index_top_k(*given, **form), None


def select_window(batch: Batch, count: int, which: slice | None) -> tuple[Tensor, Tensor | None]:
    """The last tokens. Where slots give way by score, with all positions as scores: what leaves the
    window gives way first."""
    table, lengths, _ = _contexts(batch, which)
    chosen = last_positions(lengths, count, batch.layout.top_k)
    if not batch.offload.wants_scores:
        return chosen, None
    positions = torch.arange(table.shape[1] * PAGE_ROWS, device=lengths.device)
    return chosen, positions.float().expand(len(lengths), -1).contiguous()


def _contexts(
    batch: Batch, which: slice | list[int] | Tensor | None
) -> tuple[Tensor, Tensor, IndexCodec]:
    """Page tables and lengths of the queries that `which` names, and how index keys are coded."""
    table, lengths, codec = batch.places.page_table, batch.lengths, batch.layout.index
    assert codec is not None, "an indexer without an index codec"
    if which is None:
        return table, lengths, codec
    return table[which], lengths[which], codec


def attend(
    batch: Batch,
    layer: int,
    queries: Tensor,
    codes: Tensor,
    *,
    whole: bool = False,
    placed: bool = True,
    spares: bool = False,
    onto: Partial | None = None,
) -> Partial:
    """One pass over `codes`: a slot, -1 for padding, or -2 - host row for a row in place, if some
    may be `placed`. `whole`: nothing is to run beside it; `spares`: a fetch runs beside it. What
    they give is added to the partial `onto`."""
    memory = batch.offload.memory(layer)
    return batch.ops.attend(
        queries.contiguous(),
        memory.slots,
        codes.contiguous(),
        batch.layout.row_of(layer),
        scale=batch.scale,
        placed=memory.host if placed else None,
        threads=compute_threads(),
        balanced=batch.balanced,
        whole=whole,
        spares=spares,
        into=onto,
        adds=onto is not None,
    )
