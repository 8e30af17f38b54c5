"""What `ess plan` prints: a table with a band behind every predicted figure, then sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.table import Table

from ess import console
from ess.sim.planning.answers import PlanAnswer, Question
from ess.sim.planning.ask import Ask
from ess.sim.planning.bands import EXACT, Band
from ess.sim.planning.batches import Point
from ess.sim.planning.changes import ChangedPlan
from ess.sim.planning.deployment import SECONDS_PRICED, TOKENS_PRICED
from ess.sim.planning.fleet import Groups
from ess.sim.planning.fleets import DeployedFleet, Fleets
from ess.units import counted, format_bytes

Line = tuple[str, str, str, str]
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Sides(Generic[S]):
    """The two sides of the comparison: with offload, and resident where that fits."""

    offload: S
    resident: S | None

    def line(self, name: str, show: Callable[[S], str], remark: str = "") -> Line:
        resident = "-" if self.resident is None else show(self.resident)
        return name, show(self.offload), resident, remark


def show(answer: PlanAnswer, ask: Ask, question: Question, lines: list[str]) -> None:
    print_sides([*plan_lines(answer, ask, question), *all_gpu_lines(answer, question)])
    if answer.fleets is not None:
        console.tables().print()
        print_sides(fleet_lines(answer.fleets, question))
    sentences = [*answer.advice, *(f"not measured: {mark}" for mark in answer.marks)]
    after = ["", *sentences, *lines]
    console.tables().print("\n".join(after), highlight=False)


def print_sides(lines: Iterable[Line]) -> None:
    """Prints lines of a subject, its value with offload, its value resident, and a remark."""
    table = Table.grid(padding=(0, 3))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify)
    table.add_row("", "with offload", "resident", "")
    for line in lines:
        table.add_row(*line)
    console.tables().print(table)


def plan_lines(answer: PlanAnswer, ask: Ask, question: Question) -> list[Line]:
    plan = answer.plan
    both = Sides(plan.chosen, plan.resident).line
    ours, theirs = plan.parallel.name, plan.resident_parallel.name
    neighbours = question.node.neighbours(ask.gpu_count)
    even = "-"
    if plan.break_even_batch is not None:
        even = ranged("{}", plan.break_even_batch, plan.break_even_ends)
    tokens = f"{ask.queries_each} tokens verified, {plan.accepted:.2f} accepted"
    return [
        ("the model is shared", ours, theirs, "heads x requests, experts"),
        both(
            "batch per group of heads",
            lambda point: banded(
                f"{point.batch}", plan.batch_band if point is plan.chosen else EXACT
            ),
            f"limited by {plan.limiter}",
        ),
        both(
            "slots per layer", lambda point: f"{point.slots_each:,}", f"floor {plan.slot_floor:,}"
        ),
        both("of the context", lambda point: f"{point.ratio:.1%}"),
        both("step", lambda point: banded(f"{point.step_us / 1e3:.1f} ms", point.band), tokens),
        both(
            "time per token",
            lambda point: banded(f"{point.token_us / 1e3:.1f} ms", point.token_band),
        ),
        both("waits for the link", _waits, modes(plan.chosen)),
        both(
            "host memory per node",
            lambda point: banded(
                format_bytes(point.host_bytes * neighbours),
                plan.batch_band if point.host_bytes else EXACT,
            ),
            f"{ask.gpu_count} GPUs, {neighbours} to a node",
        ),
        ("break-even batch", even, "", "the least that beats resident"),
        ("floor batch", f"{plan.floor_batch}", "", "every request at the slot floor"),
        (
            "index wall",
            f"{plan.index_wall}",
            "",
            f"index keys fill {format_bytes(plan.device_bytes)}",
        ),
        both(
            "tokens/s per decode GPU",
            lambda point: banded(f"{point.tokens_per_s:,.0f}", point.rate_band),
            _gain(plan.gain, plan.gain_band),
        ),
    ]


def _waits(point: Point) -> str:
    figures = [us / 1e3 for us in (point.exposed_us, *point.exposed_ends_us)]
    return ranged("{:.1f}", figures[0], figures[1:], unit=" ms")


def all_gpu_lines(answer: PlanAnswer, question: Question) -> list[Line]:
    """Figures for all GPUs, prefill's included."""
    shared, work = answer.all_gpus, question.work
    both = Sides(shared.offload, shared.resident).line
    limiter = shared.offload.limiter
    lines = [
        both(
            "prefill GPUs for each",
            lambda side: banded(f"{side.prefill_gpus:.1f}", side.prefill_band),
            f"groups of {shared.prefill_group}; {work.prompt_tokens:,} tokens, "
            f"{work.cached_share:.0%} cached",
        ),
        both(
            "tokens/s per GPU, all",
            lambda side: banded(f"{side.tokens_per_s:,.1f}", side.band),
            _gain(shared.gain, shared.gain_band) + (f", limited by {limiter}" if limiter else ""),
        ),
    ]
    if question.price is not None:
        lines.append(
            both(
                "cost per million tokens",
                lambda side: banded(f"{side.cost_per_million:,.2f}", side.cost_band),
                f"made, at {question.price:g} for a GPU and hour",
            )
        )
    return lines


def fleet_lines(fleets: Fleets, question: Question) -> list[Line]:
    wanted = question.wanted
    assert wanted is not None, "fleets of no rate"
    both = Sides(fleets.offload, fleets.resident).line
    sides = [fleets.offload] if fleets.resident is None else [fleets.offload, fleets.resident]
    groups = " and ".join(dict.fromkeys(str(side.prefill_group) for side in sides))
    lines = [
        both(
            "fewest GPUs",
            lambda side: ranged("{:,}", side.fleet.gpu_count, side.gpu_ends),
            f"{wanted.rate:g} requests/s",
        ),
        both("decode GPUs", lambda side: _gpus(side.fleet.decode), "groups x GPUs of each"),
        both("the model is shared", lambda side: side.parallel.name, "heads x requests, experts"),
        both(
            "prefill GPUs",
            lambda side: _gpus(side.fleet.prefill),
            f"pipelines x GPUs of each, in whole groups of {groups}",
        ),
        both("batch per group of heads", lambda side: f"{side.point.batch}", "at most"),
        both(
            "busy, decode and prefill",
            lambda side: (
                banded(f"{side.fleet.decode.load:.0%}", side.point.token_band)
                + banded(f", {side.fleet.prefill.load:.0%}", side.prefill_band)
            ),
        ),
        both(
            "first token, nine in ten",
            lambda side: ranged(
                "{:.1f}", side.fleet.prefill.first_token_s, side.first_token_ends_s, unit=" s"
            ),
            f"{wanted.ttft_s:g} s asked for; `ess sim` replays it",
        ),
        both(
            "time per token",
            lambda side: banded(f"{side.fleet.token_us / 1e3:.1f} ms", side.point.token_band),
        ),
    ]
    if question.price is not None:
        rate = wanted.rate * question.work.output_tokens
        gpu_price = question.price / SECONDS_PRICED / rate * TOKENS_PRICED
        lines.append(both("cost per million tokens", lambda side: _cost(side, gpu_price), "made"))
    return lines


def _gpus(groups: Groups) -> str:
    return f"{groups.gpu_count:,} ({groups.count:,} x {groups.gpus_each})"


def _cost(side: DeployedFleet, gpu_price: float) -> str:
    ends = tuple(end and end * gpu_price for end in side.gpu_ends)
    return ranged("{:,.2f}", side.fleet.gpu_count * gpu_price, ends)


def show_changes(every: Sequence[ChangedPlan]) -> None:
    """Prints a line for each change; the last factor is over the plan as asked."""
    table = Table.grid(padding=(0, 3))
    for justify in ("left", "right", "right", "right", "right", "left"):
        table.add_column(justify=justify)
    table.add_row("what if", "batch", "tokens/s per", "over", "tokens/s per", "over")
    table.add_row("", "", "decode GPU", "resident", "GPU, all", "as asked")
    asked = every[0].all_gpus
    for each in every:
        if each.plan is None or each.all_gpus is None:
            table.add_row(each.name, "-", "-", "-", "-", _reason(each.refused or ""))
            continue
        chosen, shared = each.plan.chosen, each.all_gpus.offload
        times = "" if asked is None else f"x{shared.tokens_per_s / asked.offload.tokens_per_s:.2f}"
        price = shared.cost_per_million
        table.add_row(
            each.name,
            f"{chosen.batch}",
            banded(f"{chosen.tokens_per_s:,.0f}", chosen.rate_band),
            "-" if each.plan.gain is None else f"x{each.plan.gain:.2f}",
            banded(f"{shared.tokens_per_s:,.1f}", shared.band),
            times + ("" if price is None else f", {price:,.2f} a million"),
        )
    console.tables().print()
    console.tables().print(table, highlight=False)


def _reason(refused: str) -> str:
    """The first clause of a refusal: a table has no room for its figures."""
    return refused.split(":")[0].split(";")[0]


def modes(point: Point) -> str:
    halves = "two halves" if point.tbo else "one batch"
    return ", ".join(
        [*(f"{counted(count, 'layer')} {name}" for name, count in point.modes.items()), halves]
    )


def banded(figure: str, band: Band) -> str:
    """
    >>> banded("12 ms", (-0.104, 0.25)), banded("12", (0.0, 0.0))
    ('12 ms -10+25%', '12')
    """
    return f"{figure} {100 * band[0]:+.0f}{100 * band[1]:+.0f}%" if any(band) else figure


def ranged(form: str, figure: float | None, ends: Sequence[float | None], *, unit: str = "") -> str:
    """
    >>> ranged("{:.1f}", 2, (1.5, 3), unit=" s"), ranged("{}", 9, (7, None))
    ('2.0 s (1.5 to 3.0)', '9 (7 to no end)')
    >>> ranged("{}", 2, (2, 2))
    '2'
    """
    shown = "-" if figure is None else form.format(figure)
    low, high = ("no end" if end is None else form.format(end) for end in ends)
    return shown + unit if {low, high} <= {shown} else f"{shown}{unit} ({low} to {high})"


def _gain(gain: float | None, band: Band) -> str:
    if gain is None:
        return ""
    return f"x{gain:.2f}, from {gain * (1 + band[0]):.2f} to {gain * (1 + band[1]):.2f}"
