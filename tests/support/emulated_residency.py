"""Residency by the CUDA kernels on an emulated device: what `specification` does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ess.pool.lru import specification
from ess.pool.lru.arena import FetchPlan, Split
from ess.pool.lru.cuda_audit import KINDS, NONE_FOUND, assert_sound
from ess.pool.lru.cuda_records import (
    REPORT,
    ResolveShape,
    audit_record,
    resolve_program,
    resolve_record,
    slot_program,
    upkeep_record,
    warm_record,
)
from tests.support.emulate import emulated, lent
from tests.support.residency_scenarios import ARENA, SPLIT

THREADS = 64
LINE = 24
UPKEEP = ("ess_land", "ess_settle", "ess_drop", "ess_clear_blocks")


def shape_of(query_max, top_k, block_max, *, together, threads=THREADS):
    """Blocks of two warps: all that crosses warps and tiles happens, at the cost of few fibers."""
    shape = ResolveShape.of(query_max=query_max, top_k=top_k, block_max=block_max)
    return replace(shape, together=together, threads=threads)


class Emulated:
    """The operations of the specification, by the kernels."""

    def __init__(self, folder, *, together, threads=THREADS):
        self.together, self.threads, self.folder = together, threads, folder
        program = resolve_program(together=together, threads=threads)
        names = [one.entry for one in shape_of(1, 1, 1, together=together).launches]
        self.kernels = emulated(program, dict.fromkeys(names, "Resolve"), folder)
        for file, records in (
            ("upkeep.cu", dict.fromkeys(UPKEEP, "Upkeep")),
            ("audit.cu", {"ess_audit": "Audit"}),
        ):
            self.kernels |= emulated(slot_program(file, threads), records, folder)
        self.seed = 0

    def launch(self, launches, record, arena, /, **arrays):
        """Kernels may use what is named here; of the rest of the workspace nothing is known yet."""
        given = self.work | {name: getattr(arena, name) for name in ARENA}
        given |= {name: one for name, one in arrays.items() if isinstance(one, np.ndarray)}
        with lent(self.folder, given, unwritten={*self.work, *SPLIT} - self.written):
            for entry, blocks in launches:
                self.seed += 1
                self.kernels[entry](record, blocks=blocks, threads=self.threads, seed=self.seed)

    def begin(self, arena, shape, *, step, ticket=1, query_count=0):
        self.work = {name: np.full(n, -77, np.int32) for name, n in shape.workspace.items()}
        self.work["now"][:] = step, ticket, query_count, arena.blocks.size, 1
        self.written = {"now"}
        if not self.together:
            self.clear_report()

    def clear_report(self):
        self.work["report"][:] = 0
        self.written.add("report")

    def plan(self, arena, rows, /, *, step, ticket, split, **options):
        assert split.holds(rows.shape), "as the specification does"
        shape = shape_of(
            *rows.shape, max(1, arena.blocks.size), together=self.together, threads=self.threads
        )
        self.begin(arena, shape, step=step, ticket=ticket, query_count=len(rows))
        given = {"rows": np.ascontiguousarray(rows)} | options
        record = resolve_record(shape, arena=arena, split=split, workspace=self.work, **given)
        given |= {name: getattr(split, name) for name in SPLIT}
        self.launch(shape.launches, record, arena, **given)
        return self.claims()

    def warm(self, arena, rows, ages, *, step, ticket, **options):
        """The list is an array of the greatest length; how much of it counts, the device knows."""
        shape = shape_of(
            rows.size // LINE + 1, LINE, max(1, arena.blocks.size), together=self.together
        )
        self.begin(arena, shape, step=step, ticket=ticket, query_count=-77)
        padding = np.full(shape.query_max * LINE - rows.size, -77, np.int32)
        self.list = {"rows": np.concatenate([rows, padding])}
        self.list |= {"count": np.array([rows.size], np.int32)} | options
        if ages is not None:
            self.list["ages"] = np.concatenate([ages, padding])
        record = warm_record(shape, arena=arena, workspace=self.work, **self.list)
        self.launch(shape.launches, record, arena, **self.list)
        return self.claims()

    def fill(self, arena, rows, **options):
        return self.warm(arena, rows, None, **options)

    def upkeep(self, entry, arena, numbers, *, blocks=2, **now):
        self.begin(arena, shape_of(1, 1, 1, together=self.together), **({"step": 1} | now))
        self.clear_report()
        listed = np.ascontiguousarray(numbers)
        record = upkeep_record(arena, listed, workspace=self.work)
        self.launch([(entry, blocks)], record, arena, listed=listed)
        return self.report

    def land(self, arena, slots, *, ticket):
        self.upkeep("ess_land", arena, slots, ticket=ticket)

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
        self.begin(arena, shape_of(1, 1, 1, together=self.together), step=step)
        record = audit_record(arena, found, workspace=self.work)
        self.launch([("ess_audit", 2)], record, arena, found=found)
        assert_sound(found)

    def claim_new(self, arena, rows, *, step, out):
        """The kernels', where there is room; that there is, the ledger promises them."""
        absent = int((arena.slot_of[rows] < 0).sum())
        if absent > self.room(arena, rows, step):
            return specification.claim_new(arena, rows, step=step, out=out)
        split = Split.create(query_count=1, top_k=max(1, rows.size))
        line = rows[None] if rows.size else np.full((1, 1), -1, np.int32)
        claims = self.plan(arena, line, step=step, ticket=1, split=split, purpose="write")
        assert claims.place_count == 0
        out[:] = split.slots[0, : rows.size]
        return True

    def room(self, arena, rows, step):
        slots = arena.slots
        bound = (arena.dirty[slots] != 0) | (arena.ticket_of[slots] != 0)
        kept = np.isin(arena.row_of[slots], rows) | (arena.last_use[slots] >= step)
        return int(((arena.row_of[slots] < 0) | ~(bound | kept)).sum())

    @property
    def report(self):
        return dict(zip(REPORT, self.work["report"].tolist(), strict=True))

    def claims(self):
        report = self.report
        assert report["faults"] == 0
        count = report["claimed"]
        return FetchPlan(
            group=0,
            ticket=0,
            slots=self.work["claimed_slots"][:count],
            rows=self.work["claimed_rows"][:count],
            hit_count=report["hits"],
            place_count=report["places"],
            late_ticket=report["late_ticket"],
            evicted_count=report["evicted"],
        )
