"""The page's arithmetic against the planner's own, where node can run it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.server.commands.cli import main
from ess.server.commands.planning import planpage
from ess.sim.locality import misses
from ess.sim.operators.gpus import silicon_of
from ess.sim.planning.answers import Question
from ess.sim.planning.ask import Ask
from ess.sim.planning.deployment import Deployment, Work
from ess.sim.planning.node import Node
from ess.sim.planning.planner import Planner
from ess.sim.planning.prefilling import prefilling_of

TIB = 1 << 40
SERVER = Path(planpage.__file__).parent
QUESTION = Question(node=Node(), work=Work(context=65_536))


def planner(**ask: Any) -> Planner:
    return Planner(
        operators=silicon_of("h200", family="deepseek-v3.2"),
        curves=misses.published(),
        ask=Ask(**{"context": 65_536, **ask}),
        layout=ModelLayout.deepseek_v32(),
    )


@pytest.fixture(scope="module")
def numbers() -> dict[str, Any]:
    return planpage.numbers_of(
        planner(),
        QUESTION,
        model="deepseek-v3.2",
        gpu="h200",
        mtps=(2,),
        contexts=(32_768, 131_072),
        batches=(1, 8, 24, 48, 80, 128, 192),
    )


@pytest.fixture(scope="module")
def answer(numbers: dict[str, Any]) -> Any:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to run the page's arithmetic")

    def run(**ask: Any) -> Any:
        full = {
            "mtp": 2,
            "accepted": None,
            "tpot_us": None,
            "host_bytes": None,
            "batch": None,
            "out": 1024,
            "cached": 0.9,
            "device_bytes": numbers["device_bytes"],
            **ask,
        }
        code = (SERVER / "plan.js").read_text() + (
            "const [n, a] = JSON.parse(require('fs').readFileSync(0));"
            "console.log(JSON.stringify(plan(n, a)));"
        )
        done = subprocess.run(
            [node, "-e", code],
            input=json.dumps([numbers, full]),
            capture_output=True,
            text=True,
            timeout=180,
            check=True,
        )
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize(
    "ask",
    [
        {"context": 65_536},
        {"context": 100_000},
        {"context": 131_072, "token_us_max": 50_000.0},
        {"context": 65_536, "batch": 70},
        {"context": 131_072, "host_bytes": 4 * TIB},
    ],
)
def test_the_page_plans_as_the_planner_does(answer: Any, ask: dict[str, Any]) -> None:
    asked = {"tpot_us" if name == "token_us_max" else name: value for name, value in ask.items()}
    page, ours = answer(**asked), planner(**ask).plan()
    assert page["refused"] is None
    assert page["floor_batch"] == ours.floor_batch
    assert page["index_wall"] == ours.index_wall
    assert page["recommended"] == ours.recommended
    assert page["chosen"]["tokens_per_s"] == pytest.approx(ours.chosen.tokens_per_s, rel=0.04)
    exact = planner(**{**ask, "token_us_max": None, "batch": page["chosen"]["batch"]}).plan().chosen
    assert page["chosen"]["slots"] == exact.slots_each
    assert page["chosen"]["host_bytes"] == exact.host_bytes
    assert page["chosen"]["step_us"] == pytest.approx(exact.step_us, rel=0.04)
    assert ours.resident is not None
    assert page["resident"]["tokens_per_s"] == pytest.approx(ours.resident.tokens_per_s, rel=0.05)


@pytest.mark.parametrize(("out", "cached"), [(1024, 0.9), (63, 0.0), (30_000, 1.0)])
def test_the_page_counts_prefill_as_the_planner_does(answer: Any, out: int, cached: float) -> None:
    page = answer(context=65_536, out=out, cached=cached)
    asked, work = planner(), Work(context=65_536, output_tokens=out, cached_share=cached)
    deployment = Deployment(
        work=work,
        prefilling=prefilling_of(asked),
        layout=asked.layout,
        node=QUESTION.node,
        gpu_count=asked.ask.gpu_count,
    )
    rate = page["chosen"]["tokens_per_s"]
    ours = deployment.shared(replace(asked.plan().chosen, tokens_per_s=rate))
    assert page["chosen"]["prefill_gpus"] == pytest.approx(ours.prefill_gpus, rel=1e-6)
    assert page["chosen"]["shared_tokens_per_s"] == pytest.approx(ours.tokens_per_s, rel=1e-6)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        ({"context": 65_536, "batch": 5000}, "a batch of 5000 does not fit"),
        ({"context": 65_536, "tpot_us": 1000}, "1 ms a token is out of reach"),
        ({"context": 4096}, "from 32768 to 131072"),
        ({"context": 65_536, "accepted": 3}, "between 1 and 2 tokens"),
        ({"context": 65_536, "out": 65_536}, "an output takes part"),
        ({"context": 65_536.5}, "whole numbers"),
        ({"context": 65_536, "host_bytes": 1 << 30}, "the host holds 0"),
    ],
)
def test_what_cannot_be_gets_a_sentence(answer: Any, ask: dict[str, Any], says: str) -> None:
    assert says in answer(**ask)["refused"]


def test_the_page_has_the_band_of_the_plan(numbers: dict[str, Any]) -> None:
    """Its batch has more queries than were measured, so its band is wider than a lone request's."""
    low, high = planner().plan().chosen.token_band
    assert f"off by {100 * low:+.0f} to {100 * high:+.0f} %" in numbers["about"]
    assert (low, high) != planner().point(1, 65_536).token_band


def test_the_page_is_whole_and_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planpage, "numbers_of", lambda *given, **named: {"model": "</script>"})
    html = planpage.page(planner(), QUESTION, model="x", gpu="y")
    assert "/*" not in re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    assert html.count("</script>") == 2
    assert not re.search(r"(?:src|href)\s*=|https?://|@import|fetch\(", html)
    script = re.search(r'application/json">(.*?)</script>', html)
    assert script is not None
    assert json.loads(script[1]) == {"model": "</script>"}
    assert "function plan(numbers, ask)" in html


def test_html_is_refused_before_planning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--html", "no/such/p.html"]) == 2
    assert "--html no/such/p.html: the folder no/such does not exist" in capsys.readouterr().err
    with pytest.raises(BadInput):
        planner(context=0)
