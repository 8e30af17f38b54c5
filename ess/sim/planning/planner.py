"""What to run: batch, slots and time for a model on given GPUs, and what limits them.

For every batch the index takes what its pages need and slots get the rest of the device memory, so
the ratio falls as the batch grows. Below the slot floor misses explode (the working set of a layer
no longer fits), so a batch that cannot give every request its floor is refused, even if it was
asked for. The floor is the layout's, or every row that a step's queries can select, if that is
more. Of the remaining batches within the time per token, the one with the most tokens per second is
taken. It is recommended only if it beats the best batch without offload, which needs no host memory
for rows.

The device memory is what weights and reserves leave, unless `Ask.device_bytes` is set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.overlap.policy import Mode
from ess.pool.capacity import HOST_PAGES, page_count
from ess.sim.decode_step import Prediction, Scenario, simulate
from ess.sim.locality import misses
from ess.sim.memory_budget import Budget
from ess.sim.operators.parallel import Parallel
from ess.sim.operators.stages import Operators
from ess.sim.planning.ask import Ask
from ess.sim.planning.bands import EXACT, Band, inverse, joined, miss_marks
from ess.sim.planning.batches import Point, best, tried
from ess.sim.planning.weights import weight_bytes
from ess.units import counted, format_bytes

MEMORY_SHARE: Final = 0.9
RESERVED_BYTES: Final = 4_169_107_456
"""Workspace, graphs and communication: 3.5 GiB and 392 MiB."""

WORTH: Final = 1.02
"""Offload that gains less than this over resident is not worth its host memory."""

MISS_FACTORS: Final = (0.5, 2.0)
TIME: Final = "time per token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`resident` is the best point without offload; None when not one whole request fits. A model
    that attends to every row cannot offload: then the resident point is chosen.

    `break_even_batch` is the least batch tried that beats it, `index_wall` the batch at which index
    keys alone fill the device, `floor_batch` the batch at which slots reach their floor. The last
    two and `resident` do not depend on host memory. `batch_band` gives the largest batches within
    the time per token at the ends of its band, `break_even_ends` those that beat resident.
    """

    device_bytes: int
    accepted: float
    chosen: Point
    batch_band: Band
    limiter: str
    resident: Point | None
    gain: float | None
    gain_band: Band
    recommended: Literal["offload", "resident"]
    break_even_batch: int | None
    break_even_ends: tuple[int | None, int | None]
    slot_floor: int
    floor_batch: int
    index_wall: int
    parallel: Parallel
    resident_parallel: Parallel
    marks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Answers an ask. The paper counts memory without the slot map and the MTP layer. `link_name`
    is what limits the rate of fetches; `baseline` plans the resident side if its GPUs share the
    model in another way."""

    operators: Operators
    curves: misses.MissCurves
    ask: Ask
    layout: ModelLayout
    count_map: bool = True
    link_name: str = "host link"
    baseline: Planner | None = None

    @property
    def budget(self) -> Budget:
        """Memory per GPU. The GPUs of the ask share host memory evenly; those of an attention group
        keep one copy of its rows."""
        ask = self.ask
        group = ask.way.attention_tp
        share = None if ask.host_bytes is None else ask.host_bytes * group // ask.gpu_count
        return replace(self.device_budget, host_bytes=share)

    @property
    def device_budget(self) -> Budget:
        """The memory of a worker that keeps nothing on the host."""
        return Budget(layout=self.layout, device_bytes=self.device_bytes, count_map=self.count_map)

    @property
    def device_bytes(self) -> int:
        if self.ask.device_bytes is not None:
            return self.ask.device_bytes
        whole = MEMORY_SHARE * self.operators.machine.memory_bytes
        weights = weight_bytes(self.operators.family, self.ask.way)
        left = int(whole) - weights - RESERVED_BYTES
        if left <= 0:
            raise BadInput(
                f"weights on {counted(self.ask.gpu_count, 'GPU')} take {format_bytes(weights)} "
                f"each and leave no memory for a request: {format_bytes(-left)} are missing; "
                "take more GPUs"
            )
        return left

    @property
    def slot_floor(self) -> int:
        """Slots in every layer that each request must have, of any length."""
        return max(self.layout.slot_floor, self.ask.queries_each * self.layout.top_k)

    @property
    def least_slots(self) -> int:
        return min(self.ask.context, self.slot_floor) if self.is_sparse else self.ask.context

    @property
    def is_sparse(self) -> bool:
        return self.operators.family.is_sparse

    def plan(self) -> Plan:
        points = self._points() if self.is_sparse else self._whole_points()
        kept = [point for point in points if self._in_time(point)]
        if not kept:
            raise BadInput(self._too_slow(min(points, key=lambda point: point.token_us)))
        resident = (self.baseline or self).best_resident()
        chosen = self.banded(best(kept))
        gain = None if resident is None else chosen.tokens_per_s / resident.tokens_per_s
        gain_band = joined([inverse(chosen.band), (resident or chosen).band])
        limiter = self._limiter(chosen, points)
        least, even, most = (
            self._even(kept, resident, 1.0 + side) for side in (gain_band[1], 0.0, gain_band[0])
        )
        return Plan(
            device_bytes=self.device_bytes,
            accepted=self.ask.tokens_each,
            chosen=chosen,
            batch_band=self._batch_band(chosen) if limiter == TIME else EXACT,
            limiter=limiter,
            resident=resident,
            gain=gain,
            gain_band=gain_band,
            recommended="offload" if gain is None or gain >= WORTH else "resident",
            break_even_batch=even,
            break_even_ends=(least, most),
            slot_floor=self.least_slots,
            floor_batch=self._device_most(self.least_slots),
            index_wall=self._device_most(0),
            parallel=self.ask.way,
            resident_parallel=(self.baseline or self).ask.way,
            marks=self._marks(chosen, resident),
        )

    def point(self, batch: int, slots_each: int) -> Point:
        """The point of a batch, run whole or in two overlapped halves, whichever is faster."""
        tbo, faster = self._faster(batch, slots_each)
        group = self.ask.way.attention_tp
        return Point(
            batch=batch,
            slots_each=slots_each,
            ratio=slots_each / self.ask.context,
            tbo=tbo,
            step_us=faster.step_us,
            exposed_us=faster.exposed_us,
            token_us=faster.step_us / self.ask.tokens_each,
            tokens_per_s=faster.tokens_per_s(batch=batch / group, accepted=self.ask.tokens_each),
            modes={mode.name: faster.modes.count(mode) for mode in Mode if mode in faster.modes},
            host_bytes=batch * page_count(self.ask.context) * self.layout.host_page_bytes // group,
            band=faster.band,
            token_band=(token_band := self._token_band(faster.band)),
            rate_band=inverse(token_band),
            exposed_ends_us=(faster.exposed_us, faster.exposed_us),
            marks=faster.marks,
        )

    def _token_band(self, step: Band) -> Band:
        return joined([step, inverse(self.ask.accepted_band)])

    def _faster(
        self, batch: int, slots_each: int, *, miss_factor: float = 1.0
    ) -> tuple[bool, Prediction]:
        both = [
            self._predict(batch, slots_each, tbo=tbo, miss_factor=miss_factor)
            for tbo in (False, True)
        ]
        tbo = both[1].step_us < both[0].step_us
        return tbo, both[tbo]

    def banded(self, point: Point) -> Point:
        """Adds what half and twice the misses would make of the step and of the wait for the link:
        twice the misses wait like a link of half the rate, or one behind half the compute."""
        if point.slots_each >= self.ask.context:
            return point
        few, many = (
            self._faster(point.batch, point.slots_each, miss_factor=factor)[1]
            for factor in MISS_FACTORS
        )
        missed = few.step_us / point.step_us - 1, many.step_us / point.step_us - 1
        band = joined([point.band, missed])
        token_band = self._token_band(band)
        return replace(
            point,
            band=band,
            token_band=token_band,
            rate_band=inverse(token_band),
            exposed_ends_us=(few.exposed_us, many.exposed_us),
        )

    def _even(self, points: list[Point], resident: Point | None, factor: float) -> int | None:
        """The least batch that offloads and beats resident if it gains `factor` times as much."""
        better = [
            point.batch
            for point in points
            if resident
            and factor * point.tokens_per_s > resident.tokens_per_s
            and point.slots_each < self.ask.context
        ]
        return min(better, default=None)

    def _batch_band(self, chosen: Point) -> Band:
        """The largest batches within the time per token, at the ends of that time's band."""
        slots = self.least_slots if self.ask.ratio is None else chosen.slots_each
        fewer, more = (self.timed(1.0 + side).largest(slots) for side in chosen.token_band[::-1])
        return (
            (fewer.batch if fewer else 0) / chosen.batch - 1.0,
            (more or chosen).batch / chosen.batch - 1.0,
        )

    def timed(self, factor: float) -> Planner:
        """A planner whose tokens take `factor` times the predicted time."""
        most = self.ask.token_us_max
        if most is None:
            return self
        return replace(self, ask=replace(self.ask, token_us_max=most / factor))

    def _marks(self, chosen: Point, resident: Point | None) -> tuple[str, ...]:
        marks = [*chosen.marks, *(resident.marks if resident else ())]
        if self.ask.accepted is None and self.ask.queries_each > 1:
            marks.append("accepted tokens: assumed, 70 % of each draft in turn")
        if chosen.slots_each < self.ask.context:
            marks += miss_marks(
                self.curves,
                self.ask,
                slots_each=chosen.slots_each,
                model=self.operators.family.name,
            )
        return tuple(dict.fromkeys(marks))

    def _points(self) -> list[Point]:
        ask, budget = self.ask, self.budget
        if ask.batch is not None:
            slots = budget.slots_each(context=ask.context, batch=ask.batch)
            self._refuse_unless(ask.batch, self.least_slots)
            return [self.point(ask.batch, slots)]
        least = self.least_slots if ask.ratio is None else self._slots_asked(ask.ratio)
        self._refuse_unless(1, least)
        most = budget.batch_max(context=ask.context, slots_each=least)

        def point_of(batch: int) -> Point:
            fair = budget.slots_each(context=ask.context, batch=batch)
            return self.point(batch, fair if ask.ratio is None else least)

        return tried(most, point_of, self._in_time)

    def _slots_asked(self, ratio: float) -> int:
        slots = int(ratio * self.ask.context)
        if slots < self.least_slots:
            raise BadInput(
                f"a ratio of {ratio:g} leaves {slots:,} slots a layer for a context of "
                f"{self.ask.context:,}; the floor is {self.least_slots:,} "
                f"(a ratio of {self.least_slots / self.ask.context:.4f}), below it misses explode"
            )
        return slots

    def _device_most(self, slots_each: int) -> int:
        return self.device_budget.batch_max(context=self.ask.context, slots_each=slots_each)

    def _refuse_unless(self, batch: int, slots_each: int) -> None:
        """Raises a refusal that says how many bytes are missing, and where."""
        context, budget = self.ask.context, self.budget
        short = budget.refusal(context=context, batch=batch, slots_each=slots_each)
        if short is None:
            return
        place = "host" if short.limiter == HOST_PAGES else "device"
        said = f"with {slots_each:,} slots a layer it {short}"
        if place == "host":
            missing = (short.needed - short.free) * self.layout.host_page_bytes
        else:
            index_bytes = budget.index_bytes(context=context, batch=batch)
            slot_bytes = batch * slots_each * budget.slot_bytes
            slot_bytes += budget.window_bytes(context=context, batch=batch)
            missing = index_bytes + slot_bytes - self.device_bytes
            if index_bytes > self.device_bytes:
                room = format_bytes(self.device_bytes)
                said = f"index keys take {format_bytes(index_bytes)}, and requests have {room}"
        raise BadInput(
            f"a batch of {batch:,} at {context:,} tokens does not fit: {said}; "
            f"{format_bytes(missing)} of {place} memory are missing per GPU"
        )

    def best_resident(self) -> Point | None:
        """The best batch with every row on the device, and none on the host."""
        most = self._device_most(self.ask.context)
        kept = [point for point in self._resident_points(most) if self._in_time(point)]
        return best(kept) if kept else None

    def _whole_points(self) -> list[Point]:
        """The points of a model that cannot offload."""
        context, asked = self.ask.context, self.ask.batch
        self._refuse_unless(asked or 1, context)
        if asked is None:
            return self._resident_points(self._device_most(context))
        return [replace(self.point(asked, context), host_bytes=0)]

    def _resident_points(self, most: int) -> list[Point]:
        def point_of(batch: int) -> Point:
            return replace(self.point(batch, self.ask.context), host_bytes=0)

        return tried(most, point_of, self._in_time)

    def _predict(self, batch: int, slots_each: int, *, tbo: bool, miss_factor: float) -> Prediction:
        ask = self.ask
        layers = tuple(
            miss_factor * count
            for count in self.curves.layers(
                context=ask.context, slots=slots_each, queries_each=ask.queries_each
            )
        )
        scenario = Scenario(
            batch=batch / ask.way.attention_tp,
            queries_each=ask.queries_each,
            context=ask.context,
            tbo=tbo,
            parallel=ask.way,
            misses=None if slots_each >= ask.context else layers,
        )
        return simulate(self.operators, scenario)

    def quick(self, slots_each: int) -> Point | None:
        """A quick guess at the best point: the largest batch, or, where that waits for the link, a
        quarter fewer requests again and again, as long as they make more tokens per second."""
        point = self.largest(slots_each)
        while point is not None and point.batch > 1 and point.is_link_heavy:
            fewer = self._with_slots(3 * point.batch // 4, slots_each)
            if fewer.tokens_per_s <= point.tokens_per_s:
                break
            point = fewer
        return point

    def largest(self, slots_each: int) -> Point | None:
        """The largest batch with at least these slots that is within the time per token, assuming
        that steps only grow with the batch."""
        budget = self.device_budget if slots_each >= self.ask.context else self.budget
        low, high = 0, budget.batch_max(context=self.ask.context, slots_each=slots_each)
        largest = None
        batch = high
        while low < high:
            point = self._with_slots(batch, slots_each)
            if self._in_time(point):
                low, largest = batch, point
            else:
                high = batch - 1
            batch = (low + high + 1) // 2
        return largest

    def _with_slots(self, batch: int, slots_each: int) -> Point:
        """The batch with all rows on the device if that is asked for, else with its fair slots."""
        context = self.ask.context
        if slots_each >= context:
            return self.point(batch, context)
        return self.point(batch, self.budget.slots_each(context=context, batch=batch))

    def _in_time(self, point: Point) -> bool:
        return self.ask.token_us_max is None or point.token_us <= self.ask.token_us_max

    def _too_slow(self, fastest: Point) -> str:
        most = self.ask.token_us_max or 0.0
        return (
            f"{most / 1e3:.1f} ms a token is out of reach: a batch of {fastest.batch:,} takes "
            f"{fastest.token_us / 1e3:.1f} ms, {(fastest.token_us - most) / 1e3:.1f} ms too many"
        )

    def _limiter(self, chosen: Point, points: list[Point]) -> str:
        """The limit that the next larger batch would exceed."""
        larger = [point for point in points if point.batch > chosen.batch]
        if larger and not self._in_time(larger[0]):
            return TIME
        if larger:
            return self.link_name if larger[0].is_link_heavy else "compute"
        least = chosen.slots_each if self.ask.ratio is not None else self.least_slots
        short = self.budget.refusal(
            context=self.ask.context, batch=chosen.batch + 1, slots_each=least
        )
        if short is not None:
            return short.limiter
        return "the batch asked for" if self.ask.batch else "the most requests that are planned"
