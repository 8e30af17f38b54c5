"""What `ess plan` prints: a table with a band behind every predicted figure, then sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.table import Table

from ess import console
from ess.sim.operators.parallel import Parallel
from ess.sim.planning.answers import Answer, Question
from ess.sim.planning.ask import Ask
from ess.sim.planning.bands import Band, inverse
from ess.sim.planning.batches import Point
from ess.sim.planning.deployment import SECONDS_PRICED, TOKENS_PRICED, Shared
from ess.sim.planning.fleet import Groups
from ess.sim.planning.fleets import Deployed, Fleets
from ess.units import counted, format_bytes

Line = tuple[str, str, str, str]


def show(answer: Answer, ask: Ask, question: Question, lines: list[str]) -> None:
    print_sides([*plan_lines(answer, ask, question), *all_gpu_lines(answer, question)])
    if answer.fleets is not None:
        console.tables().print()
        print_sides(fleet_lines(answer.fleets, question))
    sentences = [*answer.advice, *(f"not measured: {mark}" for mark in answer.marks)]
    after = ["", *sentences, *lines]
    console.tables().print("\n".join(after), highlight=False)


def print_sides(lines: Iterable[Line]) -> None:
    """Each line: what it is about, with offload, resident, a remark."""
    table = Table.grid(padding=(0, 3))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify)
    table.add_row("", "with offload", "resident", "")
    for line in lines:
        table.add_row(*line)
    console.tables().print(table)


def plan_lines(answer: Answer, ask: Ask, question: Question) -> list[Line]:
    plan = answer.plan
    chosen, resident = plan.chosen, plan.resident

    def both(name: str, said: Callable[[Point], str], remark: str = "") -> Line:
        return name, said(chosen), "-" if resident is None else said(resident), remark

    ours, theirs = name_of(plan.parallel), name_of(plan.resident_parallel)
    even = "-" if plan.break_even_batch is None else f"{plan.break_even_batch}"
    tokens = f"{ask.queries_each} tokens verified, {plan.accepted:.2f} accepted"
    return [
        ("the model is shared", ours, theirs, "heads x requests, experts"),
        both(
            "batch per group of heads", lambda point: f"{point.batch}", f"limited by {plan.limiter}"
        ),
        both(
            "slots per layer", lambda point: f"{point.slots_each:,}", f"floor {plan.slot_floor:,}"
        ),
        both("of the context", lambda point: f"{point.ratio:.1%}"),
        both("step", lambda point: _banded(f"{point.step_us / 1e3:.1f} ms", point.band), tokens),
        both("time per token", lambda point: _banded(f"{point.token_us / 1e3:.1f} ms", point.band)),
        both("waits for the link", lambda point: f"{point.exposed_us / 1e3:.1f} ms", modes(chosen)),
        both(
            "host memory per node",
            lambda point: format_bytes(point.host_bytes * question.node.neighbours(ask.gpu_count)),
            f"{ask.gpu_count} GPUs, {question.node.neighbours(ask.gpu_count)} to a node",
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
            lambda point: _banded(f"{point.tokens_per_s:,.0f}", inverse(point.band)),
            _gain(plan.gain, plan.gain_band),
        ),
    ]


def all_gpu_lines(answer: Answer, question: Question) -> list[Line]:
    """Prefill counted."""
    shared, work = answer.all_gpus, question.work

    def both(name: str, said: Callable[[Shared], str], remark: str = "") -> Line:
        other = "-" if shared.resident is None else said(shared.resident)
        return name, said(shared.offload), other, remark

    limiter = shared.offload.limiter
    lines = [
        both(
            "prefill GPUs for each",
            lambda side: f"{side.prefill_gpus:.1f}",
            f"prompts of {work.prompt_tokens:,}, {work.cached_share:.0%} cached",
        ),
        both(
            "tokens/s per GPU, all",
            lambda side: _banded(f"{side.tokens_per_s:,.1f}", side.band),
            _gain(shared.gain, shared.gain_band) + (f", limited by {limiter}" if limiter else ""),
        ),
    ]
    if question.price is not None:
        lines.append(
            both(
                "cost per million tokens",
                lambda side: f"{side.cost_per_million:,.2f}",
                f"made, at {question.price:g} for a GPU and hour",
            )
        )
    return lines


def fleet_lines(fleets: Fleets, question: Question) -> list[Line]:
    wanted = question.wanted
    assert wanted is not None, "fleets of no rate"

    def both(name: str, said: Callable[[Deployed], str], remark: str = "") -> Line:
        return (
            name,
            said(fleets.offload),
            "-" if fleets.resident is None else said(fleets.resident),
            remark,
        )

    def gpus_of(groups: Groups) -> str:
        return f"{groups.gpu_count:,} ({groups.count:,} x {groups.gpus_each})"

    rate = wanted.rate * question.work.output_tokens
    lines = [
        both(
            "fewest GPUs", lambda side: f"{side.fleet.gpu_count:,}", f"{wanted.rate:g} requests/s"
        ),
        both(
            "decode GPUs",
            lambda side: gpus_of(side.fleet.decode),
            "groups x GPUs of each",
        ),
        both(
            "the model is shared", lambda side: name_of(side.parallel), "heads x requests, experts"
        ),
        both(
            "prefill GPUs",
            lambda side: gpus_of(side.fleet.prefill),
            "pipelines x GPUs of each",
        ),
        both("batch per group of heads", lambda side: f"{side.point.batch}", "at most"),
        both(
            "busy, decode and prefill",
            lambda side: f"{side.fleet.decode.load:.0%}, {side.fleet.prefill.load:.0%}",
        ),
        both(
            "first token, nine in ten",
            lambda side: f"{side.fleet.prefill.first_token_s:.1f} s",
            f"{wanted.ttft_s:g} s asked for; `ess sim` replays it",
        ),
        both("time per token", lambda side: f"{side.fleet.token_us / 1e3:.1f} ms"),
    ]
    if question.price is not None:
        per_second = question.price / SECONDS_PRICED / rate * TOKENS_PRICED
        lines.append(
            both(
                "cost per million tokens",
                lambda side: f"{side.fleet.gpu_count * per_second:,.2f}",
                "made",
            )
        )
    return lines


def name_of(way: Parallel) -> str:
    """
    >>> name_of(Parallel(attention_tp=8, expert_tp=8)), name_of(Parallel.wide(32))
    ('TP8 x DP1, TP8', 'TP1 x DP32, EP32')
    """
    experts = [f"EP{way.expert_ep}"] if way.expert_ep > 1 or way.expert_tp == 1 else []
    experts += [f"TP{way.expert_tp}"] if way.expert_tp > 1 else []
    stages = f", PP{way.pp}" if way.pp > 1 else ""
    return f"TP{way.attention_tp} x DP{way.attention_dp}, {' x '.join(experts)}{stages}"


def modes(point: Point) -> str:
    halves = "two halves" if point.tbo else "one batch"
    return ", ".join(
        [*(f"{counted(count, 'layer')} {name}" for name, count in point.modes.items()), halves]
    )


def _banded(figure: str, band: Band) -> str:
    """
    >>> _banded("12 ms", (-0.104, 0.25))
    '12 ms -10+25%'
    """
    return f"{figure} {100 * band[0]:+.0f}{100 * band[1]:+.0f}%"


def _gain(gain: float | None, band: Band) -> str:
    if gain is None:
        return ""
    return f"x{gain:.2f}, from {gain * (1 + band[0]):.2f} to {gain * (1 + band[1]):.2f}"
