"""Ranks that divide the experts on devices say what one process says: beside the pretended one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from ess.engine.process.checks import exchange_check
from ess.ports import kept_port
from ess.units import parse_size
from tests.device.rank_tasks import expected
from tests.device.test_served import FOLDER, GRAPHS, MADE, PROMPT
from tests.device.test_served import expected as served_alone
from tests.server.harness import TOKENIZER, until
from tests.support import beside
from tests.support.forked import started
from tests.support.process import ROOT, Process
from tests.support.routers import ask

pytestmark = [pytest.mark.slow, *beside.NEEDS]
LIMIT_S = 250


@contextlib.contextmanager
def processes(
    size: int, cases: Sequence[dict], built: Path
) -> Iterator[list[subprocess.Popen[str]]]:
    made = []
    env = {**os.environ, "ESS_EMULATED": str(built), "OMP_NUM_THREADS": "1"}
    with kept_port("127.0.0.1") as port:
        try:
            for rank in range(size):
                words = (rank, size, port, json.dumps(cases))
                words = ["-m", "tests.device.rank_process", *map(str, words)]
                made.append(
                    started("interpreted", words, env=env, stdout=subprocess.PIPE, text=True)
                )
            yield made
        finally:
            for process in made:
                process.kill()
                process.communicate()


def told(size: int, cases: Sequence[dict], built: Path) -> list[list[dict[str, Any]]]:
    """What each rank has told of each case."""
    with processes(size, cases, built) as made:
        said = [process.communicate(timeout=LIMIT_S)[0] for process in made]
        assert [process.returncode for process in made] == [0] * size
    return [[json.loads(line) for line in lines.splitlines()] for lines in said]


def check(case: dict, ranks: list[dict[str, Any]]) -> None:
    for tasks, rank in zip(case["tasks"], ranks, strict=True):
        assert rank["said"] == expected(case["family"], tasks), case


FEW = {"graphs": "many", "graph_sizes": "2", "rehearses": True}
BOTH = ["busy", "late"]
CASES = (
    {"family": "v32", "mode": "dba", "mtp": "2", "depth": "1", "graphs": "many", "tasks": BOTH},
    {"family": "glm", "mode": "none", "tbo": "on", "sbo": "dispatch-shared", **FEW, "tasks": BOTH},
    {
        "family": "v32",
        "mode": "none",
        "mtp": "4",
        "redundant": 4,
        **FEW,
        "tasks": ["picky", "busy"],
    },
)


@pytest.mark.parametrize(
    "cases", [CASES[:2], pytest.param(CASES[2:], marks=pytest.mark.long)], ids=["plain", "more"]
)
def test_two_ranks_say_the_tokens_of_one(cases: Sequence[dict], built: Path):
    """Batches of other sizes, prompts beside decoding, steps that are captured beside some that are
    replayed or run eagerly, drafts, halves, copies of experts."""
    for case, *ranks in zip(cases, *told(2, cases, built), strict=True):
        check(case, ranks)
        assert all(rank["captured"] for rank in ranks), case
        assert any(rank["replayed"] for rank in ranks), case
        assert ranks[0]["chosen"] == ranks[1]["chosen"] > 0
        if "tbo" in case:
            assert all(rank["splits"] for rank in ranks), "two halves"
            assert ranks[1]["by_graph"], "it stands by as it has rehearsed"
        if case["tasks"][0] == "picky":
            assert ranks[0]["eager"].keys() == {"host logits"}, "what it stands by for is rehearsed"
        if case.get("depth"):
            steady = [names for rank in ranks for names in rank["waited"][1:]]
            assert {name for names in steady for name in names} == {"an earlier moment"}


MORE = (
    {"family": "glm", "mode": "da", "mtp": "2", **FEW, "redundant": 1}
    | {"tasks": ["late", "idle", "busy"]},
    {"family": "v32", "mode": "layerwise", "sbo": "combine-shared", "depth": "1", "redundant": 4}
    | {"tasks": ["idle", "busy", "idle"]},
)


@pytest.mark.long
def test_a_rank_of_three_has_nothing_to_do(built: Path):
    for case, *ranks in zip(MORE, *told(3, MORE, built), strict=True):
        check(case, ranks)
        for name, rank in zip(case["tasks"], ranks, strict=True):
            assert name != "idle" or (rank["exchanged"] > 20 and not rank["said"]), case


ALTERNATING = {"family": "glm", "mode": "none", "mtp": "2", "graphs": "many", "graph_sizes": "1"}


@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"mode": "da", "tbo": "on", "graph_sizes": "2"}, marks=pytest.mark.long)],
    ids=["whole", "halves"],
)
def test_a_rank_that_is_idle_between_requests_stands_by_from_graphs(more: dict, built: Path):
    """It makes parts of the other rank's tokens all the time, drafts too."""
    case = {**ALTERNATING, **more, "tasks": ["steady", "comes and goes"]}
    ranks = [lines[0] for lines in told(2, [case], built)]
    check(case, ranks)
    assert ranks[1]["by_graph"] >= ranks[1]["stood_by"] // 2 > 2
    assert ranks[1]["eager"].keys() == {"first steps"}


@pytest.mark.parametrize(
    "at",
    [
        pytest.param({}, id="requests"),
        pytest.param({"lost_at": 2}, id="captures", marks=pytest.mark.long),
        pytest.param({"lost_at": 12}, id="further captures", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_lost_ends_the_others_in_words(at: dict[str, int], built: Path):
    """In the middle of requests, whose steps are replays, or of the rehearsal."""
    [case] = [{**CASES[1], "lost": 1, **at}]
    with processes(2, [case], built) as made:
        said, _ = made[0].communicate(timeout=LIMIT_S)
        assert made[1].wait(LIMIT_S) == 3
    assert "rank 1 (member 1 of stage 0) is lost" in json.loads(said)["lost"]


@pytest.mark.long
def test_all_devices_exchange_whoever_replays(built: Path, monkeypatch: pytest.MonkeyPatch):
    """What `ess doctor` asks of them."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(FOLDER), str(ROOT))))
    monkeypatch.setenv("PRETENDED_DRIVER", str(built))
    monkeypatch.setenv("EMULATED_DEVICES", "3")
    outcome = exchange_check.trial(3)
    assert outcome.wrong == ()
    assert 0 < outcome.taken_bytes <= outcome.estimated_bytes


USED = f"0,{78 * 2**30 - 180 * 2**20}"
"""Of 80 GiB, 2 stay free where ranks meet."""
SIZES = ("--form", "f32", "--row", "f32", "--host-bytes", "96MiB", "--max-running", "2", *GRAPHS)


def completion(url: str) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        made = client.completions.create(
            model="ess-embedded", prompt=PROMPT, max_tokens=MADE, temperature=0, timeout=300
        )
    return made.choices[0].text


@pytest.mark.long
def test_one_command_starts_a_server_for_each_device(built: Path):
    """Of the second one others have so much that not all rows have slots."""
    paths = os.pathsep.join((str(FOLDER), str(ROOT)))
    told = {"PYTHONPATH": paths, "PRETENDED_DRIVER": str(built), "EMULATED_DEVICES": "2"}
    [wanted] = served_alone(PROMPT)
    with Process(
        "--device", "cuda", "--dp-size", "2", *SIZES, **told, EMULATED_USED=USED
    ) as process:
        urls = [line["url"] for line in process.greeting["processes"]]
        for url in urls:
            until(lambda url=url: ask(f"{url}/ready").status == 200, "ranks that met", within_s=240)
        for url in urls:
            assert completion(url) == TOKENIZER.decode(wanted)
        shown = [ask(f"{url}/server_info").document for url in urls]
        assert [each["settings"]["device"]["value"] for each in shown] == ["cuda:0", "cuda:1"]
        slots = [parse_size(each["settings"]["slot_bytes"]["value"]) for each in shown]
        assert slots[0] > 90 << 20 > 70 << 20 > slots[1] > 0
        process.process.terminate()
        assert process.ended(120) == 0


@pytest.mark.long
def test_an_engine_that_is_killed_in_the_rehearsal_comes_back_with_the_others(
    built: Path, tmp_path: Path
):
    """No engine has been ready, and that of rank 0 says that it is lost: both start again."""
    paths = os.pathsep.join((str(FOLDER), str(ROOT)))
    told = {"PYTHONPATH": paths, "PRETENDED_DRIVER": str(built), "EMULATED_DEVICES": "2"}
    (secret := tmp_path / "secret").write_text("of all ranks of this test")
    logs = [tmp_path / f"rank-{rank}" for rank in range(2)]
    with contextlib.ExitStack() as kept:
        meeting = f"127.0.0.1:{kept.enter_context(kept_port('127.0.0.1'))}"
        alike = ("--dp-size", "2", "--dist-init-addr", meeting, "--peer-secret-file", str(secret))
        servers = []
        for rank, log in enumerate(logs):
            lines = kept.enter_context(log.open("w"))
            of_rank = ("--dp-rank", str(rank), "--device", f"cuda:{rank}")
            process = Process(*of_rank, *alike, *SIZES, stderr=lines.fileno(), **told)
            servers.append(kept.enter_context(process))
        until(lambda: all("a step" in log.read_text() for log in logs), "rehearsals", within_s=240)
        servers[1].kill_engine()
        assert "captured in" not in logs[1].read_text(), "it was killed too late"
        for server, log in zip(servers, logs, strict=True):
            until(lambda log=log: "ready after" in log.read_text(), "a restart", within_s=240)
            assert log.read_text().count("another starts") == 1
            assert server.status("/ready") == 200
        assert "rank 1 (member 1 of stage 0) is lost" in logs[0].read_text()
        [wanted] = served_alone(PROMPT)
        for server in servers:
            assert completion(server.url) == TOKENIZER.decode(wanted)
