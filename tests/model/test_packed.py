"""Prompts that enter in one step give the tokens, rows and chances of prompts that enter alone."""

from __future__ import annotations

import random

import pytest
import torch

from ess.engine.engine import Engine
from ess.engine.prompt.pack import Span
from ess.engine.prompt.run import run_chunks
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.pool.warmup import WINDOW_MAX
from tests.model.test_engine import engine, expected, prompt, run
from tests.support.few import pairs

LENGTHS = (2, 64, 65, 30, 129, 1)
SCORED = Sampling(tokens_max=6, prompt_logprobs=2)


def spans(result) -> list[tuple[int, int, int]]:
    return [(chunk.request.number, chunk.start, chunk.stop) for chunk in result.chunks]


def prefilled_rows(eng: Engine, requests: list[Request]) -> list[torch.Tensor]:
    """What each prompt has left on the host: bytes [layers, positions, row]."""
    rows = []
    for request in requests:
        assert request.sequence is not None
        at = request.sequence.host_rows(0, request.prefill_count).long()
        layers = range(eng.offload.layout.layer_total)
        rows.append(torch.stack([eng.offload.memory(layer).host[at] for layer in layers]))
    return rows


def entered(eng: Engine, *, at_once: bool) -> list[Request]:
    made = []
    for length in LENGTHS:
        made.append(eng.add(prompt(length), Sampling(tokens_max=10)))
        while not at_once and made[-1].state != "decoding":
            eng.step()
    return made


@pytest.mark.parametrize(
    *pairs(family=("v32", "glm"), mtp=(1, 2, 3), mode=("resident", "none", "da", "dba"))
)
def test_packed_prompts_give_the_plain_model_s_tokens(family, mtp, mode):
    eng = engine(family, mtp=mtp, modes=mode, chunk_tokens=512, verify_every=1, verify_fatal=True)
    made = entered(eng, at_once=True)
    first = eng.step()
    assert spans(first) == [(0, 0, 1), (1, 0, 63), (2, 0, 64), (3, 0, 29), (4, 0, 128)]
    assert {request.state for request in made} == {"decoding"}
    run(eng)
    for request in made:
        assert request.output == expected(family, len(request.prompt), 10), len(request.prompt)
    assert eng.verifier.checked_count > 0
    assert eng.verifier.mismatch_count == 0


@pytest.mark.parametrize("family", ["v32", "glm"])
@pytest.mark.parametrize(("mtp", "is_bitwise"), [(1, True), (3, True), (3, False)])
def test_packed_rows_are_those_of_prompts_one_by_one(family, mtp, is_bitwise):
    """To the last bit in a deterministic engine, but for the MTP module, whose drafts change no
    token; else products round by how many tokens they have."""
    both = []
    for at_once in (True, False):
        eng = engine(
            family, mtp=mtp, modes="none", chunk_tokens=512, deterministic=is_bitwise, warm=False
        )
        made = entered(eng, at_once=at_once)
        eng.step()
        assert {request.state for request in made} == {"decoding"}
        both.append(prefilled_rows(eng, made))
    for packed, alone in zip(*both, strict=True):
        if is_bitwise:
            assert torch.equal(packed[:3], alone[:3])
        values = packed.view(torch.float32), alone.view(torch.float32)
        torch.testing.assert_close(*values, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["v32", "glm"])
def test_windows_and_states_are_those_of_prompts_one_by_one(family):
    """Of every group and query: a prompt within the selection, one just beyond, one far beyond."""
    eng = engine(family, mtp=2, modes="none", chunks=6, deterministic=True)
    groups = [group for group, layers in enumerate(eng.offload.layout.groups) if layers[0] < 3]

    def opened() -> list[Span]:
        return [
            Span(
                sequence=eng.offload.open(ids, length_max=256),
                start=0,
                tokens=ids[:-1],
                following=ids[1:],
            )
            for ids in map(prompt, (7, 26, 200))
        ]

    with torch.inference_mode():
        packed = run_chunks(eng.runner, opened())
        alone = [run_chunks(eng.runner, [span])[0] for span in opened()]
    for ours, theirs in zip(packed, alone, strict=True):
        assert torch.equal(ours.hidden, theirs.hidden)
        assert torch.equal(ours.windows[groups], theirs.windows[groups])
        assert ours.windows.shape[1] == min(WINDOW_MAX, len(ours.span.tokens))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_cut_prompt_goes_on_and_the_next_step_starts_with_it(depth):
    eng = engine("v32", mtp=2, modes="da", depth=depth, chunk_tokens=128)
    made = [eng.add(prompt(length), Sampling(tokens_max=8)) for length in (60, 200, 40)]
    assert spans(eng.step()) == [(0, 0, 59), (1, 0, 64)]
    assert spans(eng.step()) == [(1, 64, 192)]
    assert spans(eng.step()) == [(1, 192, 199), (2, 0, 39)]
    run(eng)
    for request in made:
        assert request.output == expected("v32", len(request.prompt), 8)


@pytest.mark.parametrize("leaves", ["cancel", "preempt"])
def test_one_of_a_step_s_requests_leaves_with_its_prompt_half_done(leaves):
    eng = engine("v32", mtp=3, modes="none", chunk_tokens=128)
    made = [eng.add(prompt(length), Sampling(tokens_max=8)) for length in (60, 200, 40, 90)]
    assert spans(eng.step()) == [(0, 0, 59), (1, 0, 64)]
    getattr(eng, leaves)(made[1])
    eng.check()
    assert spans(eng.step()) == [(2, 0, 39), (3, 0, 89)]
    if leaves == "preempt":
        eng.resume(made[1])
        assert spans(eng.step()) == [(1, 64, 192)]
    run(eng)
    for request in made:
        wanted = expected("v32", len(request.prompt), 8) if request.reason == "length" else []
        assert request.output == wanted
    assert [request.reason == "cancelled" for request in made].count(True) == (leaves == "cancel")


@pytest.mark.parametrize("chunk_tokens", [512, 128])
def test_each_prompt_gets_its_own_chances(chunk_tokens):
    """Three score, one does not; with 128 tokens a step one chunk ends inside its prompt."""
    eng = engine("v32", mtp=2, modes="none", chunk_tokens=chunk_tokens)
    wishes = [SCORED, Sampling(tokens_max=6), SCORED, SCORED]
    lengths = (30, 20, 150, 33)
    made = [eng.add(prompt(length), wish) for length, wish in zip(lengths, wishes, strict=True)]
    chances_of = {request: [] for request in made}
    widest = 0
    for result in eng.run():
        widest = max(widest, len(result.chunks))
        for chunk, scored in zip(result.chunks, result.scored, strict=True):
            chances_of[chunk.request] += scored
    assert widest == (4 if chunk_tokens == 512 else 3)
    assert chances_of[made[1]] == []
    for request in (made[0], made[2], made[3]):
        alone = engine("v32", mtp=2, modes="none", chunk_tokens=512)
        alone.add(request.prompt, SCORED)
        [wanted] = next(iter(alone.run())).scored
        assert len(chances_of[request]) == len(wanted) == request.prefill_count
        for ours, theirs in zip(chances_of[request], wanted, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert ours.rank == theirs.rank


@pytest.mark.parametrize("mtp", [1, 2])
def test_equal_prefixes_in_one_step(mtp):
    """Nothing of a prompt is cached before its step has run, so those that come with it compute it
    too; those that come in the next step find its pages. With MTP the last page is left out."""
    eng = engine("v32", mtp=mtp, modes="da", chunk_tokens=1000)
    twins = [eng.add(prompt(200), Sampling(tokens_max=9)) for _ in range(2)]
    half = eng.add([*prompt(200)[:130], 7, 8], Sampling(tokens_max=9))
    assert spans(eng.step()) == [(0, 0, 199), (1, 0, 199), (2, 0, 131)]
    late = eng.add(prompt(200), Sampling(tokens_max=9))
    cached = 192 if mtp == 1 else 128
    assert spans(eng.step()) == [(late.number, cached, 199)]
    run(eng)
    for request in (*twins, late):
        assert request.output == expected("v32", 200, 9)
    alone = engine("v32", mtp=mtp, modes="da", chunk_tokens=1000)
    other = alone.add(half.prompt, Sampling(tokens_max=9))
    run(alone)
    assert half.output == other.output


def act(eng: Engine, rand: random.Random, made: list[Request]) -> None:
    """Some requests join, or a running request leaves or is preempted, or a preempted one
    resumes."""
    lengths = (1, 2, 20, 63, 64, 65, 66, 100, 130, 190)
    ready = [request for request in made if request.state in ("prefilling", "decoding")]
    held = [request for request in made if request.is_held and request.state == "preempted"]
    match rand.choice(["join", "choice", "preempt", "resume", "cancel"]):
        case "join":
            for _ in range(rand.randint(1, 4)):
                wish = Sampling(tokens_max=rand.randint(1, 9))
                priority = rand.choice((0, 0, 1))
                made.append(eng.add(prompt(rand.choice(lengths)), wish, priority=priority))
        case "choice" if made and made[-1].reason is None:
            made.append(eng.add(made[-1].prompt, made[-1].sampling, leader=made[-1]))
        case "preempt" if ready:
            eng.preempt(rand.choice(ready))
        case "resume" if held:
            eng.resume(held[0])
        case "cancel" if ready and rand.random() < 0.3:
            eng.cancel(rand.choice(ready))


SCHEDULES = [
    (1, "none", 0, "all"),
    (2, "da", 1, "some"),
    (3, "dba", 0, "some"),
    (2, "resident", 1, "all"),
    (3, "layerwise", 1, "some"),
    (1, "da", 0, "some"),
]


@pytest.mark.parametrize(("mtp", "mode", "depth", "promise"), SCHEDULES)
def test_random_schedules_give_the_plain_model_s_tokens(mtp, mode, depth, promise):
    rand = random.Random(f"{mtp} {mode} {depth}")
    eng = engine(
        "v32",
        mtp=mtp,
        modes=mode,
        depth=depth,
        promise=promise,
        chunks=8,
        chunk_tokens=rand.choice((150, 300, 512)),
        verify_every=1,
        verify_fatal=True,
    )
    made: list[Request] = []
    packed = 0
    for _ in range(30):
        act(eng, rand, made)
        result = eng.step()
        packed += len(result.chunks) > 1
        eng.check()
    for request in made:
        if request.state == "preempted" and request.is_held:
            eng.cancel(request)
    run(eng)
    assert packed > 1
    served = [request for request in made if request.reason == "length"]
    assert len(served) > len(made) // 2
    for request in served:
        wanted = expected("v32", len(request.prompt), request.sampling.tokens_max)
        assert request.output == wanted, (request.number, len(request.prompt))
