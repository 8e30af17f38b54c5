"""The device memory that a token takes while it is in a layer, at each of the layer's moments.

A moment is one or two calls of torch or of a kernel. It takes the arrays that are there when it
ends, and those that it needs for itself. The latter are gone at the next moment, so a layer takes
as much as its largest moment, not the sum of all. Arrays with a line for each token are counted
here; arrays of scores are counted by the callers, since fewer tokens are scored at a time.

Factors of products are in the type of the weights, bfloat16 or float32. So are the results, which
are then converted to float32: for a while both are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ess.comm.experts.sizes import WORD_BYTES, WORDS
from ess.layout import SCALE_GROUP
from ess.models.config import ModelConfig
from ess.units import div_ceil

F32: Final = 4
BF16: Final = 2
LONG: Final = 8
CHOICES: Final = 5
"""Lines of numbers in which experts are chosen, in 64 bits: scores, ranks and places among them."""
CODES: Final = 2
"""Numbers of a selected row: its place among the rows of a pack, and a mask."""
STEP_LISTS: Final = 5
"""The same of a step: hits, rows in place, the two lists joined, and the joined list packed."""
PIECE: Final = 16
"""Bytes of a piece of a list that attention has cut."""
PAIRED: Final = 4
"""Numbers, in 64 bits, of a pair of a token and an expert that ranks exchange: the token's line,
the expert's place, the pair's place among those that are sorted, and one of these again."""
TURNING: Final = 3
"""A part that is turned: two products, and what they make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """`value_bytes` are those of a weight that is multiplied; codes are multiplied as bfloat16.
    A step of decoding keeps more than a chunk of prompts does: its index queries, and behind
    attention what was attended."""

    config: ModelConfig
    value_bytes: int = BF16
    is_step: bool = False

    def moments(self) -> Mapping[str, int]:
        return {
            "join": self._joined,
            "projections": self._hidden + self._projected,
            "index queries": self._hidden + self._entered + self._asked_keys,
            "queries": self._hidden + self._selected + self._made_queries,
            "attention": self._hidden + self._selected + self._attending,
            "values": self._hidden + self._selected + self._valued,
            "dense": self._behind + self._block(self.config.dense_dim, self.config.dense_limit),
            "routing": self._behind + CHOICES * LONG * self.config.expert_count,
            "experts": self._behind + self._routed,
            "shared experts": self._behind + self._shared,
        }

    @property
    def most(self) -> int:
        return max(self.moments().values())

    @property
    def scored(self) -> int:
        """Bytes beside the index scores, while those are there."""
        c = self.config
        asked = c.index_head_count * (c.index_dim + 1) * F32
        return self._hidden + self._selected + c.row_dim * F32 + c.key_dim * F32 + asked

    def product(self, depth: int, width: int, *, is_converted: bool = False) -> int:
        """What a product takes beside its factors; its result is float32 at the end. A factor
        `is_converted` that has the weights' type already."""
        if self.value_bytes == F32:
            return width * F32
        spare = F32 * depth if depth % SCALE_GROUP else 0
        coded = depth + F32 * (depth // SCALE_GROUP + 1) + spare
        plain = (width + depth * (not is_converted)) * self.value_bytes
        return max(plain, coded) + width * F32

    @property
    def waiting(self) -> int:
        """Bytes beside an exchange of ranks: what is there behind attention, and a sum."""
        return self._behind + self.config.hidden_dim * F32

    def exchanged(self, rank_count: int) -> int:
        """Of ranks that divide the experts: lines as made, as sent and as they come from all ranks;
        for each expert of theirs, whether it is here or not, the lines of `_expert_lines`, and sums
        that go back and come. A step keeps all of it beside its shared experts."""
        if rank_count == 1:
            return 0
        c, outer = self.config, self.config.hidden_dim * self.value_bytes
        pair_count = rank_count * c.experts_per_token
        told = WORDS * WORD_BYTES * c.experts_per_token
        sent = outer + (1 + rank_count) * (outer + told)
        before, after = self._expert_lines
        back = pair_count * after + 2 * rank_count * outer + c.hidden_dim * F32
        back += self._block(c.shared_width, c.shared_limit) * self.is_step
        return sent + max(pair_count * before, back) + pair_count * PAIRED * LONG

    # ---- up to attention

    @property
    def _joined(self) -> int:
        """The MTP module's two states: as given, normed, side by side, and their product."""
        if not self.config.mtp_layer_count:
            return 0
        hidden = self.config.hidden_dim
        return 6 * hidden * F32 + self.product(2 * hidden, hidden)

    @property
    def _hidden(self) -> int:
        """The layer's input."""
        return self.config.residual_dim * F32 + self._turned

    @property
    def _turned(self) -> int:
        """Cosines and sines of a token's position, and the ids of the token and its row."""
        return self.config.rope_dim * F32 + 4 * LONG

    @property
    def _projected(self) -> int:
        c = self.config
        return c.hidden_dim * F32 + self.product(c.hidden_dim, c.query_rank + c.row_dim)

    @property
    def _entered(self) -> int:
        """The normed input, what it was projected to, the query's norm, and the new row."""
        c = self.config
        return (c.hidden_dim + 2 * (c.query_rank + c.row_dim)) * F32

    @property
    def _asked_keys(self) -> int:
        """Index queries, as they come and as they meet the keys; their weights; the key."""
        c = self.config
        asked = c.index_head_count * c.index_dim
        turned = asked * 2 * F32
        return max(self.product(c.query_rank, asked), turned) + c.index_head_count * F32 + c.key_dim

    @property
    def _selected(self) -> int:
        """The low-rank query and the selection; of a step also its index queries."""
        c = self.config
        kept = c.index_head_count * c.index_dim * F32 if self.is_step else 0
        return (c.query_rank + 2 * c.top_k) * F32 + kept

    @property
    def _heads(self) -> int:
        """What is multiplied with rows: absorbed queries."""
        return self.config.head_count * self.config.row_dim * self.value_bytes

    @property
    def _latents(self) -> int:
        return self.config.head_count * self.config.latent_dim

    @property
    def _made_queries(self) -> int:
        """Queries of all heads; absorbed without the part that is turned; that part on its way, or
        the two parts joined."""
        c = self.config
        plain = c.head_count * (c.nope_dim + c.rope_dim)
        turned = c.head_count * c.rope_dim
        joined = self._heads + turned * self.value_bytes
        absorbed = self._latents * self.value_bytes + max(joined, TURNING * turned * F32)
        return max(self.product(c.query_rank, plain), plain * F32 + absorbed)

    @property
    def _attending(self) -> int:
        c = self.config
        lists = (STEP_LISTS if self.is_step else CODES) * c.top_k * F32
        sums = (self._latents + c.head_count) * F32
        pieces = PIECE * self.piece_count if self.is_step else 0
        return self._heads + lists + pieces + sums * (1 + c.has_sinks)

    @property
    def piece_count(self) -> int:
        """The most pieces that a query's list of hits and rows in place is cut into."""
        heads, keys = self.blocks
        return div_ceil(self.config.head_count, heads) * (div_ceil(2 * self.config.top_k, keys) + 1)

    @property
    def blocks(self) -> tuple[int, int]:
        """The heads and the keys of the blocks in which attention works through lists, or fewer."""
        if self.value_bytes == F32:
            return 16, 16
        return (16, 64) if self.config.head_count <= 16 else (64, 32)

    @property
    def _valued(self) -> int:
        """What was attended, its factor in the weights' type, values, and the layer's output. Gates
        make values float32."""
        c, size = self.config, self.value_bytes
        is_gated = c.value_gates != "none"
        values, attended = c.head_count * c.value_dim, self._latents * F32
        gates = (c.head_count if c.value_gates == "head" else values) * F32 * is_gated
        given, factor = values * (F32 if is_gated else size), self._latents * size * (size < F32)
        product = self.product(values, c.hidden_dim, is_converted=not is_gated)
        output = given + product + c.hidden_dim * F32
        return attended + gates + max(factor + values * size, values * size + given, output)

    # ---- behind attention

    @property
    def _behind(self) -> int:
        """The layer's input, its sum with what attention adds, and that normed; in a step also the
        attention's result."""
        c = self.config
        kept = (c.query_rank + self._latents * self.is_step) * F32
        return kept + 2 * self._hidden + c.hidden_dim * F32

    def _block(self, inner: int, limit: float) -> int:
        """The gates and their factors, the silu of the gates, and the products of both."""
        hidden = self.config.hidden_dim
        gates = (2 + 2 + 2 * (limit > 0)) * inner * F32
        return max(
            self.product(hidden, 2 * inner), gates, inner * F32 + self.product(inner, hidden)
        )

    @property
    def _expert_lines(self) -> tuple[int, int]:
        """For each expert of a token: its input and its gates, or the gates and their product;
        later the product and the expert's result, which are summed."""
        c = self.config
        before = max(c.hidden_dim + 2 * c.expert_dim, 3 * c.expert_dim)
        return before * self.value_bytes, (c.hidden_dim + c.expert_dim) * self.value_bytes

    @property
    def _routed(self) -> int:
        c, count = self.config, self.config.experts_per_token
        before, after = self._expert_lines
        return max(count * before, count * after + c.hidden_dim * F32) + count * 3 * LONG

    @property
    def _shared(self) -> int:
        c = self.config
        return 2 * c.hidden_dim * F32 + self._block(c.shared_width, c.shared_limit)
