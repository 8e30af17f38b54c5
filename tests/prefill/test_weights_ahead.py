"""Stages pack their weights before they are ready: the first request would wait for that."""

from __future__ import annotations

import pytest
import torch

from ess.clock import RealClock
from ess.comm.local import local_group
from ess.engine.config import ProcessConfig
from ess.engine.mesh.process import made_engine
from ess.engine.process.messages import Launch, Rank
from ess.engine.prompt.pack import Span
from ess.engine.prompt.run import run_chunks
from ess.engine.tokens.sampling import Sampling
from ess.kernels.cpu import stage
from ess.models.load import EMBEDDED
from ess.prefill.worker import load
from tests.support.checkpoints import tokens

RANK = Rank(rank=0, size=1, init="tcp://127.0.0.1:1", layers=((0, 6),))
IDS = tokens(90, 512, seed=5)


def decodes(launch: Launch):
    [group] = local_group(1)
    engine, _ = made_engine(launch, group)
    yield
    made = engine.add(IDS, Sampling(tokens_max=4, ignore_eos=True))
    assert [*engine.run()]
    assert len(made.output) == 4
    engine.offload.close()


def prefills(launch: Launch):
    [group] = local_group(1)
    runner = load(launch, RANK, group.team, RealClock()).stage.runner
    yield
    opened = runner.offload.open(IDS, length_max=256)
    span = Span(sequence=opened, start=0, tokens=IDS[:-1], following=IDS[1:])
    with torch.inference_mode():
        [made] = run_chunks(runner, [span])
    assert made.hidden.isfinite().all()
    runner.offload.close()


@pytest.mark.parametrize("works", [decodes, prefills])
def test_a_stage_packs_no_weights_in_its_first_steps(works, monkeypatch):
    config = ProcessConfig(form="f32", row="f32", threads=1, mtp=2)
    sizes = {"slot_bytes": 24 << 20, "host_bytes": 48 << 20, "index_bytes": 16 << 20}
    launch = Launch(model=str(EMBEDDED), config=config, length_max=2048, rank=RANK, **sizes)
    called, function = [], stage._function

    def noted(name, *kinds, **more):
        called.append(name)
        return function(name, *kinds, **more)

    monkeypatch.setattr(stage, "_function", noted)
    work = works(launch)
    next(work)
    assert "ess_pack" in called
    called.clear()
    next(work, None)
    assert "ess_pack" not in called
