"""How tensors of devices go from rank to rank: what all ranks say of theirs decides."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ess.comm.processes.meeting import SILENT_S, Meeting, RankPlace
from ess.errors import BadInput

HOST = torch.device("cpu")


def place(device: str, *, team: int = 1) -> RankPlace:
    return RankPlace(
        rank=0,
        size=2,
        team=team,
        generation=0,
        host="10.0.0.1",
        port=9,
        is_agents_store=False,
        secret=b"",
        device=torch.device(device),
        timeout_s=1.0,
        patience_s=20.0,
        until_s=time.monotonic() + 1.0,
    )


def carried(mine: RankPlace, *homes: str, machines: tuple[str, ...] = ("a", "a")) -> torch.device:
    """Where rank 0 keeps travelling tensors, when the other ranks report these homes."""
    said = dict(enumerate((mine.home, *homes)))
    addresses = {rank: f"{machine} 5{rank}" for rank, machine in enumerate(machines)}
    return Meeting(mine)._carried(said, addresses)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


@pytest.mark.usefixtures("nccl")
def test_devices_of_their_own_exchange_by_themselves():
    assert carried(place("cuda:0"), "cuda:1") == torch.device("cuda:0")
    assert carried(place("cuda:1"), "cuda:1", machines=("a", "b")) == torch.device("cuda:1")


@pytest.mark.usefixtures("nccl")
def test_a_shared_device_or_one_rank_without_nccl_takes_all_over_the_host():
    assert carried(place("cuda:0"), "cuda:0") == HOST
    assert carried(place("cuda:0"), "host:cuda:1") == HOST


def test_without_nccl_here_all_go_over_the_host(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert carried(place("cuda:0"), "cuda:1") == HOST
    assert place("cuda:0", team=2).home == "cuda:0", "a team needs NCCL, and says so later"


def test_tensors_of_the_host_stay_there():
    assert carried(place("cpu"), "cpu") == HOST


@pytest.mark.usefixtures("nccl")
def test_a_device_and_a_host_do_not_meet():
    with pytest.raises(BadInput, match=r"at 10\.0\.0\.1:9: tensors are on cpu and on cuda"):
        carried(place("cuda:0"), "cpu")


def test_a_rank_that_compiles_for_its_device_may_be_silent_as_long_as_one_that_takes_nothing():
    assert place("cuda:0").silent_s == 20.0
    assert place("cpu").silent_s == SILENT_S == 3.0


def test_the_time_left_to_join_in_does_not_limit_the_exchanges_behind_it():
    """It is short where the ranks of another machine have come late."""
    meeting = Meeting(place("cpu"))
    meeting._store = dist.HashStore()
    assert meeting._place.left_s <= 1.0
    made = meeting._process_group("team/0", 0, 1, "127.0.0.1", HOST)
    assert made.options._timeout == timedelta(seconds=20.0)
