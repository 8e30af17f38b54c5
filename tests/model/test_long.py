"""Long contexts in fp32: 4K to 16K tokens through a tight arena, the plain model's tokens; and
prompts as long as the selection that models have, to the token."""

from __future__ import annotations

import functools

import pytest

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.models.model import Model
from ess.models.plain import Plain
from tests.support.checkpoints import TINY_GLM, TINY_V32, model, tokens
from tests.support.few import few

pytestmark = pytest.mark.slow
SMALL = {"index_n_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 32768}
FAMILIES = {"deepseek_v32": TINY_V32, "glm_moe_dsa": TINY_GLM}
COUNT = 12


@functools.cache
def small(family: str, **changes: int) -> Model:
    return model({**FAMILIES[family], **SMALL, **changes})


@functools.cache
def expected(family: str, length: int) -> list[int]:
    return continued(small(family), tokens(length, 128, seed=length))


def continued(made: Model, prompt: list[int], count: int = COUNT) -> list[int]:
    plain, length = Plain(made), len(prompt)
    for start in range(0, length, 1024):
        logits = plain.run(prompt[start : start + 1024]).logits
    said = [int(logits[-1].argmax())]
    while len(said) < count:
        said.append(int(plain.run(said[-1:]).logits[-1].argmax()))
    return said


WAYS = [("deepseek_v32", "da"), ("deepseek_v32", "resident"), ("glm_moe_dsa", "dba")]
CASES = few(
    [(*WAYS[0], 8192), (*WAYS[1], 4096), (*WAYS[2], 4096)],
    all_of=[(*way, length) for way in WAYS for length in (4096, 8192, 16384)],
)


@pytest.mark.parametrize(("family", "mode", "length"), CASES)
def test_long_contexts_say_what_the_plain_model_says(family, mode, length):
    layout = small(family).config.layout(row="f32", index="f32")
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.chunk_bytes * 4,
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


TOP_K, FEW = 2048, 6
LINE = tokens(TOP_K + 1, 128, seed=5)


@pytest.mark.parametrize(
    ("family", "mode", "mtp", "tbo"),
    [
        ("deepseek_v32", "da", 4, "off"),
        pytest.param("glm_moe_dsa", "dba", 2, "off", marks=pytest.mark.long),
        pytest.param("deepseek_v32", "layerwise", 1, "on", marks=pytest.mark.long),
    ],
)
def test_prompts_as_long_as_a_selection(family, mode, mtp, tbo):
    """In one batch, over little more slots than one of them selects; each is preempted where its
    length passes the selection's, and comes again over its own cached prefix."""
    made = small(family, index_topk=TOP_K)
    layout = made.config.layout(row="f32", index="f32")
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.chunk_bytes * 34,
        host_bytes=120 * layout.host_page_bytes,
        length_max=TOP_K + 64,
        slot_floor=64,
        poison=True,
    )
    eng = Engine(made, offload, EngineConfig(mtp=mtp, modes=mode, tbo=tbo, chunk_tokens=511))
    lengths = (TOP_K - 1, TOP_K, TOP_K + 1)
    said = [continued(made, LINE[:each], FEW) for each in lengths]
    for _ in range(2):
        asked = [eng.add(LINE[:each], Sampling(tokens_max=FEW)) for each in lengths]
        left = set(asked)
        while not eng.is_idle:
            eng.step()
            eng.check()
            for request in [each for each in left if each.output and len(each.tokens) > TOP_K]:
                left.remove(request)
                if request.state == "decoding":
                    eng.preempt(request)
                    eng.resume(request)
        assert not left
        assert [each.output for each in asked] == said
    assert [each.cached_count for each in asked] == [TOP_K - 128, TOP_K - 128, TOP_K - 64]
    offload.close()
