"""`ess sim`: what users would see of requests that arrive, with offload and without."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from rich.table import Table

from ess import console
from ess.errors import BadInput
from ess.server.plan import parse_duration, planner_of
from ess.sim.arrivals import Arrival, read_arrivals
from ess.sim.goodput import Objective, Spread, Summary
from ess.sim.plan import Ask, check_planned
from ess.sim.traffic import Mix, at_rate, draw
from ess.sim.worker import Served, Serving, serve
from ess.units import parse_size

TIER: Final = re.compile(r"^(\d{1,4})x(\d{1,4})$")
BESIDE: Final = "beside"
REQUESTS: Final = 200


def sim(
    *,
    trace: Path | None = None,
    rate: float | None = None,
    requests: int | None = None,
    ctx: str = "32k",
    out: int = 512,
    spread: float = 0.0,
    seed: int = 0,
    model: str = "deepseek-v3.2",
    gpu: str = "h200",
    gpus: int = 32,
    mtp: int = 2,
    accepted: float | None = None,
    prefill: str = "4x4",
    ttft: str = "10s",
    tpot: str = "60ms",
    paced: bool = False,
    waiting: int = 256,
    ram: str | None = None,
    device_bytes: str | None = None,
    perf_db: Path | None = None,
    json: bool = False,
) -> None:
    """Replay arriving requests on one decode GPU, with offload and without.

    Parameters
    ----------
    trace
        Requests to replay: Mooncake JSONL or Azure CSV. Without it they are drawn.
    rate
        Requests per second that reach this GPU; stretches a trace in time.
    requests
        How many: the first of a trace, by default all; 200 when they are drawn.
    ctx
        Mean prompt of drawn requests, such as 32k.
    out
        Mean output of drawn requests, in tokens.
    spread
        Deviation of the logarithm of drawn lengths: 0 makes all alike.
    seed
        Of arrivals, lengths and accepted drafts. The same seed prints the same.
    model
        A model with operator tables: deepseek-v3.2.
    gpu
        A GPU with operator tables: h200.
    gpus
        GPUs that share the experts.
    mtp
        Tokens verified per step.
    accepted
        Tokens accepted per step; by default 70 % of each draft in turn.
    prefill
        Pipelines x GPUs of each that prefill for one decode GPU, or "beside" for chunks beside it.
    ttft
        Objective: time to the first token.
    tpot
        Objective: time per further token.
    paced
        Let the engine choose depth, batch and chunk for the objective's time per token.
    waiting
        Requests that may wait; one more is refused.
    ram
        Host memory of all nodes together, such as 2TiB. Without it there is enough.
    device_bytes
        Memory per GPU for slots and index. By default what weights and reserves leave.
    perf_db
        An unpacked measurement package to use in place of the tables that ship.
    json
        Print one JSON document.
    """
    check_planned(model, gpu)
    arrivals = _arrivals(trace, rate, requests, Drawn(ctx, out, spread), seed)
    ask = Ask(
        context=max(one.prompt_tokens + one.output_tokens for one in arrivals),
        queries_each=mtp,
        accepted=accepted,
        gpu_count=gpus,
        device_bytes=None if device_bytes is None else parse_size(device_bytes),
        host_bytes=None if ram is None else parse_size(ram),
    )
    serving = Serving(
        objective=Objective(ttft_s=parse_duration(ttft) / 1e6, tpot_s=parse_duration(tpot) / 1e6),
        tier=parse_tier(prefill),
        is_paced=paced,
        waiting_max=waiting,
        seed=seed,
    )
    found = serve(planner_of(ask, perf_db), arrivals, serving)
    if json:
        console.print_json(msgspec.to_builtins(found))
    else:
        _print(found, arrivals, serving)


class Drawn(msgspec.Struct, frozen=True):
    """Lengths of requests that no trace gives."""

    ctx: str
    out: int
    spread: float


def _arrivals(
    trace: Path | None, rate: float | None, requests: int | None, drawn: Drawn, seed: int
) -> list[Arrival]:
    if requests is not None and requests < 1:
        raise BadInput(f"--requests {requests}: at least one must arrive")
    if trace is not None:
        arrivals = read_arrivals(trace)[:requests]
        return arrivals if rate is None else at_rate(arrivals, rate)
    if rate is None:
        raise BadInput("give --trace FILE, or --rate, the requests per second that arrive")
    mix = Mix(
        rate=rate,
        count=requests or REQUESTS,
        prompt_tokens=parse_size(drawn.ctx),
        output_tokens=drawn.out,
        spread=drawn.spread,
    )
    return draw(mix, seed=seed)


def parse_tier(text: str) -> tuple[int, int] | None:
    """
    >>> parse_tier("4x2"), parse_tier("beside")
    ((4, 2), None)
    """
    if text == BESIDE:
        return None
    match = TIER.match(text)
    if match is None:
        raise BadInput(f"--prefill {text}: write pipelines x GPUs, such as 4x4, or {BESIDE}")
    return int(match[1]), int(match[2])


def _print(found: Served, arrivals: list[Arrival], serving: Serving) -> None:
    table = Table.grid(padding=(0, 3))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify)
    table.add_row("", "with offload", "resident", "")
    for line in _lines(found, arrivals, serving):
        table.add_row(*line)
    console.tables().print(table)


def _lines(
    found: Served, arrivals: list[Arrival], serving: Serving
) -> list[tuple[str, str, str, str]]:
    def both(
        name: str, show: Callable[[Summary], str], remark: str = ""
    ) -> tuple[str, str, str, str]:
        return name, show(found.offload), show(found.resident), remark

    tokens = sum(one.prompt_tokens for one in arrivals) / len(arrivals)
    wanted = serving.objective
    gain = found.offload.tokens_per_s / max(found.resident.tokens_per_s, 1e-9)
    return [
        both(
            "served",
            lambda one: f"{one.served_count:,}",
            f"of {len(arrivals):,} that arrive in {arrivals[-1].at_s:,.0f} s",
        ),
        both("refused", lambda one: _named(one.refused, "{:,}")),
        both("until all is done", lambda one: f"{one.seconds:,.0f} s"),
        both("tokens/s per GPU", lambda one: f"{one.tokens_per_s:,.0f}", f"x{gain:.2f}"),
        both("batch, mean and peak", lambda one: f"{one.batch_mean:.1f}, {one.batch_peak}"),
        both(
            "first token, p50 p90 p99",
            lambda one: _percents(one.ttft_s, 1.0, "s"),
            f"prompts of {tokens:,.0f} tokens; estimated {found.prefill_tokens_per_s:,.0f} "
            "a second and prefill GPU",
        ),
        both("further tokens, p50 p90 p99", lambda one: _percents(one.tpot_s, 1e3, "ms")),
        both(
            "within both objectives",
            lambda one: f"{one.good_share:.1%}",
            f"{wanted.ttft_s:g} s and {1e3 * wanted.tpot_s:g} ms",
        ),
        both("goodput, requests/s", lambda one: f"{one.good_per_s:.2f}"),
        both("misses per request and layer", lambda one: f"{one.misses_mean:.1f}"),
        both("of its time waits for the link", lambda one: f"{one.exposed_share:.1%}"),
        both("somebody waited for", lambda one: _named(one.waited_s, "{:,.0f} s")),
    ]


def _named(counts: dict[str, int] | dict[str, float], form: str) -> str:
    return ", ".join(f"{form.format(count)} {name}" for name, count in counts.items()) or "-"


def _percents(seconds: Spread | None, factor: float, unit: str) -> str:
    if seconds is None:
        return "-"
    digits = "{:,.1f}".format
    return " ".join(digits(factor * one) for one in (seconds.p50, seconds.p90, seconds.p99)) + (
        f" {unit}"
    )
