"""`ess sim`: what users would see of arriving requests, with offload and without."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from cyclopts import Parameter

from ess import console
from ess.console import MaybeWhole, Whole
from ess.errors import BadInput
from ess.server.commands.planning import simpage
from ess.server.commands.planning.plan import (
    NodeFlags,
    WayFlags,
    WorkerFlags,
    parse_duration,
)
from ess.server.commands.planning.planshow import Line, banded, print_sides, ranged
from ess.sim.planning.bands import inverse
from ess.sim.serving.arrivals import Arrival, read_arrivals
from ess.sim.serving.comparison import Served, serve
from ess.sim.serving.goodput import Objective, Spread, Summary
from ess.sim.serving.replay_settings import AUTO, Auto, MissesBy, Serving
from ess.sim.serving.traffic import Mix, at_rate, draw
from ess.sim.serving.worker import RATE_MAX, Size
from ess.units import parse_size

TIER: Final = re.compile(r"^(\d{1,4})x(\d{1,4})$")
BESIDE: Final = "beside"
REQUESTS: Final = 200

Figure = Callable[[Summary], float]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFlags:
    """The requests of a trace, or drawn at random."""

    trace: Path | None = None
    "Requests to replay: Mooncake JSONL or Azure CSV; by default random ones."
    rate: float | None = None
    (
        "Requests per second that reach this decode GPU, or the GPUs that share its heads; "
        "stretches a trace in time."
    )
    requests: MaybeWhole = None
    "How many: the first of a trace, by default all; 200 if they are drawn."
    ctx: str = "32k"
    "Mean prompt of drawn requests."
    out: Whole = 512
    "Mean output of drawn requests, in tokens."
    spread: float = 0.0
    "Deviation of the logarithm of drawn lengths: 0 makes all alike, 1 is like chat."
    burst: float = 1.0
    "1 is a Poisson process; less comes in bursts, more comes evenly (shape of gamma gaps)."
    seed: Whole = 0
    "Seed of arrivals, lengths and accepted drafts. The same seed prints the same."

    def arrivals(self) -> list[Arrival]:
        if self.requests is not None and self.requests < 1:
            raise BadInput(f"--requests {self.requests}: at least one must arrive")
        if self.trace is not None:
            recorded = read_arrivals(self.trace)[: self.requests]
            return recorded if self.rate is None else at_rate(recorded, self.rate)
        if self.rate is None:
            raise BadInput("give --trace FILE, or --rate, the requests per second that arrive")
        mix = Mix(
            rate=self.rate,
            count=self.requests or REQUESTS,
            prompt_tokens=parse_size(self.ctx, "--ctx"),
            output_tokens=self.out,
            spread=self.spread,
            burst=self.burst,
        )
        return draw(mix, seed=self.seed)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFlags:
    """The flags that say where prefill runs, and the objectives."""

    prefill: str = AUTO
    (
        "Pipelines x GPUs of each that prefill for one decode GPU, such as 4x4; auto: the fewest "
        "that keep --ttft; beside: chunks beside decode."
    )
    cached: float | None = None
    "Cached share of every prompt; by default what the blocks of a trace say, or none."
    misses: MissesBy = "curve"
    "curve: from the published curves; lru: counted by the real planner on generated selections."
    ttft: str = "10s"
    "Objective: time to the first token."
    tpot: str = "60ms"
    "Objective: time per further token."
    paced: bool = False
    "Let the engine choose depth, batch and chunk for the objective's time per token."
    waiting: Whole = 256
    "Requests that may wait; one more is refused."

    def serving(self, *, seed: int) -> Serving:
        objective = Objective(
            ttft_s=parse_duration(self.ttft, "--ttft") / 1e6,
            tpot_s=parse_duration(self.tpot, "--tpot") / 1e6,
        )
        return Serving(
            objective=objective,
            tier=parse_tier(self.prefill),
            cached_share=self.cached,
            misses=self.misses,
            is_paced=self.paced,
            waiting_max=self.waiting,
            seed=seed,
        )


def sim(
    *,
    requests: RequestFlags | None = None,
    worker: WorkerFlags | None = None,
    ways: WayFlags | None = None,
    serving: ServingFlags | None = None,
    nodes: NodeFlags | None = None,
    sustained: bool = False,
    html: Path | None = None,
    json: bool = False,
) -> None:
    """Replay arriving requests on one decode GPU or group of heads, with offload and without.

    Parameters
    ----------
    sustained
        Also search the highest rates at which nine in ten requests meet both objectives.
    html
        Also write a page with time lines of batch, waiting, misses, link and first token.
    json
        Print one JSON document.
    """
    console.check_file("--html", html)
    requests, nodes = requests or RequestFlags(), nodes or NodeFlags()
    arrivals = requests.arrivals()
    longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals)
    worker = worker or WorkerFlags()
    planner = worker.planner(longest, ways or WayFlags(), nodes)
    wanted = (serving or ServingFlags()).serving(seed=requests.seed)
    with console.patience(
        f"ess: replaying {len(arrivals):,} requests, both ways and their bands ..."
    ):
        node = nodes.node(worker.gpu)
        served, replays = serve(planner, arrivals, wanted, node=node, sustained=sustained)
    if html is not None:
        html.write_text(simpage.page(served, replays, wanted), encoding="utf-8")
        console.note(f"written: {html}")
    if json:
        console.print_json(msgspec.to_builtins(served))
    else:
        _print(served, arrivals, wanted)


def parse_tier(text: str) -> Size | Auto | None:
    """
    >>> parse_tier("4x2"), parse_tier("auto"), parse_tier("beside")
    ((4, 2), 'auto', None)
    """
    if text == BESIDE:
        return None
    if text == AUTO:
        return AUTO
    match = TIER.match(text)
    if match is None:
        raise BadInput(f"--prefill {text}: write pipelines x GPUs, such as 4x4, {AUTO} or {BESIDE}")
    return int(match[1]), int(match[2])


def _print(served: Served, arrivals: list[Arrival], serving: Serving) -> None:
    print_sides(_lines(served, arrivals, serving))
    for mark in ("", *(f"not measured: {mark}" for mark in served.marks)):
        console.tables().print(mark, highlight=False)


def _lines(served: Served, arrivals: list[Arrival], serving: Serving) -> list[Line]:
    prefill = banded(f"{served.prefill_tokens_per_s:,.0f}", inverse(served.prefill_band))
    gpus = ranged("{:,}", served.gpu_count, served.gpu_ends)
    way = served.parallel.name
    return [
        ("the model is shared", way, way, "heads x requests, experts"),
        _figure(
            served,
            "served",
            lambda summary: summary.served_count,
            "{:,}",
            f"of {len(arrivals):,} that arrive in {arrivals[-1].at_s:,.0f} s",
        ),
        ("GPUs, prefill among them", gpus, gpus, _tier(served)),
        ("prefill, tokens/s per GPU", prefill, prefill, "of a whole prompt"),
        *_rates(served),
        *_times(served, arrivals, serving.objective),
        *_sustained(served),
        _figure(served, "misses per request and layer", lambda each: each.misses_mean, "{:.1f}"),
        *(("", "", "", line) for line in _agreed(served)),
        _figure(
            served, "of its time waits for the link", lambda each: each.exposed_share, "{:.1%}"
        ),
        _both(served, "a request waited for", lambda each: _named(each.waited_s, "{:,.0f} s")),
    ]


def _rates(served: Served) -> list[Line]:
    return [
        _both(served, "refused", lambda summary: _named(summary.refused, "{:,}")),
        _figure(served, "until all is done", lambda summary: summary.seconds, "{:,.0f} s"),
        _figure(
            served,
            "tokens/s per GPU, all",
            lambda summary: summary.tokens_per_s / served.gpu_count,
            "{:,.1f}",
            _ratio(served, lambda summary: summary.tokens_per_s),
        ),
        _both(
            served,
            "batch, mean and peak",
            lambda summary: f"{summary.batch_mean:.1f}, {summary.batch_peak}",
            figure=lambda summary: summary.batch_mean,
        ),
    ]


def _times(served: Served, arrivals: list[Arrival], wanted: Objective) -> list[Line]:
    tokens = sum(arrival.prompt_tokens for arrival in arrivals) / len(arrivals)
    return [
        _both(
            served,
            "first token, p50 p90 p99",
            lambda summary: _percents(summary.ttft_s, 1.0, "s"),
            f"prompts of {tokens:,.0f} tokens, {served.cached_share:.0%} of them cached",
            figure=lambda summary: _p90(summary.ttft_s),
        ),
        _both(
            served,
            "further tokens, p50 p90 p99",
            lambda summary: _percents(summary.tpot_s, 1e3, "ms"),
            banded("a step for itself:", served.band),
            figure=lambda summary: _p90(summary.tpot_s),
        ),
        _figure(
            served,
            "within both objectives",
            lambda summary: summary.good_share,
            "{:.1%}",
            f"{wanted.ttft_s:g} s and {1e3 * wanted.tpot_s:g} ms",
        ),
        _figure(
            served,
            "goodput per GPU, requests/s",
            lambda summary: summary.good_per_s / served.gpu_count,
            "{:.4f}",
            _ratio(served, lambda summary: summary.good_per_s),
        ),
    ]


def _figure(served: Served, name: str, figure: Figure, form: str, remark: str = "") -> Line:
    return _both(served, name, lambda summary: form.format(figure(summary)), remark, figure=figure)


def _both(
    served: Served,
    name: str,
    show: Callable[[Summary], str],
    remark: str = "",
    *,
    figure: Figure | None = None,
) -> Line:
    """A line with both sides; the band shows the figure with all times and misses at their ends."""
    sides = (served.offload, served.offload_ends), (served.resident, served.resident_ends)
    ours, theirs = (show(summary) + _band_of(figure, summary, ends) for summary, ends in sides)
    return name, ours, theirs, remark


def _band_of(figure: Figure | None, summary: Summary, ends: tuple[Summary, Summary]) -> str:
    if figure is None or not figure(summary):
        return ""
    moves = [figure(end) / figure(summary) - 1 for end in ends]
    return banded("", (min(0.0, *moves), max(0.0, *moves)))


def _p90(times: Spread | None) -> float:
    return 0.0 if times is None else times.p90


def _tier(served: Served) -> str:
    decoding, size = served.parallel.attention_tp, served.prefill
    who = "1 decodes" if decoding == 1 else f"{decoding} decode together"
    if size is None:
        return f"{who}, prefill runs beside it"
    return f"{who}, {size[0]} x {size[1]} prefill for it"


def _ratio(served: Served, figure: Figure) -> str:
    """The gain with its ends: errors move both sides alike, as they share prefill and operators."""
    pairs = zip(
        (served.offload, *served.offload_ends),
        (served.resident, *served.resident_ends),
        strict=True,
    )
    gains = [figure(ours) / theirs for ours, other in pairs if (theirs := figure(other)) > 0]
    if len(gains) < 3:
        return ""
    return ranged("x{:.2f}", gains[0], (min(gains), max(gains)))


def _sustained(served: Served) -> list[Line]:
    """Sustained rates per decode GPU, and per GPU over all GPUs of each side."""
    if not served.sustained:
        return []
    offload, resident = served.sustained
    decoding = served.parallel.attention_tp
    ours, theirs = (
        ranged("{:.4f}", rate.rate_each, sorted(end.rate_each for end in ends))
        for rate, ends in zip(served.sustained, served.sustained_ends, strict=True)
    )
    remark = ""
    if resident.rate > 0:
        remark = f"x{offload.rate_each / resident.rate_each:.2f}"
    if offload.rate >= RATE_MAX:
        remark = "these all fit at once: take more --requests"
    return [
        (
            "sustained, requests/s",
            f"{offload.rate:.2f} by {offload.gpu_count}",
            f"{resident.rate:.2f} by {resident.gpu_count}",
            f"by so many GPUs, {decoding} of them for decode",
        ),
        ("sustained per GPU, all", ours, theirs, remark),
    ]


def _agreed(served: Served) -> list[str]:
    """Misses by LRU and as published, a line for each context."""
    lines = []
    for context in dict.fromkeys(misses.context for misses in served.agreed):
        pairs = [
            f"{misses.lru:.0f} {misses.published:.0f}"
            for misses in served.agreed
            if misses.context == context
        ]
        lines.append(f"by LRU and published, {context:,} tokens: {', '.join(pairs)}")
    return lines


def _named(counts: dict[str, int] | dict[str, float], form: str) -> str:
    return ", ".join(f"{form.format(count)} {name}" for name, count in counts.items()) or "-"


def _percents(seconds: Spread | None, factor: float, unit: str) -> str:
    if seconds is None:
        return "-"
    digits = "{:,.1f}".format
    return " ".join(digits(factor * value) for value in (seconds.p50, seconds.p90, seconds.p99)) + (
        f" {unit}"
    )
