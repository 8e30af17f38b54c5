"""Drafts: the MTP module guesses the tokens of the next steps.

Its row of position p pairs the finished hidden state of p with token p + 1, so it runs after the
step's tokens are known, as the last layer of the same step: every verified position gets its row
from the main model's own hidden state, and what was rejected goes with the step. The first guess
comes out of that pass. Further guesses chain on the module's own state; their rows live only here,
and their attention reads the pool's resident rows: that costs acceptance, never tokens. A model
whose passes share their selection attends in all of them to the rows that the first one chose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ess.engine.layers.batch import Batch, attend, compute_threads, join, select
from ess.engine.layers.front import turned
from ess.engine.step.feeding import Counts
from ess.engine.step.runner import Runner
from ess.kernels.merge import Partial
from ess.models.decoder import Entry
from ess.models.layers import Rotation
from ess.models.model import Model
from ess.models.mtp import Mtp


def draft(
    runner: Runner,
    batch: Batch,
    hidden: Tensor,
    following: Tensor,
    last: Counts,
    count: int,
) -> Tensor:
    """`count` guesses per sequence, int64 [sequences, count].

    `following` is the token after each query of the step; `last` is, per sequence, the query whose
    token is the newest that was kept.
    """
    mtp = runner.model.mtp
    assert mtp is not None, "drafts need an MTP module"
    assert count >= 1, f"{count} drafts"
    assert len(following) == batch.step.query_count, f"{len(following)} tokens behind queries"
    assert len(last) == len(batch.course.counts), f"{len(last)} newest tokens"
    joined = join(batch, mtp, runner.model.embed(following), hidden)
    newest = runner.layer(batch, mtp.layer, joined)[last]
    finished, guess = _ended(batch, runner.model, mtp, newest)
    guesses, chain = [guess], Chain(runner, batch, mtp, last)
    while len(guesses) < count:
        finished, guess = _ended(batch, runner.model, mtp, chain.next(guess, finished))
        guesses.append(guess)
    return torch.stack(guesses, dim=1)


def _ended(batch: Batch, model: Model, mtp: Mtp, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The module's finished hidden states, and its guesses."""
    if not batch.ops.has_stages():
        finished = mtp.finish(hidden)
        return finished, model.logits(finished).argmax(-1)
    finished, logits = model.draft_ending([hidden], threads=compute_threads())
    return finished, logits.argmax(-1)


class Chain:
    """Further guesses of one step, and the rows they have made so far."""

    def __init__(self, runner: Runner, batch: Batch, mtp: Mtp, last: Counts) -> None:
        self._runner = runner
        self._batch = batch
        self._mtp = mtp
        self._last = last
        self._lengths = batch.lengths[last]
        self._count = 0
        self._own: list[Tensor] = []
        shares = runner.model.config.mtp_shares_selection
        self._given = _first_selection(batch, mtp)[last] if shares else None

    def next(self, tokens: Tensor, finished: Tensor) -> Tensor:
        layer, runner = self._mtp.layer, self._runner
        hidden = join(self._batch, self._mtp, runner.model.embed(tokens), finished)
        rotation = runner.model.rotation(self._lengths + self._count)
        self._count += 1
        entry = layer.enter(hidden)
        queries = layer.mla.queries(entry.query, rotation)
        if self._given is not None:
            partial = self._over_pool(queries, self._given)
        else:
            self._own.append(layer.mla.rows(entry.row, rotation).float())
            selection = self._selected(entry, rotation)
            partial = self._over_pool(queries, selection, onto=self._over_own(queries))
        attended = runner.heads.joined(self._batch, layer, layer.mla.attended(partial))
        return layer.mlp(layer.output(hidden, attended))

    def _selected(self, entry: Entry, rotation: Rotation) -> Tensor:
        batch, layer = self._batch, self._mtp.layer
        assert layer.indexer is not None, "the module selects for itself"
        asked = turned(batch, layer.indexer.queries(entry.query, rotation), rotation)
        weights = layer.indexer.weights(entry.hidden)
        return select(batch, layer.number, asked, weights, self._last)[0]

    def _over_pool(
        self, queries: Tensor, selection: Tensor, *, onto: Partial | None = None
    ) -> Partial:
        batch, number = self._batch, self._mtp.layer.number
        slots = batch.step.locate(number, selection, queries=self._last)
        return attend(batch, number, queries, slots, onto=onto)

    def _over_own(self, queries: Tensor) -> Partial:
        rows = torch.stack(self._own, dim=1)
        scores = torch.einsum("qhd,qnd->qhn", queries.float(), rows) * self._batch.scale
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        latent_dim = self._batch.layout.row_of(self._mtp.layer.number).latent_dim
        return Partial(weights @ rows[..., :latent_dim], lse)


def _first_selection(batch: Batch, mtp: Mtp) -> Tensor:
    """The selection of each query of the step in the module's layer."""
    parts = batch.selected[batch.layout.group_of(mtp.layer.number)]
    chosen = torch.cat([parts[part] for part in sorted(parts, key=lambda part: part.start)])
    assert len(chosen) == len(batch.lengths), f"{len(chosen)} selections of the module's queries"
    return chosen
