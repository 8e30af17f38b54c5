"""Whole engines on a device: what tests/device shows beside one that is not there.

Needs torch with CUDA, Triton, and what an engine needs; what is missing is named.
"""

from __future__ import annotations

import pytest

for name in ("torch", "triton", "msgspec", "safetensors", "zmq"):
    pytest.importorskip(name, reason=f"engines need {name}")

import torch  # noqa: E402

from ess.door import Offload  # noqa: E402
from ess.models.load import load_model  # noqa: E402
from ess.models.weights.expected.kept_bytes import kept_bytes  # noqa: E402
from ess.pool.device_bytes import PoolShape, pool_bytes  # noqa: E402
from ess.server.commands.start.files.checkpoint import embedded_path, read_entries  # noqa: E402
from tests.device import engines  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

CASES = (
    ("glm", "dba", "4", "1", "tight"),
    ("glm", "resident", "1", "0", "ample"),
    ("v32", "none", "2", "1", "ample"),
    ("v32", "da", "4", "0", "tight"),
    ("v32", "dba", "2", "0", "tight"),
    ("glm", "layerwise", "1", "1", "smallest", "many"),
    ("v32", "da", "2", "0", "smallest", "off", "score"),
)
ROUNDED = 1.02
SPARE = 8 << 20
"""Torch rounds small arrays up to 512 bytes each, large ones to 2 MiB."""


@pytest.mark.parametrize("values", CASES, ids="-".join)
def test_the_tokens_are_those_of_the_host(values: tuple[str, ...]):
    case = dict(zip((*engines.FACTORS, "graphs", "evict"), values, strict=False))
    said = engines.scenario(engines.engine("cuda", **case))
    wanted = engines.expected(case["family"])
    assert [tokens for tokens, _ in said] == [tokens for tokens, _ in wanted]


def test_logits_are_summed_in_float32():
    made = load_model(form="bf16", device="cuda")
    finished = torch.randn(3, made.config.hidden_dim, device="cuda")
    head = made._last(made._head)
    logits = made.logits(finished)
    wanted = finished.bfloat16().double() @ head.double().T
    torch.testing.assert_close(logits.double(), wanted, atol=1e-3, rtol=1e-4)
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9


def is_near(taken: int, planned: int) -> bool:
    return planned <= taken + SPARE and taken <= ROUNDED * planned + SPARE


@pytest.mark.parametrize("form", ["bf16", "stored"])
def test_weights_take_what_their_plan_says(form: str):
    before = torch.cuda.memory_allocated()
    made = load_model(form=form, device="cuda")
    planned = kept_bytes(made.config, read_entries(embedded_path()), form)
    assert is_near(torch.cuda.memory_allocated() - before, planned)


def test_pools_take_what_their_plan_says():
    layout = engines.model("v32", "cpu").config.layout()
    shape = PoolShape(
        layout=layout, chunks=999, index_pages=800, sequence_max=32, length_max=9000, query_max=64
    )
    before = torch.cuda.memory_allocated()
    offload = Offload.create(
        layout,
        device="cuda:0",
        slot_bytes=999 * layout.chunk_bytes,
        host_bytes=800 * layout.host_page_bytes,
        sequence_max=32,
        length_max=9000,
        query_max=64,
    )
    assert is_near(torch.cuda.memory_allocated() - before, sum(pool_bytes(shape).values()))
    offload.close()


def test_a_server_would_find_its_device_and_decode_on_it():
    from ess.engine.process.checks.device_check import trial
    from ess.engine.process.checks.device_probe import probe

    assert probe(0).why_not("cuda:0") == ""
    assert trial(0).same
