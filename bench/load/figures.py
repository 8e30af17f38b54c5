"""The figures of an offered load, by the names and definitions of `vllm bench serve` and of
SGLang's `bench_serving`.

    first token          TTFT: from sending to the first event
    per further token    TPOT: of one request, from its first event to its last, over its tokens but
                         the first; requests of one token have none
    between events       ITL: every gap of every request; with drafts an event has several tokens
    whole answer         E2EL: from sending to the last event
    goodput              requests per second whose first token and further tokens met the objective
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ess.bench.harness.measure.streaming import TimedAnswer
from ess.bench.harness.report import Row, compare
from ess.bench.load.offered import OfferedLoad
from ess.sim.serving.goodput import Objective

Times = Callable[[OfferedLoad], list[float]]
SHOWN: Final = (50, 99)
LEAST: Final = 1e-9
SAMPLES_MAX: Final = 10_000

TIMES: Final[tuple[tuple[str, Times], ...]] = (
    ("first token", lambda load: [seen.first_s for seen in load.seen]),
    (
        "per further token",
        lambda load: [s for seen in load.seen if (s := seen.token_s) is not None],
    ),
    ("between events", lambda load: [gap for seen in load.seen for gap in seen.gaps_s]),
    ("whole answer", lambda load: [seen.last_s for seen in load.seen]),
)
RATES: Final[tuple[tuple[str, str, Callable[[OfferedLoad], float]], ...]] = (
    ("requests", "requests/s", lambda load: len(load.seen)),
    ("output", "tokens/s", lambda load: sum(seen.output_tokens for seen in load.seen)),
    (
        "prompts and output",
        "tokens/s",
        lambda load: sum(seen.output_tokens + seen.prompt_tokens for seen in load.seen),
    ),
)


def is_good(seen: TimedAnswer, objective: Objective) -> bool:
    each = seen.token_s
    return seen.first_s <= objective.ttft_s and (each is None or each <= objective.tpot_s)


def load_rows(
    load: OfferedLoad,
    objective: Objective,
    *,
    config: dict[str, Any],
    against: OfferedLoad | None = None,
) -> list[Row]:
    """Rows of a load, beside the same load on another server, if one is named."""
    rows = [_answered(load, config)]
    for name, unit, total in RATES:
        rates = [total(each) / each.took_s for each in (load, against or load)]
        rows.append(_row(name, unit, rates, against, better="higher"))
    rows.append(_goodput(load, objective))
    for name, times in TIMES:
        rows += _time_rows(name, times, load, against)
    return [*rows, _in_flight(load), _late(load), *_cached(load)]


def _answered(load: OfferedLoad, config: dict[str, Any]) -> Row:
    failed = Counter(load.failures)
    return Row(
        name="answered",
        value=len(load.seen),
        unit="requests",
        baseline="asked",
        baseline_value=load.count,
        ratio=len(load.seen) / load.count,
        config=config | {"failed": dict(failed.most_common(3)) or "none"},
    )


def _row(
    name: str,
    unit: str,
    pair: Sequence[float],
    against: OfferedLoad | None,
    *,
    better: Any,
    config: dict[str, Any] | None = None,
    samples: Sequence[float] = (),
) -> Row:
    ours, theirs = (max(LEAST, value) for value in pair)
    if against is None:
        return Row(name=name, value=ours, unit=unit, config=config or {}, samples=list(samples))
    return compare(
        name=name, unit=unit, ours=[ours], baseline=("the other", [theirs]), better=better,
        config=config,
    )  # fmt: skip


def _time_rows(
    name: str, times: Times, load: OfferedLoad, against: OfferedLoad | None
) -> list[Row]:
    ours = [1e3 * each for each in times(load)]
    theirs = [1e3 * each for each in times(against)] if against else ours
    if not ours or not theirs:
        return []
    mean, p90 = statistics.fmean(ours), float(np.percentile(ours, 90))
    shown = {"mean": round(mean, 3), "p90": round(p90, 3), "max": round(max(ours), 3)}
    return [
        _row(
            f"{name}, p{percent}",
            "ms",
            [float(np.percentile(side, percent)) for side in (ours, theirs)],
            against,
            better="lower",
            config=shown if percent == SHOWN[0] else None,
            samples=ours[:SAMPLES_MAX] if percent == SHOWN[0] else (),
        )
        for percent in SHOWN
    ]


def _goodput(load: OfferedLoad, objective: Objective) -> Row:
    """Requests that failed do not count."""
    good = sum(is_good(seen, objective) for seen in load.seen)
    return Row(
        name="goodput",
        value=good / load.took_s,
        unit="requests/s",
        baseline="offered",
        baseline_value=load.count / load.took_s,
        ratio=good / load.count,
        config={
            "good": good,
            "first_token_ms": round(1e3 * objective.ttft_s, 3),
            "further_token_ms": round(1e3 * objective.tpot_s, 3),
        },
    )


def _in_flight(load: OfferedLoad) -> Row:
    """The mean over the time of the load; the peak counts requests that were sent and not over."""
    spans = [(sent, sent + seen.last_s) for sent, seen in zip(load.sent_s, load.seen, strict=True)]
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    peak = int(np.cumsum([change for _, change in edges]).max())
    mean = sum(end - start for start, end in spans) / load.took_s
    return Row(name="in flight, mean", value=mean, unit="requests", config={"peak": peak})


def _late(load: OfferedLoad) -> Row:
    """How long after its time a request was sent: much of it is a client that is too slow, or
    `--at-most`."""
    late_ms = [1e3 * max(0.0, each) for each in load.late_s]
    return Row(
        name="sent late, p99",
        value=float(np.percentile(late_ms, 99)),
        unit="ms",
        config={"mean": round(statistics.fmean(late_ms), 3), "max": round(max(late_ms), 3)},
    )


def _cached(load: OfferedLoad) -> list[Row]:
    """Left out where the server does not count prompts."""
    asked = sum(seen.prompt_tokens for seen in load.seen)
    cached = sum(seen.cached_tokens for seen in load.seen)
    if not asked:
        return []
    return [
        Row(
            name="prompt tokens that were cached",
            value=cached / asked,
            unit="of 1",
            config={"cached": cached, "prompt_tokens": asked},
        )
    ]
