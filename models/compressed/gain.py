"""When offloading entries pays, by bytes alone. Needs no torch.

A step reads the weights of a rank once and, for each request, what all its layers attend to; then
it waits for the missing entries. No wait is hidden and nothing else costs time. Where something
other than memory limits the batch, offload gains nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from ess.errors import BadInput
from ess.models.compressed.memory import KEY_SCALE_BYTES, compressed, entry_bytes, needs
from ess.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One GPU with the weights of a rank: bytes, and bytes a second."""

    room_bytes: int
    """For requests."""
    weight_bytes: int
    memory_rate: float = 4.8e12
    """By default an H200's."""
    link_rate: float = 50e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    batch_resident: int
    batch_offloaded: int
    step_us_resident: float
    step_us_offloaded: float
    """A step without a miss."""
    miss_us: float
    """What a step waits for when all its selected entries are missing."""

    def at(self, missing: float) -> float:
        """Tokens a second over those of a resident batch, if this share of selections misses."""
        resident = self.batch_resident / self.step_us_resident
        return self.batch_offloaded / (self.step_us_offloaded + missing * self.miss_us) / resident

    @property
    def break_even(self) -> float:
        """The share of selections at which nothing is gained; above 1, offload always pays."""
        worth = self.batch_offloaded / self.batch_resident * self.step_us_resident
        return (worth - self.step_us_offloaded) / self.miss_us


def read_bytes(config: ModelConfig, *, tokens: int) -> int:
    """Bytes that a step reads of one request, from the device's memory."""
    own, row = compressed(config), entry_bytes(config)
    sparse, heavy = (own.kinds.count(kind) for kind in ("sparse", "heavy"))
    entries = tokens // own.sparse_rate
    keys = sparse * entries * (config.index_dim + KEY_SCALE_BYTES)
    chosen = sparse * min(config.top_k, entries) + heavy * (tokens // own.heavy_rate)
    return keys + (chosen + config.layer_total * min(own.window, tokens)) * row


def gain(config: ModelConfig, machine: Machine, *, tokens: int) -> Gain:
    asked, own = needs(config, tokens=tokens), compressed(config)
    resident, offloaded = (machine.room_bytes // each for each in (asked.resident, asked.offloaded))
    if not resident:
        raise BadInput(
            f"{machine.room_bytes:,} bytes hold no request of {tokens:,} tokens, which takes"
            f" {asked.resident:,}"
        )

    def step_us(batch: int) -> float:
        read = machine.weight_bytes + batch * read_bytes(config, tokens=tokens)
        return 1e6 * read / machine.memory_rate

    selected = min(config.top_k, tokens // own.sparse_rate) * own.kinds.count("sparse")
    return Gain(
        batch_resident=resident,
        batch_offloaded=offloaded,
        step_us_resident=step_us(resident),
        step_us_offloaded=step_us(offloaded),
        miss_us=1e6 * offloaded * selected * entry_bytes(config) / machine.link_rate,
    )
