"""The tokens of a step through the layers: decoding, and verification of drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ess.engine.entries.memory import Tokens
from ess.engine.entries.parts import asked_queries, coded_keys, coded_rows, plain_rows, with_sink
from ess.engine.layers.batch import Batch
from ess.engine.layers.front import Asking
from ess.engine.layers.selected import SelectedRows
from ess.engine.prompt.reading import attend
from ess.engine.step.half import whole
from ess.engine.step.runner import SCHEDULES, Runner
from ess.errors import BadState
from ess.kernels.merge import Partial, merge
from ess.models.compressed.model import CompressedModel, Layer
from ess.models.layers import Rotation
from ess.overlap.policy import Mode
from ess.overlap.stages import finish
from ess.overlap.timeline import Timeline, timed


class EntryStep(SelectedRows):
    """`Stages` for a layer whose indexer chooses entries. The window is attended to as soon as
    there are queries, beside a fetch."""

    def __init__(
        self, over: EntryBatch, layer: Layer, hidden: Tensor, timeline: Timeline, *, waits: bool
    ) -> None:
        super().__init__(whole(over.batch), over.number_of(layer), timeline, waits=waits)
        self._over, self._layer, self._input = over, layer, hidden
        self.window: Partial | None = None

    @timed
    def index(self) -> None:
        over, layer, hidden = self._over, self._layer, self._input
        codec, indexer, rotation = over.index_codec, layer.indexer, over.rotation(layer)
        assert indexer is not None, f"layer {layer.number} selects nothing"
        query = layer.attention.query(hidden)
        entries, keys = over.entries(layer, hidden), over.keys(layer, hidden)
        probe = indexer.probe(hidden, query, keys, rotation)
        if len(entries):
            rows = coded_rows(over.ops, entries, over.batch.layout.row)
            coded = coded_keys(over.ops, probe.keys, codec)
            over.batch.step.append(self.number, rows, keys=coded)
        self._asking = Asking(query, asked_queries(probe.queries, codec), probe.weights)

    @timed
    def pre_attn(self) -> None:
        if self._asking is None:
            raise BadState("index comes before pre_attn")
        self._queries = self._over.queries(self._layer, self._asking.query)
        self.window = self._over.last(self._layer, self._input, self._queries)

    def attend_truth(self) -> Tensor:
        return self.attend_host().out


class EntryBatch:
    """A batch of a step over its model, and tokens of its sequences, with what belongs to them
    beside their rows."""

    def __init__(self, runner: Runner, batch: Batch, tokens: Tokens, ids: Tensor) -> None:
        model = runner.model
        assert isinstance(model, CompressedModel), "layers of another family"
        assert batch.layout.index is not None, "an indexer without an index codec"
        self.batch, self.ops, self.index_codec = batch, runner.ops, batch.layout.index
        self.model, self.tokens = model, tokens
        self._runner, self._ids = runner, ids
        self._rotations: dict[str, Rotation] = {}
        self._rows = plain_rows(model.config.value_dim)

    def through(self) -> Tensor:
        """The streams behind the last layer."""
        streams = self.model.embed(self._ids)
        for layer in self.model.blocks:
            streams = self.run(layer, streams)
        return streams

    def other(self, tokens: Tokens, ids: Tensor) -> EntryBatch:
        """Other tokens of the same sequences."""
        return EntryBatch(self._runner, self.batch, tokens, ids)

    def run(self, layer: Layer, streams: Tensor) -> Tensor:
        if self._runner.on_layer is not None:
            self._runner.on_layer()
        read = layer.around_attention.read(streams)
        hidden = layer.attention_norm(read.sum)
        seen = self._chosen(layer, hidden) if layer.kind == "sparse" else self._all(layer, hidden)
        attended = with_sink(seen, layer.attention.sinks)
        output = layer.attention.output(attended, self.rotation(layer))
        return layer.mlp(layer.around_attention.write(streams, read, output), self._ids)

    def _all(self, layer: Layer, hidden: Tensor) -> Partial:
        if layer.kind == "heavy":
            self.tokens.store(layer.number, layer.rate, self.entries(layer, hidden))
        queries = self.queries(layer, layer.attention.query(hidden))
        return self.last(layer, hidden, queries)

    def _chosen(self, layer: Layer, hidden: Tensor) -> Partial:
        number, tuning = self.number_of(layer), self._runner.tuning
        mode = self.batch.course.vector[number]
        stages = EntryStep(self, layer, hidden, tuning.timeline, waits=mode <= Mode.NONE)
        chosen = _joined(finish(SCHEDULES[mode](stages)))
        tuning.ran(number, stages.ran(mode))
        if self.batch.course.verified_layer == number:
            self._runner.verifier.check(self.batch, stages, chosen.out)
        assert stages.window is not None, "attention comes behind pre_attn"
        return merge(stages.window, chosen)

    # ---- what layers need

    def number_of(self, layer: Layer) -> int:
        """The number at the door of a layer whose entries are chosen."""
        return self.model.chosen_layers.index(layer.number)

    def rotation(self, layer: Layer) -> Rotation:
        turning = self._rotations.get(layer.kind)
        if turning is None:
            turning = self.model.turning(layer.kind).at(self.tokens.positions)
            self._rotations[layer.kind] = turning
        return turning

    def queries(self, layer: Layer, query: Tensor) -> Tensor:
        return layer.attention.queries(query, self.rotation(layer)).contiguous()

    def last(self, layer: Layer, hidden: Tensor, queries: Tensor) -> Partial:
        """Attention over the last tokens, including each token itself, and, in a layer that does
        not choose, over all entries."""
        rows = layer.attention.rows(hidden, self.rotation(layer))
        self.tokens.write("window", layer.number, rows)
        slots = self.tokens.seen(layer.number, entries=layer.kind == "heavy")
        scale, memory = layer.attention.scale, self.tokens.memory.rows
        return attend(self.ops, queries, memory, slots, self._rows, scale=scale)

    def entries(self, layer: Layer, hidden: Tensor) -> Tensor:
        assert layer.compressor is not None, f"layer {layer.number} has no entries"
        positions = self.model.turning(layer.kind)
        return self.tokens.compressed("entries", layer.number, layer.compressor, hidden, positions)

    def keys(self, layer: Layer, hidden: Tensor) -> Tensor:
        assert layer.indexer is not None, f"layer {layer.number} has no index keys"
        positions, compressor = self.model.turning(layer.kind), layer.indexer.compressor
        return self.tokens.compressed("keys", layer.number, compressor, hidden, positions)


def _joined(parts: Sequence[Partial]) -> Partial:
    if len(parts) == 1:
        return parts[0]
    return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))
