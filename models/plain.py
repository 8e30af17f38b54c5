"""The model over plain growing float32 tensors: our own reference for every engine.

One call serves prefill, cached decode and the verification of several tokens: it appends the rows
and index keys of the given tokens and lets each attend to itself and everything before it. While
the top-k covers all positions, attention is dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.models.decoder import DecoderLayer, Entry
from ess.models.indexer import Probe, last_positions, select, select_units
from ess.models.layers import Rotation
from ess.models.mla import attend, attend_dense
from ess.models.model import Model


class Growing:
    """Float32 rows of one width that grow at the end; doubling keeps appends cheap."""

    def __init__(self, width: int) -> None:
        self._held = torch.empty(0, width)
        self.length = 0

    def append(self, rows: Tensor) -> None:
        end = self.length + rows.shape[0]
        if end > self._held.shape[0]:
            larger = torch.empty(max(end, 2 * self._held.shape[0]), self._held.shape[1])
            larger[: self.length] = self.filled
            self._held = larger
        self._held[self.length : end] = rows
        self.length = end

    @property
    def filled(self) -> Tensor:
        return self._held[: self.length]

    def keep(self, length: int) -> None:
        assert length <= self.length, f"{length} of {self.length} rows"
        self.length = length


class PlainLayer:
    """One decoder layer with the rows and index keys of one sequence."""

    def __init__(self, layer: DecoderLayer, config: ModelConfig) -> None:
        self._layer = layer
        self._config = config
        own = config.at_layer(layer.number)
        self._latent_dim = own.latent_dim
        self.rows = Growing(own.row_dim + own.filled_rope_dim)
        self.keys = Growing(config.key_dim if layer.indexer else 0)

    def run(
        self, hidden: Tensor, positions: Tensor, rotation: Rotation, given: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output and the selection it used; `given` is another layer's selection.

        A selection of None means that every earlier position was attended. Index keys of tokens
        that run with a given selection are not kept.
        """
        entry = self._layer.enter(hidden)
        selection = given
        if self._layer.window:
            top_k = self._config.top_k
            selection = last_positions(positions + 1, self._layer.window, top_k)
        elif self._layer.indexer is not None and given is None:
            selection = self._select(entry, positions, rotation)
        queries, rows = self._layer.pre_attn(entry, rotation)
        self.rows.append(self.kept_rows(rows.float()))
        attended = self._attend(queries, positions, selection)
        return self._layer.mlp(self._layer.output(hidden, attended)), selection

    def _select(self, entry: Entry, positions: Tensor, rotation: Rotation) -> Tensor | None:
        assert self.keys.length == self.rows.length, "keys of an earlier token were not kept"
        queries, weights, keys = self._layer.index(entry, rotation)
        probe = self.kept_probe(Probe(queries.float(), weights, keys.float()))
        self.keys.append(probe.keys)
        if self.keys.length <= self._config.top_k:
            return None
        keys, k, unit = self.keys.filled, self._config.top_k, self._config.select_unit
        if unit > 1:
            return select_units(probe, keys, positions + 1, k, unit)
        return select(probe, keys, positions + 1, k)

    def kept_rows(self, rows: Tensor) -> Tensor:
        """What attention reads of new rows: themselves. Codecs come in by overriding this."""
        return rows

    def kept_probe(self, probe: Probe) -> Probe:
        """The same for what the indexer multiplies."""
        return probe

    def _attend(self, queries: Tensor, positions: Tensor, selection: Tensor | None) -> Tensor:
        rows, sinks = self.rows.filled, self._layer.mla.sinks
        dim, scale = self._latent_dim, self._config.attention_scale
        if selection is None:
            return attend_dense(queries, rows, positions, latent_dim=dim, scale=scale, sinks=sinks)
        return attend(queries, rows, selection, latent_dim=dim, scale=scale, sinks=sinks)

    def keep(self, length: int) -> None:
        self.rows.keep(length)
        self.keys.keep(min(length, self.keys.length))


class PlainCarried:
    """A layer without rows. What goes into it is kept whole: to forget tokens is to begin again."""

    def __init__(self, layer: DecoderLayer, config: ModelConfig) -> None:
        self._layer = layer
        self.rows = Growing(config.residual_dim)
        self._state = layer.first_state()

    def run(
        self, hidden: Tensor, positions: Tensor, rotation: Rotation, given: Tensor | None
    ) -> tuple[Tensor, None]:
        assert given is None, "a layer without rows got a selection"
        self.rows.append(hidden)
        read, self._state = self._layer.carry(hidden[None], self._state)
        return self._layer.mlp(self._layer.output(hidden, read[0])), None

    def keep(self, length: int) -> None:
        self.rows.keep(length)
        self._state = self._layer.first_state()
        if length:
            _, self._state = self._layer.carry(self.rows.filled[None], self._state)


def alone(layer: DecoderLayer, config: ModelConfig) -> PlainLayer | PlainCarried:
    return (PlainLayer if layer.has_rows else PlainCarried)(layer, config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the tokens just run gave: logits, finished hidden states, one selection per layer
    group."""

    logits: Tensor
    hidden: Tensor
    selections: tuple[Tensor | None, ...]


class Plain:
    """The main model over one sequence."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.layers = tuple(alone(layer, model.config) for layer in model.layers)

    @property
    def length(self) -> int:
        return self.layers[0].rows.length

    @torch.inference_mode()
    def run(self, tokens: Sequence[int]) -> Outcome:
        self._check(tokens)
        positions = torch.arange(self.length, self.length + len(tokens))
        rotation = self._model.rotation(positions)
        hidden = self._model.embed(torch.tensor(tokens))
        selections: list[Tensor | None] = []
        for number, layer in enumerate(self.layers):
            own = self._model.config.starts_group(number)
            hidden, chosen = layer.run(hidden, positions, rotation, None if own else selections[-1])
            if own:
                selections.append(chosen)
        finished = self._model.finish(hidden)
        return Outcome(
            logits=self._model.logits(finished), hidden=finished, selections=tuple(selections)
        )

    def _check(self, tokens: Sequence[int]) -> None:
        limit = self._model.config.vocab_size
        if not tokens:
            raise BadInput("no tokens were given")
        if not 0 <= min(tokens) <= max(tokens) < limit:
            raise BadInput(f"tokens {min(tokens)}..{max(tokens)} are outside 0..{limit - 1}")

    def keep(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        for layer in self.layers:
            layer.keep(length)
