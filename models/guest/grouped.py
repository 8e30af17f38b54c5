"""Grouped-query attention over rows that a latent pool keeps.

    row    [ keys of all key heads | values of all key heads | unused ]
    query  [ the head's query in the place of its group's key | 0 | 0 ]

Keys are rotated before they are kept, each half is padded with zeros to whole scale groups, and the
last part, where a latent model has its rotary key, stays zero. So a query meets the keys of its own
group alone, and the weighted sum of rows holds the head's output in the place of its group's value:
what attends to latent rows computes this exactly, and moves three times the bytes it needs.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from ess.kernels.cpu.stage import Heads, Stage, Values, pack
from ess.kernels.merge import Partial
from ess.layout import RopeStyle
from ess.models.config import ModelConfig
from ess.models.layers import Rotation, Source, linear, rotate
from ess.models.weights.kept import lengthened, packable, stacked

STYLE: Final[RopeStyle] = "half"


class Grouped:
    """Grouped attention with the interface of `Mla`. In place of a latent model's low-rank query it
    has the query before rotation."""

    sinks: Tensor | None = None

    def __init__(self, config: ModelConfig, source: Source) -> None:
        c = config
        self._config = c
        self.head_count, self._dim = c.head_count, c.value_dim
        self._groups, self._half = c.key_head_count, c.latent_dim // 2
        self._kept = self._groups * self._dim
        keys, values = (
            source.weight(f"{name}_proj", self._kept, c.hidden_dim) for name in ("k", "v")
        )
        unused = self._half - self._kept
        padded = lengthened(keys, unused), lengthened(values, unused + c.rope_dim)
        queries = packable(source.weight("q_proj", c.query_rank, c.hidden_dim))
        self._down = packable(stacked([queries, *padded]))
        self._out = packable(source.weight("o_proj", c.hidden_dim, c.query_rank))

    def attended(self, partial: Partial) -> Tensor:
        return partial.out

    @property
    def dtype(self) -> torch.dtype:
        return self._down.dtype

    @property
    def device(self) -> torch.device:
        return self._down.device

    def down(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Normed hidden -> (queries and row, both before their turn)."""
        both = linear(hidden, self._down)
        query, row = torch.split(both, [self._config.query_rank, self._config.row_dim], -1)
        return query, row

    def queries(self, query: Tensor, rotation: Rotation) -> Tensor:
        """[tokens, query_rank] -> [tokens, heads, latent + rope]."""
        turned = self._turned(query, self.head_count, rotation).to(self.dtype)
        shape = (len(query), self._groups, self._each, self._config.row_dim)
        asked = turned.new_zeros(shape)
        for group, heads in enumerate(turned.view(*shape[:3], -1).unbind(1)):
            asked[:, group, :, group * self._dim : (group + 1) * self._dim] = heads
        return asked.flatten(1, 2)

    def rows(self, row: Tensor, rotation: Rotation) -> Tensor:
        """The new rows [tokens, latent + rope], ready to be encoded and stored."""
        keys, rest = torch.split(row, [self._kept, row.shape[1] - self._kept], -1)
        return torch.cat((self._turned(keys, self._groups, rotation).flatten(1), rest), -1)

    def row_finish(self, rotation: Rotation) -> None:
        """None: no op does what `rows` does."""
        return

    def values(self, attended: Tensor) -> Tensor:
        """Attended rows, float32 [tokens, heads, latent] -> [tokens, heads, value]."""
        taken = [
            heads[..., self._half + group * self._dim :][..., : self._dim]
            for group, heads in enumerate(torch.split(attended, self._each, 1))
        ]
        return torch.cat(taken, 1)

    def output(self, attended: Tensor) -> Tensor:
        """Attended rows -> [tokens, hidden]."""
        return linear(self.values(attended).flatten(1), self._out)

    def sides(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of rows, each [tokens, key heads, dim]."""
        ends = (slice(start, start + self._kept) for start in (0, self._half))
        keys, values = (rows[:, end].reshape(len(rows), -1, self._dim) for end in ends)
        return keys, values

    def as_attended(self, values: Tensor) -> Tensor:
        """The values of each head [tokens, heads, dim], at the places where attended rows hold
        them."""
        rows = values.new_zeros(len(values), self._groups, self._each, 2 * self._half)
        for group, heads in enumerate(values.view(*rows.shape[:3], -1).unbind(1)):
            first = self._half + group * self._dim
            rows[:, group, :, first : first + self._dim] = heads
        return rows.flatten(1, 2)

    @property
    def _each(self) -> int:
        """Heads that share a key."""
        return self.head_count // self._groups

    def _turned(self, values: Tensor, count: int, rotation: Rotation) -> Tensor:
        return rotate(values.reshape(len(values), count, self._dim), rotation, STYLE)

    # ---- the same as ops of compiled stages

    def project_in(self, stage: Stage, normed: Values) -> tuple[Values, Values]:
        """Normed hidden -> (queries before their turn, the new row)."""
        c = self._config
        both = stage.linear(normed, pack(self._down))
        query, row = both.part(0, c.query_rank), both.part(c.query_rank, c.row_dim)
        stage.rotate(Heads(row.part(0, self._dim), self._groups, self._dim), STYLE)
        return query, row

    def query_stage(self) -> Stage:
        """Takes queries before their turn, gives them in the place of their group's key."""
        c, stage, count = self._config, Stage(), self.head_count
        query, asked = stage.take(c.query_rank), stage.room(count * c.row_dim)
        heads = Heads(query.part(0, self._dim), count, self._dim)
        self._blank(stage, query, asked)
        stage.rotate(heads, STYLE)
        for group in range(self._groups):
            first = group * self._each
            place = asked.part(first * c.row_dim + group * self._dim, self._dim)
            turned = Heads(query.part(first * self._dim, self._dim), self._each, self._dim)
            stage.copy(turned, Heads(place, self._each, c.row_dim))
        stage.give(asked, self.dtype, count, c.row_dim)
        return stage

    def _blank(self, stage: Stage, some: Values, to: Values) -> None:
        """A norm without weight is zeros: of a length that fills a row."""
        step = math.gcd(self._config.rope_dim, self._config.row_dim)
        zeros = stage.norm(some.part(0, step), torch.zeros(step), 1.0)
        stage.copy(Heads(zeros, to.dim // step, 0), Heads(to.part(0, step), to.dim // step, step))

    def add_output(self, stage: Stage, hidden: Values) -> None:
        """Takes attended rows; `hidden` += their output."""
        stage.add(stage.linear(self._values_in(stage), pack(self._out)), hidden)

    def value_stage(self) -> Stage:
        """Takes attended rows, gives values."""
        stage = Stage()
        stage.give(self._values_in(stage), torch.float32, self.head_count, self._dim)
        return stage

    def _values_in(self, stage: Stage) -> Values:
        dim, latent = self._dim, self._config.latent_dim
        attended, values = stage.take(self.head_count * latent), stage.room(self.head_count * dim)
        for group in range(self._groups):
            first = group * self._each
            place = attended.part(first * latent + self._half + group * dim, dim)
            to = values.part(first * dim, dim)
            stage.copy(Heads(place, self._each, latent), Heads(to, self._each, dim))
        return values
