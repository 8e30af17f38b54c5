"""How a step begins: whose turn it is, and pages for its new rows."""

from __future__ import annotations

from ess.door.checks import in_range
from ess.door.owner import Owner
from ess.door.sequences.holding import grow
from ess.door.sequences.sequence import Sequence, require_state
from ess.door.steps.arrays import Brought
from ess.door.steps.step import Step
from ess.errors import BadInput


def begin(
    owner: Owner,
    sequences: tuple[Sequence, ...],
    query_counts: list[int],
    starts: list[int] | None,
    room: int | None,
) -> Step:
    """PoolFull if the pages for the new rows do not fit: then nothing has changed. With any other
    error no step has begun either."""
    pools = owner.pools
    brought = _brought(owner, sequences, query_counts)
    row_counts = query_counts if brought is None else brought.row_counts
    _check_sizes(owner, sequences, sum(query_counts), sum(row_counts), room)
    pools.inflight.settle()
    bounds = [
        _bound(sequence, None if starts is None else starts[place])
        for place, sequence in enumerate(sequences)
    ]
    if brought is None:
        ends = [
            _end(owner, sequence, bound, count)
            for sequence, bound, count in zip(sequences, bounds, query_counts, strict=True)
        ]
    else:
        ends = brought.ends
    grow(pools, [(s.holding, end) for s, end in zip(sequences, ends, strict=True)])
    space = room or sum(query_counts)
    step = Step(owner, sequences, query_counts, space, brought)
    owner.placement.begin(step)
    owner.open_step = step
    for sequence, count in zip(sequences, row_counts, strict=True):
        sequence.progress.joined(step.number, count)
    return step


def _check_sizes(
    owner: Owner, sequences: tuple[Sequence, ...], total: int, row_total: int, room: int | None
) -> None:
    query_max = owner.pools.sizes.query_max
    if len(set(sequences)) != len(sequences):
        twice = next(each for each in sequences if sequences.count(each) > 1)
        raise BadInput(f"sequence {twice.number} is in the step twice")
    if not 1 <= total <= query_max:
        raise BadInput(f"query_counts sum to {total}, must be 1..{query_max}")
    if room is not None:
        in_range("room", room, total, query_max)
        if room > total and not owner.pools.has_pads:
            raise BadInput(f"room is {room}, but steps on the host are not padded")
    if row_total > owner.placement.new_rows_max:
        raise BadInput(
            f"{row_total} new rows do not fit a group of {owner.placement.new_rows_max} slots"
        )


def _bound(sequence: Sequence, start: int | None) -> int:
    if sequence.state != "active":
        require_state(sequence, "active")
    return sequence.progress.check_start(start)


def _end(owner: Owner, sequence: Sequence, bound: int, count: int) -> int:
    """Where the sequence ends behind `count` new rows."""
    end, limit = bound + count, sequence.length_max or owner.pools.sizes.length_max
    if not bound < end <= limit:
        raise BadInput(
            f"sequence {sequence.number}: {count} new rows after {bound}, "
            f"must be at least 1 and end within {limit}"
        )
    return end


def _brought(
    owner: Owner, sequences: tuple[Sequence, ...], query_counts: list[int]
) -> Brought | None:
    """A token brings the row whose last token it is."""
    layout, sizes, tables = owner.pools.layout, owner.pools.sizes, owner.pools.tables
    if layout.row_tokens == 1:
        return None
    for sequence, count in zip(sequences, query_counts, strict=True):
        require_state(sequence, "active")
        text, limit = int(tables.texts[sequence.line]), sequence.length_max or sizes.length_max
        if count < 1 or text + count > limit:
            raise BadInput(
                f"sequence {sequence.number}: {count} tokens after {text}, must be at least 1 and"
                f" end within {limit}"
            )
    texts = tables.texts[[sequence.line for sequence in sequences]].tolist()
    return Brought.of(texts, query_counts, layout.row_tokens)
