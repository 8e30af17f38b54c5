"""Ranks as real processes: order and content, kills and stops, leaving and meeting again."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from itertools import product

import pytest

from tests.comm.peer_process import FRAMES
from tests.comm.ranks import LIMIT_S, Rank, environment, ranks
from tests.house.tree import ROOT
from tests.support.few import few

pytestmark = pytest.mark.slow

ACTS = ("wait", "pour")


def ends(group: list[Rank]) -> list[list[str]]:
    said = [rank.lines() for rank in group]
    assert [rank.process.wait(LIMIT_S) for rank in group] == [0] * len(group)
    return said


@pytest.mark.parametrize(("size", "team"), [(4, 1), (4, 2)])
def test_every_frame_arrives_in_order_and_whole(size: int, team: int) -> None:
    with ranks("stream", size, team=team) as group:
        first, *others = ends(group)
    assert first == ["joined", *[f"report {FRAMES} right"] * team, "done"]
    assert others == [["joined", "done"]] * (size - 1)


@pytest.mark.parametrize(
    ("act", "victim"), few([("wait", 2), ("pour", 0)], all_of=product(ACTS, range(3)))
)
def test_a_killed_rank_is_named_by_all_others(act: str, victim: int) -> None:
    with ranks(act, 3) as group:
        for rank in group:
            rank.until("waiting")
        group[victim].signal(signal.SIGKILL)
        group.pop(victim)
        for said in ends(group):
            assert said[0].startswith(f"lost {victim} stage {victim} (rank {victim}) is lost: ")


@pytest.mark.parametrize(("act", "victim"), few([("pour", 2)], all_of=product(ACTS, range(3))))
def test_a_stopped_rank_is_found_by_its_missing_beats(act: str, victim: int) -> None:
    with ranks(act, 3) as group:
        for rank in group:
            rank.until("waiting")
        group[victim].signal(signal.SIGSTOP)
        stopped = group.pop(victim)
        for said in ends(group):
            name = f"stage {victim} (rank {victim})"
            assert said[0].startswith(f"lost {victim} {name} is lost: no beat of it came for ")
        stopped.signal(signal.SIGKILL)
        assert stopped.process.wait(LIMIT_S) == -signal.SIGKILL


@pytest.mark.parametrize("number", few([signal.SIGKILL], all_of=[signal.SIGKILL, signal.SIGSTOP]))
def test_a_lost_member_ends_its_team(number: signal.Signals) -> None:
    with ranks("gather", 4, team=2) as group:
        for rank in group:
            rank.until("waiting")
        group[3].signal(number)
        for said in ends(group[:3]):
            assert said[0].startswith("lost ")
            assert "stage 1" in said[0]
        group[3].signal(signal.SIGKILL)


def test_generations_follow_one_another_in_a_process() -> None:
    with ranks("meet_again", 2) as group:
        first, second = ends(group)
    assert first == ["joined", "done"]
    told = [f"generation {number} {[1.0] * number}" for number in (1, 2, 3)]
    assert second == ["joined", *told, "done"]


def test_a_team_of_processes_gathers_exchanges_and_broadcasts() -> None:
    with ranks("team", 4, team=2) as group:
        assert ends(group) == [["joined", "done"]] * 4


def test_torchrun_starts_a_group() -> None:
    """Its agent keeps the store; ranks read their numbers from the environment."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "tests.comm.peer_process", "stream", "env", "env", "env"),
        ],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"joined|done|report \d+ right", done.stdout)  # both write at once
    assert sorted(said) == sorted(["joined", "joined", f"report {FRAMES} right", "done", "done"])
