"""Residency by the CUDA kernels on an emulated device: what `specification` does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from ess.pool.lru.arena import FetchPlan
from ess.pool.lru.cuda_audit import KINDS, NONE_FOUND, assert_sound
from ess.pool.lru.cuda_records import (
    EachRecord,
    ResolveRecord,
    audit_record,
    claim_record,
    observe_record,
    resolve_record,
    upkeep_record,
    warm_record,
)
from ess.pool.lru.cuda_shape import (
    FIRST,
    NOW,
    REPORT,
    Moment,
    ResolveShape,
    resolve_program,
    slot_program,
)
from ess.pool.lru.cuda_workspaces import now_of
from tests.support.device_residency import host_pages, in_flight
from tests.support.emulate import emulated, lent
from tests.support.residency_scenarios import ARENA, SPLIT
from tests.support.twins import ids

THREADS = 64
LINE = 24
EACH = ResolveShape.of_new_rows(1, 1).launches_each
UPKEEP = ("ess_settle", "ess_drop", "ess_clear_blocks")
SCORES = ("ess_scale", "ess_follow")


def shape_of(query_max, top_k, block_max, *, is_together, threads=THREADS):
    """Blocks of two warps: all that crosses warps and tiles happens, at the cost of few fibers."""
    shape = ResolveShape.of(query_max=query_max, top_k=top_k, block_max=block_max)
    return replace(shape, is_together=is_together, threads=threads)


def moment_of(ticket, landed):
    """A step that began some copies before this one; the record says what its stream has waited for
    since, `now` says what had landed by then. Without a ticket: between steps."""
    if ticket is None:
        return FIRST, {"ticket": landed[0], "landed": landed[0], "behind": landed[1]}
    copy = 1 + ticket // 2 % 3 if ticket > 6 else 1
    began, lane, known = ticket - 2 * copy, ticket % 2, list(landed)
    waited = max(0, (landed[lane] - began) // 2)
    if waited:
        known[lane] = max(0, began)
    now = {"ticket": began, "landed": known[0], "behind": known[1]}
    return Moment(copy=copy, waited=waited), now


class Emulated:
    """The operations of the specification, by the kernels. `landed` has the latest ticket of each
    lane whose copy has landed."""

    def __init__(self, folder, *, is_together, threads=THREADS, is_scored=False):
        self.is_together, self.threads, self.folder = is_together, threads, folder
        self.is_scored = is_scored
        program = self.shape(1, 1, 1).program(is_scored=is_scored)
        names = [launch.entry for launch in self.shape(1, 1, 1).launches(1)]
        self.kernels = emulated(program, dict.fromkeys(names, "Resolve"), folder)
        each = resolve_program("each.cu", threads=threads, is_scored=is_scored)
        names = [launch.entry for launch in EACH]
        self.kernels |= emulated(each, dict.fromkeys(names, "Each"), folder)
        for file, records in (
            ("scores.cu", dict.fromkeys(SCORES, "Observe")),
            ("upkeep.cu", dict.fromkeys(UPKEEP, "Upkeep")),
            ("audit.cu", {"ess_audit": "Audit"}),
        ):
            self.kernels |= emulated(slot_program(file, threads), records, folder)
        self.seed = 0
        self.reset()

    def reset(self):
        """Nothing has landed, and calls are made when their tickets say."""
        self.landed = [0, 0]
        self.moment = self.query_count = None

    def shape(self, *sizes):
        return shape_of(*sizes, is_together=self.is_together, threads=self.threads)

    def launch(self, launches, record, arena, /, **arrays):
        """Kernels may use what is named here; of the rest of the workspace nothing is known yet."""
        given = self.work | {name: getattr(arena, name) for name in ARENA}
        given |= {"rank_of": arena.rank_of} if self.is_scored else {}
        given |= {name: each for name, each in arrays.items() if isinstance(each, np.ndarray)}
        with lent(self.folder, given, unwritten={*self.work, *SPLIT} - {"now", "report"}):
            for entry, blocks in launches:
                self.seed += 1
                self.kernels[entry](record, blocks=blocks, threads=self.threads, seed=self.seed)

    def begin(self, arena, shape, *, step, ticket=None, query_count=0):
        """The arena as a device has it, and the moment of a call that gives out this ticket."""
        sizes = {"now": len(NOW), "report": len(REPORT)} | shape.claims | shape.scratch
        self.work = {name: np.full(n, -77, np.int32) for name, n in sizes.items()}
        moment, now = self.moment or moment_of(ticket, self.landed)
        if self.query_count is not None:
            query_count = self.query_count
        self.work["now"][:] = now_of(step=step, query_count=query_count, **now)
        self.work["report"][:] = 0
        there = {name: getattr(arena, name) for name in ARENA if name != "block_count"}
        there["rank_of"] = arena.eviction.rank_of if self.is_scored else None
        block_count = np.array([arena.blocks.size], np.int32)
        return SimpleNamespace(**there, block_count=block_count), moment

    def plan(self, arena, rows, /, *, step, ticket, split, **options):
        assert split.holds(rows.shape), "as the specification does"
        shape = self.shape(*rows.shape, max(1, arena.blocks.size))
        there, moment = self.begin(arena, shape, step=step, ticket=ticket, query_count=len(rows))
        pages = host_pages(arena.slot_of.size)
        given = {"rows": np.ascontiguousarray(rows), "host_page_of": pages} | options
        at = {"arena": there, "moment": moment, "workspace": self.work}
        record = resolve_record(shape, split=split, **at, **given)
        given |= {name: getattr(split, name) for name in SPLIT}
        self.launch(shape.launches(len(rows)), record, there, **given)
        return self.claims(arena)

    def observe(self, arena, lookup, selection, line_of, length, *, logits):
        """By blocks that take several pages in turn."""
        there, moment = self.begin(arena, self.shape(1, 1, 1), step=1, query_count=len(selection))
        given = {"positions": np.ascontiguousarray(selection), "logits": logits}
        given |= {"scales": np.full(2 * len(selection), np.nan, np.float32)}
        given |= {"holders": np.zeros(2 * (arena.slot_of.size // 64), np.int32)}
        given |= {"page_table": lookup.lines, "table_row": line_of, "length": length}
        record = observe_record(arena=there, workspace=self.work, moment=moment, **given)
        record.blocks_each = 2
        launches = zip(SCORES, (len(selection), 2 * len(selection)), strict=True)
        self.launch(launches, record, there, **given)
        assert self.report["faults"] == 0
        assert not given["holders"].any()

    def warm(self, arena, rows, ages, *, step, ticket, **options):
        """The list is an array of the greatest length; how much of it counts, the device knows."""
        shape = self.shape(rows.size // LINE + 1, LINE, max(1, arena.blocks.size))
        there, moment = self.begin(arena, shape, step=step, ticket=ticket, query_count=-77)
        padding = np.full(shape.query_max * LINE - rows.size, -77, np.int32)
        self.list = {"rows": np.concatenate([rows, padding])}
        self.list |= {"count": np.array([rows.size], np.int32)} | options
        if ages is not None:
            self.list["ages"] = np.concatenate([ages, padding])
        record = warm_record(shape, arena=there, moment=moment, workspace=self.work, **self.list)
        self.launch(shape.launches(shape.query_max), record, there, **self.list)
        return self.claims(arena)

    def fill(self, arena, rows, **options):
        return self.warm(arena, rows, None, **options)

    def upkeep(self, entry, arena, numbers, *, blocks=2, step=1):
        there, _ = self.begin(arena, self.shape(1, 1, 1), step=step)
        listed = np.ascontiguousarray(numbers)
        record = upkeep_record(there, listed, workspace=self.work)
        self.launch([(entry, blocks)], record, there, listed=listed)
        return self.report

    def land(self, arena, slots, *, ticket):
        """No kernel: the next call is told."""
        assert ticket > self.landed[ticket % 2], "a lane lands its copies in order"
        self.landed[ticket % 2] = ticket

    def settle(self, arena, slots):
        self.upkeep("ess_settle", arena, slots)

    def drop(self, arena, rows):
        return self.upkeep("ess_drop", arena, rows)["left"]

    def clear_block(self, arena, block, *, step):
        return self.clear_blocks(arena, np.array([block], np.int32), step=step)

    def clear_blocks(self, arena, blocks, *, step):
        return self.upkeep("ess_clear_blocks", arena, blocks, blocks=1, step=step)["held"] == 0

    def check(self, arena, *, step):
        found = np.zeros(2 + 2 * KINDS, np.int32)
        found[2 + KINDS :] = NONE_FOUND
        there, _ = self.begin(arena, self.shape(1, 1, 1), step=step)
        record = audit_record(there, found, workspace=self.work)
        self.launch([("ess_audit", 2)], record, there, found=found)
        assert_sound(found)

    def claim_new(self, arena, rows, *, step, out):
        """The kernels', where there is room; that there is, the ledger promises them."""
        return self.claim_each([arena], rows, step=step, out=out[None], absent=np.zeros(1)) == 1

    def claim_each(self, arenas, rows, *, step, out, absent):
        """In all groups that come before one without room."""
        done_count = 0
        for group, arena in enumerate(arenas):
            absent[group] = np.count_nonzero(arena.slot_of[rows] < 0)
            if absent[group] > self.room(arena, rows, step):
                break
            done_count += 1
        if done_count:
            self.claim_all(arenas[:done_count], rows, step=step, out=out)
        return done_count

    def claim_all(self, arenas, rows, *, step, out):
        """Pads among the rows; what is shared by the groups is lent once."""
        line = np.append(rows, ids([-1, -1]))[None]
        block_max = max(arena.blocks.size for arena in arenas)
        shape = replace(
            ResolveShape.of_new_rows(line.size, max(1, block_max)), threads=self.threads
        )
        slots, one = np.full((len(arenas), line.size), -77, np.int32), ids([1])
        given, records, works = {"line": line, "slots": slots, "one": one}, [], []
        for group, arena in enumerate(arenas):
            there, _ = self.begin(arena, shape, step=step)
            works.append(self.work | {"now": works[0]["now"]} if works else self.work)
            at = {"slots": slots[group].ctypes.data, "query_count": one.ctypes.data}
            records.append(claim_record(shape, arena=there, workspace=works[-1], rows=line, **at))
            own = {"slot_of", "blocks", "block_count", "hit_age"} if group else {*ARENA}
            own |= {"rank_of"} if self.is_scored else set()
            given |= {f"{name} {group}": getattr(there, name) for name in own}
            named = (
                works[-1].items() if group == 0 else [w for w in works[-1].items() if w[0] != "now"]
            )
            given |= {f"{name} {group}": array for name, array in named}
        calls = np.frombuffer(bytes((ResolveRecord * len(records))(*records)), np.int32).copy()
        written = {name for name in given if name.split()[0] in ("now", "report")}
        unwritten = {f"{name} {g}" for g in range(len(arenas)) for name in self.work} | {"slots"}
        with lent(self.folder, given | {"calls": calls}, unwritten=unwritten - written):
            for entry, blocks in shape.launches_each:
                self.seed += 1
                each = EachRecord(calls.ctypes.data, blocks)
                grid = {"blocks": blocks * len(arenas), "threads": self.threads}
                self.kernels[entry](each, **grid, seed=self.seed)
        assert all(work["report"][REPORT.index("faults")] == 0 for work in works)
        assert all(work["report"][REPORT.index("places")] == 0 for work in works)
        assert (slots[:, rows.size :] == -1).all()
        out[: len(arenas)] = slots[:, : rows.size]

    def room(self, arena, rows, step):
        slots = arena.slots
        flies = in_flight(arena.ticket_of[slots], self.landed) != 0
        bound = (arena.dirty[slots] != 0) | flies
        kept = np.isin(arena.row_of[slots], rows) | (arena.last_use[slots] >= step)
        return int(((arena.row_of[slots] < 0) | ~(bound | kept)).sum())

    @property
    def report(self):
        return dict(zip(REPORT, self.work["report"].tolist(), strict=True))

    def claims(self, arena):
        report = self.report
        assert report["faults"] == 0
        count = report["claimed"]
        return FetchPlan(
            group=0,
            ticket=0,
            slots=self.work["claimed_slots"][:count],
            rows=arena.row_of[self.work["claimed_slots"][:count]],
            hit_count=report["hits"],
            place_count=report["places"],
            late_ticket=report["late_ticket"],
            evicted_count=report["evicted"],
        )
