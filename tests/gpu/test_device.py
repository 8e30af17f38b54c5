"""The scenarios of tests/support on a device, at real sizes, and what only a device can show."""

from __future__ import annotations

import numpy as np
import pytest

from ess.kernels.cuda.arrays import DeviceArray
from ess.kernels.cuda.rows import flat_form, ring_form
from ess.pool.cuda_programs import ROW_BYTES as ROW_SIZES
from ess.pool.cuda_programs import rival_form
from tests.support import device_claims as claims
from tests.support import device_scenarios as scenarios
from tests.support import residency_scenarios as residency
from tests.support.built import needs_native
from tests.support.device_residency import DeviceCampaign
from tests.support.twins import assert_every_case_was_met

pytestmark = pytest.mark.gpu

WAYS = {False: "phases", True: "together"}
REPLAYS = 1000


def test_every_form_moves_the_same_bytes():
    scenarios.every_form_moves_the_same_bytes(ROW_SIZES, 399)


@needs_native
def test_jobs_keep_their_order_and_their_rows():
    scenarios.jobs_keep_their_order_and_their_rows(60)


def test_a_job_follows_compute_and_compute_follows_the_job():
    scenarios.a_job_follows_the_compute_stream_and_compute_follows_the_job(200)


def test_refusals():
    scenarios.refusals_name_what_is_wrong_and_change_nothing()


@needs_native
def test_chunks_are_queued_by_native_code():
    scenarios.chunks_are_queued_by_native_code()


@needs_native
def test_a_lane_that_is_dropped_waits_for_its_jobs():
    scenarios.a_lane_that_is_dropped_waits_for_its_jobs()


@needs_native
def test_a_fetch_that_fails_midway_keeps_what_is_queued():
    scenarios.a_fetch_that_fails_midway_keeps_what_is_queued()


def test_memory_that_is_dropped_waits_for_its_copies():
    scenarios.memory_that_is_dropped_waits_for_its_copies()


def test_counted_copies_follow_a_graph():
    scenarios.counted_copies_follow_a_graph(100)


def test_a_count_asks_for_lists_on_the_device():
    scenarios.a_count_asks_for_lists_on_the_device()


def test_memory_is_registered_whole_and_let_go():
    scenarios.memory_is_registered_whole_and_let_go()


def test_copies_of_the_driver_are_cut_where_registrations_meet():
    scenarios.copies_of_the_driver_are_cut_where_registrations_meet()


def test_pinned_memory_is_near_and_not_for_children():
    scenarios.pinned_memory_is_near_and_not_for_children()


@needs_native
@pytest.mark.parametrize("evict", ["lru", "score"])
@pytest.mark.parametrize("is_together", WAYS, ids=WAYS.get)
def test_the_planner_agrees_over_a_campaign(is_together, evict):
    world = DeviceCampaign(7, residency.OnDevice(is_together=is_together), evict)
    for _ in range(150):
        world.one_step()
    if evict == "lru":
        assert_every_case_was_met(world.seen)
    else:
        assert world.seen["plan evicted_count"] > 3


@pytest.mark.parametrize("is_together", WAYS, ids=WAYS.get)
def test_a_thousand_replays_of_one_graph(is_together):
    step = residency.Step(
        query_max=2, top_k=512, row_count=20_000, slot_count=4096, is_together=is_together
    )
    for number in range(REPLAYS):
        step.replay(300 + number, step.select())
        if number % 100 == 0 or number == REPLAYS - 1:
            step.check(300 + number)


def test_a_batch_of_160_requests():
    step = residency.Step(
        query_max=80, top_k=2048, row_count=60_000, slot_count=32_768, is_together=False
    )
    for number in range(6):
        step.replay(300 + number, step.select())
        step.check(300 + number)


def test_repeats_are_equal_bit_for_bit():
    """Twenty runs of one plan from one state, at a size where blocks race."""
    seen = set()
    for _ in range(20):
        step = residency.Step(
            query_max=32, top_k=1024, row_count=9000, slot_count=4096, is_together=False
        )
        step.replay(300, step.select())
        slots = b"".join(split.slots.read().tobytes() for split in step.splits)
        seen.add(step.residency.arena.row_of.read().tobytes() + slots)
    assert len(seen) == 1


def test_positions_become_slots():
    residency.positions_become_slots_when_all_is_resident()


@pytest.mark.parametrize("is_together", WAYS, ids=WAYS.get)
def test_a_landing_warms_and_fills(is_together):
    residency.a_landing_warms_and_fills_behind_the_plans(
        is_together, row_count=30_000, slot_count=4096
    )


def test_tickets_start_over():
    residency.tickets_start_over_when_all_has_landed()


def test_new_rows_get_slots_in_all_groups():
    claims.new_rows_get_slots_in_all_groups(40)


def test_what_is_in_flight_is_not_located():
    residency.what_is_in_flight_is_not_located()


def test_an_audit_names_what_is_wrong():
    residency.an_audit_names_what_is_wrong()


def test_rows_leave_and_are_settled():
    residency.rows_leave_and_are_settled()


def test_rows_beyond_four_gigabytes():
    rig = scenarios.Rig(6)
    row_count = (9 << 29) // 656
    pool = scenarios.pinned_rows(rig, 656, row_count)
    rows = np.arange(row_count - 2000, row_count, dtype=np.int32)
    pool[rows] = scenarios.random_rows(rig.random, rows.size)
    there = DeviceArray(rig.device, rows)
    for form in (flat_form(656), ring_form(656), rival_form(656)):
        target = DeviceArray(rig.device, np.zeros((rows.size, 656), np.uint8))
        scenarios.move(rig, form, scenarios.host(pool), target, source_rows=there)
        rig.compute.synchronize()
        np.testing.assert_array_equal(target.read(), pool[rows])


def test_a_lane_follows_torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    from ess.flashtrans import open_lane
    from ess.kernels.streams import RowCopy

    rig = scenarios.Rig(8)
    with open_lane(device="cuda:0") as lane:
        slab = torch.zeros(300, 656, dtype=torch.uint8, device="cuda")
        rows = torch.randperm(300)
        for turn in range(20):
            slab.fill_(turn)
            store = RowCopy(source=slab, source_rows=rows, target=rig.pool, target_rows=rows)
            lane.submit([store]).wait(30)
            assert (rig.pool[:300] == turn).all()
