"""One sequence over plain tensors: the specification of everything that serves such a model.

`run` takes a prompt in any pieces, a token at a time, or drafts. Its tokens are accepted as a whole
by the next `run`, or in part by `keep`, which drops the others. The rule of the state: at a length
L each compressor has L // rate entries. An entry is stored when all its tokens are accepted, never
before: those of windows that drafts have closed are attended to in the step that made them, and
made again from the tokens' values and gates if the drafts stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.models.compressed.attention import attend
from ess.models.compressed.compressor import Compressor
from ess.models.compressed.form import state_form
from ess.models.compressed.model import CompressedModel, Layer, check_tokens
from ess.models.compressed.state import Ring, State
from ess.models.indexer import select
from ess.models.layers import RotaryPositions, Rotation
from ess.models.plain import Growing


class Entries:
    """The entries of one compressor."""

    def __init__(self, compressor: Compressor, ring: Ring, positions: RotaryPositions) -> None:
        self._compressor, self._ring, self._positions = compressor, ring, positions
        self.stored = Growing(compressor.dim)
        self._made = torch.empty(0, compressor.dim)

    def run(self, hidden: Tensor) -> Tensor:
        """All entries that the new tokens may see, with those of windows that they close."""
        assert not len(self._made), "entries of the tokens before were neither stored nor left"
        first, tokens = self.stored.length, self._compressor.tokens(hidden)
        before = self._ring.read(self._compressor.first_token(first))
        self._made = self._compressor.entries(torch.cat((before, tokens)), first, self._positions)
        self._ring.write(tokens)
        return torch.cat((self.stored.filled, self._made))

    def keep(self, length: int) -> None:
        """Keeps the entries whose tokens are all among the first `length`."""
        count, stored = length // self._compressor.rate, self.stored.length
        self.stored.append(self._made[: max(0, count - stored)])
        self.stored.keep(count)
        self._made = self._made[:0]


class VisibleRows(NamedTuple):
    """Rows [count, dim], and which of them each token may attend to, bool [tokens, count]."""

    rows: Tensor
    by: Tensor


class PlainLayer:
    """A layer with the entries of one sequence; its rings are in the sequence's state."""

    def __init__(self, model: CompressedModel, layer: Layer, state: State) -> None:
        assert model.config.compressed is not None, "a layer of another family"
        self._layer, self._state, self._config = layer, state, model.config
        self._window = model.config.compressed.window
        self._positions = model.turning(layer.kind)
        self._rows = state.ring("window", layer.number)
        self.entries = self.keys = None
        if layer.compressor is not None:
            ring = state.ring("entries", layer.number)
            self.entries = Entries(layer.compressor, ring, self._positions)
        if layer.indexer is not None:
            ring = state.ring("keys", layer.number)
            self.keys = Entries(layer.indexer.compressor, ring, self._positions)

    def run(self, streams: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        read = self._layer.around_attention.read(streams)
        hidden = self._layer.attention_norm(read.sum)
        rotation = self._positions.at(positions)
        output = self._layer.attention.output(self._attend(hidden, rotation), rotation)
        streams = self._layer.around_attention.write(streams, read, output)
        return self._layer.mlp(streams, tokens)

    def _attend(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        attention = self._layer.attention
        query = attention.query(hidden)
        queries = attention.queries(query, rotation)
        last = self._last_rows(attention.rows(hidden, rotation), rotation.positions)
        if self.entries is None:
            return self._over(queries, last)
        entries = self.entries.run(hidden)
        if self.keys is None:
            lengths = (rotation.positions + 1) // self._layer.rate
            all_seen = torch.arange(len(entries)) < lengths[:, None]
            return self._over(queries, last, VisibleRows(entries, all_seen))
        selection = self._select(hidden, query, rotation)
        return self.attend_chosen(queries, last, entries, selection)

    def attend_chosen(
        self, queries: Tensor, last: VisibleRows, entries: Tensor, selection: Tensor
    ) -> Tensor:
        """Attends to the last tokens and the selected entries; -1 in a selection is a pad.
        Subclasses override this to read the entries from elsewhere."""
        places = selection.long().where(selection >= 0, len(entries))
        chosen = torch.zeros(len(queries), len(entries) + 1, dtype=torch.bool)
        chosen.scatter_(1, places, True)
        return self._over(queries, last, VisibleRows(entries, chosen[:, :-1]))

    def _over(self, queries: Tensor, *parts: VisibleRows) -> Tensor:
        rows = torch.cat([part.rows for part in parts])
        seen = torch.cat([part.by for part in parts], 1)
        attention = self._layer.attention
        return attend(queries, rows, seen, scale=attention.scale, sinks=attention.sinks)

    def _last_rows(self, new: Tensor, positions: Tensor) -> VisibleRows:
        begin = int(positions[0])
        first = max(0, begin + 1 - self._window)
        rows = torch.cat((self._rows.read(first, begin), new))
        self._rows.write(new, begin)
        ages = positions[:, None] - torch.arange(first, first + len(rows))
        return VisibleRows(rows, (ages >= 0) & (ages < self._window))

    def _select(self, hidden: Tensor, query: Tensor, rotation: Rotation) -> Tensor:
        """The indexer's choice among the entries that are complete at each token."""
        indexer = self._layer.indexer
        assert indexer is not None, "a layer that selects nothing"
        assert self.keys is not None, "an indexer without keys"
        keys = self.keys.run(hidden)
        if not len(keys):
            return torch.empty(len(hidden), 0, dtype=torch.int32)
        lengths = (rotation.positions + 1) // self._layer.rate
        probe = indexer.probe(hidden, query, keys, rotation)
        return select(probe, keys, lengths, self._config.top_k)

    def keep(self, length: int) -> None:
        for entries in (self.entries, self.keys):
            if entries is not None:
                entries.keep(length)


class Plain:
    """The model over one sequence; as many as `drafts` tokens may be taken back."""

    def __init__(
        self, model: CompressedModel, *, drafts: int = 0, memory: Tensor | None = None
    ) -> None:
        """The state is in `memory`, if others keep it."""
        self._model = model
        self.state = State(state_form(model.config, drafts=drafts), memory)
        self.layers = tuple(map(self.layer, model.blocks))
        module = model.module
        self._in_module = None if module is None else PlainLayer(model, module.layer, self.state)
        self._ran = torch.empty(0)

    def layer(self, layer: Layer) -> PlainLayer:
        return PlainLayer(self._model, layer, self.state)

    def begin(self, count: int) -> None:
        """Called before `count` tokens are run; for memories that keep entries elsewhere."""

    @property
    def length(self) -> int:
        return self.state.length

    @torch.inference_mode()
    def run(self, tokens: Sequence[int]) -> Tensor:
        """Logits of each."""
        ids = torch.tensor(tokens)
        check_tokens(ids, self._model.config)
        self.keep(self.length)
        self.begin(len(ids))
        positions = torch.arange(self.length, self.length + len(ids))
        streams = self._model.embed(ids)
        for layer in self.layers:
            streams = layer.run(streams, positions, ids)
        self.state.advance(len(ids))
        self._ran = streams
        return self._model.logits(self._model.finish(streams))

    @torch.inference_mode()
    def guesses(self, following: Sequence[int], count: int) -> Tensor:
        """Logits [count, vocabulary] of the MTP module. `following` are the tokens behind each that
        was kept of the last `run`, the newest one last: the module's rows of their positions are
        made of both, and the first guess. Each further guess takes the one before for true, and its
        row is made again when that is known."""
        module, layer = self._model.module, self._in_module
        if module is None or layer is None:
            raise BadInput(f"this {self._model.config.family} checkpoint has no MTP module")
        tokens, begin = torch.tensor(following), self.length - len(following)
        streams, logits = self._ran[: len(following)], list[Tensor]()
        while len(logits) < count:
            joined = module.join(self._model.embedded(tokens), streams)
            hidden = layer.run(joined, torch.arange(begin, begin + len(tokens)), tokens)
            streams, begin = hidden[-1:], begin + len(tokens)
            logits.append(self._model.logits(module.finish(streams)))
            tokens = logits[-1].argmax(-1)
        return torch.cat(logits)

    @torch.inference_mode()
    def keep(self, length: int) -> None:
        """Accept the tokens before `length`, and forget the others."""
        self.state.cut(length)
        for layer in self.layers:
            layer.keep(length)

    def fork(self) -> Plain:
        """Another sequence with the same tokens, all of them accepted."""
        return resumed(self._model, self.save(), drafts=self.state.form.drafts)

    def save(self) -> tuple[bytes, list[Tensor]]:
        """The state, and the entries and index keys of each layer that has them."""
        self.keep(self.length)
        return self.state.save(), [entries.stored.filled.clone() for entries in self._all()]

    def _all(self) -> list[Entries]:
        pairs = ((layer.entries, layer.keys) for layer in self.layers)
        return [entries for pair in pairs for entries in pair if entries is not None]

    @torch.inference_mode()
    def load(self, saved: tuple[bytes, Sequence[Tensor]]) -> None:
        state, stored = saved
        held = self._all()
        if len(stored) != len(held):
            raise BadInput(f"entries of {len(stored)} compressors were saved, not of {len(held)}")
        self.state.load(state)
        for entries, rows in zip(held, stored, strict=True):
            entries.stored.append(rows)
            entries.keep(self.length)


def resumed(
    model: CompressedModel, saved: tuple[bytes, Sequence[Tensor]], *, drafts: int = 0
) -> Plain:
    plain = Plain(model, drafts=drafts)
    plain.load(saved)
    return plain
