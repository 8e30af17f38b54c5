"""The lane and the residency of a device, end to end over cuda-python, on an emulated driver.

The driver is a library of our own that does as little as events force it to, so a dependency that
is missing shows as wrong rows. It takes the place of libcuda in a process of its own: run as a
script, this file plays the scenarios of a kind.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.support import device_claims, device_scenarios, emulated_driver, residency_scenarios
from tests.support.built import needs_native
from tests.support.emulate import needs_compiler

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    needs_native,
    pytest.mark.skipif(
        importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed"
    ),
]

LANE = (
    "jobs_keep_their_order_and_their_rows",
    "a_job_follows_the_compute_stream_and_compute_follows_the_job",
    "jobs_go_on_while_an_audit_looks_at_them",
    "refusals_name_what_is_wrong_and_change_nothing",
    "chunks_are_queued_by_native_code",
    "counted_copies_follow_a_graph",
    "a_count_asks_for_lists_on_the_device",
    "memory_is_registered_whole_and_let_go",
    "a_chunk_that_is_refused_is_registered_in_halves",
    "copies_of_the_driver_are_cut_where_registrations_meet",
    "pinned_memory_is_near_and_not_for_children",
    "every_form_moves_the_same_bytes",
    "a_lane_that_is_dropped_waits_for_its_jobs",
    "a_fetch_that_fails_midway_keeps_what_is_queued",
    "memory_that_is_dropped_waits_for_its_copies",
)
RESIDENCY = (
    "a_graph_is_replayed_with_changing_selections",
    "a_landing_warms_and_fills_behind_the_plans",
    "an_audit_names_what_is_wrong",
    "phases_replay_a_graph",
    "positions_become_slots_when_all_is_resident",
    "rows_leave_and_are_settled",
    "the_lowest_ranks_give_way",
    "tickets_start_over_when_all_has_landed",
    "what_is_in_flight_is_not_located",
)
CLAIMS = ("new_rows_get_slots_in_all_groups",)
KINDS = {
    "lane": (device_scenarios, LANE),
    "residency": (residency_scenarios, RESIDENCY),
    "claims": (device_claims, CLAIMS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_scenarios(kind, folder):
    """One after another; where one fails its name is the first that was not printed."""
    emulated_driver.build_driver(folder)
    printed = emulated_driver.run_script(__file__, folder, ESS_SCENARIOS=kind)
    assert printed.splitlines() == [*KINDS[kind][1]]


if __name__ == "__main__":
    emulated_driver.begin()
    module, names = KINDS[os.environ["ESS_SCENARIOS"]]
    for name in names:
        getattr(module, name)()
        print(name)
