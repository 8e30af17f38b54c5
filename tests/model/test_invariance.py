"""A request's logits are the same bits alone and in company, in NONE and in RESIDENT."""

from __future__ import annotations

import functools

import pytest
import torch

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.step.runner import Forward, Runner
from ess.engine.tokens.sampling import Sampling
from ess.kernels.cpu import native
from ess.models.load import EMBEDDED, load_model
from ess.models.model import Model
from ess.models.text.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(not native.available(), reason="torch's products do not promise it")
TEXT = "A transaction is a unit of work that is performed against a database, in one order. "
STEPS = 5


@functools.cache
def model(form: str) -> Model:
    return load_model(form=form)  # type: ignore[arg-type]


def prompt(shift: int, length: int) -> list[int]:
    ids = Tokenizer(EMBEDDED).encode(TEXT * 20)
    return ids[shift : shift + length]


def logits_of_first(
    form: str, mode: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """Of the first request, at each of its steps."""
    config = model(form).config
    layout = config.layout(row="f32", index="f32") if form == "f32" else config.layout()
    seen: list[torch.Tensor] = []
    company: list[int] = []
    decode = Runner.decode

    def noted(self: Runner, batch: object, tokens: list[int]) -> Forward:
        forward = decode(self, batch, tokens)  # type: ignore[arg-type]
        seen.append(forward.logits[0].clone())
        company.append(len(forward.logits))
        return forward

    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.page_bytes * 6,
        host_bytes=60 * layout.host_page_bytes,
        length_max=1024,
        slot_floor=64,
    )
    with monkeypatch.context() as patched, offload:
        patched.setattr(Runner, "decode", noted)
        engine = Engine(model(form), offload, EngineConfig(modes=mode))
        first = engine.add(prompts[0], Sampling(tokens_max=STEPS))
        engine.step()
        for other in prompts[1:]:
            engine.add(other, Sampling(tokens_max=STEPS + 9))
        while first.reason is None:
            engine.step()
    assert max(company[:STEPS]) > 1 or len(prompts) == 1, "no other request was in a step"
    return seen[:STEPS]


@pytest.mark.parametrize("form", ["bf16", "f32"])
@pytest.mark.parametrize("mode", ["none", "resident"])
def test_logits_do_not_depend_on_neighbours(
    form: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = prompt(0, 400)
    others = [prompt(3 + 5 * place, 60 + 37 * place) for place in range(6)]
    alone = logits_of_first(form, mode, [mine], monkeypatch)
    together = logits_of_first(form, mode, [mine, *others], monkeypatch)
    assert len(alone) == len(together) == STEPS
    for step, (each, other) in enumerate(zip(alone, together, strict=True)):
        assert torch.equal(each, other), f"step {step}: {float((each - other).abs().max()):.2g}"
