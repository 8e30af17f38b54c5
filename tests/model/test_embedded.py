"""The model in the box: what it weighs, how it says the same in low precision and over slots."""

from __future__ import annotations

import functools

import pytest
import torch.nn.functional as F

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.layout import ModelLayout
from ess.models.load import EMBEDDED, load_model
from ess.models.plain import Plain
from ess.models.text.tokenizer import Tokenizer
from tests.support.greedy import greedy
from tests.support.stored import Stored

COUNT = 12
TEXT = (
    "The module provides a portable way of using operating system dependent functionality. "
    "If you just want to read or write a file, see open(). A transaction is a unit of work that "
    "is performed against a database. The query returns the rows that match the condition. "
)


@functools.cache
def exact():
    return load_model(form="f32")


@functools.cache
def ids(count: int) -> list[int]:
    return Tokenizer(EMBEDDED).encode(TEXT * (1 + count // 40))[:count]


def test_it_loads_small_and_fits_its_layout():
    model = load_model(form="bf16")
    layout = ModelLayout.embedded()
    assert model.config.layout(name=layout.name) == layout
    assert sum(file.stat().st_size for file in EMBEDDED.iterdir()) < 30e6


def test_low_precision_stays_close_to_our_own_float32():
    tokens = ids(400)
    reference = Plain(exact()).run(tokens).logits
    rounded = Stored(load_model(form="bf16"), exact().config.layout()).run(tokens).logits
    loss = F.kl_div(
        rounded.log_softmax(-1), reference.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    agreement = (rounded.argmax(-1) == reference.argmax(-1)).float().mean()
    assert loss < 5e-3, f"mean KL {loss:.2e}"
    assert agreement >= 0.95, f"argmax agreement {agreement:.3f}"


@functools.cache
def expected(length: int) -> list[int]:
    return greedy(exact(), ids(length), COUNT)


def engine(*, mode: str, mtp: int) -> Engine:
    layout = exact().config.layout(row="f32", index="f32")
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.page_bytes * 5,
        host_bytes=16 * layout.host_page_bytes,
        length_max=2048,
        slot_floor=64,
    )
    return Engine(exact(), offload, EngineConfig(modes=mode, mtp=mtp))


@pytest.mark.parametrize(("mode", "mtp"), [("none", 2), ("dba", 4), ("resident", 3)])
def test_the_engine_says_what_the_plain_model_says(mode, mtp):
    made = engine(mode=mode, mtp=mtp)
    requests = [made.add(ids(count), Sampling(tokens_max=COUNT)) for count in (40, 450)]
    for _ in made.run():
        pass
    for request in requests:
        assert request.output == expected(len(request.prompt))
    stats = made.offload.stats()
    assert stats.miss_count.sum() + stats.place_count.sum() > 0, "the arena was never tight"
    made.offload.close()
