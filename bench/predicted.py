"""The predicted half of the headline: the planner's answers, with the resident baseline beside."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ess.bench.headline import Found, Plan
from ess.bench.report import Row, compare
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.sim import misses, tables
from ess.sim.operators import Fitted, Operators
from ess.sim.plan import Ask, Planner, Point
from ess.sim.simulate import Scenario, simulate
from ess.sim.timeline import Span

USER_RATES: Final = (15.0, 20.0, 30.0)
CURVE_POINTS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Throughput over batch, with offload and without; for the plots."""

    title: str
    batches: list[float]
    tokens_per_s: list[float]
    user_rates: list[float]
    resident_batches: list[float]
    resident_tokens_per_s: list[float]
    resident_user_rates: list[float]
    index_wall: int
    floor_batch: int


def predict(found: Found, plan: Plan, context: int, mtp: int) -> None:
    ask = Ask(context=context, queries_each=mtp, accepted=plan.accepted, gpu_count=plan.gpus)
    planner = Planner(
        operators=Operators(tables=tables.load(None), fitted=Fitted.shipped()),
        curves=misses.published(),
        ask=ask,
        layout=ModelLayout.deepseek_v32(),
    )
    for name, rate in (("most tokens", None), *((f"{r:g} tokens/s/user", r) for r in USER_RATES)):
        found.rows.extend(predicted_rows(planner, plan, name, rate))
    found.curves.append(curves_of(planner, plan))
    found.timelines.append(predicted_timeline(planner, plan))


def predicted_rows(planner: Planner, plan: Plan, name: str, rate: float | None) -> list[Row]:
    """The best batch, or the best that gives every user at least `rate`."""
    asked = replace(planner.ask, token_us_max=None if rate is None else 1e6 / rate)
    title = f"{plan.model} on {plan.gpu}, {name}"
    try:
        answer = replace(planner, ask=asked).plan()
    except BadInput as refusal:
        return [
            Row(
                name=title,
                value=0.0,
                unit="tokens/s/GPU",
                config={"half": "predicted", "ctx": asked.context, "refused": str(refusal)},
            )
        ]
    chosen, resident = answer.chosen, answer.resident
    config = _point_config(planner, chosen) | {"limited_by": answer.limiter}
    if resident is None:
        return [
            Row(
                name=title,
                value=chosen.tokens_per_s,
                unit="tokens/s/GPU",
                config=config | {"resident": "not one request in time" if rate else "none fits"},
            )
        ]
    return [
        compare(
            name=title,
            unit="tokens/s/GPU",
            ours=[chosen.tokens_per_s],
            baseline=(f"resident, batch {resident.batch}", [resident.tokens_per_s]),
            better="higher",
            config=config,
        )
    ]


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
        "step_ms": round(point.step_us / 1e3, 1),
        "exposed_ms": round(point.exposed_us / 1e3, 2),
        "per_user": round(1e6 / point.token_us, 1),
        "accepted": round(ask.tokens_each, 2),
        "misses_p50": round(float(p50), 1),
        "misses_p95": round(float(p95), 1),
    }


def curves_of(planner: Planner, plan: Plan) -> Curves:
    ask, budget = planner.ask, planner.budget
    answer = planner.plan()
    batches = _spread(answer.floor_batch)
    points = [
        planner.point(batch, budget.slots_each(context=ask.context, batch=batch))
        for batch in batches
    ]
    most = budget.batch_max(context=ask.context, slots_each=ask.context)
    whole = [planner.point(batch, ask.context) for batch in _spread(most)]
    return Curves(
        title=f"{plan.model} on {plan.gpu}, {ask.context:,} tokens, mtp {ask.queries_each}",
        batches=[float(one.batch) for one in points],
        tokens_per_s=[one.tokens_per_s for one in points],
        user_rates=[1e6 / one.token_us for one in points],
        resident_batches=[float(one.batch) for one in whole],
        resident_tokens_per_s=[one.tokens_per_s for one in whole],
        resident_user_rates=[1e6 / one.token_us for one in whole],
        index_wall=answer.index_wall,
        floor_batch=answer.floor_batch,
    )


def _spread(most: int) -> list[int]:
    return sorted({round(one) for one in np.linspace(1, most, CURVE_POINTS)}) if most else []


def predicted_timeline(planner: Planner, plan: Plan) -> tuple[str, list[Span]]:
    ask, chosen = planner.ask, planner.plan().chosen
    layers = planner.curves.layers(
        context=ask.context, slots=chosen.slots_each, queries_each=ask.queries_each
    )
    scenario = Scenario(
        batch=chosen.batch,
        queries_each=ask.queries_each,
        context=ask.context,
        tbo=chosen.tbo,
        ranks=ask.gpu_count,
        misses=layers,
    )
    spans = simulate(planner.operators, scenario).timeline.spans
    title = f"predicted: {plan.model} on {plan.gpu}, batch {chosen.batch}, {ask.context:,} tokens"
    return title, list(spans)
