"""GLM-5-next through the engine under random calls and little memory: always the plain model's."""

from __future__ import annotations

import random

import pytest
import torch

from ess.door import Offload
from ess.door.sequences import kept
from ess.engine.engine import Engine, EngineConfig
from tests.compressed.test_walks import MADE, Walk, checked
from tests.linear.world import TEXTS, model, told
from tests.support.manual_lane import ManualLane


def engine(seed: int) -> Engine:
    """Less of everything than the requests want: lines, pages of both kinds, slots."""
    draw, layout = random.Random(seed), model().config.layout(row="f32", index="f32")
    offload = Offload.create(
        layout,
        slot_bytes=draw.choice((1, 2)) * layout.group_count * layout.chunk_bytes,
        host_bytes=30 * layout.host_page_bytes,
        index_bytes=20 * layout.index_page_bytes,
        length_max=640,
        sequence_max=4,
        slot_floor=24,
        lane=ManualLane(seed=seed, delay_max=3),
        poison=True,
    )
    config = EngineConfig(
        modes=draw.choice(("none", "da", "dba", "layerwise", "resident")),
        chunk_tokens=draw.choice((48, 150)),
        depth=draw.choice((0, 1)),
        tbo=draw.choice(("off", 2)),
        promise="some",
    )
    return Engine(model(), offload, config)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_answers_are_the_plain_model_s(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(kept, "KEPT_TOKENS", 128)
    walk = Walk(seed, engine(seed), TEXTS)
    checked(walk, lambda text, length: told(length, line=text, count=MADE))
