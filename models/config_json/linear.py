"""What a configuration says of units that are selected together and of linear attention, and what
requests keep beside their rows for both. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta, field

from ess.units import PAGE_ROWS, align_up

if TYPE_CHECKING:
    from ess.models.config import ModelConfig

Size = Annotated[int, Meta(ge=1, le=1 << 24)]
Name = Literal["matrix", "channels", "unit"]

HEADER_BYTES: Final = 64
VALUE_BYTES: Final = 4


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    """Indexers that choose neighbouring tokens together, by one key mixed from the tokens' keys;
    and residual streams that are mixed around each block."""

    unit: Annotated[int, Meta(ge=1, le=PAGE_ROWS)] = field(name="index_kpool")
    mixing_rounds: Size = field(name="hc_sinkhorn_iters")


class Recurrent(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of linear attention: a state of one size in the place of rows."""

    head_count: Size = field(name="linear_num_heads")
    head_dim: Size = field(name="linear_head_dim")
    kernel: Annotated[int, Meta(ge=1, le=64)] = field(name="linear_conv_kernel_dim")
    """Tokens that a channel of queries, keys and values is made of."""
    decay_bound: Annotated[float, Meta(ge=-1e3, lt=0.0)] | None = field(name="linear_lower_bound")
    """A bound of the logarithm of the share that a state keeps per token; None: no bound."""

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of a layer's matrices: heads, keys, values."""
        return self.head_count, self.head_dim, self.head_dim

    @property
    def channel_shape(self) -> tuple[int, ...]:
        """The shape of what is kept of earlier tokens: as many as the next token is computed
        from."""
        return self.kernel - 1, 3 * self.head_count * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class StateField:
    """The state of one layer, by its number in the whole model: a matrix and channels where
    attention is linear; where an indexer chooses units, the last tokens' contribution to their
    unit's key."""

    name: Name
    layer: int
    shape: tuple[int, ...]

    @property
    def byte_count(self) -> int:
        return VALUE_BYTES * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class StateForm:
    """The line of bytes that a request keeps: a header with its length, then the fields in float32,
    one behind the other. Nothing at all where there are no fields."""

    fields: tuple[StateField, ...]

    @property
    def byte_count(self) -> int:
        held = sum(each.byte_count for each in self.fields)
        return align_up(HEADER_BYTES + held, HEADER_BYTES) if held else 0

    def offsets(self) -> list[int]:
        """Where each field begins, in bytes."""
        ends = [HEADER_BYTES]
        for each in self.fields:
            ends.append(ends[-1] + each.byte_count)
        return ends[:-1]


def state_form(config: ModelConfig) -> StateForm:
    fields: list[StateField] = []
    for layer in config.recurrent_layers:
        own = config.recurrent
        assert own is not None, f"layer {layer} is of another kind"
        fields.append(StateField(name="matrix", layer=layer, shape=own.matrix_shape))
        fields.append(StateField(name="channels", layer=layer, shape=own.channel_shape))
    if config.pooled is not None:
        shape = config.pooled.unit - 1, config.key_dim
        indexed = filter(config.has_indexer, range(config.layer_count))
        fields += [StateField(name="unit", layer=layer, shape=shape) for layer in indexed]
    return StateForm(tuple(fields))
