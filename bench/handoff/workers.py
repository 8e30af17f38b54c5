"""A worker with the embedded model: an engine of one thread, and a link of a set rate."""

from __future__ import annotations

from typing import Final

import msgspec
import torch

from ess.bench.handoff.paced import PacedTransport
from ess.clock import RealClock
from ess.door import Offload
from ess.door.handoff.port import Port
from ess.engine.engine import Engine, EngineConfig
from ess.models.load import load_model
from ess.models.model import Model
from ess.transfer.endpoint import Identity
from ess.transfer.messages import Seal, layout_hash, new_epoch
from ess.transfer.transports.tcp import TcpTransport
from ess.units import PAGE_ROWS, div_ceil

SECRET: Final = Seal(b"both workers of a benchmark")
UNPACED: Final = 1e12
PATIENCE_S: Final = 600.0


class WorkerSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Pools for contexts of this length, with slots for `slot_share` of them in every layer."""

    context: int
    mtp: int = 2
    output: int = 128
    sequences: int = 2
    slot_share: float = 1.0
    chunk_tokens: int = 512

    @property
    def pages(self) -> int:
        return div_ceil(self.context + self.output, PAGE_ROWS) + 1

    @property
    def slots(self) -> int:
        """Slots of each sequence in every layer, in whole blocks."""
        return div_ceil(int(self.slot_share * self.pages * PAGE_ROWS), PAGE_ROWS) * PAGE_ROWS


class Worker:
    def __init__(
        self, shape: WorkerSizes, *, model: Model | None = None, warm: bool = True
    ) -> None:
        torch.set_num_threads(1)
        loaded, self.clock = model or load_model(), RealClock()
        self.offload = _offload(loaded, shape)
        who = Identity(epoch=new_epoch(), seal=SECRET, layout=layout_hash(self.offload.layout))
        self.link = PacedTransport(TcpTransport(who), bytes_per_s=UNPACED, clock=self.clock)
        self.port = Port(
            self.offload,
            self.link,
            SECRET,
            clock=self.clock,
            wait_s=PATIENCE_S,
            lease_s=PATIENCE_S,
        )
        config = EngineConfig(
            mtp=shape.mtp,
            chunk_tokens=shape.chunk_tokens,
            max_running=shape.sequences,
            warm=warm,
        )
        self.engine = Engine(loaded, self.offload, config, port=self.port)

    def close(self) -> None:
        self.engine.close()
        self.port.close()
        self.offload.close()


def _offload(model: Model, shape: WorkerSizes) -> Offload:
    layout = model.config.layout(name="ess-embedded")
    blocks = shape.sequences * shape.slots // PAGE_ROWS * layout.group_count
    return Offload.create(
        layout,
        slot_bytes=blocks * layout.chunk_bytes,
        host_bytes=shape.sequences * shape.pages * layout.host_page_bytes,
        length_max=shape.pages * PAGE_ROWS,
        sequence_max=shape.sequences,
        slot_floor=min(layout.slot_floor, shape.slots),
    )
