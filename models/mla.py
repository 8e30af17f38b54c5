"""Multi-head latent attention, absorbed: queries meet the cached latent rows directly.

A head's key is W_k c for the latent c of a row, so its score q.(W_k c) is (W_k^T q).c: `queries`
moves W_k to the query, `output` applies W_v after the weighted sum of latents. Both are exact
identities; what the cache holds is one row [latent | rope key] per token for all heads.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ess.kernels.calls import RowFinish
from ess.kernels.cpu.stage import Heads, Stage, Values, pack
from ess.kernels.merge import Partial
from ess.models.config import ModelConfig
from ess.models.layers import Rotation, Source, linear, rms_norm, rotate
from ess.models.weights.kept import Weight, plain, stacked

GATHER_ELEMENTS: Final = 1 << 20


class Mla:
    sinks: Tensor | None = None
    """A logit per head that attention spreads its weight over too, with nothing to gain there."""

    def __init__(self, config: ModelConfig, source: Source, *, tp: int = 1) -> None:
        """With `tp` ranks `source` has one rank's share of the weights that make queries and
        values: `head_count` of all heads."""
        c = config
        self._config = c
        self.head_count = heads = c.head_count // tp
        assert heads * tp == c.head_count, f"{c.head_count} heads of {tp} ranks"
        self._down = self._down_from(source)
        self._latent_norm = source.vector("kv_a_layernorm.weight", c.latent_dim)
        self._query_up = self._queries_from(source)
        up = source.matrix("kv_b_proj", heads * (c.nope_dim + c.value_dim), c.latent_dim)
        per_head = up.view(heads, c.nope_dim + c.value_dim, c.latent_dim)
        self._key_up, self._value_up = torch.split(per_head, [c.nope_dim, c.value_dim], 1)
        self._out = source.weight("o_proj", c.hidden_dim, c.head_count * c.value_dim)

    def _down_from(self, source: Source) -> Weight:
        c = self._config
        self._query_norm = source.vector("q_a_layernorm.weight", c.query_rank)
        query = source.weight("q_a_proj", c.query_rank, c.hidden_dim)
        return stacked((query, source.weight("kv_a_proj_with_mqa", c.row_dim, c.hidden_dim)))

    def _queries_from(self, source: Source) -> Weight:
        c = self._config
        return source.weight("q_b_proj", self.head_count * (c.nope_dim + c.rope_dim), c.query_rank)

    def attended(self, partial: Partial) -> Tensor:
        """What attention over all chosen rows leaves to each head beside its sink."""
        if self.sinks is None:
            return partial.out
        return partial.out * (partial.lse - self.sinks).sigmoid()[..., None]

    @property
    def dtype(self) -> torch.dtype:
        return self._key_up.dtype

    @property
    def device(self) -> torch.device:
        return self._key_up.device

    def down(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Normed hidden -> (normed low-rank query, latent and rope key before norm and rope)."""
        both = linear(hidden, self._down)
        query, row = torch.split(both, [self._config.query_rank, self._config.row_dim], -1)
        return rms_norm(query, self._query_norm, self._config.query_latent_eps), row

    def queries(self, query: Tensor, rotation: Rotation) -> Tensor:
        """[tokens, query_rank] -> [tokens, heads, latent + rope]."""
        c = self._config
        heads = linear(query, self._query_up).view(-1, self.head_count, c.nope_dim + c.rope_dim)
        nope, rope = torch.split(heads, [c.nope_dim, c.rope_dim], -1)
        latents = torch.bmm(nope.to(self.dtype).transpose(0, 1), self._key_up).transpose(0, 1)
        return torch.cat((latents, rotate(rope, rotation, "interleaved").to(self.dtype)), -1)

    def rows(self, row: Tensor, rotation: Rotation) -> Tensor:
        """The new rows [tokens, latent + rope], ready to be encoded and stored."""
        c = self._config
        latent, rope = torch.split(row, [c.latent_dim, c.rope_dim], -1)
        normed = rms_norm(latent, self._latent_norm, c.query_latent_eps)
        return torch.cat((normed, rotate(rope, rotation, "interleaved")), -1)

    def row_finish(self, rotation: Rotation) -> RowFinish | None:
        """What `rows` does, for an op that stores them as well; None where no op does it."""
        return RowFinish(self._latent_norm, self._config.query_latent_eps, rotation.angles)

    def values(self, attended: Tensor) -> Tensor:
        """Attended latents, float32 [tokens, heads, latent] -> [tokens, heads, value]."""
        latents = attended.to(self.dtype).transpose(0, 1)
        return torch.bmm(latents, self._value_up.transpose(1, 2)).transpose(0, 1)

    def output(self, attended: Tensor) -> Tensor:
        """Attended latents -> [tokens, hidden]."""
        return linear(self.values(attended).flatten(1), self._out)

    # ---- the same as ops of compiled stages

    def project_in(self, stage: Stage, normed: Values) -> tuple[Values, Values]:
        """Normed hidden -> (normed low-rank query, the new row)."""
        c = self._config
        both = stage.linear(normed, pack(plain(self._down)))
        query, row = both.part(0, c.query_rank), both.part(c.query_rank, c.row_dim)
        stage.norm(query, self._query_norm, c.query_latent_eps, query)
        latent, rope = row.part(0, c.latent_dim), row.part(c.latent_dim, c.rope_dim)
        stage.norm(latent, self._latent_norm, c.query_latent_eps, latent)
        stage.rotate(Heads(rope, 1, 0), "interleaved")
        return query, row

    def query_stage(self) -> Stage:
        """Takes the low-rank query, gives absorbed queries."""
        c, stage = self._config, Stage()
        heads = stage.linear(stage.take(c.query_rank), pack(plain(self._query_up)))
        count = self.head_count
        nope = Heads(heads.part(0, c.nope_dim), count, c.nope_dim + c.rope_dim)
        rope = Heads(heads.part(c.nope_dim, c.rope_dim), count, nope.step)
        asked = stage.room(count * c.row_dim)
        latents = Heads(asked.part(0, c.latent_dim), count, c.row_dim)
        turned = Heads(asked.part(c.latent_dim, c.rope_dim), count, c.row_dim)
        stage.linear_heads(nope, pack(self._key_up.transpose(1, 2)), latents)
        stage.copy(rope, turned)
        stage.rotate(turned, "interleaved")
        stage.give(asked, self.dtype, count, c.row_dim)
        return stage

    def add_output(self, stage: Stage, hidden: Values) -> None:
        """Takes attended latents; `hidden` += their output."""
        self._add(stage, self._values_in(stage), hidden)

    def value_stage(self) -> Stage:
        """Takes attended latents, gives values."""
        stage = Stage()
        values = self._values_in(stage)
        stage.give(values, torch.float32, self.head_count, self._config.value_dim)
        return stage

    def _values_in(self, stage: Stage) -> Values:
        c, count = self._config, self.head_count
        attended = stage.take(count * c.latent_dim)
        values = stage.room(count * c.value_dim)
        stage.linear_heads(
            Heads(attended.part(0, c.latent_dim), count, c.latent_dim),
            pack(self._value_up),
            Heads(values.part(0, c.value_dim), count, c.value_dim),
        )
        return values

    def _add(self, stage: Stage, values: Values, hidden: Values) -> None:
        stage.add(stage.linear(values, pack(plain(self._out))), hidden)


class MlaShare(Mla):
    """One rank's heads. It makes values of its own heads (`values`); its output takes the values of
    all heads, [tokens, heads, value], since the output projection is whole on every rank."""

    def output(self, attended: Tensor) -> Tensor:
        return linear(attended.flatten(1), self._out)

    def add_output(self, stage: Stage, hidden: Values) -> None:
        c = self._config
        self._add(stage, stage.take(c.head_count * c.value_dim), hidden)


def attend(
    queries: Tensor,
    rows: Tensor,
    selection: Tensor,
    *,
    latent_dim: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Plain float32 attention of each query over its selected rows; -1 in a selection is a pad."""
    step = max(1, GATHER_ELEMENTS // (selection.shape[1] * rows.shape[1]))
    parts = []
    for q, s in zip(torch.split(queries, step), torch.split(selection, step), strict=True):
        chosen = s.clamp_min(0).flatten()
        gathered = rows.index_select(0, chosen).view(*s.shape, -1)
        scores = torch.bmm(q.float(), gathered.transpose(1, 2)) * scale
        weights = _weights(scores.masked_fill((s < 0)[:, None], -torch.inf), sinks)
        parts.append(torch.bmm(weights, gathered[..., :latent_dim]))
    return torch.cat(parts)


def attend_dense(
    queries: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    latent_dim: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Plain float32 attention of each query over all rows up to its own position."""
    step = max(1, GATHER_ELEMENTS // (queries.shape[1] * rows.shape[0]))
    seen = torch.arange(rows.shape[0], device=rows.device)
    parts = []
    for q, p in zip(torch.split(queries, step), torch.split(positions, step), strict=True):
        scores = (q.float() @ rows.T) * scale
        weights = _weights(scores.masked_fill((seen > p[:, None])[:, None], -torch.inf), sinks)
        parts.append(weights @ rows[:, :latent_dim])
    return torch.cat(parts)


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The weights of scores [queries, heads, rows]."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks[:, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]
