"""Prompt chunks through the model: rows and keys are made, stored as the truth and read back.

Rows are encoded and then attended decoded, also within their own chunk, so that a chunk boundary
or a prefix hit changes no value. The attention of a chunk reads the host's rows layer by layer; no
slot is touched. What the working set needs is the selections of the last queries: the windows.

The chunks of a step run as one pack: what is done token by token, the products and the experts, is
done once for all their tokens; the indexer and the attention run span by span, each over its own
sequence. No span reads what another one of its pack writes.

Products over many tokens at once are fast, and their rounding depends on how many these are. In a
deterministic engine chunks run through the stages of a decode step instead, which treat every token
alike however the prompt is cut, whatever prefix was there and whatever else is in the pack.

A request may ask for the chances of its prompt's own tokens. They are computed from the chunk's
last states, for some tokens at a time: never more than `LOGITS_MAX` logits are in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """`tokens` of an open sequence, from position `start` on, that run through the model together.

    `following[i]` is the token behind `tokens[i]`: what the MTP module pairs with i. `windows` are
    found on the way, one for each layer group.
    """

    sequence: Opened
    start: int
    tokens: Sequence[int]
    following: Sequence[int]
    windows: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.tokens)
        assert count == len(self.following) > 0, f"{len(self.following)} tokens behind {count}"

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Spans, one behind the other. `places[i]` are the tokens of span i among those of all."""

    runner: Runner
    spans: tuple[Span, ...]
    places: tuple[slice, ...]
    rotation: Rotation

    @property
    def layout(self) -> ModelLayout:
        return self.runner.offload.layout

    @property
    def ops(self) -> Ops:
        return self.runner.ops

    def each(self) -> Iterator[tuple[int, Span, slice]]:
        return zip(range(len(self.spans)), self.spans, self.places, strict=True)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A span's windows int32 [groups, w, k], and its last layer's output, a state per token."""

    pack: Pack
    span: Span
    windows: Tensor
    hidden: Tensor


Chosen = Sequence[Tensor | None]
"""The selections of each span's queries; None while they cover every position."""


def run_chunks(
    runner: Runner, spans: Sequence[Span], on_layer: Callable[[int], None] | None = None
) -> list[Prefilled]:
    """Runs the spans as one pack. `on_layer` is told of each layer when its rows are stored."""
    pack = packed(runner, spans)
    run_layer = _layer_alike if runner.is_deterministic else _layer
    hidden = runner.model.embed(_joined([span.tokens for span in spans]))
    chosen: Chosen = [None] * len(spans)
    for layer in runner.model.layers:
        hidden, chosen = run_layer(pack, layer, hidden, chosen)
        if on_layer is not None:
            on_layer(layer.number)
    if runner.offload.layout.mtp_layer_count:
        mtp = runner.model.mtp
        assert mtp is not None, "the layout has an MTP layer, the model has none"
        embedded = runner.model.embed(_joined([span.following for span in spans]))
        joined = mtp.join(embedded, runner.model.finish(hidden))
        run_layer(pack, mtp.layer, joined, [None] * len(spans))
        if on_layer is not None:
            on_layer(mtp.layer.number)
    return [
        Prefilled(pack, span, _windows(pack, span), hidden[place]) for _, span, place in pack.each()
    ]


def span_of(chunk: Chunk) -> Span:
    request, sequence = chunk.request, chunk.request.sequence
    assert sequence is not None, f"request {request.number} has no rows"
    assert request.state == "prefilling", f"request {request.number} is {request.state}"
    assert chunk.start == request.prefilled_count, f"a chunk from {chunk.start} on"
    return Span(
        sequence=sequence,
        start=chunk.start,
        tokens=request.prompt[chunk.start : chunk.stop],
        following=request.prompt[chunk.start + 1 : chunk.stop + 1],
    )


def packed(runner: Runner, spans: Sequence[Span]) -> Pack:
    assert len({span.sequence for span in spans}) == len(spans) > 0, "a sequence has two spans"
    ends = list(itertools.accumulate(len(span.tokens) for span in spans))
    positions = [torch.arange(span.start, span.stop) for span in spans]
    return Pack(
        runner=runner,
        spans=tuple(spans),
        places=tuple(itertools.starmap(slice, itertools.pairwise([0, *ends]))),
        rotation=runner.model.rotation(torch.cat(positions)),
    )


def _joined(lines: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([token for line in lines for token in line])


def _windows(pack: Pack, span: Span) -> Tensor:
    assert len(span.windows) == pack.layout.group_count, "a group without a window"
    return torch.stack([span.windows[group] for group in sorted(span.windows)]).int().contiguous()


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
    pack, span, model = chunk.pack, chunk.span, chunk.pack.runner.model
    assert span.start <= first <= span.stop, f"position {first} of [{span.start}, {span.stop})"
    hidden = chunk.hidden[first - span.start :]
    assert len(hidden) == len(following), f"{len(following)} tokens of {len(hidden)} states"
    at_once = max(1, LOGITS_MAX // model.config.vocab_size)
    scored: list[Chance] = []
    for states in torch.split(hidden, at_once):
        targets = following[len(scored) : len(scored) + len(states)]
        scored += chances(ended(pack, model, states)[1], targets, top_count)
    return scored


def _layer(pack: Pack, layer: DecoderLayer, hidden: Tensor, given: Chosen) -> tuple[Tensor, Chosen]:
    entry = layer.enter(hidden)
    chosen = given
    if layer.indexer is not None:
        chosen = _select(pack, layer, entry)
        _keep_windows(pack, layer, chosen)
    attended = _attend(pack, layer, entry, chosen)
    return layer.mlp(layer.output(hidden, attended)), chosen


def _layer_alike(
    pack: Pack, layer: DecoderLayer, hidden: Tensor, given: Chosen
) -> tuple[Tensor, Chosen]:
    made, chosen = front(pack, layer, hidden), given
    if made.queries is not None and made.weights is not None:
        _import_keys(pack, layer, made.keys)
        chosen = [
            _top_k(pack, span, layer.number, made.queries[place], made.weights[place])
            for _, span, place in pack.each()
        ]
        _keep_windows(pack, layer, chosen)
    _import_rows(pack, layer, made.rows)
    asked = queries(pack, layer, made.query)
    attended = []
    for at, span, place in pack.each():
        mine = chosen[at]
        assert mine is not None, f"layer {layer.number} shares a selection that was not made"
        host_rows = span.sequence.host_rows(0, span.stop)
        attended.append(_attend_chosen(pack, layer.number, asked[place], host_rows, mine))
    return back(pack, layer, hidden, torch.cat(attended)), chosen


def _import_keys(pack: Pack, layer: DecoderLayer, keys: Tensor | None) -> None:
    assert keys is not None, f"layer {layer.number} has an indexer and made no keys"
    for _, span, place in pack.each():
        span.sequence.import_keys(layer.number, span.start, keys[place])


def _import_rows(pack: Pack, layer: DecoderLayer, rows: Tensor) -> None:
    for _, span, place in pack.each():
        span.sequence.import_rows(layer.number, span.start, rows[place])


def _keep_windows(pack: Pack, layer: DecoderLayer, chosen: Chosen) -> None:
    group = pack.layout.group_of(layer.number)
    for at, span, _ in pack.each():
        span.windows[group] = _window(span, chosen[at], pack.layout.top_k)


def _select(pack: Pack, layer: DecoderLayer, entry: Entry) -> Chosen:
    layout, ops = pack.layout, pack.ops
    probe = turned(layer.index(entry, pack.rotation), layout, ops)
    _import_keys(pack, layer, key_records(probe.keys, layout, ops))
    return [
        None
        if span.stop <= layout.top_k
        else _top_k(pack, span, layer.number, probe.queries[place], probe.weights[place])
        for _, span, place in pack.each()
    ]


def _top_k(pack: Pack, span: Span, layer: int, queries: Tensor, weights: Tensor) -> Tensor:
    codec, count = pack.layout.index, len(span.tokens)
    assert codec is not None, "an indexer without an index codec"
    assert len(queries) == count, f"{len(queries)} queries"
    return pack.ops.index_top_k(
        queries,
        weights,
        pack.runner.offload.memory(layer).key_pages,
        span.sequence.page_table.expand(count, -1),
        torch.arange(span.start, span.stop, dtype=torch.int32) + 1,
        codec,
        k=pack.layout.top_k,
        threads=compute_threads(),
    )


def _attend(pack: Pack, layer: DecoderLayer, entry: Entry, chosen: Chosen) -> Tensor:
    new = row_bytes(layer.mla.rows(entry.row, pack.rotation), pack.layout, pack.ops)
    _import_rows(pack, layer, new)
    asked = layer.mla.queries(entry.query, pack.rotation)
    attended = []
    for at, span, place in pack.each():
        host_rows, mine = span.sequence.host_rows(0, span.stop), chosen[at]
        if mine is None:
            attended.append(_attend_all(pack, span, layer.number, asked[place], host_rows))
        else:
            attended.append(_attend_chosen(pack, layer.number, asked[place], host_rows, mine))
    return torch.cat(attended)


def _attend_all(pack: Pack, span: Span, layer: int, asked: Tensor, host_rows: Tensor) -> Tensor:
    codec, config = pack.layout.row, pack.runner.model.config
    stored = pack.runner.offload.memory(layer).host[host_rows.long()]
    rows = pack.ops.decode_rows(stored, codec, torch.empty(span.stop, config.row_dim))
    positions = torch.arange(span.start, span.stop)
    return attend_dense(
        asked, rows, positions, latent_dim=codec.latent_dim, scale=config.attention_scale
    )


def _attend_chosen(
    pack: Pack, layer: int, queries: Tensor, host_rows: Tensor, chosen: Tensor
) -> Tensor:
    """In place, from the host's rows; some queries at a time, for ops that gather them."""
    assert len(queries) == len(chosen), f"{len(chosen)} selections for {len(queries)} queries"
    offload, ops = pack.runner.offload, pack.ops
    named = torch.where(chosen >= 0, host_rows[chosen.clamp_min(0).long()], -1).int()
    parts = [
        ops.attend(
            q,
            offload.memory(layer).host,
            rows,
            offload.layout.row,
            scale=pack.runner.model.config.attention_scale,
            threads=compute_threads(),
        ).out
        for q, rows in zip(torch.split(queries, QUERIES), torch.split(named, QUERIES), strict=True)
    ]
    return torch.cat(parts)


def _window(span: Span, chosen: Tensor | None, top_k: int) -> Tensor:
    """The selections of the last queries, oldest first."""
    count = min(WINDOW_MAX, len(span.tokens))
    if chosen is not None:
        return chosen[-count:]
    positions = torch.arange(top_k, dtype=torch.int32).expand(count, top_k)
    lengths = torch.arange(span.stop - count, span.stop)[:, None] + 1
    return torch.where(positions < lengths, positions, -1).int()
