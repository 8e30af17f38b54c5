"""How a step begins: whose turn it is, and pages for its new rows."""

from __future__ import annotations

from ess.door.arrays import Brought
from ess.door.checks import in_range
from ess.door.owner import Owner
from ess.door.sequences.holding import grow
from ess.door.sequences.sequence import Sequence, require_state
from ess.door.step import Step
from ess.errors import BadInput


def begin(
    owner: Owner,
    sequences: tuple[Sequence, ...],
    query_counts: list[int],
    starts: list[int] | None,
    room: int | None,
    brought: Brought | None = None,
) -> Step:
    """PoolFull if the pages for the new rows do not fit: then nothing has changed."""
    pools, total = owner.pools, sum(query_counts)
    if brought is None and pools.layout.row_tokens > 1:
        brought = _closing(sequences, query_counts)
    row_counts = query_counts if brought is None else brought.row_counts
    row_total = sum(row_counts)
    if len(set(sequences)) != len(sequences):
        raise BadInput("a sequence is in the step twice")
    if not 1 <= total <= pools.sizes.query_max:
        raise BadInput(f"query_counts sum to {total}, must be 1..{pools.sizes.query_max}")
    if room is not None:
        in_range("room", room, total, pools.sizes.query_max)
    if row_total > owner.placement.new_rows_max:
        raise BadInput(
            f"{row_total} new rows do not fit a group of {owner.placement.new_rows_max} slots"
        )
    if brought is not None:
        _check_brought(query_counts, brought)
    pools.inflight.settle()
    for place, sequence in enumerate(sequences):
        least, start = int(brought is None), None if starts is None else starts[place]
        _check_turn(sequence, row_counts[place], start, least=least)
    ends = [s.length_bound + count for s, count in zip(sequences, row_counts, strict=True)]
    grow(pools, [(s.holding, end) for s, end in zip(sequences, ends, strict=True)])
    step = owner.open_step = Step(owner, sequences, query_counts, room or total, brought)
    for sequence, count in zip(sequences, row_counts, strict=True):
        sequence.progress.joined(step.number, count)
    owner.placement.begin(step)
    return step


def _closing(sequences: tuple[Sequence, ...], query_counts: list[int]) -> Brought:
    """A token brings the row that it is the last token of."""
    for place, sequence in enumerate(sequences):
        require_state(sequence, "active")
        in_range(f"query_counts[{place}]", query_counts[place], 1, 1 << 31)
    tables, rate = sequences[0].owner.pools.tables, sequences[0].owner.pools.layout.row_tokens
    texts = tables.texts[[sequence.line for sequence in sequences]].tolist()
    return Brought.closing(texts, query_counts, rate)


def _check_brought(query_counts: list[int], brought: Brought) -> None:
    """Behind the rows before them, queries select new rows of their own sequence only."""
    seen = iter(brought.seen_counts)
    for place, (queries, rows) in enumerate(zip(query_counts, brought.row_counts, strict=True)):
        in_range(f"query_counts[{place}]", queries, 1, sum(query_counts))
        in_range(f"row_counts[{place}]", rows, 0, 1 << 31)
        for count in (next(seen) for _ in range(queries)):
            in_range(f"seen_counts of sequence number {place} of the step", count, 0, rows)


def _check_turn(sequence: Sequence, count: int, start: int | None, *, least: int) -> None:
    require_state(sequence, "active")
    sequence.progress.check_start(start)
    pools = sequence.owner.pools
    limit = pools.layout.rows_of(sequence.length_max or pools.sizes.length_max)
    if count < least or sequence.length_bound + count > limit:
        raise BadInput(
            f"sequence {sequence.number}: {count} new rows after {sequence.length_bound}, "
            f"must be at least {least} and end within {limit}"
        )
