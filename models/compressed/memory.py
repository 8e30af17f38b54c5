"""What a request takes of host and device when its entries are offloaded. Needs no torch.

The entries that an indexer chooses from are offloaded. Their index keys, the slots, the entries
that all tokens attend to, and the state stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ess.models.compressed.form import state_form
from ess.models.config import Compressed, ModelConfig
from ess.units import div_ceil

# As published engines keep them: 448 numbers in e4m3 with a scale for each 64 of them, in a byte
# each, and one byte to fill up; then 64 numbers in bf16 that are turned.
SCALED: Final = 64
KEY_SCALE_BYTES: Final = 4
MAP_BYTES: Final = 4
STATE_VALUE_BYTES: Final = 2
SLOTS: Final = 1600
"""Slots of each layer and request: 25/8 of the 512 entries that a token selects, as for rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes of one request."""

    host: int
    offloaded: int
    """On the device, with its slots."""
    resident: int
    """On the device, with all its entries."""
    state: int
    """What both take beside the entries."""


def entry_bytes(config: ModelConfig) -> int:
    """An entry, and a row of a window."""
    scales = div_ceil(config.nope_dim, SCALED)
    return config.nope_dim + 2 * config.rope_dim + scales + scales % 2


def needs(config: ModelConfig, *, tokens: int, slots: int = SLOTS, drafts: int = 1) -> Needs:
    own, row = compressed(config), entry_bytes(config)
    sparse, heavy = (own.kinds.count(kind) for kind in ("sparse", "heavy"))
    entries = tokens // own.sparse_rate
    key = config.index_dim + KEY_SCALE_BYTES
    form = state_form(config, drafts=drafts)
    state = form.bytes_of(value_bytes=STATE_VALUE_BYTES, row_bytes=row)
    kept = heavy * (tokens // own.heavy_rate) * row + state
    chosen = sparse * min(slots, entries) * row
    return Needs(
        host=sparse * entries * (row + key),
        offloaded=sparse * entries * (key + MAP_BYTES) + chosen + kept,
        resident=sparse * entries * (row + key) + kept,
        state=state,
    )


def compressed(config: ModelConfig) -> Compressed:
    assert config.compressed is not None, f"{config.family} keeps rows of tokens"
    return config.compressed
