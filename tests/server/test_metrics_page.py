"""docs/metrics.md has every metric of ours, with its labels and its sentence, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from ess.engine.process.messages import (
    ExpertLine,
    GraphLine,
    HandoffStatus,
    PeerLine,
    PoolUse,
    StageLine,
    Status,
)
from ess.pool.disk.use import DiskUse
from ess.server.http.metrics import exposition
from tests.server.harness import PacedEngine, Served, saying, until

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
WHOLE = Status(
    preempted_count=2,
    preemption_count=7,
    pools=(PoolUse("host pages", 1, 2, 3),),
    hits=(1,),
    misses=(1,),
    places=(1,),
    fetched_bytes=(1,),
    stored_bytes=(1,),
    slots_used=(1,),
    slots=(2,),
    modes=((1, 0, 0, 0),),
    transfer_us=(1,),
    exposed_us=(1,),
    handoff=HandoffStatus(peers=(PeerLine(address="a:1", epoch=1, is_up=True, heard_s=0.1),)),
    stages=(StageLine(0, (0, 1)),),
    disk=DiskUse(),
    graphs=GraphLine(
        held=1, most=2, bytes=3, byte_max=4, replayed=5, captured=6, dropped=7, eager={"memory": 8}
    ),
    experts=ExpertLine(step_count=1, chosen_count=2, balance=0.5),
)
"""Of a worker that does everything at once, as none does."""


@pytest.fixture(scope="module")
def families() -> list[Metric]:
    with Served(PacedEngine(saying("", ends=False), status=WHOLE)) as served:
        until(lambda: served.service.board.status == WHOLE, "the status")
        served.service.tally.answers["/v1/models", 200] += 1
        served.service.tally.refusals["queue_full"] += 1
        served.service.tally.finishes["stop"] += 3
        page = exposition(served.service).decode()
    return list(text_string_to_metric_families(page))


def row(family: Metric) -> str:
    labels = {label for sample in family.samples for label in sample.labels} - {"le"}
    name = family.name + ("_total" if family.type == "counter" else "")
    named = ", ".join(f"`{label}`" for label in sorted(labels))
    return f"| `{name}` | {named} | {family.documentation} |"


def test_the_page_has_every_metric(families: list[Metric]) -> None:
    made = sorted(row(family) for family in families if family.name.startswith("ess_"))
    _, _, behind = PAGE.read_text().partition("## All of them\n")
    assert [line for line in behind.splitlines() if line.startswith("| `ess_")] == made
    assert len(made) > 60


def test_what_the_page_speaks_of_is_there(families: list[Metric]) -> None:
    there = {sample.name for family in families for sample in family.samples}
    spoken = set(re.findall(r"\b((?:ess|process|vllm|sglang)[_:][a-z_]+)", PAGE.read_text()))
    assert {name for name in spoken if not {name, f"{name}_count"} & there} == set()


def test_times_that_requests_were_set_aside(families: list[Metric]) -> None:
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert samples["ess_requests_preempted",] == 2
    assert samples["ess_preemptions_total",] == 7
    assert samples["vllm:num_preemptions_total", "test-model"] == 7
    assert samples["vllm:request_success_total", "stop", "test-model"] == 3
