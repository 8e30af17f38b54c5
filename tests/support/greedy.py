"""Greedy decoding by the plain model, token by token and with drafts: what engines must say."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.models.compressed import plain as compressed
from ess.models.compressed.model import CompressedModel
from ess.models.model import Model
from ess.models.mtp import Mtp
from ess.models.plain import Plain, PlainLayer


class Drafter(Protocol):
    def draft(self, tokens: Sequence[int], hidden: Tensor, count: int) -> list[int]: ...


class PlainDrafter:
    """The MTP module over one sequence. Its rows lag the main model's tokens by one."""

    def __init__(self, model: Model) -> None:
        if model.mtp is None:
            raise BadInput(f"this {model.config.family} checkpoint has no MTP module")
        self._model = model
        self._mtp: Mtp = model.mtp
        self.layer = PlainLayer(self._mtp.layer, model.config)

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
    if isinstance(model, CompressedModel):
        return _over_entries(compressed.Plain(model), prompt, count)
    return continued(Plain(model), prompt, count)


@functools.cache
def made_once(model: Model, prompt: tuple[int, ...], count: int) -> list[int]:
    """The same for several tests of one model, which stays in memory."""
    return greedy(model, prompt, count)


def _over_entries(plain: compressed.Plain, prompt: Sequence[int], count: int) -> list[int]:
    tokens = [int(plain.run(prompt)[-1].argmax())]
    while len(tokens) < count:
        tokens.append(int(plain.run(tokens[-1:])[-1].argmax()))
    return tokens


def continued(plain: Plain, prompt: Sequence[int], count: int) -> list[int]:
    """The same by a plain model of the caller's."""
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
    if verified < 1:
        raise BadInput(f"verified is {verified}, must be positive")
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
