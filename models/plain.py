"""The model over plain growing float32 tensors: our own reference for every later engine.

One call serves prefill, cached decode and the verification of several tokens: it appends the rows
and index keys of the given tokens and lets each attend to itself and everything before it. While
the top-k covers all positions, attention is dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ess.models.config import ModelConfig
from ess.models.decoder import DecoderLayer, Entry
from ess.models.indexer import Probe, select
from ess.models.layers import Rotation
from ess.models.mla import attend, attend_dense
from ess.models.model import Model
from ess.models.mtp import Mtp
from ess.models.precision import Precision


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

    def __init__(self, layer: DecoderLayer, config: ModelConfig, precision: Precision) -> None:
        self._layer = layer
        self._config = config
        self._precision = precision
        self.rows = Growing(config.row_dim)
        self.keys = Growing(config.index_dim if layer.indexer else 0)

    def run(
        self, hidden: Tensor, positions: Tensor, rotation: Rotation, given: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output and the selection it used; `given` is another layer's selection.

        A selection of None means that every earlier position was attended.
        """
        entry = self._layer.enter(hidden)
        selection = given
        if self._layer.indexer is not None and given is None:
            selection = self._select(entry, positions, rotation)
        queries, rows = self._layer.pre_attn(entry, rotation)
        self.rows.append(self._precision.rows(rows.float()))
        attended = self._attend(queries, positions, selection)
        return self._layer.mlp(self._layer.output(hidden, attended)), selection

    def _select(self, entry: Entry, positions: Tensor, rotation: Rotation) -> Tensor | None:
        probe = self._layer.index(entry, rotation)
        through = self._precision.index
        exact = Probe(through(probe.queries.float()), probe.weights, through(probe.keys.float()))
        self.keys.append(exact.keys)
        if self.keys.length <= self._config.top_k:
            return None
        return select(exact, self.keys.filled, positions + 1, self._config.top_k)

    def _attend(self, queries: Tensor, positions: Tensor, selection: Tensor | None) -> Tensor:
        rows, latent_dim = self.rows.filled, self._config.latent_dim
        scale = self._config.attention_scale
        if selection is None:
            return attend_dense(queries, rows, positions, latent_dim=latent_dim, scale=scale)
        return attend(queries, rows, selection, latent_dim=latent_dim, scale=scale)

    def keep(self, length: int) -> None:
        self.rows.keep(length)
        self.keys.keep(min(length, self.keys.length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of the tokens just run: logits, finished hidden states, one selection per layer group."""

    logits: Tensor
    hidden: Tensor
    selections: tuple[Tensor | None, ...]


class Plain:
    """The main model over one sequence."""

    def __init__(self, model: Model, *, precision: Precision | None = None) -> None:
        self._model = model
        self.layers = tuple(
            PlainLayer(layer, model.config, precision or Precision()) for layer in model.layers
        )

    @property
    def length(self) -> int:
        return self.layers[0].rows.length

    @torch.inference_mode()
    def run(self, tokens: Sequence[int]) -> Outcome:
        positions = torch.arange(self.length, self.length + len(tokens))
        rotation = self._model.rotation(positions)
        hidden = self._model.embed(torch.tensor(tokens))
        selections: list[Tensor | None] = []
        for number, layer in enumerate(self.layers):
            own = self._model.config.has_indexer(number)
            hidden, chosen = layer.run(hidden, positions, rotation, None if own else selections[-1])
            if own:
                selections.append(chosen)
        finished = self._model.finish(hidden)
        return Outcome(
            logits=self._model.logits(finished), hidden=finished, selections=tuple(selections)
        )

    def keep(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        for layer in self.layers:
            layer.keep(length)


class Drafter(Protocol):
    def draft(self, tokens: Sequence[int], hidden: Tensor, count: int) -> list[int]: ...


class PlainDrafter:
    """The MTP module over one sequence. Its rows lag the main model's tokens by one."""

    def __init__(self, model: Model, *, precision: Precision | None = None) -> None:
        assert model.mtp is not None, "this model has no MTP module"
        self._model = model
        self._mtp: Mtp = model.mtp
        self.layer = PlainLayer(self._mtp.layer, model.config, precision or Precision())

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], hidden: Tensor, count: int) -> list[int]:
        """`count` guesses after `tokens`, which follow the positions that `hidden` belongs to.

        The rows of the given tokens stay; those of the guesses are dropped, since the main model's
        hidden states replace them once the guesses are verified.
        """
        finished, first = self._feed(tokens, hidden, None)
        stays = self.layer.rows.length
        given = self._last(first, stays) if self._model.config.mtp_shares_selection else None
        guesses = [self._guess(finished)]
        while len(guesses) < count:
            finished, _ = self._feed(guesses[-1:], finished[-1:], given)
            guesses.append(self._guess(finished))
        self.layer.keep(stays)
        return guesses

    def _last(self, selection: Tensor | None, length: int) -> Tensor:
        if selection is None:
            return torch.arange(length, dtype=torch.int32)[None]
        return selection[-1:]

    def _feed(
        self, tokens: Sequence[int], hidden: Tensor, given: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        start = self.layer.rows.length
        positions = torch.arange(start, start + len(tokens))
        joined = self._mtp.join(self._model.embed(torch.tensor(tokens)), hidden)
        rotation = self._model.rotation(positions)
        output, selection = self.layer.run(joined, positions, rotation, given)
        return self._mtp.finish(output), selection

    def _guess(self, finished: Tensor) -> int:
        return int(self._model.logits(finished[-1:]).argmax())


def greedy(model: Model, prompt: Sequence[int], count: int) -> list[int]:
    """`count` tokens after the prompt, one at a time."""
    plain = Plain(model)
    tokens = [int(plain.run(prompt).logits[-1].argmax())]
    while len(tokens) < count:
        tokens.append(int(plain.run(tokens[-1:]).logits[-1].argmax()))
    return tokens


def greedy_mtp(
    model: Model,
    prompt: Sequence[int],
    count: int,
    *,
    verified: int,
    drafter: Drafter | None = None,
) -> tuple[list[int], int]:
    """The same tokens, `verified` per step: one known, the others drafted; and the steps taken."""
    plain, guesser = Plain(model), drafter or PlainDrafter(model)
    outcome = plain.run(prompt)
    hidden, known = outcome.hidden, [*prompt[1:], int(outcome.logits[-1].argmax())]
    tokens, step_count = [known[-1]], 0
    while len(tokens) < count:
        drafts = guesser.draft(known, hidden, verified - 1) if verified > 1 else []
        outcome = plain.run([tokens[-1], *drafts])
        targets = outcome.logits.argmax(-1).tolist()
        accepted = 1 + _equal_prefix(drafts, targets)
        plain.keep(plain.length - verified + accepted)
        hidden, known = outcome.hidden[:accepted], targets[:accepted]
        tokens += known
        step_count += 1
    return tokens[:count], step_count


def _equal_prefix(drafts: Sequence[int], targets: Sequence[int]) -> int:
    for number, (draft, target) in enumerate(zip(drafts, targets, strict=False)):
        if draft != target:
            return number
    return len(drafts)
