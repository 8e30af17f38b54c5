"""The fewest requests and faults of a plan that still fail."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tests.campaign.plan import Plan


def shrunk(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Parts are left out, one at a time, until none can be."""
    while True:
        smaller = next((less for less in _less(plan) if fails(less)), None)
        if smaller is None:
            return plan
        plan = smaller


def _less(plan: Plan) -> list[Plan]:
    """The plan without one of its requests, faults or odds; the largest parts first."""
    found = []
    for name in ("asks", "hits"):
        listed = getattr(plan, name)
        found += [
            msgspec.structs.replace(plan, **{name: listed[:at] + listed[at + 1 :]})
            for at in range(len(listed))
        ]
    found += [
        msgspec.structs.replace(plan, odds={n: c for n, c in plan.odds.items() if n != name})
        for name in plan.odds
    ]
    return found
