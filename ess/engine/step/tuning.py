"""Which schedule every layer runs in a step, and what the step teaches the next one.

Fixed modes run as they are. "layerwise" starts from a calibration, then follows live counters:
every few steps the misses, the link's rate and the stages' times since the last look go to the
policy, which decides when another vector has won for long enough. Without a calibration the first
step runs NONE, and the averages start at what that step shows. A step whose rows are all in slots
runs RESIDENT and teaches nothing. When slots are scarce such a step still finds all its rows, but
the rows in use must be stamped, or they would be evicted first: the step runs NONE, whose plan
stamps them.

A captured graph belongs to a vector, so no more than `VECTOR_MAX` vectors are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ess.cost import Hiding, hiding
from ess.door import Offload, Step
from ess.door.stats import Stats
from ess.engine.config import Modes
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.overlap import policy
from ess.overlap.calibration import DEFAULT, DEVICE, load
from ess.overlap.policy import Mode, Observation, PolicyState, Vector
from ess.overlap.sbo import Sbo
from ess.overlap.tbo import Tbo, reasons_off
from ess.overlap.timeline import Timeline
from ess.units import div_ceil

LAYERWISE: Final = "layerwise"
LOOK_EVERY: Final = 8
VECTOR_MAX: Final = 3
ATTENTION: Final = ("attend_all", "attend_resident", "attend_fetched")


def fixed_vector(modes: Modes, layout: ModelLayout) -> Vector | None:
    """The mode of each layer: one name for all layers, or a list of names with the same name
    throughout a group. None: layerwise."""
    if modes == LAYERWISE:
        return None
    names = [modes] * layout.layer_total if isinstance(modes, str) else list(modes)
    if len(names) != layout.layer_total:
        raise BadInput(f"{len(names)} modes for {layout.layer_total} layers")
    known = {mode.name.lower(): mode for mode in Mode}
    for name in names:
        if name not in known:
            raise BadInput(f"mode {name!r} is not one of {', '.join((*known, LAYERWISE))}")
    for group in layout.groups:
        if len({names[layer] for layer in group}) > 1:
            raise BadInput(
                f"layers {group[0]}..{group[-1]} share a selection, so they share a mode"
            )
    return tuple(known[name] for name in names)


@dataclass(frozen=True, slots=True)
class _Since:
    """The steps that the next observation is about: `stats` from before them, then their sums."""

    stats: Stats
    step_count: int = 0
    request_count: int = 0
    query_count: int = 0

    def with_step(self, step: Step) -> _Since:
        return replace(
            self,
            step_count=self.step_count + 1,
            request_count=self.request_count + len(step.sequences),
            query_count=self.query_count + step.query_count,
        )


class Tuning:
    """`mode_counts[layer, mode]` says how often a layer ran in a mode. `kept` are the vectors so
    far, the latest last. `split_count` steps ran in two halves; `reasons` say why the latest step
    did not."""

    def __init__(
        self,
        offload: Offload,
        modes: Modes,
        *,
        calibration: str = "",
        tbo: Tbo = "off",
        sbo: Sbo = "off",
        asks_first: bool = False,
    ) -> None:
        """`asks_first`: steps run on a device. The host learns too late that a row is absent, so a
        layer runs RESIDENT only where all rows are known to be in slots: never the MTP module's."""
        self.sbo = sbo
        self._asks_first = asks_first
        self.split_count = 0
        self.reasons: tuple[str, ...] = ("no step has run",)
        self.timeline = Timeline(clock=offload.clock, stopwatch=offload.stopwatch)
        self.mode_counts: npt.NDArray[np.int64] = np.zeros(
            (offload.layout.layer_total, len(Mode)), np.int64
        )
        self.kept: tuple[Vector, ...] = ()
        self._offload = offload
        self._tbo = tbo
        self._fixed = fixed_vector(modes, offload.layout)
        self._is_guessed = not calibration
        assumed = DEVICE if asks_first else DEFAULT
        self._calibrated = load(calibration, offload.layout) if calibration else assumed
        self._state: PolicyState | None = None
        self._since: _Since | None = None

    def vector(self, step: Step) -> Vector:
        """The modes of this step. Asked once per step, before its first layer."""
        wanted = self._wanted(step)
        if not self._asks_first or Mode.RESIDENT not in wanted:
            return wanted
        return self._proven(wanted, is_there=self._offload.all_resident(step.sequences))

    def first_vectors(self) -> tuple[Vector, ...]:
        """The modes of a device's first steps: with all rows in slots, and without."""
        wanted = self._fixed or (Mode.RESIDENT,) * self._offload.layout.layer_total
        vectors = (self._proven(wanted, is_there=is_there) for is_there in (True, False))
        return tuple(dict.fromkeys(vectors))

    def _proven(self, wanted: Vector, *, is_there: bool) -> Vector:
        known_count = self._offload.layout.layer_count if is_there else 0
        known, others = wanted[:known_count], wanted[known_count:]
        return (*known, *(max(mode, Mode.NONE) for mode in others))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Counts nothing meanwhile: for steps that serve no request."""
        mode_counts, split_count = self.mode_counts.copy(), self.split_count
        stopwatch = self.timeline.stopwatch
        if stopwatch is not None:
            stopwatch.rests = True
        try:
            yield
        finally:
            if stopwatch is not None:
                stopwatch.rests = False
            self.mode_counts[:] = mode_counts
            self.split_count = split_count

    def _wanted(self, step: Step) -> Vector:
        self.timeline.spans.clear()
        if self._fixed is not None:
            self.timeline.restart()
            return self._fixed
        is_resident = self._offload.all_resident(step.sequences)
        state = self._learn(self._state or self._start(step), is_resident=is_resident)
        if self._state is None or state.vector != self._state.vector:
            self._keep(state.vector)
        self._state = state
        if self._since is not None:
            assert not is_resident, "a step whose rows are all in slots teaches nothing"
            self._since = self._since.with_step(step)
            return state.vector
        if self._offload.is_scarce:
            return (Mode.NONE,) * len(state.vector)
        return policy.modes(state, all_resident=True)

    def reasons_whole(
        self, counts: Sequence[int], vector: Vector, *, has_experts: bool
    ) -> tuple[str, ...]:
        """Why a step with `counts` queries per sequence is not run in two halves; empty if it
        is."""
        assert len(vector) == self._offload.layout.layer_total, f"{len(vector)} modes"
        self.reasons = reasons_off(self._tbo, counts=counts, vector=vector, has_experts=has_experts)
        self.split_count += not self.reasons
        return self.reasons

    def overrule(self, *, splits: bool) -> None:
        """The ranks have agreed on another way than `reasons_whole` said."""
        self.reasons = () if splits else ("the rank with the most tokens runs its step whole",)
        self.split_count += 1 if splits else -1

    def ran(self, layers: int | slice, mode: Mode) -> None:
        self.mode_counts[layers, mode] += 1

    def check(self) -> None:
        assert len(set(self.kept)) == len(self.kept) <= VECTOR_MAX, f"kept {self.kept}"
        assert (self.mode_counts >= 0).all(), "a layer ran less than never"
        assert self.split_count >= 0, f"{self.split_count} steps ran in halves"
        self.timeline.check()
        if self._fixed is not None:
            assert self._state is None, "fixed modes follow live counters"
            assert not self.kept, "fixed modes were changed"
        if self._state is not None:
            assert self.kept[-1:] == (self._state.vector,), "the vector that runs is not kept"
        if self._since is not None:
            self._check_since(self._since)

    def _check_since(self, since: _Since) -> None:
        assert self._state is not None, "steps are counted, and no policy asks for them"
        assert 0 < since.step_count <= LOOK_EVERY, f"{since.step_count} steps since the last look"
        assert since.step_count <= since.request_count, "a step without requests"
        assert since.request_count <= since.query_count, "a request without queries"
        now, before = self._offload.stats(), since.stats
        assert (now.miss_count >= before.miss_count).all(), "counts of misses have fallen"

    def _keep(self, vector: Vector) -> None:
        others = tuple(kept for kept in self.kept if kept != vector)
        self.kept = (*others, vector)[-VECTOR_MAX:]
        assert self.kept[-1] == vector, "the vector that runs is not kept"

    def _start(self, step: Step) -> PolicyState:
        layout, known = self._offload.layout, self._calibrated
        bounds = [sequence.length_bound for sequence in step.sequences]
        key_count = sum(
            sum(range(bound - count + 1, bound + 1))
            for bound, count in zip(bounds, step.query_counts, strict=True)
        )
        misses = known.misses_at(max(bounds), layout.layer_total)
        per_query = float(np.mean(misses)) * len(step.sequences) / step.query_count
        behind = known.constants.hiding(
            query_count=step.query_count,
            key_count=key_count,
            missing_share=min(1.0, per_query / layout.top_k),
            waits_late=self._asks_first,
        )
        return policy.start(
            misses=misses,
            request_count=len(step.sequences),
            row_bytes=layout.row_bytes,
            bytes_per_us=known.bytes_per_us,
            hiding=behind,
        )

    def _learn(self, state: PolicyState, *, is_resident: bool) -> PolicyState:
        """The policy's state after the steps since the last look: if these are enough, or if the
        step that comes has all its rows and so ends the series."""
        since, wanted_count = self._since, 1 if self._is_guessed else LOOK_EVERY
        if since is None and is_resident:
            self.timeline.restart()
            return state
        if since is not None and since.step_count < wanted_count and not is_resident:
            return state
        stats = self._offload.stats()
        seen = None if since is None else self._observed(since, stats)
        self._since = None if is_resident else _Since(stats)
        self.timeline.restart()
        if seen is None:
            return state
        if self._is_guessed:
            self._is_guessed = seen.hiding is None
            state = replace(
                state,
                misses=seen.misses,
                bytes_per_us=seen.bytes_per_us or state.bytes_per_us,
                hiding=seen.hiding or state.hiding,
            )
        return policy.advance(state, seen)

    def _observed(self, since: _Since, stats: Stats) -> Observation:
        """The rows that the steps since the last look had to move, and the times beside which they
        moved; for steps that ran in two halves, the same for a half."""
        assert since.step_count > 0, "an observation of no step"
        assert since.request_count > 0, "steps without requests"
        layout, half_count = self._offload.layout, 1 if self.reasons else 2
        run_count = half_count * since.step_count
        missed = stats.miss_count - since.stats.miss_count
        asked = missed + stats.hit_count - since.stats.hit_count
        asked += stats.place_count - since.stats.place_count
        assert (missed >= 0).all(), "counts of misses never fall"
        assert (asked >= missed).all(), "more rows missed than asked for"
        per_layer = [int(missed[layout.group_of(layer)]) for layer in range(layout.layer_total)]
        moved_us = float((stats.transfer_ns - since.stats.transfer_ns).sum()) / 1e3
        moved_bytes = int((stats.moved_bytes - since.stats.moved_bytes).sum())
        return Observation(
            misses=tuple(count / since.request_count for count in per_layer),
            request_count=div_ceil(since.request_count, run_count),
            step_count=since.step_count,
            bytes_per_us=moved_bytes / moved_us if moved_us and moved_bytes else None,
            hiding=self._windows(
                div_ceil(since.query_count, run_count),
                float(missed.sum()) / max(1, int(asked.sum())),
            ),
        )

    def _windows(self, query_count: int, missing_share: float) -> Hiding | None:
        """One pair of windows for all layers: the step's mean. What splitting costs comes from the
        calibration, since a step runs a layer in one mode only and cannot compare two. None where
        none was timed: on a device few steps are.
        """
        assert query_count > 0, "steps without queries"
        assert 0.0 <= missing_share <= 1.0, f"{missing_share} of the rows missed"
        timeline, constants = self.timeline, self._calibrated.constants
        run_count = timeline.run_count["pre_attn"]
        if run_count == 0:
            return None
        return hiding(
            pre_attn_us=timeline.total_us("pre_attn") / run_count,
            attend_us=timeline.total_us(*ATTENTION) / run_count,
            index_us=timeline.total_us("select") / run_count,
            split_us=constants.split_fixed_us + constants.split_query_us * query_count,
            index_split_us=constants.index_split_us,
            missing_share=missing_share,
            waits_late=self._asks_first,
        )
