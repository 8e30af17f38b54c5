"""A prompt chunk through the model: rows and keys are made, stored as the truth and read back.

Rows are encoded and then attended decoded, also within their own chunk, so that a chunk boundary
or a prefix hit changes no value. The attention of a chunk reads the host's rows layer by layer; no
slot is touched. What the working set needs is the selections of the last queries: the windows.

Products over many tokens at once are fast, and their rounding depends on how many these are. In a
deterministic engine a chunk runs through the stages of a decode step instead, which treat every
token alike however the prompt is cut and whatever prefix was there.

A request may ask for the chances of its prompt's own tokens. They are computed from the chunk's
last states, for some tokens at a time: never more than `LOGITS_MAX` logits are in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ess.door import Sequence as Opened
from ess.engine.layers.batch import (
    back,
    compute_threads,
    ended,
    front,
    key_records,
    queries,
    row_bytes,
    turned,
)
from ess.engine.plan import Chunk
from ess.engine.step.runner import Runner
from ess.engine.tokens.chance import Chance
from ess.engine.tokens.logprobs import chances
from ess.kernels.ops import Ops
from ess.layout import ModelLayout
from ess.models.decoder import DecoderLayer, Entry
from ess.models.layers import Rotation
from ess.models.mla import attend_dense
from ess.pool.warmup import WINDOW_MAX

QUERIES: Final = 64
LOGITS_MAX: Final = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Positions [start, stop) of an open sequence that run through the model together."""

    runner: Runner
    sequence: Opened
    start: int
    stop: int
    rotation: Rotation
    windows: dict[int, Tensor]

    @property
    def layout(self) -> ModelLayout:
        return self.runner.offload.layout

    @property
    def ops(self) -> Ops:
        return self.runner.ops


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A chunk's windows int32 [groups, w, k], and its last layer's output, a state per token."""

    span: Span
    windows: Tensor
    hidden: Tensor


def run_chunk(
    runner: Runner, sequence: Opened, tokens: Sequence[int], start: int, following: Sequence[int]
) -> Prefilled:
    """Runs `tokens` from position `start` on.

    `following[i]` is the prompt's token behind `tokens[i]`: what the MTP module pairs with i.
    """
    assert len(tokens) == len(following) > 0, f"{len(following)} tokens behind {len(tokens)}"
    stop = start + len(tokens)
    rotation = runner.model.rotation(torch.arange(start, stop))
    span = Span(
        runner=runner, sequence=sequence, start=start, stop=stop, rotation=rotation, windows={}
    )
    run_layer = _layer_alike if runner.is_deterministic else _layer
    hidden = runner.model.embed(torch.tensor(list(tokens)))
    chosen: Tensor | None = None
    for layer in runner.model.layers:
        hidden, chosen = run_layer(span, layer, hidden, chosen)
    if runner.offload.layout.mtp_layer_count:
        mtp = runner.model.mtp
        assert mtp is not None, "the layout has an MTP layer, the model has none"
        embedded = runner.model.embed(torch.tensor(list(following)))
        run_layer(span, mtp.layer, mtp.join(embedded, runner.model.finish(hidden)), None)
    assert len(span.windows) == runner.offload.layout.group_count, "a group without a window"
    windows = torch.stack([span.windows[group] for group in sorted(span.windows)])
    return Prefilled(span, windows.int().contiguous(), hidden)


def score(prefilled: Prefilled, chunk: Chunk) -> tuple[Chance, ...]:
    """The chances of the tokens behind the chunk's positions, as the request asks for them."""
    sampling, prompt = chunk.request.sampling, chunk.request.prompt
    if sampling.prompt_logprobs is None:
        return ()
    first = min(max(chunk.start, sampling.prompt_start), chunk.stop)
    following = prompt[first + 1 : chunk.stop + 1]
    return tuple(_scored(prefilled, first, following, sampling.prompt_logprobs))


def _scored(chunk: Prefilled, first: int, following: Sequence[int], top_count: int) -> list[Chance]:
    """The chances of `following`, the tokens behind the chunk's positions from `first` on."""
    span, model = chunk.span, chunk.span.runner.model
    assert span.start <= first <= span.stop, f"position {first} of [{span.start}, {span.stop})"
    hidden = chunk.hidden[first - span.start :]
    assert len(hidden) == len(following), f"{len(following)} tokens of {len(hidden)} states"
    at_once = max(1, LOGITS_MAX // model.config.vocab_size)
    scored: list[Chance] = []
    for states in torch.split(hidden, at_once):
        targets = following[len(scored) : len(scored) + len(states)]
        scored += chances(ended(span, model, states)[1], targets, top_count)
    return scored


def _layer(
    span: Span, layer: DecoderLayer, hidden: Tensor, given: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    entry = layer.enter(hidden)
    chosen = given
    if layer.indexer is not None:
        chosen = _select(span, layer, entry)
        group = span.runner.offload.layout.group_of(layer.number)
        span.windows[group] = _window(span, chosen)
    attended = _attend(span, layer, entry, chosen)
    return layer.mlp(layer.output(hidden, attended)), chosen


def _layer_alike(
    span: Span, layer: DecoderLayer, hidden: Tensor, given: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    made, chosen = front(span, layer, hidden), given
    if made.queries is not None and made.weights is not None:
        span.sequence.import_keys(layer.number, span.start, made.keys)
        chosen = _top_k(span, layer.number, made.queries, made.weights)
        span.windows[span.layout.group_of(layer.number)] = _window(span, chosen)
    assert chosen is not None, f"layer {layer.number} shares a selection that was not made"
    span.sequence.import_rows(layer.number, span.start, made.rows)
    host_rows = span.sequence.host_rows(0, span.stop)
    asked = queries(span, layer, made.query)
    attended = _attend_chosen(span, layer.number, asked, host_rows, chosen)
    return back(span, layer, hidden, attended), chosen


def _select(span: Span, layer: DecoderLayer, entry: Entry) -> Tensor | None:
    """None while the selection covers every position."""
    layout, ops = span.layout, span.ops
    probe = turned(layer.index(entry, span.rotation), layout, ops)
    span.sequence.import_keys(layer.number, span.start, key_records(probe.keys, layout, ops))
    if span.stop <= layout.top_k:
        return None
    return _top_k(span, layer.number, probe.queries, probe.weights)


def _top_k(span: Span, layer: int, queries: Tensor, weights: Tensor) -> Tensor:
    offload, codec = span.runner.offload, span.layout.index
    assert codec is not None, "an indexer without an index codec"
    assert len(queries) == span.stop - span.start, f"{len(queries)} queries"
    table = span.sequence.page_table.expand(span.stop - span.start, -1)
    return span.ops.index_top_k(
        queries,
        weights,
        offload.memory(layer).key_pages,
        table,
        torch.arange(span.start, span.stop, dtype=torch.int32) + 1,
        codec,
        k=span.layout.top_k,
        threads=compute_threads(),
    )


def _attend(span: Span, layer: DecoderLayer, entry: Entry, chosen: Tensor | None) -> Tensor:
    offload, ops = span.runner.offload, span.runner.ops
    codec, config = offload.layout.row, span.runner.model.config
    new = row_bytes(layer.mla.rows(entry.row, span.rotation), offload.layout, ops)
    span.sequence.import_rows(layer.number, span.start, new)
    queries = layer.mla.queries(entry.query, span.rotation)
    host_rows = span.sequence.host_rows(0, span.stop)
    if chosen is not None:
        return _attend_chosen(span, layer.number, queries, host_rows, chosen)
    stored = offload.memory(layer.number).host[host_rows.long()]
    rows = ops.decode_rows(stored, codec, torch.empty(span.stop, config.row_dim))
    positions = torch.arange(span.start, span.stop)
    return attend_dense(
        queries, rows, positions, latent_dim=codec.latent_dim, scale=config.attention_scale
    )


def _attend_chosen(
    span: Span, layer: int, queries: Tensor, host_rows: Tensor, chosen: Tensor
) -> Tensor:
    """In place, from the host's rows; some queries at a time, for ops that gather them."""
    assert len(queries) == len(chosen), f"{len(chosen)} selections for {len(queries)} queries"
    offload, ops = span.runner.offload, span.runner.ops
    named = torch.where(chosen >= 0, host_rows[chosen.clamp_min(0).long()], -1).int()
    parts = [
        ops.attend(
            q,
            offload.memory(layer).host,
            rows,
            offload.layout.row,
            scale=span.runner.model.config.attention_scale,
            threads=compute_threads(),
        ).out
        for q, rows in zip(torch.split(queries, QUERIES), torch.split(named, QUERIES), strict=True)
    ]
    return torch.cat(parts)


def _window(span: Span, chosen: Tensor | None) -> Tensor:
    """The selections of the last queries, oldest first."""
    count = min(WINDOW_MAX, span.stop - span.start)
    assert count > 0, f"no query in [{span.start}, {span.stop})"
    if chosen is not None:
        return chosen[-count:]
    top_k = span.runner.offload.layout.top_k
    positions = torch.arange(top_k, dtype=torch.int32).expand(count, top_k)
    lengths = torch.arange(span.stop - count, span.stop)[:, None] + 1
    return torch.where(positions < lengths, positions, -1).int()
