"""One decode step of one GPU, on explicit lanes: what a batch costs, and what offload adds to it.

    compute    kernels, in stream order
    exchange   expert dispatch and combine
    fetch      host to device; DA and DBA start it before the compute that hides it
    store      device to host, behind everything

With two-batch overlap the halves of the batch take turns: attention of both, then experts of both,
so each half's exchange runs beside the other half's compute. An exposed fetch stops the compute
lane, as it does on a stream. Modes come from `overlap.policy`, layer by layer.

The layer of the drafts misses as many rows as the mean layer. The first draft pass fetches them as
other layers do, for the whole batch; later passes read resident rows only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ess.cost import exposed, transfer_us
from ess.errors import BadInput
from ess.overlap.policy import Mode, best_mode
from ess.sim.operators.parallel import Parallel
from ess.sim.operators.stages import MicroBatch, Operators, Stages, hiding_of
from ess.sim.timeline import COMPUTE, EXCHANGE, FETCH, STORE, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`batch` is requests per GPU, all stages of a pipeline counted: 4 requests on 8 GPUs are 0.5.

    `misses` are per request and layer; without them the whole latent is resident. `mode` forces one
    schedule on every layer; without it the policy chooses per layer. `prompt_groups` of the
    attention groups (None: all) also run `prompt_chunk` prompt tokens behind `prompt_prefix`.
    """

    batch: float
    queries_each: int
    context: int
    tbo: bool = True
    parallel: Parallel = field(default_factory=lambda: Parallel.wide(32))
    misses: tuple[float, ...] | None = None
    mode: Mode | None = None
    prompt_chunk: int | None = None
    prompt_prefix: int = 0
    prompt_groups: int | None = None

    def __post_init__(self) -> None:
        sizes = (self.batch, self.queries_each, self.context)
        if not self.batch > 0 or min(sizes[1:]) < 1:
            raise BadInput(
                f"batch, queries and context are {sizes}: the batch must be above 0, "
                "the others 1 or more"
            )
        if (self.prompt_chunk or 1) < 1 or self.prompt_prefix < 0:
            raise BadInput(
                f"a chunk of {self.prompt_chunk} prompt tokens behind {self.prompt_prefix}: "
                "the chunk must be 1 or more, the prefix not negative"
            )

    @property
    def group_batch(self) -> float:
        """Requests of one attention group in one micro-batch of the pipeline."""
        return self.batch * self.parallel.attention_tp

    @property
    def half_count(self) -> int:
        return 2 if self.tbo and self.group_batch > 1 else 1

    @property
    def shape(self) -> MicroBatch:
        """The shape of one half."""
        return self._shape(self.half_count)

    @property
    def whole(self) -> MicroBatch:
        return self._shape(1)

    def _shape(self, part_count: int) -> MicroBatch:
        return MicroBatch(
            request_count=self.group_batch / part_count,
            queries_each=self.queries_each,
            context=self.context,
            parallel=self.parallel,
            prompt_tokens=-(-(self.prompt_chunk or 0) // part_count),
            prompt_prefix=self.prompt_prefix,
            prompt_groups=self.prompt_groups,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step. `exposed_us` is its extra time over the same step with everything resident; the
    drafts' part of it is not on the `timeline`, which has the layers of the model.

    `band` says how far `step_us` may be off, as shares of it: (-0.1, 0.15) is from 10 % less to 15
    % more. `marks` name what does not rest on a measured table.
    """

    step_us: float
    exposed_us: float
    modes: tuple[Mode, ...]
    timeline: Timeline
    band: tuple[float, float]
    marks: tuple[str, ...]

    def tokens_per_s(self, *, batch: float, accepted: float) -> float:
        return batch * accepted / self.step_us * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFetch:
    """How one layer of one micro-batch fetches its missing rows."""

    mode: Mode
    moved_us: float
    missing_share: float
    split_us: float
    index_split_us: float


def simulate(operators: Operators, scenario: Scenario) -> Prediction:
    layers = operators.family.layout.layer_count
    if scenario.misses is not None and len(scenario.misses) != layers:
        raise BadInput(f"misses of {len(scenario.misses)} layers, the model has {layers}")
    shape, halves = scenario.shape, scenario.half_count
    plain = stages_of(operators, shape)
    fetches = _fetches(operators, scenario, plain)
    row_bytes, rate = operators.family.layout.row_bytes, operators.machine.store_rate
    if fetches:
        stored_us = shape.query_count * row_bytes / rate
        timeline = lay_out(plain, fetches, half_count=halves, stored_us=stored_us)
    else:
        timeline = lay_out(plain, (None,) * layers, half_count=halves)
    layers_us = timeline.end_us
    resident_us = _resident_us(plain, halves) if fetches else layers_us
    drafted_us = _draft_exposed_us(operators, scenario) if fetches else 0.0
    trust = operators.trust(shape)
    return Prediction(
        step_us=layers_us + drafted_us + operators.around_us(scenario.whole),
        exposed_us=layers_us + drafted_us - resident_us,
        modes=tuple(fetch.mode for fetch in fetches) or (Mode.RESIDENT,) * layers,
        timeline=timeline,
        band=trust.band,
        marks=trust.marks,
    )


@lru_cache(maxsize=64)
def _resident_us(layers: tuple[Stages, ...], half_count: int) -> float:
    """The layers' time without fetches: a planner asks for it with every count of slots."""
    return lay_out(layers, (None,) * len(layers), half_count=half_count).end_us


def _draft_exposed_us(operators: Operators, scenario: Scenario) -> float:
    """Extra time of the first draft pass, which `around_us` counts with all rows resident."""
    whole, misses = scenario.whole, scenario.misses or ()
    stages = operators.first_draft(whole)
    if stages is None:
        return 0.0
    fetch = _layer_fetch(operators, scenario, whole, stages, math.fsum(misses) / len(misses))
    with_us, without_us = (lay_out([stages], [each], half_count=1).end_us for each in (fetch, None))
    return with_us - without_us


def stages_of(operators: Operators, shape: MicroBatch) -> tuple[Stages, ...]:
    """The stages of every layer."""
    kinds = operators.family.kinds
    by_kind = {kind: operators.stages(shape, kind) for kind in set(kinds)}
    return tuple(by_kind[kind] for kind in kinds)


def _fetches(
    operators: Operators, scenario: Scenario, layers: Sequence[Stages]
) -> list[LayerFetch]:
    """The fetch of every layer; none where everything is resident."""
    misses = scenario.misses or ()
    if misses and not operators.family.is_sparse:
        raise BadInput(f"{operators.family.name} attends to every row: there is nothing to offload")
    shape = scenario.shape
    return [
        _layer_fetch(operators, scenario, shape, stages, miss)
        for stages, miss in zip(layers, misses, strict=False)
    ]


def _layer_fetch(
    operators: Operators, scenario: Scenario, shape: MicroBatch, stages: Stages, miss_count: float
) -> LayerFetch:
    layout, query_count = operators.family.layout, shape.query_count
    share = min(1.0, miss_count / (scenario.queries_each * layout.top_k))
    moved_us = transfer_us(
        miss_count=miss_count,
        request_count=shape.request_count,
        row_bytes=layout.row_bytes,
        bytes_per_us=operators.machine.link_rate,
    )
    mode = scenario.mode
    if mode is None:
        behind = hiding_of(operators, stages, query_count=query_count, missing_share=share)
        mode = best_mode(exposed(moved_us, behind))
    return LayerFetch(
        mode=mode,
        moved_us=moved_us,
        missing_share=share,
        split_us=operators.split_us(query_count),
        index_split_us=operators.index_split_us,
    )


def lay_out(
    layers: Sequence[Stages],
    fetches: Sequence[LayerFetch | None],
    *,
    half_count: int,
    stored_us: float = 0.0,
) -> Timeline:
    """`stored_us` is the time to store the rows of a half, in layers that fetch."""
    timeline = Timeline()
    before: list[tuple[int, ...]] = [()] * half_count
    joined_us = 0.0
    for stages, fetch in zip(layers, fetches, strict=True):
        attended = [_attention(timeline, stages, fetch, after, joined_us) for after in before]
        if fetch is not None:
            for task in attended:
                timeline.add(STORE, "store", stored_us, (task,))
        before, joined_us = _experts(timeline, stages, attended), stages.join
    for after in before:
        timeline.add(COMPUTE, "join", joined_us, after)
    return timeline


def _attention(
    timeline: Timeline,
    stages: Stages,
    fetch: LayerFetch | None,
    after: tuple[int, ...],
    joined_us: float,
) -> int:
    """Adds the attention block of one half, after its expert outputs have been summed; returns the
    last task."""
    timeline.add(COMPUTE, "project", joined_us + stages.project, after)
    match fetch.mode if fetch else Mode.RESIDENT:
        case Mode.DA | Mode.DBA:
            assert fetch is not None
            _split_attend(timeline, stages, fetch)
        case Mode.NONE:
            assert fetch is not None
            timeline.add(COMPUTE, "pre_attn", stages.pre_attn)
            indexed = timeline.add(COMPUTE, "index", stages.index)
            fetched = timeline.add(FETCH, "fetch", fetch.moved_us, (indexed,))
            timeline.add(COMPUTE, "attend", stages.attend, (fetched,))
        case Mode.RESIDENT:
            timeline.add(COMPUTE, "index", stages.index)
            timeline.add(COMPUTE, "pre_attn", stages.pre_attn)
            timeline.add(COMPUTE, "attend", stages.attend)
    timeline.add(COMPUTE, "output", stages.output)
    return timeline.add(COMPUTE, "route", stages.route + stages.send)


def _split_attend(timeline: Timeline, stages: Stages, fetch: LayerFetch) -> None:
    """DA fetches after the indexer, DBA after each half of it; fetched rows are attended last."""
    part_count = 2 if fetch.mode is Mode.DBA else 1
    fetched = []
    for part in range(part_count):
        extra_us = fetch.index_split_us if part else 0.0
        indexed = timeline.add(COMPUTE, "index", stages.index / part_count + extra_us)
        fetched.append(timeline.add(FETCH, "fetch", fetch.moved_us / part_count, (indexed,)))
    late_us = stages.attend * fetch.missing_share
    timeline.add(COMPUTE, "pre_attn", stages.pre_attn)
    timeline.add(COMPUTE, "attend_resident", stages.attend - late_us)
    timeline.add(COMPUTE, "attend_fetched", late_us + fetch.split_us, fetched)


def _experts(timeline: Timeline, stages: Stages, attended: Sequence[int]) -> list[tuple[int, ...]]:
    """Adds dispatch of all halves, then shared and routed experts of each; returns last tasks."""
    sent = [timeline.add(EXCHANGE, "dispatch", stages.dispatch, (task,)) for task in attended]
    ended: list[tuple[int, ...]] = []
    for dispatched in sent:
        timeline.add(COMPUTE, "shared", stages.shared)
        done = timeline.add(COMPUTE, "experts", stages.experts, (dispatched,))
        ended.append((timeline.add(EXCHANGE, "combine", stages.combine, (done,)),))
    return ended
