"""Ranks that divide the experts on two devices: over NCCL, as processes."""

from __future__ import annotations

from pathlib import Path

import pytest

for name in ("torch", "triton", "msgspec", "safetensors", "zmq"):
    pytest.importorskip(name, reason=f"engines need {name}")

import torch  # noqa: E402

from ess.engine.process.checks import exchange_check  # noqa: E402
from tests.ranks.test_processes import add, expected, ranks  # noqa: E402

COUNT = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT < 2, reason="ranks need two CUDA devices"),
]
OWN = ({"device": "cuda:0"}, {"device": "cuda:1"})


def test_all_devices_exchange_and_an_exchange_takes_what_is_estimated():
    outcome = exchange_check.trial(COUNT)
    assert not outcome.wrong
    assert 0 < outcome.taken_bytes <= outcome.estimated_bytes


@pytest.mark.parametrize(("tbo", "sbo"), [("off", "off"), ("on", "dispatch-shared")])
def test_two_ranks_say_the_tokens_of_one_process(tmp_path: Path, tbo: str, sbo: str):
    """With collectives in graphs that are captured before the first request, and drafts."""
    given = {"backend": "cuda", "modes": "none", "mtp": 2, "graphs": 16, "graph_sizes": "2"}
    with ranks(tmp_path, 2, *OWN, **given, tbo=tbo, sbo=sbo) as [first, last]:
        first.ready()
        last.ready()
        for number, length in enumerate((40, 130)):
            first.say(add(number, length))
        last.say(add(2, 90))
        first.ended(0, 1)
        last.ended(2)
        for engine, number, length in ((first, 0, 40), (first, 1, 130), (last, 2, 90)):
            assert engine.tokens(number) == expected(length), length
        first.until(lambda _: first.status.graphs is not None and first.status.graphs.replayed > 0)
