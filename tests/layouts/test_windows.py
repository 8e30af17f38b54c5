"""Layers that attend to a window: no index keys, slots for the window alone, the same answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput, PoolFull
from ess.layout import IndexCodec, ModelLayout, RowCodec
from ess.models.registry import read_config
from ess.overlap.policy import Mode
from ess.pool.capacity import SLOTS, WINDOW_SLOTS, capacity_of, even_chunks, needs, request_bytes
from ess.pool.ledger import Ledger
from ess.sim.memory_budget import Budget
from tests.model.grid import TOKEN_COUNT, checkpoint, expected, text
from tests.pd.rigs import Pair, alone
from tests.support import checkpoints
from tests.support.manual_lane import ManualLane

MIXED = ModelLayout(
    name="mixed",
    layer_count=5,
    groups=((0,), (1, 2), (3,), (4,)),
    row=RowCodec(form="opaque", opaque_bytes=16),
    index=IndexCodec(key_dim=8, head_count=1),
    top_k=32,
    slot_floor=1024,
    windows=(0, 32, 0, 16),
)
LENGTH = 700


def test_groups_with_an_indexer_have_keys_and_no_others() -> None:
    assert MIXED.key_groups == (0, 2)
    assert [MIXED.key_layer_of(group) for group in range(4)] == [0, None, 1, None]
    assert MIXED.key_page_bytes == 2 * 64 * 12
    assert MIXED.host_page_bytes == 64 * (5 * 16 + 2 * 12)
    assert MIXED.index_page_bytes == 64 * (2 * 12 + 4 * 4)
    alike = replace(MIXED, windows=())
    assert alike.key_groups == (0, 1, 2, 3)
    assert alike.key_page_bytes == 2 * MIXED.key_page_bytes


def test_a_part_has_its_windows_and_knows_where_its_keys_begin() -> None:
    front, back = MIXED.part(0, 3), MIXED.part(3, 5)
    assert (front.windows, back.windows) == ((0, 32), (0, 16))
    assert (front.first_key_layer, back.first_key_layer) == (0, 1)
    assert (front.key_groups, back.key_groups) == ((0,), (0,))
    assert front.host_page_bytes + back.host_page_bytes == MIXED.host_page_bytes


@pytest.mark.parametrize(
    ("windows", "said"),
    [
        ((0, 1), "windows has 2 entries for 4 groups"),
        ((0, 33, 0, 0), "group 1 attends to the last"),
    ],
)
def test_windows_that_are_none_are_refused(windows: tuple[int, ...], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        replace(MIXED, windows=windows)


@pytest.mark.parametrize("requests", [1, 2, 7, 40])
@pytest.mark.parametrize("layout", [MIXED, read_config(checkpoints.DOTS3).layout()])
def test_every_group_has_room_for_as_many_requests(layout: ModelLayout, requests: int) -> None:
    """With a chunk to spare in each group; and the counts of sizes are those of the ledger."""
    blocks = [layout.group_layers_max // len(group) for group in layout.groups]
    floors = [layout.window_floor if w else layout.slot_floor for w in layout.windows]
    each = zip(blocks, floors, strict=True)
    chunks = sum(-(-requests * floor // (64 * count)) + 1 for count, floor in each)
    given = even_chunks(layout, chunks)
    assert sum(given) == chunks
    sizes = {
        "slot_bytes": chunks * layout.chunk_bytes,
        "host_bytes": 1 << 40,
        "index_bytes": 1 << 40,
    }
    capacity = capacity_of(layout, **sizes)
    wanted = needs(1 << 20, slots=layout.slot_floor, window_floor=layout.window_floor)
    most = capacity.request_max(wanted)
    assert min(most[SLOTS], most[WINDOW_SLOTS]) >= requests
    books = Ledger(capacity.accounts(layout))
    books.reserve({name: requests * count for name, count in wanted.items() if "slots" in name})
    with pytest.raises(PoolFull, match="window slots x"):
        books.require({WINDOW_SLOTS: capacity.window_slots + 1})


def test_a_budget_keeps_room_for_windows() -> None:
    """The bytes of a batch are the sum of what its requests need, and one byte less refuses it."""
    batch, context = 3, 4096
    each = needs(context, slots=MIXED.slot_floor, window_floor=MIXED.window_floor)
    enough = batch * request_bytes(MIXED, each)
    for missing, most in ((0, batch), (1, batch - 1)):
        budget = Budget(layout=MIXED, device_bytes=enough - missing)
        assert budget.batch_max(context=context, slots_each=MIXED.slot_floor) == most
    assert budget.slots_each(context=context, batch=batch) == MIXED.slot_floor - 1
    shared = Budget(layout=MIXED, device_bytes=enough).split_for([context] * batch, slot_floor=1024)
    assert shared.free(WINDOW_SLOTS) == batch * MIXED.window_floor


def offload(layout: ModelLayout, *, requests: int, **more: Any) -> Offload:
    chunks = sum(
        requests * (-(-(layout.window_floor if w else layout.slot_floor) // 64)) + 1
        for w in layout.windows or (0,) * layout.group_count
    )
    return Offload.create(
        layout,
        slot_bytes=chunks * layout.chunk_bytes,
        host_bytes=80 * layout.host_page_bytes,
        length_max=2048,
        poison=True,
        **more,
    )


def test_a_window_reserves_its_window_and_nobody_gets_more() -> None:
    with offload(MIXED, requests=2) as door:
        slots = [door.owner.pools.sparse.slot_count(group) for group in range(4)]
        assert min(slots[0], slots[2]) >= 2 * 1024
        assert 2 * 96 <= max(slots[1], slots[3]) < 1024
        opened = [door.open(range(10), promise="some") for _ in range(2)]
        ledger = door.owner.pools.ledger
        assert (ledger.promised(SLOTS), ledger.promised(WINDOW_SLOTS)) == (2 * 1024, 2 * 96)
        opened.pop().close()
        door.open(range(10), length_max=20, promise="some")
        assert ledger.promised(WINDOW_SLOTS) == 96 + 20
        with pytest.raises(PoolFull, match="window slots x 2 groups"):
            ledger.reserve({WINDOW_SLOTS: ledger.free(WINDOW_SLOTS) + 1})
        door.check()


def test_keys_of_a_window_are_refused() -> None:
    with offload(MIXED, requests=1) as door:
        line, keys = door.open(range(10), length_max=64), np.zeros((4, 12), np.uint8)
        line.import_keys(3, 0, keys)
        with pytest.raises(BadInput, match="layer 1 of 'mixed' has no index keys of its own"):
            line.import_keys(1, 0, keys)
        step = door.begin([line], query_counts=[1], starts=[0])
        with pytest.raises(BadInput, match="layer 4 of 'mixed' has no index keys of its own"):
            step.append(4, np.zeros((1, 16), np.uint8), keys=keys[:1])
        step.abandon()
        assert door.memory(1).key_pages.numel() == 0
        assert door.memory(3).key_pages.shape == (80, 64 * 12)


def dots3(**more: Any) -> Engine:
    config = more.pop("config", EngineConfig(chunk_tokens=96))
    layout = checkpoint("dots3_note").config.layout(row="f32", index="f32")
    assert layout.window_floor < layout.slot_floor / 8
    lane = ManualLane(seed=3, delay_max=3)
    return Engine(checkpoint("dots3_note"), offload(layout, lane=lane, **more), config)


@pytest.mark.slow
def test_a_batch_whose_windows_are_there_is_resident_though_rows_behind_them_are_not() -> None:
    eng = dots3(requests=2)
    spans = [(0, LENGTH), (5, 90)]
    wish = Sampling(tokens_max=TOKEN_COUNT, ignore_eos=True)
    requests = [eng.add(text("dots3_note")[start:stop], wish) for start, stop in spans]
    for _ in eng.run():
        eng.check()
        eng.offload.check()
    assert [request.output for request in requests] == [
        expected("dots3_note", *span) for span in spans
    ]
    sparse = eng.offload.owner.pools.sparse
    assert sparse.window_departed_count > 0
    assert eng.tuning.mode_counts[:, Mode.RESIDENT].all()


@pytest.mark.slow
def test_preempted_forked_and_come_back() -> None:
    eng = dots3(requests=2)
    wish = Sampling(tokens_max=TOKEN_COUNT, ignore_eos=True)
    request = eng.add(text("dots3_note")[:300], wish)
    while len(request.output) < 4:
        eng.step()
    eng.preempt(request)
    eng.offload.check()
    eng.resume(request)
    again = eng.add(text("dots3_note")[:300], wish)
    for _ in eng.run():
        eng.offload.check()
        assert not any(eng.offload.verify(layer) for layer in range(6))
    assert request.output == again.output == expected("dots3_note", 0, 300)
    assert again.cached_count == 256


@pytest.mark.slow
def test_a_prompt_lands_with_the_keys_of_its_indexers() -> None:
    model = checkpoint("dots3_note")
    pair = Pair(pools={"model": model}, prefill_pools={"model": model})
    wish = Sampling(tokens_max=TOKEN_COUNT, ignore_eos=True)
    asked = [(text("dots3_note")[:count], wish) for count in (1, 64, 65, 200, 129)]
    added = [pair.add(*each) for each in asked]
    pair.run()
    assert [given.reason for given, _ in added] == ["sent"] * len(asked)
    assert [taken.output for _, taken in added] == alone(asked, model=model)
    assert pair.decode.port.counts.landed_count == len(asked)
