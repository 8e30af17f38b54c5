"""A short run of every kernel, for compute-sanitizer: slow tools, small sizes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support import device_claims as claims
from tests.support import device_scenarios as scenarios
from tests.support import residency_scenarios as residency

if __name__ == "__main__":
    scenarios.every_form_moves_the_same_bytes((584, 656), 200)
    for is_together in (False, True):
        residency.a_graph_is_replayed_with_changing_selections(3, 1, is_together=is_together)
        residency.a_landing_warms_and_fills_behind_the_plans(is_together)
    claims.new_rows_get_slots_in_all_groups()
    residency.an_audit_names_what_is_wrong()
    residency.positions_become_slots_when_all_is_resident()
    residency.rows_leave_and_are_settled()
    residency.tickets_start_over_when_all_has_landed()
    residency.what_is_in_flight_is_not_located()
    print("all scenarios played")
