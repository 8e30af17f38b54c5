from __future__ import annotations

import json
import re

import pytest

from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.server.commands.cli import main
from ess.server.commands.plan import parse_duration
from ess.sim.locality import misses
from ess.sim.memory_budget import Budget
from ess.sim.operators import tables
from ess.sim.operators.paper import Fitted, PaperOperators
from ess.sim.plan import Ask, Plan, Planner

GIB = 1 << 30


@pytest.fixture(scope="module")
def operators() -> PaperOperators:
    return PaperOperators(tables=tables.load(), fitted=Fitted.shipped())


def answer(operators: PaperOperators, *, as_paper: bool = False, **ask: float) -> Plan:
    return Planner(
        operators=operators,
        curves=misses.published(),
        ask=Ask(**ask),
        layout=ModelLayout.deepseek_v32(mtp=not as_paper),
        count_map=not as_paper,
    ).plan()


@pytest.mark.parametrize(
    ("context", "ratio", "batch"),
    [(32_768, 1.0, 54), (131_072, 1.0, 13), (131_072, 0.2, 40), (131_072, 0.1, 54)],
)
def test_the_papers_batch_limits(operators: PaperOperators, context: int, ratio: float, batch: int):
    """The paper rounds 54 at 32K down to a multiple of four."""
    slots = int(ratio * context)
    budget = Budget(
        layout=ModelLayout.deepseek_v32(mtp=False), device_bytes=80 * GIB, count_map=False
    )
    assert budget.batch_max(context=context, slots_each=slots) == batch
    found = answer(operators, as_paper=True, context=context, batch=batch, device_bytes=80 * GIB)
    assert round(found.chosen.ratio, 2) >= ratio
    assert found.index_wall == (81 if context == 131_072 else 325)


def test_the_papers_ratios(operators: PaperOperators):
    ratios = [
        answer(
            operators, as_paper=True, context=32_768, batch=batch, device_bytes=80 * GIB
        ).chosen.ratio
        for batch in (64, 96, 128, 160)
    ]
    assert [round(ratio, 2) for ratio in ratios] == [0.82, 0.48, 0.31, 0.21]


def test_every_planned_batch_is_admitted_and_keeps_the_time(operators: PaperOperators):
    found = answer(operators, context=131_072, token_us_max=45_000.0, host_bytes=8 << 40)
    assert found.chosen.token_us <= 45_000.0
    assert found.chosen.slots_each >= found.slot_floor
    assert found.chosen.host_bytes <= (8 << 40) // 32
    assert found.gain is not None
    assert found.gain > 1.0
    assert found.resident is not None
    assert found.resident.batch < found.break_even_batch <= found.chosen.batch


def test_host_memory_limits(operators: PaperOperators):
    found = answer(operators, context=32_768, host_bytes=100 * GIB)
    assert (found.chosen.batch, found.limiter) == (2, "host pages")


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        ({"context": 131_072, "batch": 90}, r"batch of 90 at 131,072 .* device memory are missing"),
        ({"context": 131_072, "token_us_max": 20_000.0}, r"20.0 ms a token .* ms too many"),
        ({"context": 131_072, "gpu_count": 4}, r"weights on 4 GPUs .* are missing"),
        ({"context": 32_768, "host_bytes": GIB}, r"GiB of host memory are missing per GPU"),
        ({"context": 131_072, "batch": 2, "ratio": 0.5}, "fixes the ratio"),
        ({"context": 131_072, "accepted": 2.5}, "between 1 and 2"),
        ({"context": 131_072, "ratio": 1.5}, r"outside 0\.\.1"),
    ],
)
def test_impossible_asks_get_a_sentence(
    operators: PaperOperators, ask: dict[str, float], match: str
):
    with pytest.raises(BadInput, match=match):
        answer(operators, **ask)


def test_what_is_missing_is_what_would_have_been_enough(operators: PaperOperators):
    """The missing bytes, added, admit the batch."""
    with pytest.raises(BadInput) as refusal:
        answer(operators, context=131_072, batch=40, device_bytes=40 * GIB)
    amount = re.search(r"; ([\d.]+) GiB of", str(refusal.value))
    assert amount is not None
    for extra, fits in ((0.01, True), (-0.01, False)):
        enough = int((40 + float(amount[1]) + extra) * GIB)
        budget = Budget(layout=ModelLayout.deepseek_v32(), device_bytes=enough)
        short = budget.refusal(context=131_072, batch=40, slots_each=6400)
        assert (short is None) == fits


def test_the_command_prints_a_table_or_a_document(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--ctx", "128k", "--batch", "32", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["chosen"]["batch"] == 32
    assert document["chosen"]["modes"]
    assert main(["plan", "--ctx", "128k", "--batch", "32"]) == 0
    assert "index wall" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["50", "0ms", "-1ms", "fast"])
def test_times_need_a_unit(text: str):
    with pytest.raises(BadInput, match="is not a time"):
        parse_duration(text)


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--model", "llama"]) == 2
    assert "no operator tables for 'llama'" in capsys.readouterr().err
