"""GLM-5-next through the engine: what the plain model says, whatever happens to a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ess.door import Offload
from ess.door.sequences import kept
from ess.engine.engine import Engine, EngineConfig
from ess.engine.ranks.accord import Alone
from ess.engine.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.models.plain import Plain
from ess.models.registry import build
from tests.families.test_covered import FIRST
from tests.linear.world import LINE, MADE, OTHER, add, engines, finish, model, run, told
from tests.model import grid
from tests.support import checkpoints
from tests.support.greedy import greedy

PAGE, UNIT = 64, 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# ---- prompts


@pytest.mark.parametrize("chunk", range(1, 9))
def test_chunks_end_at_every_offset_of_a_unit_and_of_the_tokens_a_channel_is_made_of(
    chunk: int,
) -> None:
    """Units of 4 tokens, and 3 tokens before each."""
    with engines(chunk_tokens=chunk) as engine:
        request = add(engine, LINE[: 13 + chunk])
        finish(engine)
        assert request.output == told(13 + chunk)


def test_prompts_of_every_length_beside_one_another() -> None:
    """They stand at every offset of a unit, in the same steps."""
    with engines(chunk_tokens=21, chunks=1) as engine:
        requests = [add(engine, LINE[:length]) for length in range(1, 18)]
        finish(engine)
        for request in requests:
            assert request.output == told(len(request.prompt)), len(request.prompt)


def test_chances_of_a_prompt_are_those_of_the_plain_model() -> None:
    """A prompt that is cut where a state is kept."""
    wanted = Plain(model()).run(LINE[:90]).logits.log_softmax(-1)
    with engines(chunk_tokens=80) as engine:
        engine.add(LINE[:90], Sampling(tokens_max=1, ignore_eos=True, prompt_logprobs=0))
        scored = [chance for result in engine.run() for each in result.scored for chance in each]
    assert len(scored) == 89
    for place, chance in enumerate(scored):
        assert abs(chance.logprob - float(wanted[place, LINE[place + 1]])) < 1e-3


# ---- preemption, cancellation, what other engines have said


@pytest.mark.parametrize("depth", [0, 1])
def test_a_state_goes_to_the_host_and_comes_back(depth: int) -> None:
    """In a prompt and at each offset of a unit while it decodes; others take its line."""
    with engines(sequence_max=2, depth=depth) as engine:
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
                if held.state != "preempted":
                    break
                between = add(engine, OTHER[: 20 + len(held.output)])
                while between.state != "finished":
                    engine.step()
                engine.offload.check()
                engine.resume(held)
        assert held.output == told(150)
        assert engine.preempted_count >= MADE - depth


@pytest.mark.parametrize("depth", [0, 1])
def test_a_line_that_was_left_at_any_moment_serves_others(depth: int) -> None:
    with engines(sequence_max=2, depth=depth) as engine:
        for moment in range(1, 8):
            gone, stays = add(engine, LINE[:100]), add(engine, OTHER[: 30 + moment])
            for _ in range(moment):
                engine.step()
            engine.cancel(gone)
            finish(engine)
            assert stays.output == told(30 + moment, line=1), moment


def test_what_another_engine_has_said_goes_on() -> None:
    for said in range(1, MADE):
        with engines() as engine:
            request = add(engine, LINE[:77], said=told(77)[:said])
            finish(engine)
            assert request.output == told(77), said


# ---- prefixes


def test_a_hit_begins_where_a_state_was_kept() -> None:
    with engines(chunks=8) as engine:
        run(engine, LINE[:300])
        for length, cached in ((300, 256), (257, 256), (256, 0), (200, 192), (100, 0)):
            request = run(engine, LINE[:length])
            assert (request.cached_count, request.output) == (cached, told(length)), length
        changed = LINE[:270] + OTHER[:40]
        request = run(engine, changed)
        assert request.cached_count == 256
        assert request.output == greedy(model(), changed, MADE)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_state_is_kept_every_so_many_tokens(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """In prompts, whatever their chunks; and while a request decodes, unless a step is ahead."""
    monkeypatch.setattr(kept, "KEPT_TOKENS", PAGE)
    with engines(chunks=8, chunk_tokens=150, depth=depth) as engine:
        run(engine, LINE[:300])
        assert [run(engine, LINE[:length]).cached_count for length in (250, 129, 65)] == [
            *(192, 128, 64)
        ]
        first = run(engine, OTHER[:125])
        whole = OTHER[:125] + first.output
        request = run(engine, whole)
        assert request.cached_count == (64 if depth else 128)
        assert request.output == greedy(model(), whole, MADE)


def test_a_state_belongs_to_its_salt_and_goes_with_its_page() -> None:
    with engines(chunks=8, host_pages=9) as engine:
        add(engine, LINE[:100], salt=b"one")
        finish(engine)
        assert run(engine, LINE[:100]).cached_count == 0
        assert run(engine, LINE[:100]).cached_count == PAGE
        states = engine.offload.owner.pools.states
        assert states is not None
        assert len(states.kept) == 2
        run(engine, OTHER[:520])
        assert run(engine, LINE[:100]).cached_count == 0
        engine.forget_prefixes()
        assert len(states.kept) == states.kept.byte_count == 0


# ---- forks


@pytest.mark.parametrize("length", [29, 30, 31, 32, 67])
def test_forks_begin_with_the_state_of_their_leader(length: int) -> None:
    """At each offset of a unit, with seeds of their own: each says what it says alone."""
    prompt = LINE[:length]

    def sampled(seed: int) -> Sampling:
        return Sampling(tokens_max=MADE, ignore_eos=True, temperature=1.5, seed=seed)

    with engines() as engine:
        leader = engine.add(prompt, sampled(1))
        followers = [engine.add(prompt, sampled(seed), leader=leader) for seed in (2, 3)]
        finish(engine)
        together = [request.output for request in (leader, *followers)]
    assert len({tuple(output) for output in together}) == 3
    for seed, output in zip((1, 2, 3), together, strict=True):
        with engines() as engine:
            alone = engine.add(prompt, sampled(seed))
            finish(engine)
            assert alone.output == output, seed


# ---- keys of units


def held_keys(engine: Engine, request: Request, count: int) -> torch.Tensor:
    """Of the first units, float32 [layers, units, dim]: the device's, which the host has too."""
    sequence, pools = request.sequence, engine.offload.owner.pools
    assert sequence is not None
    engine.offload.drain()
    last = np.arange(UNIT - 1, count * UNIT, UNIT)
    here = sequence.holding.row_ids(0, count * UNIT)[last]
    home = sequence.holding.host_rows(0, count * UNIT)[last]
    layers = range(pools.layout.key_layer_count)
    found = np.stack([pools.index.keys.read(layer, here) for layer in layers])
    for layer in layers:
        assert np.array_equal(pools.latent.keys.read(layer, home), found[layer])
    return torch.from_numpy(found).view(torch.float32)


def until_said(engine: Engine, prompt: list[int], count: int) -> Request:
    request = engine.add(prompt, Sampling(tokens_max=count + 1, ignore_eos=True))
    while len(request.output) < count:
        engine.step()
    return request


@pytest.mark.parametrize("is_late", [False, True])
def test_keys_that_steps_make_are_those_of_a_prompt(is_late: bool) -> None:
    """In both tiers, copied at once or late; also of a unit that a chunk begins and a step ends."""
    with engines(is_late=is_late) as engine:
        request = until_said(engine, LINE[:30], 40)
        whole, stepped = LINE[:30] + request.output, held_keys(engine, request, 68 // UNIT)
    with engines(chunk_tokens=128) as engine:
        prompted = held_keys(engine, until_said(engine, whole, 1), 68 // UNIT)
    assert (stepped - prompted).abs().max() < 1e-4
    assert prompted.abs().max() > 0.1
    assert len(set(prompted.flatten(1).tolist()[0])) > 100


def test_units_without_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["full", "full", "shared", "full"]
    raw = checkpoints.tiny_glm5_next("IIII", index_kpool=16, index_topk=32, indexer_types=kinds)
    monkeypatch.setitem(grid.RANDOM, "units", raw)
    assert grid.differences({**FIRST["glm5_next"], "checkpoint": "units"}) == []


# ---- what else an engine is asked


def test_verify_mode_sees_a_slot_that_differs() -> None:
    for damages in (False, True):
        with engines(chunks=8, verify_every=1, modes="none") as engine:
            request = add(engine, LINE[:200])
            while request.state != "decoding":
                engine.step()
            engine.offload.drain()
            if damages:
                engine.offload.memory(0).slots[:] = 0
            finish(engine)
            assert engine.verifier.checked_count > 0
            assert bool(engine.verifier.mismatch_count) == damages


def test_the_slow_kernels_say_the_same() -> None:
    with engines(backend="reference") as engine:
        assert run(engine, LINE[:75]).output == told(75)


def test_a_state_of_another_length_is_seen_at_once() -> None:
    with engines() as engine:
        request = add(engine, LINE[:20])
        while request.state != "decoding":
            engine.step()
        assert engine.runner.beside is not None
        engine.runner.beside.lengths += 1
        with pytest.raises(AssertionError, match="states of"):
            engine.step()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fake_prefill": True}, "fake_prefill is True, and the model is glm5_next: rows that are"),
    ({"deterministic": True}, "deterministic is True, and the model is glm5_next: it has no comp"),
    ({"mtp": 2}, "mtp is 2, but the model or the layout has no MTP layer"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_it_cannot_do_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said), engines(**config):
        pass


def test_engines_that_divide_experts_are_refused() -> None:
    """A prompt that is cut where a state is kept would meet them more often than they know."""
    layout = model().config.layout(row="f32", index="f32")
    offload = Offload.create(layout, slot_bytes="1MiB", host_bytes="1MiB")
    with offload, pytest.raises(BadInput, match="its states and experts stay in one engine"):
        Engine(model(), offload, EngineConfig(), ranks=Alone())


def test_states_lie_in_no_device_s_memory_yet() -> None:
    layout = model().config.layout(row="f32", index="f32")
    with pytest.raises(BadInput, match="not on 'cuda' yet"):
        Offload.create(layout, slot_bytes="1MiB", host_bytes="1MiB", device="cuda")


def test_rounded_weights_rows_and_keys_are_the_same_offloaded_and_resident() -> None:
    """Weights in bf16, rows and keys in fp8, as a server has them by default."""
    config = model().config
    drawn = {name: each.bfloat16() for name, each in checkpoints.tensors(config).items()}
    rounded, layout, said = build(config, drawn.__getitem__), config.layout(), []
    for mode, chunks in (("resident", 14), ("none", 1)):
        offload = Offload.create(
            layout,
            slot_bytes=chunks * layout.group_count * layout.chunk_bytes,
            host_bytes=16 * layout.host_page_bytes,
            length_max=512,
            slot_floor=24,
            poison=True,
        )
        with offload:
            engine = Engine(rounded, offload, EngineConfig(modes=mode))
            requests = [add(engine, line[:330]) for line in (LINE, OTHER)]
            finish(engine)
            said.append([request.output for request in requests])
            missed = int(offload.stats().miss_count.sum())
            assert bool(missed) == (chunks == 1)
    assert said[0] == said[1]
