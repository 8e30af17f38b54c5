"""Prompt chunks: work per token is done for all of them at once, attention span by span.

Entries that an indexer chooses from go to the host and are read there, as rows of other models. A
span is run in pieces that end where a state is to be kept for other prompts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ess.door import Sequence as Opened
from ess.engine.entries.memory import Memory
from ess.engine.entries.parts import asked_queries, coded_keys, coded_rows, plain_rows, with_sink
from ess.engine.layers.batch import compute_threads
from ess.engine.prompt.pack import Span
from ess.engine.prompt.reading import attend
from ess.engine.step.runner import Runner
from ess.kernels.merge import Partial, merge
from ess.models.compressed.compressor import Compressor
from ess.models.compressed.form import Name
from ess.models.compressed.model import CompressedModel, Layer
from ess.models.compressed.state import State
from ess.models.layers import Rotation
from ess.pool.warmup import WINDOW_MAX


@dataclass(frozen=True, slots=True)
class Piece:
    """`tokens` of one sequence behind its state, and the token behind each; the last selections of
    each layer come."""

    sequence: Opened
    state: State
    tokens: Sequence[int]
    following: Sequence[int]
    windows: dict[int, Tensor] = field(default_factory=dict)

    @property
    def start(self) -> int:
        return self.state.length

    @property
    def stop(self) -> int:
        return self.state.length + len(self.tokens)


@dataclass(frozen=True, slots=True)
class SpanOutput:
    """What one span made: the streams of its tokens, and windows int32 [groups, windows, k]."""

    streams: Tensor
    windows: Tensor


def run_spans(
    runner: Runner, memory: Memory, spans: Sequence[Span], on_layer: Callable[[int], None] | None
) -> list[SpanOutput]:
    """Runs the spans; `on_layer` is called with each layer that has all their entries."""
    cut = [_cut(memory, span) for span in spans]
    parts_of: list[list[tuple[Tensor, Tensor]]] = [[] for _ in spans]
    rounds = list(itertools.zip_longest(*cut))
    for number, round_ in enumerate(rounds, start=1):
        placed = [(place, piece) for place, piece in enumerate(round_) if piece is not None]
        pieces = Pieces(runner, memory, [piece for _, piece in placed])
        streams = pieces.through(on_layer if number == len(rounds) else None)
        for (place, piece), part in zip(placed, streams, strict=True):
            parts_of[place].append((part, _windows(piece)))
    return [
        SpanOutput(
            torch.cat([streams for streams, _ in parts]),
            torch.cat([windows for _, windows in parts], 1)[:, -WINDOW_MAX:].contiguous(),
        )
        for parts in parts_of
    ]


def _cut(memory: Memory, span: Span) -> list[Piece]:
    sequence = span.sequence
    assert isinstance(sequence, Opened), "a span of no open sequence"
    state = State(memory.form, sequence.beside)
    assert state.length == span.start, f"a state of {state.length} tokens, a span at {span.start}"
    stops = sorted({*sequence.kept_ends(span.start, span.stop), span.stop})
    places = [stop - span.start for stop in stops]
    return [
        Piece(sequence, state, span.tokens[begin:end], span.following[begin:end])
        for begin, end in itertools.pairwise([0, *places])
    ]


def _windows(piece: Piece) -> Tensor:
    return torch.stack([piece.windows[group] for group in sorted(piece.windows)])


class Pieces:
    """Pieces of different sequences, run through all layers together."""

    def __init__(self, runner: Runner, memory: Memory, pieces: Sequence[Piece]) -> None:
        model = runner.model
        assert isinstance(model, CompressedModel), "layers of another family"
        self._model, self._ops, self._offload = model, runner.ops, runner.offload
        self._memory, self._pieces = memory, pieces
        ends = itertools.accumulate(len(piece.tokens) for piece in pieces)
        self._places = list(itertools.starmap(slice, itertools.pairwise([0, *ends])))
        self._positions = torch.cat([torch.arange(each.start, each.stop) for each in pieces])
        self._rows = plain_rows(model.config.value_dim)

    def through(self, on_layer: Callable[[int], None] | None) -> list[Tensor]:
        """The streams of each."""
        ids = torch.tensor([token for each in self._pieces for token in each.tokens])
        streams, chosen = self._model.embed(ids), self._model.chosen_layers
        for layer in self._model.blocks:
            streams = self._run(layer, streams, ids)
            if on_layer is not None and layer.number in chosen:
                on_layer(chosen.index(layer.number))
        if self._memory.has_module:
            self._draft_rows(streams)
        for piece in self._pieces:
            piece.state.advance(len(piece.tokens))
            piece.sequence.reached(piece.state.length)
        return [streams[place] for place in self._places]

    def _draft_rows(self, streams: Tensor) -> None:
        """The rows of the MTP module, which drafts will attend to."""
        module = self._model.module
        assert module is not None, "the layout has room for rows of a module"
        following = torch.tensor([token for each in self._pieces for token in each.following])
        self._run(module.layer, module.join(self._model.embedded(following), streams), following)

    def _run(self, layer: Layer, streams: Tensor, ids: Tensor) -> Tensor:
        read = layer.around_attention.read(streams)
        hidden = layer.attention_norm(read.sum)
        rotation = self._model.turning(layer.kind).at(self._positions)
        query = layer.attention.query(hidden)
        queries = layer.attention.queries(query, rotation).contiguous()
        rows = layer.attention.rows(hidden, rotation)
        seen = []
        for piece, place in zip(self._pieces, self._places, strict=True):
            last = self._last(piece, layer, queries[place], rows[place])
            mine = hidden[place], query[place], queries[place], rotation.part(place)
            seen.append(self._beside(piece, layer, last, *mine))
        out = torch.cat([part.out for part in seen])
        attended = with_sink(
            Partial(out, torch.cat([part.lse for part in seen])), layer.attention.sinks
        )
        out_streams = layer.attention.output(attended, rotation)
        return layer.mlp(layer.around_attention.write(streams, read, out_streams), ids)

    def _last(self, piece: Piece, layer: Layer, queries: Tensor, new: Tensor) -> Partial:
        """Attention over the last tokens, including each token itself."""
        window, ring = self._memory.window, piece.state.ring("window", layer.number)
        first = max(0, piece.start + 1 - window)
        rows = torch.cat((ring.read(first), new))
        ring.write(new)
        positions = torch.arange(piece.start, piece.stop)
        last = positions[:, None] - torch.arange(window - 1, -1, -1)
        slots = (last - first).where(last >= 0, -1).int()
        held = rows.view(torch.uint8)
        return attend(self._ops, queries, held, slots, self._rows, scale=layer.attention.scale)

    def _beside(
        self,
        piece: Piece,
        layer: Layer,
        last: Partial,
        hidden: Tensor,
        query: Tensor,
        queries: Tensor,
        rotation: Rotation,
    ) -> Partial:
        """Attention over the window, and over entries."""
        if layer.compressor is None:
            return last
        entries = self._made(piece, layer, "entries", layer.compressor, hidden)
        if layer.indexer is None:
            return merge(last, self._all(piece, layer, entries, queries))
        number, codec = self._model.chosen_layers.index(layer.number), self._offload.layout.index
        assert codec is not None, "an indexer without an index codec"
        keys = self._made(piece, layer, "keys", layer.indexer.compressor, hidden)
        probe = layer.indexer.probe(hidden, query, keys, rotation)
        first = piece.start // layer.rate
        rows = coded_rows(self._ops, entries, self._offload.layout.row)
        piece.sequence.import_keys(number, first, coded_keys(self._ops, keys, codec))
        piece.sequence.import_rows(number, first, rows)
        chosen = self._ops.index_top_k(
            asked_queries(probe.queries, codec),
            probe.weights,
            self._offload.memory(number).key_pages,
            piece.sequence.page_table.expand(len(hidden), -1),
            ((rotation.positions + 1) // layer.rate).int(),
            codec,
            k=self._offload.layout.top_k,
            threads=compute_threads(),
        )
        piece.windows[number] = chosen[-WINDOW_MAX:]
        return merge(last, self._chosen(piece, layer, number, chosen, queries))

    def _made(
        self, piece: Piece, layer: Layer, name: Name, compressor: Compressor, hidden: Tensor
    ) -> Tensor:
        """The entries that these tokens complete."""
        ring, first = piece.state.ring(name, layer.number), piece.start // compressor.rate
        tokens = compressor.tokens(hidden)
        before = ring.read(compressor.first_token(first))
        entries = compressor.entries(
            torch.cat((before, tokens)), first, self._model.turning(layer.kind)
        )
        ring.write(tokens)
        return entries

    def _all(self, piece: Piece, layer: Layer, entries: Tensor, queries: Tensor) -> Partial:
        memory, line = self._memory, piece.sequence.line
        first, count = piece.start // layer.rate, piece.stop // layer.rate
        rows = memory.entries(layer.number, line, torch.arange(count))
        memory.put_entries(rows[first:], entries)
        seen = (torch.arange(piece.start, piece.stop) + 1) // layer.rate
        slots = rows.where(torch.arange(count) < seen[:, None], -1).int()
        scale = layer.attention.scale
        return attend(self._ops, queries, memory.rows, slots, self._rows, scale=scale)

    def _chosen(
        self, piece: Piece, layer: Layer, number: int, chosen: Tensor, queries: Tensor
    ) -> Partial:
        count = piece.stop // layer.rate
        rows = piece.sequence.host_rows(0, count)
        codes = chosen if not count else rows[chosen.clamp_min(0)].where(chosen >= 0, -1)
        host, scale = self._offload.memory(number).host, layer.attention.scale
        return attend(self._ops, queries, host, codes, self._offload.layout.row, scale=scale)
