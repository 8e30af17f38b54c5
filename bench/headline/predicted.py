"""The predicted half of the headline: the answers of `ess plan` beside the resident baseline.

The baseline is the best batch that keeps every row on the device, in the way of sharing the model
that is best for it. Both sides have the same operators, drafts and prefill.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from ess.bench.harness.report import Row, compare
from ess.bench.headline.plan import Curves, HeadlineRun, Outcome
from ess.errors import BadInput
from ess.pool.capacity import HOST_PAGES
from ess.sim.decode_step import Scenario, simulate
from ess.sim.planning.answers import PlanAnswer, Question, answered
from ess.sim.planning.ask import Ask
from ess.sim.planning.bands import Band
from ess.sim.planning.batches import Point
from ess.sim.planning.deployment import OUTPUT_TOKENS, Work
from ess.sim.planning.node import Node, node_of
from ess.sim.planning.planner import Planner
from ess.sim.planning.planners import planner_of
from ess.sim.planning.ways import best_way
from ess.sim.timeline import Span

USER_RATES: Final = (15.0, 20.0, 30.0)
CURVE_POINTS: Final = 64
UNIT: Final = "tokens/s/GPU"


def check_predicted(plan: HeadlineRun) -> None:
    """Refuses a question that has no answer at any context."""
    for mtp in plan.mtps:
        if not _planner(plan, max(plan.contexts), mtp).is_sparse:
            raise BadInput(f"--model {plan.model} attends to every row: it offloads nothing")


def predict(outcome: Outcome, plan: HeadlineRun, context: int, mtp: int) -> None:
    title = f"{plan.model} on {plan.gpu}"
    planner = best_way(_planner(plan, context, mtp))
    try:
        answer = answered(planner, Question(node=_node(plan), work=_work(context)))
    except BadInput as refusal:
        outcome.rows.append(_refused(title, context, str(refusal)))
        return
    curves = curves_of(planner, plan, answer)
    outcome.rows.extend(
        [
            best_row(planner, f"{title}, most tokens", answer),
            whole_row(planner, f"{title}, most tokens, prefill's GPUs counted", answer),
            *(pareto_row(planner, title, curves, rate) for rate in USER_RATES),
        ]
    )
    if answer.plan.limiter == HOST_PAGES:
        name = f"{title}, host memory without limit"
        outcome.rows.append(unlimited_row(plan, name, context, mtp))
    outcome.curves.append(curves)
    outcome.timelines.append(predicted_timeline(planner, plan, answer.plan.chosen))


def _work(context: int) -> Work:
    """What `ess plan` takes a request to be; at most half of a short context is output."""
    return Work(context=context, output_tokens=min(OUTPUT_TOKENS, max(1, context // 2)))


def _node(plan: HeadlineRun) -> Node:
    node = node_of(plan.gpu)
    return node if plan.node_bytes is None else replace(node, host_bytes=plan.node_bytes)


def _planner(plan: HeadlineRun, context: int, mtp: int) -> Planner:
    node = _node(plan)
    ask = Ask(
        context=context,
        queries_each=mtp,
        accepted=plan.accepted,
        gpu_count=plan.gpus,
        host_bytes=node.host_bytes_of(max(plan.gpus, 1)),
    )
    return planner_of(ask, plan.gpu, node, model=plan.model)


def best_row(planner: Planner, name: str, answer: PlanAnswer) -> Row:
    plan = answer.plan
    row = _row(planner, name, plan.chosen, plan.resident, lacking="not one request fits")
    row.config["limited_by"] = plan.limiter
    if plan.gain is not None:
        row.config["ratio_ends"] = _ends(plan.gain, plan.gain_band)
    row.config["not_measured"] = "; ".join(answer.marks)
    return row


def whole_row(planner: Planner, name: str, answer: PlanAnswer) -> Row:
    """The same batches, with the tokens shared among all GPUs that were bought."""
    both = answer.all_gpus
    config: dict[str, Any] = {
        "half": "predicted",
        "ctx": planner.ask.context,
        "prefill_gpus_each": round(both.offload.prefill_gpus, 1),
    }
    if both.resident is None or both.gain is None:
        return Row(name=name, value=both.offload.tokens_per_s, unit=UNIT, config=config)
    config["prefill_gpus_each_resident"] = round(both.resident.prefill_gpus, 1)
    config["ratio_ends"] = _ends(both.gain, both.gain_band)
    return compare(
        name=name,
        unit=UNIT,
        ours=[both.offload.tokens_per_s],
        baseline=("resident", [both.resident.tokens_per_s]),
        better="higher",
        config=config,
    )


def pareto_row(planner: Planner, title: str, curves: Curves, rate: float) -> Row:
    """The batch with the most tokens among those that give every user at least `rate`."""
    name = f"{title}, {rate:g} tokens/s/user"
    chosen, resident = (
        max(
            (point for point in points if 1e6 / point.token_us >= rate),
            key=lambda point: point.tokens_per_s,
            default=None,
        )
        for points in (curves.points, curves.resident)
    )
    if chosen is None:
        fastest = max(1e6 / point.token_us for point in curves.points)
        return _refused(name, planner.ask.context, f"{fastest:.1f} tokens/s/user at most")
    lacking = "no batch is that fast" if curves.resident else "not one request fits"
    return _row(planner, name, chosen, resident, lacking=lacking)


def unlimited_row(plan: HeadlineRun, name: str, context: int, mtp: int) -> Row:
    """The gain with as much host memory as the batch needs: `host_gib` says how much of it."""
    limited = _planner(plan, context, mtp)
    planner = best_way(replace(limited, ask=replace(limited.ask, host_bytes=None)))
    answer = planner.plan()
    row = _row(planner, name, answer.chosen, answer.resident, lacking="not one request fits")
    if answer.gain is not None:
        row.config["ratio_ends"] = _ends(answer.gain, answer.gain_band)
    return row


def _refused(name: str, context: int, reason: str) -> Row:
    config = {"half": "predicted", "ctx": context, "refused": reason}
    return Row(name=name, value=0.0, unit=UNIT, config=config)


def _row(
    planner: Planner, name: str, chosen: Point, resident: Point | None, *, lacking: str
) -> Row:
    config = _point_config(planner, chosen)
    if resident is None:
        config["resident"] = lacking
        return Row(name=name, value=chosen.tokens_per_s, unit=UNIT, config=config)
    return compare(
        name=name,
        unit=UNIT,
        ours=[chosen.tokens_per_s],
        baseline=(f"resident, batch {resident.batch}", [resident.tokens_per_s]),
        better="higher",
        config=config,
    )


def _ends(gain: float, band: Band) -> str:
    return f"{gain * (1 + band[0]):.2f}..{gain * (1 + band[1]):.2f}"


def _point_config(planner: Planner, point: Point) -> dict[str, Any]:
    ask = planner.ask
    p50, p95 = np.percentile(_misses(planner, point), [50, 95])
    return {
        "half": "predicted",
        "ctx": ask.context,
        "batch": point.batch,
        "mtp": ask.queries_each,
        "slots_each": point.slots_each,
        "host_gib": round(point.host_bytes / (1 << 30)),
        "step_ms": round(point.step_us / 1e3, 1),
        "exposed_ms": round(point.exposed_us / 1e3, 2),
        "per_user": round(1e6 / point.token_us, 1),
        "accepted": round(ask.tokens_each, 2),
        "misses_p50": round(float(p50), 1),
        "misses_p95": round(float(p95), 1),
    }


def _misses(planner: Planner, point: Point) -> tuple[float, ...]:
    """The misses of each layer; a single 0 where every row has a slot."""
    ask, curves = planner.ask, planner.curves
    if point.slots_each >= ask.context:
        return (0.0,)
    return curves.layers(context=ask.context, slots=point.slots_each, queries_each=ask.queries_each)


def curves_of(planner: Planner, plan: HeadlineRun, answer: PlanAnswer) -> Curves:
    ask, budget, resident = planner.ask, planner.budget, planner.baseline or planner
    most = budget.batch_max(context=ask.context, slots_each=planner.least_slots)
    most_resident = resident.device_budget.batch_max(context=ask.context, slots_each=ask.context)
    return Curves(
        title=f"{plan.model} on {plan.gpu}, {ask.context:,} tokens, mtp {ask.queries_each}",
        points=[
            planner.point(batch, budget.slots_each(context=ask.context, batch=batch))
            for batch in _spread(most)
        ],
        resident=[resident.point(batch, ask.context) for batch in _spread(most_resident)],
        index_wall=answer.plan.index_wall,
        floor_batch=answer.plan.floor_batch,
    )


def _spread(most: int) -> list[int]:
    return sorted({round(batch) for batch in np.linspace(1, most, CURVE_POINTS)}) if most else []


def predicted_timeline(
    planner: Planner, plan: HeadlineRun, chosen: Point
) -> tuple[str, list[Span]]:
    ask = planner.ask
    scenario = Scenario(
        batch=chosen.batch / ask.way.attention_tp,
        queries_each=ask.queries_each,
        context=ask.context,
        tbo=chosen.tbo,
        parallel=ask.way,
        misses=None if chosen.slots_each >= ask.context else _misses(planner, chosen),
    )
    spans = simulate(planner.operators, scenario).timeline.spans
    title = f"predicted: {plan.model} on {plan.gpu}, batch {chosen.batch}, {ask.context:,} tokens"
    return title, list(spans)
