"""Families with states through the engine: what the plain model says, whatever happens to a
request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ess.door import Offload
from ess.door.sequences import kept
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.layout import ModelLayout, RowForm
from ess.models.compressed.model import CompressedModel
from ess.models.registry import build, read_config
from tests.compressed import world as compressed
from tests.states.world import (
    EACH,
    GLM5,
    LINE,
    MADE,
    OTHER,
    V4,
    AnyModel,
    World,
    add,
    finish,
    run,
)
from tests.support import checkpoints
from tests.support.greedy import greedy

WAYS = pytest.mark.parametrize(
    ("world", "way"),
    [
        pytest.param(GLM5, {"depth": 0}, id="glm5_next"),
        pytest.param(GLM5, {"depth": 1}, id="glm5_next-depth"),
        pytest.param(V4, {"mtp": 1}, id="deepseek_v4"),
        pytest.param(V4, {"mtp": 4}, id="deepseek_v4-drafts"),
    ],
)
Way = dict[str, Any]


# ---- prompts


@EACH
def test_a_chunk_may_have_nothing_to_score(world: World) -> None:
    """Only the chances behind its last token are wanted, or none."""
    for start in (20, 39, 40, 41):
        with world.engines(chunk_tokens=16) as engine:
            asked = Sampling(tokens_max=2, prompt_logprobs=1, prompt_start=start)
            engine.add(LINE[:41], asked)
            scored = [chance for step in engine.run() for each in step.scored for chance in each]
            assert len(scored) == max(0, 40 - start)


@EACH
@pytest.mark.parametrize("chunk", range(1, 10))
def test_chunks_end_at_every_offset_of_what_a_state_gathers(world: World, chunk: int) -> None:
    """Units and entries of 4 tokens, entries of 8; 3 tokens before each in a linear layer."""
    with world.engines(chunk_tokens=chunk) as engine:
        assert run(engine, LINE[: 13 + chunk]).output == world.told(13 + chunk)


@pytest.mark.parametrize(
    ("world", "most"),
    [
        pytest.param(GLM5, 17, id="glm5_next"),
        pytest.param(V4, 25, id="deepseek_v4", marks=pytest.mark.slow),
    ],
)
def test_prompts_of_every_length_beside_one_another(world: World, most: int) -> None:
    """They stand at every offset of a unit and of an entry, in the same steps."""
    with world.engines(chunk_tokens=21, chunks=1) as engine:
        requests = [add(engine, LINE[: 1 + n]) for n in range(most)]
        finish(engine)
        for request in requests:
            assert request.output == world.told(len(request.prompt)), len(request.prompt)


@EACH
def test_chances_of_a_prompt_are_those_of_the_plain_model(world: World) -> None:
    """A prompt of several chunks, which is cut where a state is kept."""
    wanted = world.logits(LINE[:90]).log_softmax(-1)
    with world.engines(chunk_tokens=80) as engine:
        engine.add(LINE[:90], Sampling(tokens_max=1, ignore_eos=True, prompt_logprobs=0))
        scored = [chance for result in engine.run() for each in result.scored for chance in each]
    assert len(scored) == 89
    for place, chance in enumerate(scored):
        assert abs(chance.logprob - float(wanted[place, LINE[place + 1]])) < 1e-3


# ---- preemption, cancellation, what other engines have said


@WAYS
def test_a_state_goes_to_the_host_and_comes_back(world: World, way: Way) -> None:
    """In a prompt, and at each offset of a unit or an entry while it decodes; others take its
    line."""
    with world.engines(sequence_max=2, **way) as engine:
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
        assert held.output == world.told(150)
        assert engine.preempted_count >= MADE - way.get("depth", -1)


@WAYS
def test_a_line_that_was_left_at_any_moment_serves_others(world: World, way: Way) -> None:
    with world.engines(sequence_max=2, **way) as engine:
        for moment in range(1, 8):
            gone, stays = add(engine, LINE[:100]), add(engine, OTHER[: 30 + moment])
            for _ in range(moment):
                engine.step()
            engine.cancel(gone)
            finish(engine)
            assert stays.output == world.told(30 + moment, line=1), moment


@EACH
def test_what_another_engine_has_said_goes_on(world: World) -> None:
    for said in range(1, MADE):
        with world.engines() as engine:
            request = add(engine, LINE[:77], prior_output=world.told(77)[:said])
            finish(engine)
            assert request.output == world.told(77), said


# ---- prefixes


@WAYS
def test_a_hit_begins_where_a_state_was_kept(world: World, way: Way) -> None:
    """At the end of the last page before a prompt's last token: each run keeps one."""
    page = world.page
    with world.engines(chunks=8, **way) as engine:
        run(engine, LINE[: 3 * page - 1])
        lengths = (3 * page - 1, 2), (2 * page + 1, 2), (2 * page, 0), (page + 44, 1), (page, 0)
        for length, pages in lengths:
            request = run(engine, LINE[:length])
            assert (request.cached_count, request.output) == (pages * page, world.told(length))
        changed = LINE[: 2 * page + 14] + OTHER[:40]
        request = run(engine, changed)
        assert request.cached_count == 2 * page
        assert request.output == greedy(world.model(), changed, MADE)


@pytest.mark.parametrize(("depth", "chunk"), [(0, 200), (1, 150)])
@EACH
def test_a_state_is_kept_every_so_many_tokens(
    monkeypatch: pytest.MonkeyPatch, world: World, depth: int, chunk: int
) -> None:
    """In prompts, whatever their chunks; and while a request decodes, unless a step is ahead."""
    page = world.page
    monkeypatch.setattr(kept, "KEPT_TOKENS", page)
    with world.engines(chunks=8, chunk_tokens=chunk, depth=depth) as engine:
        run(engine, LINE[: 3 * page - 1])
        for length, cached in ((2 * page + 1, 2 * page), (2 * page, page), (page + 1, page)):
            assert run(engine, LINE[:length]).cached_count == cached
        first = run(engine, OTHER[: 2 * page - 3])
        whole = OTHER[: 2 * page - 3] + first.output
        request = run(engine, whole)
        assert request.cached_count == (page if depth else 2 * page)
        assert request.output == greedy(world.model(), whole, MADE)


@EACH
def test_a_state_belongs_to_its_salt_and_goes_with_its_page(world: World) -> None:
    page = world.page
    with world.engines(chunks=8, host_pages=4) as engine:
        add(engine, LINE[: page + 44], salt=b"one")
        finish(engine)
        assert run(engine, LINE[: page + 44]).cached_count == 0
        assert run(engine, LINE[: page + 44]).cached_count == page
        states = engine.offload.owner.pools.states
        assert states is not None
        assert len(states.kept) == 2
        run(engine, OTHER[: 3 * page + 20])
        assert run(engine, LINE[: page + 44]).cached_count == 0
        engine.forget_prefixes()
        assert len(states.kept) == states.kept.byte_count == 0


# ---- forks


@pytest.mark.parametrize(
    ("world", "length", "mtp"),
    [*((GLM5, length, 1) for length in (29, 30, 31, 32, 67)), (V4, 30, 4), (V4, 259, 1)],
    ids=lambda value: getattr(value, "family", str(value)),
)
def test_forks_begin_with_the_state_of_their_leader(world: World, length: int, mtp: int) -> None:
    """At each offset of a unit, with seeds of their own: each says what it says alone, without a
    draft."""
    prompt = LINE[:length]

    def sampled(seed: int) -> Sampling:
        return Sampling(tokens_max=MADE, ignore_eos=True, temperature=1.5, seed=seed)

    with world.engines(mtp=mtp) as engine:
        leader = engine.add(prompt, sampled(1))
        followers = [engine.add(prompt, sampled(seed), leader=leader) for seed in (2, 3)]
        finish(engine)
        together = [request.output for request in (leader, *followers)]
    assert len({tuple(output) for output in together}) == 3
    for seed, output in zip((1, 2, 3), together, strict=True):
        with world.engines() as engine:
            alone = engine.add(prompt, sampled(seed))
            finish(engine)
            assert alone.output == output, seed


# ---- what else an engine is asked


@pytest.mark.parametrize("damages", [False, True])
@EACH
def test_verify_mode_sees_a_slot_that_differs(world: World, *, damages: bool) -> None:
    with world.engines(chunks=8, verify_every=1, modes="none") as engine:
        request = add(engine, LINE[:200])
        while request.state != "decoding":
            engine.step()
        engine.offload.drain()
        if damages:
            engine.offload.memory(0).slots[:] = 0
        finish(engine)
        assert engine.verifier.checked_count > 0
        assert bool(engine.verifier.mismatch_count) == damages


@pytest.mark.parametrize(("world", "mtp"), [(GLM5, 1), (V4, 2)], ids=["glm5_next", "deepseek_v4"])
def test_the_slow_kernels_say_the_same(world: World, mtp: int) -> None:
    with world.engines(backend="reference", mtp=mtp) as engine:
        assert run(engine, LINE[:75]).output == world.told(75)


REFUSED: list[tuple[World, Way, str]] = [
    (GLM5, {"fake_prefill": True}, "fake_prefill is True, and the model is glm5_next: rows that"),
    (GLM5, {"deterministic": True}, "deterministic is True, and the model is glm5_next: it has"),
    (GLM5, {"mtp": 2}, "mtp is 2, but the model or the layout has no MTP layer"),
    (V4, {"fake_prefill": True}, "fake_prefill is True, and the model is deepseek_v4: rows that"),
    (V4, {"tbo": 1}, "tbo is 1, and the model is deepseek_v4: the steps of its layers are not cut"),
    (V4, {"sbo": "combine-down"}, "sbo is combine-down, and the model is deepseek_v4: its experts"),
    (V4, {"mtp": 5}, "mtp is 5, and the model is deepseek_v4: states beside rows have room for 4"),
]


@pytest.mark.parametrize(("world", "way", "said"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_it_cannot_do_is_refused_by_name(world: World, way: Way, said: str) -> None:
    with pytest.raises(BadInput, match=said), world.engines(**way):
        pass


def rounded_glm5(row: RowForm) -> tuple[AnyModel, ModelLayout]:
    config = GLM5.model().config
    drawn = {name: each.bfloat16() for name, each in checkpoints.tensors(config).items()}
    return build(config, drawn.__getitem__), config.layout(row=row)


def rounded_v4(row: RowForm) -> tuple[AnyModel, ModelLayout]:
    config = read_config({**compressed.LISTED, "head_dim": 72})
    weights = compressed.weights(config)
    drawn = {
        name: each if each.dtype == torch.int64 else each.bfloat16()
        for name, each in weights.items()
    }
    layout = config.layout(row=row)
    assert layout.row_bytes == {"bf16": 144, "fp8": 88}[row]
    return CompressedModel(config, drawn.__getitem__), layout


@pytest.mark.parametrize(
    ("rounded", "row", "mtp"),
    [(rounded_glm5, "fp8", 1), (rounded_v4, "bf16", 4), (rounded_v4, "fp8", 4)],
)
def test_rounded_weights_rows_and_keys_are_the_same_offloaded_and_resident(
    rounded: Any, row: RowForm, mtp: int
) -> None:
    """Weights in bf16, rows in bf16 or fp8, keys in fp8, as a server has them by default."""
    (model, layout), said = rounded(row), []
    for mode, chunks, verified in (("resident", 14, 1), ("none", 1, mtp)):
        offload = Offload.create(
            layout,
            slot_bytes=chunks * layout.group_count * layout.chunk_bytes,
            host_bytes=16 * layout.host_page_bytes,
            length_max=512,
            slot_floor=layout.top_k,
            poison=True,
        )
        with offload:
            engine = Engine(model, offload, EngineConfig(modes=mode, mtp=verified))
            requests = [add(engine, line[:330]) for line in (LINE, OTHER)]
            finish(engine)
            said.append([request.output for request in requests])
            missed = int(offload.stats().miss_count.sum())
            assert bool(missed) == (chunks == 1)
    assert said[0] == said[1]
