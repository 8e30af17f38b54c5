"""What lies on the device, beside what plans say: run by `test_pretended_steps`."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ess.door import Offload
from ess.engine import step_bytes
from ess.engine.engine import Engine
from ess.engine.layer_bytes import F32
from ess.engine.prompt import downloads, plain_rows
from ess.engine.prompt.downloads import Downloads
from ess.engine.step_bytes import (
    CANDIDATES,
    DRAWN,
    KEPT,
    MADE,
    decode_bytes,
    prompt_bytes,
    staged_bytes,
)
from ess.engine.tokens.device_draw import Drawing, draw_all
from ess.engine.tokens.sampling import Sampling
from ess.kernels.cuda import driver
from ess.pool.device_bytes import LANDING_ROWS, PoolShape, pool_bytes
from ess.units import PAGE_ROWS
from tests.device import engines
from tests.support.checkpoints import tokens
from tests.support.pretended import PRETENCE, is_there


def storages(*things: Any) -> dict[int, Any]:
    """The memory of those that are tensors of the device, each once."""
    with torch._C.DisableTorchFunction():
        held = [
            thing.untyped_storage()
            for thing in things
            if issubclass(type(thing), torch.Tensor) and is_there(thing)
        ]
        return {memory._cdata: memory for memory in held}


def alive() -> dict[int, Any]:
    gc.collect()
    return storages(*gc.get_objects())


def tensor_bytes() -> int:
    return sum(memory.nbytes() for memory in alive().values())


class Peak:
    """The most bytes of tensors that were made since, and are alive together. What kernels take
    for themselves is not seen, since the host's run in their place."""

    def __init__(self) -> None:
        self.most = self._now = 0
        self._known = set(alive())
        self._run = PRETENCE.run

    def __enter__(self) -> Peak:
        PRETENCE.run = self._watched
        return self

    def __exit__(self, *error: object) -> None:
        del PRETENCE.run

    def begin(self) -> None:
        self.most = self._now

    def _watched(self, *given: Any, **named: Any) -> Any:
        result = self._run(*given, **named)
        for key, memory in storages(*tree_leaves(result)).items():
            if key not in self._known:
                self._known.add(key)
                self._now += memory.nbytes()
                weakref.finalize(memory, self._gone, key, memory.nbytes())
        self.most = max(self.most, self._now)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def driver_bytes() -> int:
    free_bytes, total_bytes = driver.Device().memory()
    return total_bytes - free_bytes


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("family", ["v32", "glm"])
def test_pools_take_what_their_plan_says(family, mtp):
    """65 pages have more rows than a landing lists at a time, 21 have fewer."""
    config, pages = engines.model(family, "cpu").config, 65 if mtp else 21
    assert (pages * PAGE_ROWS > LANDING_ROWS) is mtp
    layout = config.layout(row="fp8")
    if not mtp:
        layout = config.layout(row="f32", index="f32", has_mtp=False)
    shape = PoolShape(
        layout=layout,
        chunks=37,
        index_pages=pages,
        sequence_max=5,
        length_max=700,
        query_max=12,
        is_scored=mtp,
    )
    tensors, given = tensor_bytes(), driver_bytes()
    offload = Offload.create(
        layout,
        device="cuda:0",
        slot_bytes=37 * layout.chunk_bytes,
        host_bytes=33 * layout.host_page_bytes,
        index_bytes=pages * layout.index_page_bytes,
        sequence_max=5,
        length_max=700,
        query_max=12,
        slot_floor=16,
        evict="score" if mtp else "lru",
    )
    planned = pool_bytes(shape)
    pools = offload._pools
    assert planned["slots"] == pools.sparse.slab.nbytes
    assert planned["index keys"] == pools.index.keys.pages.nbytes
    ranks = pools.sparse.rank_of
    ranks_bytes = 0 if ranks is None else ranks.nbytes
    assert planned["row maps"] == pools.sparse.slot_of.nbytes + ranks_bytes
    assert sum(planned.values()) == tensor_bytes() - tensors + driver_bytes() - given
    offload.close()


@pytest.mark.parametrize(("most", "fits"), [(step_bytes.STAGED_BYTES, True), (1 << 14, False)])
def test_a_prompt_has_as_many_bytes_under_way_as_its_plan_says(most, fits, monkeypatch):
    """All of the longest chunk where it fits, else the most and a layer's rows."""
    for module in (downloads, step_bytes):
        monkeypatch.setattr(module, "STAGED_BYTES", most)
    seen = []

    class Watched(Downloads):
        def land(self):
            seen.append(self._byte_count)
            super().land()

    monkeypatch.setattr(plain_rows, "Downloads", Watched)
    with engines.alone():
        eng = engines.engine("cuda", door=False, mtp="2")
        eng.add(tokens(130, engines.VOCABULARY, seed=1), Sampling(tokens_max=1))
        while not eng.is_idle:
            eng.step()
        layout = eng.offload.layout
        eng.offload.close()
    planned = staged_bytes(layout, chunk_tokens=96, length_max=engines.LENGTH_MAX)
    whole = 96 * layout.host_page_bytes // PAGE_ROWS
    assert (planned == whole) is fits
    assert (planned if fits else most) <= max(seen) <= planned


def test_steps_take_no_more_than_their_estimate():
    with engines.alone():
        eng = engines.engine("cuda", mode="da", mtp="2", arena="ample")
        config, layout = eng.runner.model.config, eng.offload.layout
        with Peak() as peak:
            requests = [
                eng.add(
                    tokens(count, engines.VOCABULARY, seed=count),
                    Sampling(tokens_max=4, ignore_eos=True),
                )
                for count in (90, 130)
            ]
            while any(request.state != "decoding" for request in requests):
                eng.step()
            longest = {"length_max": engines.LENGTH_MAX}
            planned = prompt_bytes(config, layout, chunk_tokens=96, prompt_max=2, **longest)
            assert 0 < peak.most <= planned
            peak.begin()
            while not eng.is_idle:
                eng.step()
            assert 0 < peak.most <= decode_bytes(config, query_max=4, **longest)
        eng.offload.close()


def test_prompts_behind_cached_prefixes_take_no_more_than_their_estimate():
    """A pack needs the rows of all its prompts, cached ones included. The tokens of five prompts
    fit into one step here; there is memory for the rows of the longest prompt."""
    with engines.alone():
        model, offload, config = engines.parts("cuda", mode="da", mtp="2", arena="ample")
        eng = Engine(model, offload, replace(config, chunk_tokens=5 * PAGE_ROWS))
        begun = [tokens(130, engines.VOCABULARY, seed=seed) for seed in range(5)]
        once = Sampling(tokens_max=1, ignore_eos=True)
        for prompt in begun:
            eng.add(prompt, once)
        while not eng.is_idle:
            eng.step()
        packs = []
        with Peak() as peak:
            for prompt in begun:
                eng.add(prompt[:129], once)
            while not eng.is_idle:
                packs.append([(chunk.start, chunk.stop) for chunk in eng.step().chunks])
        sizes = {"chunk_tokens": 5 * PAGE_ROWS, "length_max": engines.LENGTH_MAX, "prompt_max": 5}
        assert 0 < peak.most <= prompt_bytes(model.config, offload.layout, **sizes)
        assert [chunk for pack in packs for chunk in pack] == [(64, 128)] * 5
        assert max(map(len, packs)) == engines.LENGTH_MAX // (2 * PAGE_ROWS)
        offload.close()


def test_a_draw_has_as_many_logits_at_a_time_as_are_counted():
    """Beside those that the model made and those that are kept for chances of tokens."""
    count, vocabulary, device = 64, 30_000, torch.device("cuda:0")
    samplings = [
        Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.1, seed=seed)
        for seed in range(count)
    ]
    with engines.alone():
        made = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(1)).to(device)
        by = Drawing(count, device).columns(samplings)
        positions = torch.arange(count).to(device)
        with Peak() as peak:
            drawn = draw_all(made.clone(), by, positions)
        assert drawn.shape == (count,)
    more, of_draw = 2 * CANDIDATES * F32 * count, DRAWN - MADE - KEPT
    assert 2 * made.nbytes < peak.most <= of_draw * made.nbytes + more
