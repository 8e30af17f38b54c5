"""A small decode on this machine, everything resident and offloaded: the same tokens?

    python -m ess.engine.process.checks.selfcheck                 prints one JSON line

Two layers of the model in the box, float32, so that equal means equal. The offload's slots hold a
fraction of the rows; what is resident has slots for all.
"""

from __future__ import annotations

import sys
import time
from typing import Final, Literal

import msgspec
import torch

from ess.comm.experts.expert_ranks import ExpertRanks
from ess.door import Offload
from ess.engine.devices import backend_of
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.kernels.cpu import native
from ess.models.load import EMBEDDED
from ess.models.model import Model
from ess.models.registry import build
from ess.models.weights.checkpoint import Checkpoint
from ess.models.weights.rank import RankWeights

LAYER_COUNT: Final = 2
PROMPT_COUNT: Final = 700
MADE_COUNT: Final = 16


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    same: bool
    miss_count: int
    offload_s: float
    resident_s: float
    isa: str | None


def trial() -> Trial:
    torch.set_num_threads(1)
    model = small_model()
    offload_s, offloaded, miss_count = decode(model, modes="da", chunk_count=5)
    resident_s, resident, none_missed = decode(model, modes="resident", chunk_count=16)
    assert none_missed == 0, f"{none_missed} rows were missing though all had slots"
    return Trial(
        same=offloaded == resident,
        miss_count=miss_count,
        offload_s=offload_s,
        resident_s=resident_s,
        isa=native.isa() if native.available() else None,
    )


def small_model(
    device: str | torch.device = "cpu",
    *,
    form: Literal["f32", "bf16"] = "f32",
    expert_ranks: ExpertRanks | None = None,
) -> Model:
    with Checkpoint(EMBEDDED) as checkpoint:
        weights = RankWeights(checkpoint, form=form)
        config = msgspec.structs.replace(
            checkpoint.model_config, layer_count=LAYER_COUNT, mtp_layer_count=0
        )
        return build(
            config, lambda name: weights.tensor(name).to(device), expert_ranks=expert_ranks
        )


def decode(
    model: Model,
    *,
    modes: Literal["da", "resident"],
    chunk_count: int,
    prompt_count: int = PROMPT_COUNT,
    made_count: int = MADE_COUNT,
    device: str = "cpu",
) -> tuple[float, list[int], int]:
    """Seconds, tokens and rows fetched for one request; `chunk_count` times 64 slots per layer."""
    layout = model.config.layout(row="f32", index="f32")
    offload = Offload.create(
        layout,
        slot_bytes=chunk_count * layout.group_count * layout.page_bytes,
        host_bytes=32 * layout.host_page_bytes,
        length_max=1024,
        slot_floor=64,
        device=device,
    )
    config = EngineConfig(modes=modes, budget_every=0, backend=backend_of(device))
    with offload:
        engine = Engine(model, offload, config)
        prompt = [300 + 7 * i % 3000 for i in range(prompt_count)]
        request = engine.add(prompt, Sampling(tokens_max=made_count, ignore_eos=True))
        began_s = time.monotonic()
        for _ in engine.run():
            pass
        offload.drain()
        spent_s = time.monotonic() - began_s
        return spent_s, request.output, int(offload.stats().miss_count.sum())


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(trial()).decode() + "\n")
