"""The residency kernels that run for a batch of a given size, and the memory they work in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from ess.errors import BadInput
from ess.kernels.cuda.program import Program
from ess.units import PAGE_ROWS, div_ceil

BINS: Final = 257
"""Free slots and 255 ages, or free slots and 256 ranks."""
ITEMS: Final = 8
PHASE_THREADS: Final = 512
CLUSTER_BLOCKS: Final = 8
ALONE_ENTRIES_MAX: Final = 8192
ALONE_SLOTS_MAX: Final = 32768
ENTRIES_MAX: Final = 1 << 30

NOW: Final = ("step", "ticket", "landed", "behind", "query_count", "stamps")
REPORT: Final = (
    *("claimed", "missing", "eligible", "absent", "hits", "places", "late_ticket"),
    *("evicted", "unwritten", "faults", "left", "held"),
)
Kind = Literal["select", "write", "landing", "leave"]
"""The most calls of a step with reports of their own."""
KINDS: Final[tuple[Kind, ...]] = ("select", "write", "landing", "leave")


class Launch(NamedTuple):
    entry: str
    blocks: int


class Moment(NamedTuple):
    """A call's place in its step, and the queries it is for.

    Its own copy is number `copy` of the step, and its stream has waited for the first `waited`
    copies (for none if 0). Its answer lies in workspace number `part`, where no other call of its
    group in this step has one, and its lines are the step's queries from `first` on.
    """

    copy: int = 1
    waited: int = 0
    part: int = 0
    first: int = 0


FIRST: Final = Moment()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveShape:
    """The largest call that a record is made for. The device counts actual queries and blocks.

    `is_together`: the blocks of one cluster run all phases in one launch; else there is a launch
    for each phase, over the whole device.
    """

    query_max: int
    top_k: int
    block_max: int
    is_together: bool
    threads: int

    @classmethod
    def of_new_rows(cls, row_max: int, block_max: int) -> ResolveShape:
        """For a call that finds slots for new rows, together with those of other groups."""
        shape = cls.of(query_max=1, top_k=row_max, block_max=block_max)
        return replace(shape, is_together=False)

    @classmethod
    def of(cls, *, query_max: int, top_k: int, block_max: int) -> ResolveShape:
        if min(query_max, top_k, block_max) < 1 or query_max * top_k > ENTRIES_MAX:
            raise BadInput(
                f"{query_max} queries of {top_k} rows over {block_max} blocks cannot be resolved"
            )
        is_together = fits_one_cluster(query_max * top_k, block_max * PAGE_ROWS)
        return cls(
            query_max=query_max,
            top_k=top_k,
            block_max=block_max,
            is_together=is_together,
            threads=PHASE_THREADS,
        )

    @property
    def tile_max(self) -> int:
        return div_ceil(self.block_max * PAGE_ROWS, self.threads * ITEMS)

    @property
    def parts_each(self) -> int:
        """Blocks that share a query."""
        return div_ceil(self.top_k, self.threads)

    @property
    def claim_max(self) -> int:
        """The most rows that one call can claim slots for."""
        return min(self.query_max * self.top_k, self.block_max * PAGE_ROWS)

    def program(self, *, is_scored: bool) -> Program:
        file = "together.cu" if self.is_together else "resolve.cu"
        return resolve_program(file, threads=self.threads, is_scored=is_scored)

    def launches(self, query_count: int) -> list[Launch]:
        """The launches, in order, of a call with this many lines."""
        parts, tiles = query_count * self.parts_each, self.tile_max
        assert 0 < query_count <= self.query_max, f"{query_count} queries, at most {self.query_max}"
        assert tiles > 0, "a launch for no slot"
        if self.is_together:
            return [Launch("ess_resolve_together", CLUSTER_BLOCKS)]
        return [
            Launch("ess_probe", parts),
            Launch("ess_count", tiles + parts),
            Launch("ess_rank", tiles),
            Launch("ess_assign", parts),
            Launch("ess_serve", query_count),
        ]

    @property
    def launches_each(self) -> list[Launch]:
        """The launches for new rows of several groups, a line each; blocks are per group."""
        assert self.query_max == 1, f"{self.query_max} lines of new rows"
        return [
            Launch("ess_each_probe", self.parts_each),
            Launch("ess_each_count", self.tile_max + self.parts_each),
            Launch("ess_each_rank", self.tile_max),
            Launch("ess_each_serve", 1),
        ]

    @property
    def claims(self) -> dict[str, int]:
        """int32 numbers by name: the claims that a call leaves for its copy."""
        return dict.fromkeys(("claimed_slots", "claimed_host_rows"), self.claim_max)

    @property
    def scratch(self) -> dict[str, int]:
        """The int32 numbers, by name, that each phase of a call leaves for the next."""
        return {
            "first_count": self.query_max * self.parts_each,
            "bin_count": BINS * self.tile_max,
            "bin_total": BINS,
        }


def fits_one_cluster(entry_count: int, slot_count: int) -> bool:
    """Whether one cluster does a call faster than five launches over the whole device.

    A barrier of a cluster costs about half of a launch, but only the cluster's eight
    multiprocessors can work. At these sizes each has two parts of queries and one tile.
    """
    assert entry_count > 0, "no entry to resolve"
    assert slot_count > 0, "no slot to resolve into"
    return entry_count <= ALONE_ENTRIES_MAX and slot_count <= ALONE_SLOTS_MAX


def resolve_program(file: str, *, threads: int, is_scored: bool) -> Program:
    """A program whose kernels choose victims: by age, or by rank where rows are scored."""
    program = slot_program(file, threads)
    cluster = (("ESS_BLOCKS", CLUSTER_BLOCKS),) if file == "together.cu" else ()
    scored = (("ESS_SCORED", 1),) if is_scored else ()
    return replace(program, defines=(*program.defines, *cluster, *scored))


def slot_program(file: str, threads: int) -> Program:
    assert 0 < threads <= 1024, f"a block of {threads} threads"
    assert threads % 32 == 0, f"{threads} threads are not whole warps"
    return Program(file=file, defines=(("ESS_THREADS", threads),))
