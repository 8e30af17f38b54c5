"""What the residency of a device must answer, made from what the specification does.

The differences are those that ess/pool/lru/cuda.py names: tickets stay when a copy has landed, rows
without a slot are named by host row, and so are rows that a landing is still bringing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ess.pool.lru import specification
from ess.units import PAGE_ROWS, div_ceil
from tests.support.twins import Campaign, Side


def host_pages(row_count):
    """Where the pages of these rows are: elsewhere, and not in their order."""
    count = div_ceil(row_count, PAGE_ROWS)
    pages = np.random.default_rng(row_count).permutation(2 * count)[:count].astype(np.int32)
    assert count < 3 or (pages != np.arange(count)).any()
    return pages


def host_rows(rows, host_page_of):
    return host_page_of[rows // PAGE_ROWS] * np.int32(PAGE_ROWS) + rows % PAGE_ROWS


def plan(arena, rows, *, step, ticket, split):
    claims = specification.plan(arena, rows, step=step, ticket=ticket, split=split)
    assert ticket % 2 == 0, "odd tickets are those of landings"
    query_count, width = rows.shape
    slots = split.slots[:query_count, :width]
    ticket_of = np.where(slots >= 0, arena.ticket_of[np.maximum(slots, 0)], 0)
    placed = (slots < -1) | (ticket_of % 2 == 1)
    missed = (ticket_of != 0) & ~placed
    hosts = host_rows(np.maximum(rows, 0), host_pages(arena.slot_of.size))
    compact(np.where(missed, slots, -1), missed, split.miss, split.miss_count)
    compact(np.where(placed, hosts, -1), placed, split.place, split.place_count)
    slots[placed] = -2 - hosts[placed]
    return replace(claims, place_count=int(placed.sum()))


def compact(values, keep, out, count):
    for query, (line, kept) in enumerate(zip(values, keep, strict=True)):
        out[query, : line.size] = np.pad(
            line[kept], (0, line.size - kept.sum()), constant_values=-1
        )
        count[query] = kept.sum()


def in_flight(ticket_of, landed):
    """The tickets as the specification has them: 0 for what has landed on its lane."""
    return np.where(ticket_of <= np.asarray(landed)[ticket_of & 1], 0, ticket_of)


class Specified:
    """The specification's operations, and this `plan`."""

    plan = staticmethod(plan)

    def __getattr__(self, name):
        return getattr(specification, name)


class DeviceSide(Side):
    def everything(self):
        state = super().everything()
        landed = getattr(self.operations, "landed", (0, 0))
        return state | {"ticket_of": in_flight(state["ticket_of"], landed)}


class DeviceCampaign(Campaign):
    """Steps fetch on one lane, landings on another; each lands its copies in order."""

    def __init__(self, seed, operations, evict="lru"):
        super().__init__(seed, evict)
        self.sides = [DeviceSide(each, (3, 2), evict) for each in (Specified(), operations)]
        self.given = [0, 1]

    def fetch(self, name, group, *arguments):
        lane = int(name != "plan")
        self.given[lane] += 2
        self.ticket = self.given[lane] - 1
        return super().fetch(name, group, *arguments)

    def land(self, at):
        """This copy, and first those before it on its lane."""
        if at < len(self.flying):
            lane = self.flying[at][1] % 2
            earlier = [i for i in range(at + 1) if self.flying[i][1] % 2 == lane]
            for landed_count, i in enumerate(earlier):
                super().land(i - landed_count)
