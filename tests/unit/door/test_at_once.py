"""What a call copies before it returns leaves the pools as a copy that a lane has made."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ess.door import Offload
from ess.door.residency import row_copies
from ess.door.stats import Counters
from ess.flashtrans import InlineLane, WorkerLane
from ess.kernels.cpu import native
from ess.pool.lru import planner, specification
from tests.support.built import needs_native
from tests.unit.door.test_door import LAYOUT, make, opened, snapshot

pytestmark = needs_native

COUNTS = (2, 1)


def decode_step(offload: Offload, sequences, rng) -> list[torch.Tensor]:
    """New rows and a selection in all layers; without those of the MTP module none are kept."""
    step = offload.begin(sequences, query_counts=COUNTS)
    is_drafted, seen = rng.random() < 0.7, []
    for layer in range(LAYOUT.layer_total if is_drafted else LAYOUT.layer_count):
        rows = torch.from_numpy(rng.integers(0, 256, (sum(COUNTS), 16), np.uint8))
        keys = torch.from_numpy(rng.integers(0, 256, (sum(COUNTS), 12), np.uint8))
        leads = layer in (0, 2)
        step.append(layer, rows, keys=keys if leads else None)
        chosen = np.full((sum(COUNTS), LAYOUT.top_k), -1, np.int32)
        for query, length in enumerate(step.query_stop):
            count = min(int(length), LAYOUT.top_k - 1)
            chosen[query, :count] = np.sort(rng.choice(int(length), count, replace=False))
        selection = torch.from_numpy(chosen) if leads else None
        rows_of = step.resolve(layer, selection, waits=is_drafted).wait()
        seen += [rows_of.slots.clone(), rows_of.hit_count.clone(), rows_of.place_count.clone()]
        seen.append(offload.memory(layer).slots[rows_of.slots.clamp(min=0).long()].clone())
    kept = [int(rng.integers(0, count + 1)) * is_drafted for count in COUNTS]
    step.commit(accepted=kept)
    offload.drain()
    offload.check()
    return seen


@pytest.mark.parametrize("decides", [planner, specification], ids=["native", "specification"])
@pytest.mark.parametrize("at_once_bytes", [0, 100, 1 << 20])
def test_many_steps_leave_the_same_bytes_everywhere(at_once_bytes, decides, monkeypatch):
    """Also where the specification decides, which copies nothing: the door does it afterwards."""
    monkeypatch.setattr(planner, "resolve", decides.resolve)
    worlds = []
    for lane in (InlineLane(), WorkerLane(at_once_bytes=at_once_bytes)):
        offload, rng = make(lane=lane), np.random.default_rng(3)
        worlds.append((offload, [opened(offload, 70), opened(offload, 100)], rng))
    landed_count = 0
    for _ in range(40):
        (lane_copied, at_once) = [decode_step(*world) for world in worlds]
        assert all(each.equal(other) for each, other in zip(lane_copied, at_once, strict=True))
        assert snapshot(worlds[0][0]) == snapshot(worlds[1][0])
        landed_count += int(worlds[1][0].stats().fetch_count.sum())
    assert landed_count
    both = [offload.stats() for offload, _, _ in worlds]
    for name in ("hit_count", "miss_count", "evicted_count", "stored_bytes", "used_slot_count"):
        assert getattr(both[0], name).tolist() == getattr(both[1], name).tolist(), name
    assert both[0].evicted_count.all(), "no group was under pressure"
    assert both[0].stored_bytes.all(), "nothing was stored"
    for offload, _, _ in worlds:
        offload.close()


@pytest.mark.parametrize("groups", [[], [1], [0, 1], [0, 2], [1, 2]])
def test_stored_rows_are_counted_for_their_groups_alone(groups):
    layout = replace(LAYOUT, layer_count=4, groups=((0, 1), (2,), (3,)), mtp_layer_count=0)
    counters = Counters(layout)
    for row_count in (0, 5):
        counters.stored(groups, row_count)
    expected = [0, 0, 0]
    for group in groups:
        expected[group] = 5 * len(layout.groups[group]) * layout.row.row_bytes
    assert counters._counts["stored_bytes"].tolist() == expected


def test_rows_and_keys_are_written_the_same_without_native_code(monkeypatch):
    hidden = SimpleNamespace(available=lambda: False, address=native.address)
    written = []
    for library in (native, hidden):
        monkeypatch.setattr(row_copies, "native", library)
        with make(lane=InlineLane()) as offload:
            sequences, rng = [opened(offload, 70), opened(offload, 100)], np.random.default_rng(3)
            for _ in range(5):
                decode_step(offload, sequences, rng)
            written.append(snapshot(offload))
    assert written[0] == written[1]
