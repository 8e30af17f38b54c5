"""`deterministic`: the same bits whatever the neighbours, drafts, chunks and prefixes are."""

from __future__ import annotations

import types

import msgspec
import pytest

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.determinism import require_alike
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput, Unavailable
from ess.models.load import load_model
from ess.overlap.policy import Mode
from tests.model.grid import text

LENGTH, SHIFT = 300, 40
SAMPLING = Sampling(tokens_max=14, temperature=0.8, seed=3, logprobs=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return load_model()


def engine(model, *, mtp: int = 1, chunks: int = 5, evict: str = "lru", **changes) -> Engine:
    layout = model.config.layout(has_mtp=mtp > 1)
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.page_bytes * chunks,
        host_bytes=80 * layout.host_page_bytes,
        length_max=1024,
        slot_floor=64,
        poison=True,
        evict=evict,
    )
    return Engine(model, offload, EngineConfig(mtp=mtp, **changes))


def said(eng: Engine, *neighbours: int) -> list[object]:
    made = chances_of(eng, *neighbours)
    eng.offload.close()
    return made


def chances_of(eng: Engine, *neighbours: int) -> list[object]:
    """The request's tokens with their chances to the last bit, among requests that share its text
    from the start or not at all."""
    others = [eng.add(text("embedded")[:count], Sampling(tokens_max=20)) for count in neighbours]
    for _ in range(4 * len(others)):
        eng.step()
    request = eng.add(text("embedded")[:LENGTH], SAMPLING)
    chances: list[object] = []
    while request.reason is None:
        for made in eng.step().made:
            if made.request is request:
                chances += [msgspec.structs.astuple(chance) for chance in made.chances]
    return [*request.output, *chances]


def test_the_same_bits_in_every_company(model):
    alone = said(engine(model, deterministic=True))
    assert len(alone) == 2 * SAMPLING.tokens_max
    for changes, neighbours in (
        ({"chunk_tokens": 64}, (290, 17)),
        ({"mtp": 4, "chunk_tokens": 200}, ()),
        ({"mtp": 2, "chunk_tokens": 96, "depth": 1}, (130, 64, 299)),
        ({"chunks": 24, "max_running": 2}, (200,)),
    ):
        assert said(engine(model, deterministic=True, **changes), *neighbours) == alone, changes


def test_how_a_prompt_is_cut_changes_no_bit_without_it(model):
    assert said(engine(model, modes="none", chunk_tokens=64)) == said(
        engine(model, modes="none", chunk_tokens=300)
    )


def test_what_it_cannot_be_combined_with_is_refused_by_name(model):
    with pytest.raises(BadInput, match="every layer as NONE, but modes is 'da'"):
        EngineConfig(deterministic=True, modes="da")
    with pytest.raises(BadInput, match="needs tbo off"):
        EngineConfig(deterministic=True, tbo="on")
    with pytest.raises(BadInput, match="needs sbo off"):
        EngineConfig(deterministic=True, sbo="combine-down")
    lacking = types.SimpleNamespace(has_stages=lambda: False, implementation=lambda: "torch")
    with pytest.raises(Unavailable, match="compiled stages, which backend 'reference' lacks"):
        require_alike(lacking, "reference")


class Heard:
    """Ops that keep what each was told."""

    def __init__(self, ops):
        self._ops, self.told = ops, []

    def __getattr__(self, name):
        function = getattr(self._ops, name)

        def call(*given, **options):
            self.told.append((name, options))
            return function(*given, **options)

        return call


@pytest.mark.parametrize(("deterministic", "evict"), [(False, "score"), (True, "lru")])
def test_attention_fills_a_device_unless_it_is_asked_for_bits(model, deterministic, evict):
    """And the indexer gets the number of queries per request, if that is the same for all."""
    eng = engine(model, mtp=2, evict=evict, modes="none", deterministic=deterministic)
    eng.tuning.timeline.keeps_spans = True  # a trace goes by the ops one by one
    heard = eng.runner.ops = Heard(eng.runner.ops)
    eng.add(text("embedded")[:9], Sampling(tokens_max=4, ignore_eos=True))
    while not eng.is_idle:
        eng.step()
    eng.offload.close()
    balanced = {
        options["balanced"]
        for name, options in heard.told
        if name == "attend" and "balanced" in options
    }
    asked = ("index_top_k", "index_scored" if evict == "score" else "index_top_k")
    counts = {options.get("queries_per_request") for name, options in heard.told if name in asked}
    assert balanced == {not deterministic}
    assert counts == {None, 1, 2}


def test_steps_of_one_bucket_whose_requests_differ_share_no_graph(model, monkeypatch):
    """A request with fewer queries than the bucket has moves those of the next one to its place."""
    runner = engine(model, mtp=2, modes="none").runner
    vector = (Mode.NONE,) * runner.offload.layout.layer_total
    monkeypatch.setattr(runner.tuning, "vector", lambda step: vector)
    courses = [
        runner.course(
            types.SimpleNamespace(number=1, query_count=8, query_counts=counts), (2, 2, 2, 2)
        )
        for counts in [(2, 2, 2), (2, 1, 2), (2, 2, 2, 2)]
    ]
    assert [course.queries_per_request for course in courses] == [2, 1, 2]
    assert courses[0] != courses[1]
    assert courses[0] == courses[2]
