"""Long contexts in fp32: 4K and 16K tokens through a tight arena, the plain model's tokens."""

from __future__ import annotations

import functools

import pytest

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.models.model import Model
from ess.models.plain import Plain
from tests.support.checkpoints import TINY_GLM, TINY_V32, model, tokens

pytestmark = pytest.mark.slow
SMALL = {"index_n_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 32768}
FAMILIES = {"deepseek_v32": TINY_V32, "glm_moe_dsa": TINY_GLM}
COUNT = 12


@functools.cache
def small(family: str) -> Model:
    return model({**FAMILIES[family], **SMALL})


@functools.cache
def expected(family: str, length: int) -> list[int]:
    plain, prompt = Plain(small(family)), tokens(length, 128, seed=length)
    for start in range(0, length, 1024):
        logits = plain.run(prompt[start : start + 1024]).logits
    made = [int(logits[-1].argmax())]
    while len(made) < COUNT:
        made.append(int(plain.run(made[-1:]).logits[-1].argmax()))
    return made


WAYS = [("deepseek_v32", "da"), ("deepseek_v32", "resident"), ("glm_moe_dsa", "dba")]
CASES = [(*way, 4096) for way in WAYS] + [
    pytest.param(*way, 16384, marks=pytest.mark.long if way[1:] != ("da",) else ()) for way in WAYS
]


@pytest.mark.parametrize(("family", "mode", "length"), CASES)
def test_long_contexts_say_what_the_plain_model_says(family, mode, length):
    layout = small(family).config.layout(row="f32", index="f32")
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.group_layers_max * layout.page_bytes * 4,
        host_bytes=(length // 64 + 8) * layout.host_page_bytes,
        length_max=length + 64,
        slot_floor=64,
        poison=True,
    )
    eng = Engine(small(family), offload, EngineConfig(mtp=2, modes=mode, chunk_tokens=1000))
    request = eng.add(tokens(length, 128, seed=length), Sampling(tokens_max=COUNT))
    for _ in eng.run():
        pass
    assert request.output == expected(family, length)
    offload.close()
