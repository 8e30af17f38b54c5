"""DeepSeek-V4 through the engine: what the plain model says, whatever happens to a request."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from ess.door import Offload
from ess.door.sequences import kept
from ess.engine.engine import Engine, EngineConfig
from ess.engine.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.layout import RowForm
from ess.models.compressed.model import CompressedModel
from ess.models.compressed.plain import Plain
from ess.models.registry import read_config
from tests.compressed import drafting, world
from tests.model import grid
from tests.support import checkpoints
from tests.support.greedy import greedy
from tests.support.manual_lane import ManualLane
from tests.support.pairwise import all_pairs, pairs_of, pairwise

LINE = checkpoints.tokens(900, 96, seed=8)
OTHER = checkpoints.tokens(900, 96, seed=9)
PAGE = 256
"""Tokens of a page: 64 entries."""
MADE = 6
FACTORS = {
    "checkpoint": ("deepseek_v4",),
    **{name: grid.FACTORS[name] for name in ("mode", "depth", "arena", "warm")},
    "mtp": ("1", "2", "4"),
    "tbo": ("off",),
    "sbo": ("off",),
    "evict": ("lru", "score"),
}
WAYS = pairwise(FACTORS)
FIRST = [way for way in WAYS if way["arena"] == "smallest" and way["mtp"] == "4"][:1]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@contextmanager
def engines(
    *,
    spelling: str = "listed",
    chunks: int = 2,
    sequence_max: int = 8,
    host_pages: int = 24,
    **config: Any,
) -> Iterator[Engine]:
    """Slots for 64 entries a chunk, in each layer."""
    model = world.tiny(spelling)
    layout = world.layout(mtp=config.get("mtp", 1), spelling=spelling)
    offload = Offload.create(
        layout,
        slot_bytes=chunks * layout.group_count * layout.page_bytes,
        host_bytes=host_pages * layout.host_page_bytes,
        length_max=1024,
        sequence_max=sequence_max,
        slot_floor=8,
        lane=ManualLane(seed=1, delay_max=3),
        poison=True,
    )
    with offload:
        yield Engine(model, offload, EngineConfig(**{"chunk_tokens": 64, **config}))


@functools.cache
def told(length: int, *, line: int = 0, count: int = MADE, spelling: str = "listed") -> list[int]:
    return greedy(world.tiny(spelling), (LINE, OTHER)[line][:length], count)


def add(engine: Engine, prompt: list[int], **wishes: Any) -> Request:
    return engine.add(prompt, Sampling(tokens_max=MADE, ignore_eos=True), **wishes)


def finish(engine: Engine) -> None:
    for _ in engine.run():
        pass
    engine.offload.check()
    engine.check()


def run(engine: Engine, prompt: list[int]) -> Request:
    request = add(engine, prompt)
    finish(engine)
    return request


def test_every_pair_of_settings_meets() -> None:
    assert set().union(*(pairs_of(way) for way in WAYS)) == all_pairs(FACTORS)
    assert len(WAYS) < 20


@pytest.mark.parametrize("way", FIRST, ids=lambda way: "-".join(way.values()))
def test_an_engine_says_what_the_plain_model_says(
    way: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting.known(monkeypatch, world.tiny(), seed=1)
    assert grid.differences(way) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [way for way in WAYS if way not in FIRST], ids=lambda way: "-".join(way.values())
)
def test_an_engine_says_it_in_every_way(
    way: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting.known(monkeypatch, world.tiny(), seed=1)
    assert grid.differences(way) == []


@pytest.mark.parametrize("chunk", range(1, 10))
def test_chunks_end_at_every_offset_of_both_windows(chunk: int) -> None:
    """Entries of 4 tokens and of 8."""
    with engines(chunk_tokens=chunk) as engine:
        request = engine.add(LINE[: 13 + chunk], Sampling(tokens_max=3, ignore_eos=True))
        for _ in engine.run():
            pass
        assert request.output == told(13 + chunk)[:3]


@pytest.mark.slow
def test_prompts_of_every_length_beside_one_another() -> None:
    with engines(chunk_tokens=21, chunks=1) as engine:
        requests = [add(engine, LINE[:length]) for length in range(1, 26)]
        finish(engine)
        for request in requests:
            assert request.output == told(len(request.prompt)), len(request.prompt)


def test_published_windows_are_served_too() -> None:
    """Of 128 tokens, and layers of the last tokens alone."""
    with engines(spelling="ratios") as engine:
        requests = [add(engine, LINE[:length]) for length in (127, 128, 131, 300)]
        finish(engine)
        for request in requests:
            assert request.output == told(len(request.prompt), spelling="ratios")


# ---- preemption


@pytest.mark.parametrize("mtp", [1, 4])
def test_a_state_goes_to_the_host_and_comes_back(mtp: int) -> None:
    """In a prompt and at each offset of a window while it decodes; others take its line."""
    with engines(sequence_max=2, mtp=mtp) as engine:
        held = add(engine, LINE[:150])
        engine.step()
        assert held.state == "prefilling"
        engine.preempt(held)
        run(engine, OTHER[:40])
        engine.resume(held)
        while held.state != "finished":
            engine.step()
            if held.state == "decoding":
                engine.preempt(held)
                between = add(engine, OTHER[: 20 + len(held.output)])
                while between.state != "finished":
                    engine.step()
                engine.offload.check()
                engine.resume(held)
        assert held.output == told(150)
        assert engine.preempted_count == 1 + MADE


# ---- prefixes


@pytest.mark.parametrize("mtp", [1, 4])
def test_a_hit_begins_where_a_state_was_kept(mtp: int) -> None:
    with engines(chunks=8, mtp=mtp) as engine:
        run(engine, LINE[:700])
        for length, cached in ((700, 512), (513, 512), (512, 0), (300, 256)):
            request = run(engine, LINE[:length])
            assert (request.cached_count, request.output) == (cached, told(length)), length
        changed = LINE[:600] + OTHER[:40]
        request = run(engine, changed)
        assert request.cached_count == 512
        assert request.output == greedy(world.tiny(), changed, MADE)


def test_a_state_is_kept_every_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """In prompts, whatever their chunks, and while a request decodes."""
    monkeypatch.setattr(kept, "KEPT_TOKENS", PAGE)
    with engines(chunks=8, chunk_tokens=200) as engine:
        run(engine, LINE[:700])
        assert [run(engine, LINE[:length]).cached_count for length in (600, 400, 257)] == [
            512,
            256,
            256,
        ]
        first = run(engine, OTHER[:508])
        whole = OTHER[:508] + first.output
        request = run(engine, whole)
        assert request.cached_count == 512
        assert request.output == greedy(world.tiny(), whole, MADE)


def test_a_state_goes_with_its_page_and_belongs_to_its_salt() -> None:
    with engines(chunks=8, host_pages=4, chunk_tokens=900) as engine:
        add(engine, LINE[:300], salt=b"one")
        finish(engine)
        assert run(engine, LINE[:300]).cached_count == 0
        assert run(engine, LINE[:300]).cached_count == PAGE
        states = engine.offload.owner.pools.states
        assert states is not None
        assert len(states.kept) == 2
        run(engine, OTHER[:800])
        assert run(engine, LINE[:300]).cached_count == 0
        engine.forget_prefixes()
        assert len(states.kept) == states.kept.byte_count == 0


def test_states_are_kept_in_bounded_memory() -> None:
    states = kept.KeptStates(10)
    for number in range(4):
        states.keep(bytes([number]), np.full(4, number, np.uint8))
    states.check()
    assert states.byte_count == 8
    contents = [bytes([number]) for number in range(4)]
    assert [states.longest(contents[:count]) for count in (4, 3, 2)] == [4, 3, 0]
    states.keep(b"large", np.zeros(11, np.uint8))
    assert len(states) == 0
    states.keep(b"again", np.zeros(5, np.uint8))
    states.emptied()
    states.check()
    assert states.byte_count == 0


def test_where_states_are_kept() -> None:
    assert kept.kept_ends(0, 20_000, prompt_end=20_000, page_tokens=256) == [8192, 16384, 19968]
    assert kept.kept_ends(8192, 16384, prompt_end=20_000, page_tokens=256) == [16384]
    assert kept.kept_ends(16384, 19968, prompt_end=19_968, page_tokens=256) == [19968]
    assert kept.kept_ends(0, 255, prompt_end=255, page_tokens=256) == []


# ---- forks


def test_forks_begin_with_the_state_of_their_leader() -> None:
    """At offsets of a window, with seeds of their own: each says what it says alone, without a
    draft."""
    for length, mtp in ((30, 4), (259, 1)):
        prompt = LINE[:length]

        def sampled(seed: int) -> Sampling:
            return Sampling(tokens_max=MADE, ignore_eos=True, temperature=1.5, seed=seed)

        with engines(mtp=mtp) as engine:
            leader = engine.add(prompt, sampled(1))
            followers = [engine.add(prompt, sampled(seed), leader=leader) for seed in (2, 3)]
            finish(engine)
            together = [request.output for request in (leader, *followers)]
        assert len({tuple(output) for output in together}) == 3
        for seed, output in zip((1, 2, 3), together, strict=True):
            with engines() as engine:
                alone = engine.add(prompt, sampled(seed))
                finish(engine)
                assert alone.output == output, (length, seed)


# ---- what else an engine is asked


def test_what_another_engine_has_said_goes_on() -> None:
    with engines() as engine:
        request = add(engine, LINE[:77], said=told(77)[:3])
        finish(engine)
        assert request.output == told(77)


def test_chances_of_a_prompt_are_those_of_the_plain_model() -> None:
    wanted = Plain(world.tiny()).run(LINE[:90]).log_softmax(-1)
    with engines() as engine:
        sampling = Sampling(tokens_max=1, ignore_eos=True, prompt_logprobs=0)
        engine.add(LINE[:90], sampling)
        scored = [chance for result in engine.run() for each in result.scored for chance in each]
    assert len(scored) == 89
    for place, chance in enumerate(scored):
        assert abs(chance.logprob - float(wanted[place, LINE[place + 1]])) < 1e-3


def damaged(engine: Engine) -> None:
    slab = engine.offload.memory(0).slots
    slab[:] = 0


def test_verify_mode_sees_a_slot_that_differs() -> None:
    for damages in (False, True):
        with engines(chunks=8, verify_every=1, modes="none") as engine:
            request = add(engine, LINE[:200])
            while request.state != "decoding":
                engine.step()
            engine.offload.drain()
            if damages:
                damaged(engine)
            finish(engine)
            assert engine.verifier.checked_count > 0
            assert bool(engine.verifier.mismatch_count) == damages


@pytest.mark.parametrize("row", ["bf16", "fp8"])
def test_rounded_rows_and_keys_are_the_same_offloaded_and_resident(row: RowForm) -> None:
    """Weights and rows in bf16, keys in fp8, as a server has them by default; and rows in fp8."""
    config = read_config({**world.LISTED, "head_dim": 72})
    drawn = {name: each.bfloat16() for name, each in world.weights(config).items()}
    ids = {name: each for name, each in world.weights(config).items() if each.dtype == torch.int64}
    model = CompressedModel(config, {**drawn, **ids}.__getitem__)
    layout, said = config.layout(row=row), []
    assert layout.row_bytes == {"bf16": 144, "fp8": 88}[row]
    for mode, chunks, mtp in (("resident", 4, 1), ("none", 1, 4)):
        offload = Offload.create(
            layout,
            slot_bytes=chunks * layout.group_count * layout.page_bytes,
            host_bytes=8 * layout.host_page_bytes,
            length_max=512,
            slot_floor=8,
            poison=True,
        )
        with offload:
            engine = Engine(model, offload, EngineConfig(modes=mode, mtp=mtp))
            requests = [add(engine, line[:330]) for line in (LINE, OTHER)]
            finish(engine)
            said.append([request.output for request in requests])
            missed = int(offload.stats().miss_count.sum())
            assert bool(missed) == (chunks == 1)
    assert said[0] == said[1]


def test_the_slow_kernels_say_the_same() -> None:
    with engines(backend="reference", mtp=2) as engine:
        assert run(engine, LINE[:75]).output == told(75)


REFUSED: Iterable[tuple[dict[str, Any], str]] = [
    ({"tbo": 1}, "tbo is 1, and the model is deepseek_v4: the steps of its layers are not cut"),
    ({"sbo": "combine-down"}, "sbo is combine-down, and the model is deepseek_v4: its experts"),
    ({"fake_prefill": True}, "fake_prefill is True, and the model is deepseek_v4: rows that are"),
    ({"mtp": 5}, "mtp is 5, and the model is deepseek_v4: states beside rows have room for 4"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_it_cannot_do_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said), engines(**config):
        pass


def test_rows_that_do_not_fit_fp8_are_refused() -> None:
    config = world.tiny().config
    with pytest.raises(
        BadInput, match="the 24 dimensions of an entry that are not turned are no m"
    ):
        config.layout()


def test_rows_that_were_not_imported_are_not_reached() -> None:
    with engines() as engine:
        sequence = engine.offload.open(LINE[:5])
        with pytest.raises(BadInput, match="5 need 1 rows"):
            sequence.reached(5)
        sequence.close()
