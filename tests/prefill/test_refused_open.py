"""A prompt that is refused leaves the pools as they were, the order of idle pages included: stages
of a pipeline that are never asked for it have the same pools as the stage that refused it."""

from __future__ import annotations

import numpy as np
import pytest

from ess.door import Offload
from ess.errors import PoolFull
from ess.pool.prefix import page_hashes
from tests.support.layouts import PLAIN as LAYOUT
from tests.support.manual_lane import ManualLane

PAGE = 64
OLD, YOUNG = [1] * 2 * PAGE, [2] * 2 * PAGE


@pytest.fixture
def offload():
    """Of 8 host pages 4 are idle: those of OLD, then those of YOUNG."""
    made = Offload.create(
        LAYOUT,
        slot_bytes=64 * LAYOUT.group_count * LAYOUT.chunk_bytes,
        host_bytes=8 * LAYOUT.host_page_bytes,
        sequence_max=4,
        length_max=1024,
        query_max=8,
        lane=ManualLane(seed=1),
    )
    with made:
        for text in (OLD, YOUNG):
            keep(made, text)
        yield made


def keep(offload: Offload, text: list[int]) -> None:
    sequence = offload.open([*text, 0])
    for layer in range(LAYOUT.layer_total):
        rows = np.ones((len(text), LAYOUT.row_bytes), np.uint8)
        sequence.import_rows(layer=layer, start=0, rows=rows)
    for layer in range(LAYOUT.key_layer_count):
        keys = np.ones((len(text), offload._pools.index.keys.key_bytes), np.uint8)
        sequence.import_keys(layer=layer, start=0, keys=keys)
    sequence.close()


@pytest.mark.parametrize("on_device", [True, False], ids=["on the device", "on the host"])
def test_a_refused_open_leaves_the_order_of_idle_pages(offload: Offload, on_device: bool):
    prefix = offload._pools.latent.prefix
    idle = list(prefix._idle)
    assert len(idle) == 4
    running = offload.open(list(range(100, 100 + 4 * PAGE)))
    with pytest.raises(PoolFull) as refused:
        offload.open([*OLD, *range(1000, 1000 + 3 * PAGE)], on_device=on_device)
    assert not refused.value.permanent
    assert list(prefix._idle) == idle
    offload.check()
    also = offload.open(list(range(500, 500 + PAGE)))
    left = [len(prefix.find(page_hashes(text))) for text in (OLD, YOUNG)]
    assert left == [1, 2], "the page used longest ago was not forgotten first"
    for sequence in (also, running):
        sequence.close()
