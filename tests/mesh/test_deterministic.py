"""`deterministic` where ranks divide a model: the bits of one engine, whatever the neighbours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
from msgspec import structs

from ess.comm.group import Group
from ess.comm.link import LinkLost
from ess.comm.local import local_group
from ess.engine.config import ProcessConfig
from ess.engine.mesh import process
from ess.engine.mesh.engines import Lead
from ess.engine.process.messages import Launch, Rank
from ess.engine.process.rank import greet
from ess.errors import BadInput
from ess.models.load import EMBEDDED, load_model
from tests.comm.test_local import each
from tests.mesh.rig import Shape, run_mesh
from tests.model.test_deterministic import chances_of, engine, said

RANK = Rank(rank=0, size=2, init="tcp://127.0.0.1:1", layers=((0, 6),), team=2)
HALVES = structs.replace(RANK, team=1, layers=((0, 3), (3, 6)))
LAUNCH = Launch(
    model=str(EMBEDDED),
    config=ProcessConfig(deterministic=True, threads=1),
    length_max=1024,
    slot_bytes=0,
    host_bytes=0,
    index_bytes=0,
    rank=RANK,
)
BOX = Shape(family="box", chunks=3)


@pytest.mark.parametrize(
    ("shape", "settings", "neighbours"),
    [
        (replace(BOX, pp=2), {"chunk_tokens": 64}, (290, 17)),
        (replace(BOX, tp=2, mtp=2), {"chunk_tokens": 96, "depth": 1}, (130, 64)),
    ],
)
def test_the_bits_of_one_engine(shape, settings, neighbours):
    """In bf16, with rows in fp8: tokens and chances, beside other requests."""

    def act(lead: Lead) -> list[object]:
        made = chances_of(lead, *neighbours)
        while not lead.is_idle:
            lead.step()
        return made

    alone = said(engine(load_model(), deterministic=True))
    assert run_mesh(shape, act, deterministic=True, **settings) == alone


def test_a_share_of_the_heads_that_rounds_otherwise_is_refused(monkeypatch):
    model = SimpleNamespace(config=SimpleNamespace(is_grouped=False, head_count=8))
    monkeypatch.setattr(process, "load_model", lambda *_, **more: model)
    with pytest.raises(BadInput, match="tp_size is 2: a rank's 4 of 8 heads round otherwise"):
        process.load_part(LAUNCH, RANK)


def refused(launches: Sequence[Launch]) -> str:
    """What rank 0 says to ranks that were started like this."""

    def run(group: Group) -> None:
        try:
            greet(group, process.facts(launches[group.rank]))
        except BaseException as wrong:
            group.fail(str(wrong))
            raise

    refusal, lost = each(local_group(2, team=2), run)
    assert isinstance(refusal, BadInput)
    assert isinstance(lost, LinkLost)
    return str(refusal)


def test_ranks_that_would_round_otherwise_do_not_begin(monkeypatch):
    """As on two machines with other instructions. Without `deterministic` they work together."""
    monkeypatch.setattr(process, "arithmetic", lambda config: f"kernels {next(kinds)}")
    kinds = count()
    said = r"arithmetic is kernels \d on rank 1, kernels \d on rank 0"
    assert re.match(said, refused([LAUNCH, LAUNCH]))
    config = replace(LAUNCH.config, deterministic=False)
    assert "arithmetic" not in process.facts(structs.replace(LAUNCH, config=config))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tpot_ms": 20.0}, "tpot_ms is 20.0 on rank 1, 0.0 on rank 0"),
        ({"deterministic": False}, "deterministic is False on rank 1, True on rank 0"),
        ({"fake_prefill": True, "role": "decode"}, "role is decode on rank 1, both on rank 0"),
    ],
)
def test_nodes_with_other_flags_do_not_begin(settings, named):
    """Each node has a command line. With other limits or refusals the ranks would come apart, or
    wait for one another for ever."""
    other = structs.replace(LAUNCH, config=replace(LAUNCH.config, **settings))
    assert refused([LAUNCH, other]) == named


def test_nodes_that_cut_the_layers_elsewhere_do_not_begin():
    other = structs.replace(LAUNCH, rank=structs.replace(HALVES, layers=((0, 2), (2, 6))))
    named = "layers is ((0, 2), (2, 6)) on rank 1, ((0, 3), (3, 6)) on rank 0"
    assert refused([structs.replace(LAUNCH, rank=HALVES), other]) == named
