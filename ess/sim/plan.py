"""What to run: batch, slots and time for a model on given GPUs, and what limits them.

For every batch the index takes what its pages need and slots get the rest of the device memory, so
the ratio falls as the batch grows; below the slot floor misses explode (the working set of a layer
no longer fits), so a batch that cannot give every request its floor is not planned. Among those
that remain, and that keep the time per token, the batch with the most tokens per second is taken.

The device memory is what weights and reserves leave; `Ask.device_bytes` overrides it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.overlap.policy import Mode
from ess.pool.capacity import HOST_PAGES, page_count
from ess.sim.decode_step import Prediction, Scenario, simulate
from ess.sim.locality import misses
from ess.sim.memory_budget import Budget
from ess.sim.operators.parallel import Parallel
from ess.sim.operators.stages import Operators
from ess.units import format_bytes

MEMORY_SHARE: Final = 0.9
RESERVED_BYTES: Final = 4_169_107_456
"""Workspace, graphs and communication: 3.5 GiB and 392 MiB."""

REPLICATED_BYTES: Final = 20_600_000_000
EXPERT_BYTES: Final = 652_800_000_000
"""DeepSeek-V3.2 in fp8: what every GPU holds, and the routed experts that all share."""

DRAFT_ACCEPTANCE: Final = 0.7
CANDIDATES_MAX: Final = 24
HEAVY_LINK: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Of `batch` (per GPU) and `ratio` (slots over context) at most one is given."""

    context: int
    queries_each: int = 2
    accepted: float | None = None
    gpu_count: int = 32
    device_bytes: int | None = None
    host_bytes: int | None = None
    token_us_max: float | None = None
    batch: int | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        if min(self.context, self.queries_each, self.gpu_count) < 1:
            sizes = f"context {self.context}, mtp {self.queries_each}, gpus {self.gpu_count}"
            raise BadInput(f"{sizes}: all must be 1 or more")
        if self.batch is not None and self.ratio is not None:
            raise BadInput(f"batch {self.batch} fixes the ratio; leave {self.ratio} out, or batch")
        if self.batch is not None and self.batch < 1:
            raise BadInput(f"a batch of {self.batch} requests per GPU decodes nothing")
        if self.ratio is not None and not 0.0 < self.ratio <= 1.0:
            raise BadInput(f"a ratio of {self.ratio} is outside 0..1, slots over context")
        if not 1.0 <= self.tokens_each <= self.queries_each:
            most = f"between 1 and {self.queries_each} tokens a step"
            raise BadInput(
                f"{self.tokens_each} accepted tokens with mtp {self.queries_each}: {most}"
            )

    @property
    def tokens_each(self) -> float:
        """Tokens per request and step: as given, or 70 % for each draft in turn."""
        expected = math.fsum(DRAFT_ACCEPTANCE**draft for draft in range(self.queries_each))
        return expected if self.accepted is None else self.accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One batch on one GPU. `exposed_us` is the part of a step that waits for the host link."""

    batch: int
    slots_each: int
    ratio: float
    tbo: bool
    step_us: float
    exposed_us: float
    token_us: float
    tokens_per_s: float
    modes: dict[str, int]
    host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`resident` is the best without offload; None when not one whole request fits.

    `break_even_batch` is the least batch tried that beats it, `index_wall` the batch at which index
    keys alone fill the device, `floor_batch` the batch at which slots reach their floor.
    """

    device_bytes: int
    accepted: float
    chosen: Point
    limiter: str
    resident: Point | None
    gain: float | None
    break_even_batch: int | None
    slot_floor: int
    floor_batch: int
    index_wall: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Answers an ask. The paper counts memory without the slot map and the MTP layer."""

    operators: Operators
    curves: misses.MissCurves
    ask: Ask
    layout: ModelLayout
    count_map: bool = True

    @property
    def budget(self) -> Budget:
        """Host memory is shared evenly by the GPUs of the ask."""
        ask = self.ask
        share = None if ask.host_bytes is None else ask.host_bytes // ask.gpu_count
        return Budget(
            layout=self.layout,
            device_bytes=self.device_bytes,
            host_bytes=share,
            count_map=self.count_map,
        )

    @property
    def device_bytes(self) -> int:
        if self.ask.device_bytes is not None:
            return self.ask.device_bytes
        whole = MEMORY_SHARE * self.operators.machine.memory_bytes
        weights = REPLICATED_BYTES + EXPERT_BYTES // self.ask.gpu_count
        left = int(whole) - weights - RESERVED_BYTES
        if left <= 0:
            raise BadInput(
                f"weights on {self.ask.gpu_count} GPUs take {format_bytes(weights)} each and leave "
                f"no memory for a request: {format_bytes(-left)} are missing; take more GPUs"
            )
        return left

    @property
    def slot_floor(self) -> int:
        return min(self.ask.context, self.layout.slot_floor)

    def plan(self) -> Plan:
        points = self._points()
        kept = [point for point in points if self._in_time(point)]
        if not kept:
            raise BadInput(self._too_slow(min(points, key=lambda point: point.token_us)))
        chosen = max(kept, key=lambda point: point.tokens_per_s)
        resident = self._resident()
        better = [
            point.batch
            for point in points
            if resident and point.tokens_per_s > resident.tokens_per_s
        ]
        return Plan(
            device_bytes=self.device_bytes,
            accepted=self.ask.tokens_each,
            chosen=chosen,
            limiter=self._limiter(chosen, points),
            resident=resident,
            gain=None if resident is None else chosen.tokens_per_s / resident.tokens_per_s,
            break_even_batch=min(better, default=None),
            slot_floor=self.slot_floor,
            floor_batch=self._batch_max(self.slot_floor),
            index_wall=self._batch_max(0),
        )

    def point(self, batch: int, slots_each: int) -> Point:
        """The faster of one batch and two overlapped halves."""
        both = [self._predict(batch, slots_each, tbo=tbo) for tbo in (False, True)]
        tbo = both[1].step_us < both[0].step_us
        faster = both[tbo]
        return Point(
            batch=batch,
            slots_each=slots_each,
            ratio=slots_each / self.ask.context,
            tbo=tbo,
            step_us=faster.step_us,
            exposed_us=faster.exposed_us,
            token_us=faster.step_us / self.ask.tokens_each,
            tokens_per_s=faster.tokens_per_s(batch=batch, accepted=self.ask.tokens_each),
            modes={mode.name: faster.modes.count(mode) for mode in Mode if mode in faster.modes},
            host_bytes=batch * page_count(self.ask.context) * self.layout.host_page_bytes,
        )

    def _points(self) -> list[Point]:
        ask, budget = self.ask, self.budget
        if ask.batch is not None:
            slots = budget.slots_each(context=ask.context, batch=ask.batch)
            self._refuse_unless(ask.batch, self.slot_floor)
            return [self.point(ask.batch, slots)]
        least = self.slot_floor if ask.ratio is None else max(1, int(ask.ratio * ask.context))
        self._refuse_unless(1, least)
        most = self._batch_max(least)
        if ask.ratio is not None:
            return [self.point(batch, least) for batch in _spread(most)]
        return [
            self.point(batch, budget.slots_each(context=ask.context, batch=batch))
            for batch in _spread(most)
        ]

    def _batch_max(self, slots_each: int) -> int:
        return self.budget.batch_max(context=self.ask.context, slots_each=slots_each)

    def _refuse_unless(self, batch: int, slots_each: int) -> None:
        """The refusal says how many bytes are missing, and where."""
        context, budget = self.ask.context, self.budget
        short = budget.refusal(context=context, batch=batch, slots_each=slots_each)
        if short is None:
            return
        place = "host" if short.limiter == HOST_PAGES else "device"
        if place == "host":
            missing = (short.needed - short.free) * self.layout.host_page_bytes
        else:
            index_bytes = budget.index_bytes(context=context, batch=batch)
            missing = index_bytes + batch * slots_each * budget.slot_bytes - self.device_bytes
        raise BadInput(
            f"a batch of {batch} at {context:,} tokens does not fit: with {slots_each:,} slots a "
            f"layer it {short}; {format_bytes(missing)} of {place} memory are missing per GPU"
        )

    def _resident(self) -> Point | None:
        """The best batch with every row on the device."""
        most = self._batch_max(self.ask.context)
        points = [self.point(batch, self.ask.context) for batch in _spread(most)] if most else []
        kept = [point for point in points if self._in_time(point)]
        return max(kept, key=lambda point: point.tokens_per_s, default=None)

    def _predict(self, batch: int, slots_each: int, *, tbo: bool) -> Prediction:
        ask = self.ask
        layers = self.curves.layers(
            context=ask.context, slots=slots_each, queries_each=ask.queries_each
        )
        scenario = Scenario(
            batch=batch,
            queries_each=ask.queries_each,
            context=ask.context,
            tbo=tbo,
            parallel=Parallel.wide(ask.gpu_count),
            misses=None if slots_each >= ask.context else layers,
        )
        return simulate(self.operators, scenario)

    def _in_time(self, point: Point) -> bool:
        return self.ask.token_us_max is None or point.token_us <= self.ask.token_us_max

    def _too_slow(self, fastest: Point) -> str:
        most = self.ask.token_us_max or 0.0
        return (
            f"{most / 1e3:.1f} ms a token is out of reach: a batch of {fastest.batch} takes "
            f"{fastest.token_us / 1e3:.1f} ms, {(fastest.token_us - most) / 1e3:.1f} ms too many"
        )

    def _limiter(self, chosen: Point, points: list[Point]) -> str:
        """What stops the next larger batch."""
        larger = [point for point in points if point.batch > chosen.batch]
        if larger:
            heavy = larger[0].exposed_us > HEAVY_LINK * larger[0].step_us
            return "host link" if heavy else "compute"
        least = chosen.slots_each if self.ask.ratio is not None else self.slot_floor
        short = self.budget.refusal(
            context=self.ask.context, batch=chosen.batch + 1, slots_each=least
        )
        return "the batch asked for" if short is None else short.limiter


def _spread(most: int) -> list[int]:
    """At most `CANDIDATES_MAX` batches from 1 to `most`, evenly, both ends among them."""
    if most <= CANDIDATES_MAX:
        return list(range(1, most + 1))
    step = (most - 1) / (CANDIDATES_MAX - 1)
    return sorted({1 + round(step * place) for place in range(CANDIDATES_MAX)})
