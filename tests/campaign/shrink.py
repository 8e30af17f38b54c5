"""The fewest requests, faults and features of a plan that still fail."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tests.campaign.plan import PLAIN, Plan


def shrunk(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Parts are left out, one at a time, until none can be."""
    while True:
        smaller = next((less for less in _less(plan) if fails(less)), None)
        if smaller is None:
            return plan
        plan = smaller


def _less(plan: Plan) -> list[Plan]:
    """The plan without one of its requests, faults, odds or features; the largest parts first."""
    smaller = []
    for name in ("asks", "hits"):
        listed = getattr(plan, name)
        smaller += [_with(plan, name, listed[:at] + listed[at + 1 :]) for at in range(len(listed))]
    for name in ("odds", "disk_odds"):
        odds = getattr(plan, name)
        smaller += [
            _with(plan, name, {fault: odds[fault] for fault in odds if fault != left})
            for left in odds
        ]
    smaller += [_with(plan, *each) for each in PLAIN.items() if getattr(plan, each[0]) != each[1]]
    return smaller


def _with(plan: Plan, name: str, value: object) -> Plan:
    return msgspec.structs.replace(plan, **{name: value})
