"""A short run of every kernel, for compute-sanitizer: slow tools, small sizes. Each scenario is
named before it is played, so that what a tool ends in is known. Words choose: `kernels`, `rings`.

Rings are alone: a tool that follows barriers of shared memory makes room for as many as there are
instructions that make one, which is 4 of a ring, where 64 threads make 256 with them.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support import device_claims as claims
from tests.support import device_scenarios as scenarios
from tests.support import residency_scenarios as residency

SIZES = (584, 656)
replayed, landed = (
    residency.a_graph_is_replayed_with_changing_selections,
    residency.a_landing_warms_and_fills_behind_the_plans,
)
KERNELS = {
    "moves": partial(scenarios.every_form_moves_the_same_bytes, SIZES, 200, ("flat",)),
    "new rows": claims.new_rows_get_slots_in_all_groups,
    "audit": residency.an_audit_names_what_is_wrong,
    "locate": residency.positions_become_slots_when_all_is_resident,
    "leave": residency.rows_leave_and_are_settled,
    "ranks": residency.the_lowest_ranks_give_way,
    "ranks together": partial(residency.the_lowest_ranks_give_way, is_together=True),
    "tickets": residency.tickets_start_over_when_all_has_landed,
    "in flight": residency.what_is_in_flight_is_not_located,
    "phases": partial(replayed, 3, 1, is_together=False),
    "landing in phases": partial(landed, False),
    "together": partial(replayed, 3, 1, is_together=True),
    "landing together": partial(landed, True),
}
RINGS = {"rings": partial(scenarios.every_form_moves_the_same_bytes, SIZES, 200, ("ring",))}

if __name__ == "__main__":
    for word in sys.argv[1:]:
        for name, play in {"kernels": KERNELS, "rings": RINGS}[word].items():
            print(f"{name} ...", flush=True)
            play()
    print("all scenarios played")
