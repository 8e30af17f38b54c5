"""The predicted half of the headline: the planner's answers beside the resident baseline."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ess.bench.harness.report import Row, compare
from ess.bench.headline.plan import Curves, Outcome, Plan
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.sim.decode_step import Scenario, simulate
from ess.sim.locality import misses
from ess.sim.operators.gpus import operators_of
from ess.sim.operators.parallel import Parallel
from ess.sim.planning.ask import Ask
from ess.sim.planning.batches import Point
from ess.sim.planning.planner import Plan as Answer
from ess.sim.planning.planner import Planner
from ess.sim.timeline import Span

USER_RATES: Final = (15.0, 20.0, 30.0)
CURVE_POINTS: Final = 20


def predict(outcome: Outcome, plan: Plan, context: int, mtp: int) -> None:
    ask = Ask(context=context, queries_each=mtp, accepted=plan.accepted, gpu_count=plan.gpus)
    planner = Planner(
        operators=operators_of(plan.gpu),
        curves=misses.published(),
        ask=ask,
        layout=ModelLayout.deepseek_v32(),
    )
    title = f"{plan.model} on {plan.gpu}"
    try:
        answer = planner.plan()
    except BadInput as refusal:
        outcome.rows.append(_refused(title, context, str(refusal)))
        return
    curves = curves_of(planner, plan, answer)
    best = _row(planner, f"{title}, most tokens", answer.chosen, answer.resident)
    best.config["limited_by"] = answer.limiter
    outcome.rows.append(best)
    outcome.rows.extend(pareto_row(planner, title, curves, rate) for rate in USER_RATES)
    outcome.curves.append(curves)
    outcome.timelines.append(predicted_timeline(planner, plan, answer.chosen))


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
    return _row(planner, name, chosen, resident)


def _refused(name: str, context: int, reason: str) -> Row:
    config = {"half": "predicted", "ctx": context, "refused": reason}
    return Row(name=name, value=0.0, unit="tokens/s/GPU", config=config)


def _row(planner: Planner, name: str, chosen: Point, resident: Point | None) -> Row:
    config = _point_config(planner, chosen)
    if resident is None:
        config["resident"] = "not one request"
        return Row(name=name, value=chosen.tokens_per_s, unit="tokens/s/GPU", config=config)
    return compare(
        name=name,
        unit="tokens/s/GPU",
        ours=[chosen.tokens_per_s],
        baseline=(f"resident, batch {resident.batch}", [resident.tokens_per_s]),
        better="higher",
        config=config,
    )


def _point_config(planner: Planner, point: Point) -> dict[str, Any]:
    ask = planner.ask
    layers = planner.curves.layers(
        context=ask.context, slots=point.slots_each, queries_each=ask.queries_each
    )
    p50, p95 = np.percentile(layers, [50, 95])
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


def curves_of(planner: Planner, plan: Plan, answer: Answer) -> Curves:
    ask, budget = planner.ask, planner.budget
    most = budget.batch_max(context=ask.context, slots_each=ask.context)
    return Curves(
        title=f"{plan.model} on {plan.gpu}, {ask.context:,} tokens, mtp {ask.queries_each}",
        points=[
            planner.point(batch, budget.slots_each(context=ask.context, batch=batch))
            for batch in _spread(answer.floor_batch)
        ],
        resident=[planner.point(batch, ask.context) for batch in _spread(most)],
        index_wall=answer.index_wall,
        floor_batch=answer.floor_batch,
    )


def _spread(most: int) -> list[int]:
    return sorted({round(batch) for batch in np.linspace(1, most, CURVE_POINTS)}) if most else []


def predicted_timeline(planner: Planner, plan: Plan, chosen: Point) -> tuple[str, list[Span]]:
    ask = planner.ask
    layers = planner.curves.layers(
        context=ask.context, slots=chosen.slots_each, queries_each=ask.queries_each
    )
    scenario = Scenario(
        batch=chosen.batch,
        queries_each=ask.queries_each,
        context=ask.context,
        tbo=chosen.tbo,
        parallel=Parallel.wide(ask.gpu_count),
        misses=layers,
    )
    spans = simulate(planner.operators, scenario).timeline.spans
    title = f"predicted: {plan.model} on {plan.gpu}, batch {chosen.batch}, {ask.context:,} tokens"
    return title, list(spans)
