"""Every public row beside our prediction: `value` is ours, `baseline_value` the measurement.

A row is met where the measurement lies within our band. The last rows show our error as a whole:
its median over rows whose conditions are nearly complete (E) or partly guessed (P), and how much it
changes from small to large batches and contexts. Rows of vLLM and TensorRT-LLM are predicted from
tables of their own framework, as far as there are any. Rows of vLLM are also shown apart, since its
tables are of another year. Parts of the model were chosen with `seen` rows in view; the median
without them is shown too. Bounds (U) are not counted: they are met where we predict that more is
possible. `floor` says which error a perfect model would have.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from ess.bench.harness.output.agreement import agreement
from ess.bench.harness.report import Row, compare
from ess.bench.silicon.floor import floor_rows
from ess.bench.silicon.outcome import Outcome
from ess.sim.decode_step import Scenario, simulate
from ess.sim.operators.gpus import silicon_of
from ess.sim.operators.silicon import host
from ess.sim.operators.silicon.assembled import SiliconOperators
from ess.sim.operators.silicon.stacks import SGLANG
from ess.sim.prefill.colocated import mixed_us, prompt_us, stall_us
from ess.sim.prefill.prompt_pass import PromptPass, pass_trust
from ess.sim.published.serving import Serving, servings

MIDDLE: Final = 0.08
TREND: Final = 0.10
WITHIN: Final = 0.8
GAPS: Final = MappingProxyType(
    {"overlapped": host.STEP_GAP_US, "launched": host.LAUNCHED_US, "serial": host.SERIAL_US}
)


def silicon_benchmark(*, smoke: bool) -> list[Row]:
    """Takes about a second, so the smoke size is the same."""
    outcomes = outcomes_of(servings())
    return [
        *(_row(outcome) for outcome in outcomes if outcome.ours is not None),
        *_middles(outcomes),
        *floor_rows([outcome for outcome in outcomes if outcome.is_counted]),
        *_trends(outcomes),
    ]


def outcomes_of(rows: Sequence[Serving]) -> list[Outcome]:
    """The outcomes in the order of the rows; a ratio needs our figures for both its rows."""
    predictions = Predictions()
    return [predictions.of(row) for row in rows]


class Predictions:
    """The predictions so far, and the operators that were read for them."""

    def __init__(self) -> None:
        self._outcomes: dict[str, Outcome] = {}
        self._measured = lru_cache(_measured)

    def of(self, row: Serving) -> Outcome:
        kinds: dict[str, Callable[[Serving], Outcome]] = {
            "decode": self._decode,
            "prompt": self._prompt,
            "ratio": self._ratio,
            "rate": self._rate,
        }
        predict = kinds.get(row["kind"])
        outcome = predict(row) if predict else Outcome(row, None)
        self._outcomes[row["row"]] = outcome
        return outcome

    def _decode(self, row: Serving) -> Outcome:
        """A decode step, with prompts between the steps where they ran on the same GPUs."""
        operators, scenario = self._operators(row), _scenario(row)
        step = simulate(operators, scenario)
        step_us = step.step_us + (_stalled_us(row, operators, scenario) if row["prompt"] else 0.0)
        return Outcome(row, step_us / 1e3, step.band, step.marks)

    def _prompt(self, row: Serving) -> Outcome:
        operators, count = self._operators(row), max(1, row.count("count"))
        groups = row.count("groups") or None
        tokens, overlap = row.count("tokens"), row["tbo"] == "1"
        us = prompt_us(
            operators, row.parallel, prompt=tokens, count=count, groups=groups, overlap=overlap
        )
        trust = pass_trust(operators, PromptPass(parallel=row.parallel, tokens=tokens, count=count))
        return Outcome(row, us / 1e6, trust.band, trust.marks)

    def _ratio(self, row: Serving) -> Outcome:
        above, below = (self._outcomes[name] for name in row["over"].split("|"))
        assert above.ours is not None, f"{above.row['row']}: a ratio needs a prediction"
        assert below.ours is not None, f"{below.row['row']}: a ratio needs a prediction"
        return Outcome(row, above.ours / below.ours, above.band, above.marks)

    def _rate(self, row: Serving) -> Outcome:
        """Tokens per second of one GPU."""
        if row["batch"]:
            assert not row["prompt"], f"{row['row']}: a rate with prompts between"
            took = self._decode(row)
            assert took.ours is not None, f"{row['row']}: no step"
            return replace(took, ours=row.number("batch") * row.number("output") / took.ours * 1e3)
        took = self._prompt(row)
        assert took.ours is not None, f"{row['row']}: no pass"
        return replace(took, ours=row.number("tokens") * row.number("count") / took.ours)

    def _operators(self, row: Serving) -> SiliconOperators:
        return replace(
            self._measured(row["gpu"], row["family"], row["kv"], row["stack"]),
            balance=row["balance"] or None,
            step_gap_us=GAPS[row["host"]],
        )


def _measured(gpu: str, family: str, kv: str, stack: str) -> SiliconOperators:
    return silicon_of(gpu, family=family, kv=kv or None, stack=stack or SGLANG)


def _stalled_us(row: Serving, operators: SiliconOperators, scenario: Scenario) -> float:
    """Time that prompts add to a step. Of requests that are all sent at once the first wait for all
    prompts and the last for none."""
    if row["prompts"] == "at once":
        count = math.ceil(scenario.group_batch)
        prompts_us = prompt_us(
            operators, scenario.parallel, prompt=row.count("prompt"), count=count
        )
        return prompts_us / 2 / row.number("output")
    ended = scenario.batch * scenario.parallel.gpu_count / row.number("output")
    prompt = row.count("prompt")
    if row["prompts"] == "mixed":
        return mixed_us(operators, scenario, ended_each=ended, prompt=prompt)
    return stall_us(
        operators, scenario.parallel, ended_each=ended, prompt=prompt, overlap=scenario.tbo
    )


def _scenario(row: Serving) -> Scenario:
    return Scenario(
        batch=row.number("batch"),
        queries_each=row.count("queries"),
        context=row.count("context"),
        tbo=row["tbo"] == "1",
        parallel=row.parallel,
    )


def _row(outcome: Outcome) -> Row:
    row, (below, above) = outcome.row, outcome.band
    assert outcome.ours is not None, f"{row['row']}: no prediction"
    config: dict[str, Any] = {
        "use": row["use"],
        "seen": row["seen"],
        "band": f"{below:+.0%} {above:+.0%}",
        **{
            name: row[name]
            for name in ("gpu", "family", "stack", "batch", "context", "date", "source", "note")
        },
        "marks": list(outcome.marks),
    }
    agreed = agreement(
        name=row["row"],
        unit=row["unit"],
        ours=outcome.ours,
        published=("measured", row.number("value")),
        tolerance=above if row["use"] != "U" else None,
        config={key: value for key, value in config.items() if value},
    )
    if row["kind"] != "rate":
        return agreed
    return _bound(agreed)


def _bound(told: Row) -> Row:
    """A bound is met where we predict that more is possible than was reached."""
    assert told.baseline_value is not None, f"{told.name}: a bound without a measurement"
    return compare(
        name=f"{told.name}, bound",
        unit=told.unit,
        ours=[told.value],
        baseline=("reached", [told.baseline_value]),
        better="higher",
        target=1.0,
        config={key: value for key, value in told.config.items() if key != "error"},
    )


CHOICES: Final[Mapping[str, Callable[[Outcome], bool]]] = MappingProxyType(
    {
        "all counted": lambda each: True,
        "nothing seen": lambda each: each.is_held_out,
        "nothing seen, not vLLM": lambda each: each.is_held_out and not each.is_vllm,
        "E": lambda each: each.row["use"] == "E",
        "decode": lambda each: each.is_decode,
        "decode within a node": lambda each: each.is_decode and not each.is_wide,
        "decode over nodes": lambda each: each.is_decode and each.is_wide,
        "decode with drafts": lambda each: each.is_decode and each.row.count("queries") > 1,
        "decode beside prompts": lambda each: each.is_decode and bool(each.row["prompts"]),
        "prompts": lambda each: each.row["kind"] == "prompt",
        "prompts over nodes": lambda each: each.row["kind"] == "prompt" and each.is_wide,
        "software of 2025": lambda each: each.is_old,
        "software of 2026": lambda each: not each.is_old,
        "not vLLM": lambda each: not each.is_vllm,
    }
)


def _middles(outcomes: Sequence[Outcome]) -> list[Row]:
    counted = [outcome for outcome in outcomes if outcome.is_counted]
    return [
        _within_bands(counted),
        *(
            _middle(f"middle error, {name}", list(filter(is_chosen, counted)))
            for name, is_chosen in CHOICES.items()
        ),
    ]


def _within_bands(counted: Sequence[Outcome]) -> Row:
    ours = [outcome for outcome in counted if not outcome.is_vllm]
    within = sum(abs(outcome.error) <= outcome.band[1] for outcome in ours)
    share = within / len(ours)
    return _judged(
        "within their bands, not vLLM", share, at_least=WITHIN, config={"rows": len(ours)}
    )


def _middle(name: str, chosen: Sequence[Outcome]) -> Row:
    errors = [outcome.error for outcome in chosen]
    signed = statistics.median(errors)
    middle = statistics.median(map(abs, errors))
    within = sum(abs(error) <= MIDDLE for error in errors)
    config = {"rows": len(chosen), "signed": f"{signed:+.1%}", "within 8 %": within}
    return _judged(name, middle, at_most=MIDDLE, config=config)


def _trends(outcomes: Sequence[Outcome]) -> list[Row]:
    counted = [each for each in outcomes if each.is_counted and not each.is_vllm]
    decode = [each for each in counted if each.row["kind"] == "decode"]
    prompts = [each for each in counted if each.row["kind"] == "prompt"]
    return [
        _trend("trend over batch, decode, not vLLM", decode, "batch"),
        _trend("trend over context, decode, not vLLM", decode, "context"),
        _trend("trend over length, prompts, not vLLM", prompts, "tokens"),
        _trend("trend within D8", [each for each in decode if "D8" in each.row["row"]], "batch"),
        _trend("trend within D11", [each for each in decode if "D11" in each.row["row"]], "batch"),
        _trend("trend within P7", [each for each in prompts if "P7" in each.row["row"]], "tokens"),
    ]


def _trend(name: str, chosen: Sequence[Outcome], by: str) -> Row:
    """How much the error changes from the least to the most, on a line through all logarithms."""
    sizes = [math.log2(each.row.number(by)) for each in chosen]
    slope = statistics.linear_regression(sizes, [each.error for each in chosen]).slope
    change = slope * (max(sizes) - min(sizes))
    return _judged(name, change, at_most=TREND, config={"rows": len(chosen)})


def _judged(
    name: str,
    value: float,
    *,
    config: dict[str, Any],
    at_most: float | None = None,
    at_least: float | None = None,
) -> Row:
    """Met if the absolute value is at most `at_most`, or the value at least `at_least`."""
    if at_least is not None:
        how, wanted, ratio = "at least", at_least, value / at_least
    else:
        assert at_most is not None, f"{name}: neither a most nor a least"
        how, wanted, ratio = "at most", at_most, at_most / max(abs(value), at_most / 100)
    return Row(
        name=name,
        value=value,
        unit="of 1",
        baseline=how,
        baseline_value=wanted,
        ratio=ratio,
        target=1.0,
        met=ratio >= 1.0,
        config=config,
    )
