"""One decode step of one GPU, on explicit lanes: what a batch costs, and what offload adds to it.

    compute    kernels, in stream order
    exchange   expert dispatch and combine
    fetch      host to device; DA and DBA start it before the compute that hides it
    store      device to host, behind everything

With two-batch overlap the halves of the batch take turns: attention of both, then experts of both,
so each half's exchange runs beside the other half's compute. An exposed fetch stops the compute
lane, as it does on a stream. Modes come from `overlap.policy`, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ess.cost import exposed, transfer_us
from ess.errors import BadInput
from ess.overlap.policy import Mode, best_mode
from ess.sim.operators.stages import LAYOUT, TOP_K, Operators, Shape, Stages
from ess.sim.timeline import COMPUTE, EXCHANGE, FETCH, STORE, Timeline

LAYERS: Final = LAYOUT.layer_count
DENSE_LAYERS: Final = 3
ROW_BYTES: Final = LAYOUT.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`misses` are per request and layer; none given means that the whole latent is resident.

    `mode` forces one schedule on every layer; without it the policy chooses per layer.
    """

    batch: int
    queries_each: int
    context: int
    tbo: bool = True
    ranks: int = 32
    misses: tuple[float, ...] | None = None
    mode: Mode | None = None

    def __post_init__(self) -> None:
        sizes = (self.batch, self.queries_each, self.context)
        if min(sizes) < 1:
            raise BadInput(f"batch, queries and context are {sizes}, all must be 1 or more")
        if self.misses is not None and len(self.misses) != LAYERS:
            raise BadInput(f"misses of {len(self.misses)} layers, the model has {LAYERS}")

    @property
    def half_count(self) -> int:
        return 2 if self.tbo and self.batch > 1 else 1

    @property
    def shape(self) -> Shape:
        return Shape(
            request_count=self.batch / self.half_count,
            queries_each=self.queries_each,
            context=self.context,
            ranks=self.ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step. `exposed_us` is what the same step takes longer than with everything resident."""

    step_us: float
    exposed_us: float
    fetch_us: float
    modes: tuple[Mode, ...]
    timeline: Timeline

    def tokens_per_s(self, *, batch: int, accepted: float) -> float:
        return batch * accepted / self.step_us * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFetch:
    """How one layer of one micro-batch gets its missing rows."""

    mode: Mode
    moved_us: float
    missing_share: float
    split_us: float
    index_split_us: float


NO_FETCHES: Final[Sequence[LayerFetch | None]] = (None,) * LAYERS


def simulate(operators: Operators, scenario: Scenario) -> Prediction:
    sparse = operators.stages(scenario.shape)
    fetches = [_layer_fetch(operators, scenario, sparse, miss) for miss in scenario.misses or ()]
    timeline = _lay_out(operators, scenario, sparse, fetches or NO_FETCHES)
    layers_us = timeline.end_us
    resident_us = layers_us
    if fetches:
        resident_us = _lay_out(operators, scenario, sparse, NO_FETCHES).end_us
    return Prediction(
        step_us=layers_us + _around_us(operators, scenario),
        exposed_us=layers_us - resident_us,
        fetch_us=timeline.busy_us(FETCH),
        modes=tuple(fetch.mode for fetch in fetches) or (Mode.RESIDENT,) * LAYERS,
        timeline=timeline,
    )


def _share(scenario: Scenario, miss_count: float) -> float:
    """The part of a request's selected rows that waits for the fetch."""
    return min(1.0, miss_count / (scenario.queries_each * TOP_K))


def _layer_fetch(
    operators: Operators, scenario: Scenario, stages: Stages, miss_count: float
) -> LayerFetch:
    query_count, share = scenario.shape.query_count, _share(scenario, miss_count)
    moved_us = transfer_us(
        miss_count=miss_count,
        request_count=scenario.shape.request_count,
        row_bytes=ROW_BYTES,
        bytes_per_us=operators.machine.link_rate,
    )
    mode = scenario.mode
    if mode is None:
        behind = operators.hiding(stages, query_count=query_count, missing_share=share)
        mode = best_mode(exposed(moved_us, behind))
    return LayerFetch(
        mode=mode,
        moved_us=moved_us,
        missing_share=share,
        split_us=operators.split_us(query_count),
        index_split_us=operators.index_split_us,
    )


def _lay_out(
    operators: Operators,
    scenario: Scenario,
    sparse: Stages,
    fetches: Sequence[LayerFetch | None],
) -> Timeline:
    timeline = Timeline()
    dense = operators.stages(scenario.shape, dense=True)
    stored_us = scenario.shape.query_count * ROW_BYTES / operators.machine.store_rate
    before: list[tuple[int, ...]] = [()] * scenario.half_count
    for layer, fetch in enumerate(fetches):
        stages = dense if layer < DENSE_LAYERS else sparse
        attended = [_attention(timeline, stages, fetch, after) for after in before]
        if fetch is not None:
            for task in attended:
                timeline.add(STORE, "store", stored_us, (task,))
        before = _experts(timeline, stages, attended)
    return timeline


def _attention(
    timeline: Timeline, stages: Stages, fetch: LayerFetch | None, after: tuple[int, ...]
) -> int:
    """The attention block of one half; returns its last task."""
    timeline.add(COMPUTE, "project", stages.project, after)
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
    return timeline.add(COMPUTE, "output", stages.output)


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
    """Dispatch of all halves, then shared and routed experts of each; returns what ends each."""
    sent = [timeline.add(EXCHANGE, "dispatch", stages.dispatch, (task,)) for task in attended]
    ended: list[tuple[int, ...]] = []
    for dispatched in sent:
        timeline.add(COMPUTE, "shared", stages.shared)
        done = timeline.add(COMPUTE, "experts", stages.experts, (dispatched,))
        ended.append((timeline.add(EXCHANGE, "combine", stages.combine, (done,)),))
    return ended


def _around_us(operators: Operators, scenario: Scenario) -> float:
    """Outside the layers: the head over all queries, a draft pass for each further one, the host.

    A draft pass is one layer and the head over the whole batch, one query each. It attends resident
    rows and fetches behind, so offload adds nothing to it.
    """
    pass_shape = replace(scenario.shape, request_count=scenario.batch, queries_each=1)
    stages = operators.stages(pass_shape)
    hidden_us = min(stages.dispatch, stages.shared)
    exchange_us = stages.dispatch + stages.combine - hidden_us
    draft_us = stages.compute_us + exchange_us + operators.head_us(scenario.batch)
    head_us = operators.head_us(scenario.batch * scenario.queries_each)
    return (scenario.queries_each - 1) * draft_us + head_us + operators.fitted.step_fixed_us
