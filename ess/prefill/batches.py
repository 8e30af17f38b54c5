"""The micro-batches under way, and how busy each stage is with them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from ess.prefill.orders import Part

WINDOW_S: Final = 10.0
SPANS_MAX: Final = 1 << 12


@dataclass(slots=True, eq=False)
class Batch:
    """`seconds` holds the time of each stage that has run it. `done` and `count` place its chunk in
    the prompt; they are unset if it has several chunks."""

    number: int
    parts: tuple[Part, ...]
    done: int
    count: int | None
    seconds: dict[int, float] = field(default_factory=dict)


class Batches:
    """Batches from the start of their first stage until all stages have reported."""

    def __init__(self, stage_count: int) -> None:
        self._stage_count = stage_count
        self._by_number: dict[int, Batch] = {}
        self._next_number = 0
        self._spans: list[deque[tuple[float, float]]] = [
            deque(maxlen=SPANS_MAX) for _ in range(stage_count)
        ]
        self._counts = [0] * stage_count

    def __len__(self) -> int:
        return len(self._by_number)

    def begin(self, parts: tuple[Part, ...] = ()) -> Batch:
        real = [part for part in parts if part.stop > part.start]
        alone = real[0] if len(real) == 1 else None
        batch = Batch(
            self._next_number,
            parts,
            done=0 if alone is None else alone.start,
            count=None if alone is None else alone.stop - alone.start,
        )
        self._by_number[batch.number] = batch
        self._next_number += 1
        return batch

    def drop(self, batch: Batch) -> None:
        """Removes a batch that could not begin."""
        assert not batch.seconds, f"batch {batch.number} has run"
        del self._by_number[batch.number]

    def ran(self, stage: int, number: int, seconds: float, *, now_s: float) -> Batch:
        """Records the report of a stage."""
        batch = self._by_number.get(number)
        assert batch is not None, f"stage {stage} has run batch {number}, which is not under way"
        assert stage not in batch.seconds, f"stage {stage} has run batch {number} twice"
        batch.seconds[stage] = seconds
        self._spans[stage].append((now_s, seconds))
        self._counts[stage] += 1
        if len(batch.seconds) == self._stage_count:
            del self._by_number[number]
        return batch

    def is_through(self, batch: Batch) -> bool:
        return batch.number not in self._by_number

    def chunk_count(self, stage: int) -> int:
        return self._counts[stage]

    def busy_share(self, stage: int, *, now_s: float) -> float:
        """The busy share of the last `WINDOW_S`."""
        spans = self._spans[stage]
        while spans and spans[0][0] < now_s - WINDOW_S:
            spans.popleft()
        return min(1.0, sum(seconds for _, seconds in spans) / WINDOW_S)

    def check(self) -> None:
        for number, batch in self._by_number.items():
            assert batch.number == number, f"batch {batch.number} stands under {number}"
            assert len(batch.seconds) < self._stage_count, f"batch {number} is through and kept"
