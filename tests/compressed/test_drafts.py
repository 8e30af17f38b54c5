"""DeepSeek-V4 with drafts: whatever is accepted, and wherever, the tokens are those of the plain
model, and the drafts those of its MTP module."""

from __future__ import annotations

import itertools

import pytest

from ess.engine.tokens.sampling import Sampling
from ess.models.compressed.plain import Plain
from tests.compressed import drafting, world
from tests.states.world import LINE, OTHER, V4, V4_PUBLISHED, add, finish, run
from tests.support.greedy import made_once


def plain(prompt: list[int], count: int) -> list[int]:
    return made_once(world.tiny(), tuple(prompt), count)


def module_s(prompt: list[int], count: int, *, verified: int) -> tuple[list[int], list[list[int]]]:
    """The plain model's tokens, several verified in a step, and the drafts behind each step."""
    plain = Plain(world.tiny(), drafts=4)
    if len(prompt) > 1:
        plain.run(prompt[:-1])
        plain.guesses(prompt[1:], 1)
    said, drafts, newest = list[int](), list[list[int]](), [prompt[-1]]
    while len(said) < count:
        begin = plain.length
        targets = plain.run(newest).argmax(-1).tolist()
        right = [a == b for a, b in zip(newest[1:], targets, strict=False)]
        kept = (right.index(False) if False in right else len(right)) + 1
        plain.keep(begin + kept)
        said += targets[:kept]
        drafts.append(plain.guesses(targets[:kept], verified - 1).argmax(-1).tolist())
        newest = [targets[kept - 1], *drafts[-1]]
    return said[:count], drafts


@pytest.mark.parametrize(
    ("length", "verified", "depth"),
    [(1, 4, 0), (2, 2, 1), (7, 2, 0), (7, 4, 1), (75, 4, 1), (140, 2, 1), (140, 4, 0)],
)
def test_drafts_are_those_of_the_plain_module(
    length: int, verified: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in one chunk and in several, whose last rows drafts attend to."""
    drafted = drafting.watched(monkeypatch)
    said, drafts = module_s(LINE[:length], 6, verified=verified)
    with V4.engines(mtp=verified, depth=depth) as engine:
        assert run(engine, LINE[:length]).output == said == V4.told(length)
    asked = min(len(drafts), len(drafted.guesses)) - 1
    assert asked >= 4
    assert drafted.guesses[:asked] == drafts[:asked]


SLOW = [pytest.param(*each, marks=pytest.mark.slow) for each in (("da", 2), ("dba", 4))]


@pytest.mark.parametrize(("mode", "verified"), [("none", 4), *SLOW])
def test_every_count_is_accepted_at_every_offset(
    mode: str, verified: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of 4 tokens and of 8 are closed by drafts, which are then right or wrong; three
    requests at once, fewer slots than entries."""
    drafted = drafting.known(monkeypatch, world.tiny(), seed=verified)
    with V4.engines(mtp=verified, chunks=1, modes=mode, depth=1) as engine:
        sampling = Sampling(tokens_max=60, ignore_eos=True)
        prompts = [LINE[:100], OTHER[:37], LINE[200:203]]
        requests = [engine.add(prompt, sampling) for prompt in prompts]
        finish(engine)
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.output == plain(prompt, 60)
        assert bool(engine.offload.stats().miss_count.sum())
    met = {(begin % 8, kept) for begin, count, kept in drafted.steps if count == verified}
    assert met == set(itertools.product(range(8), range(1, verified + 1)))


@pytest.mark.parametrize("mtp", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_published_windows_with_drafts(mtp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 tokens: an entry is closed by each of the tokens of a step, right or wrong."""
    model = world.tiny("ratios")
    drafted = drafting.known(monkeypatch, model, seed=mtp)
    with V4_PUBLISHED.engines(mtp=mtp) as engine:
        requests = [add(engine, LINE[: 381 + n]) for n in range(4)]
        finish(engine)
        for request in requests:
            assert request.output == V4_PUBLISHED.told(len(request.prompt))
    closing = {kept for begin, count, kept in drafted.steps if begin + count > 383 >= begin}
    assert len(closing) >= 3


def test_the_last_token_that_may_be_leaves_no_room_for_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the end of a state's entries, of pages and of what a request was given."""
    drafting.known(monkeypatch, world.tiny(), seed=1)
    prompt = (LINE + OTHER)[:1016]
    with V4.engines(mtp=4, chunks=8) as engine:
        for count in (8, 7, 3):
            request = engine.add(prompt, Sampling(tokens_max=count, ignore_eos=True))
            finish(engine)
            assert request.output == plain(prompt, 8)[:count]


def test_fewer_tokens_where_drafts_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one token to four of them; the module's rows have no gap."""
    drafted = drafting.known(monkeypatch, world.tiny(), seed=2)
    with V4.engines(mtp=4, mtp_auto=True) as engine:
        request = engine.add(LINE[:90], Sampling(tokens_max=60, ignore_eos=True))
        finish(engine)
        assert request.output == plain(LINE[:90], 60)
    assert drafted.steps


def test_drafts_behind_a_prefix_hit_and_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's rows come with the state."""
    drafted = drafting.watched(monkeypatch)
    said, drafts = module_s(LINE[:300], 6, verified=4)
    with V4.engines(mtp=4, chunks=8) as engine:
        run(engine, LINE[:300])
        first = drafted.guesses[: len(drafts) - 1]
        assert first == drafts[: len(drafts) - 1]
        drafted.guesses.clear()
        request = add(engine, LINE[:300])
        while request.state != "finished":
            engine.step()
            if request.state == "decoding":
                engine.preempt(request)
                engine.resume(request)
        assert (request.cached_count, request.output) == (256, said)
    assert drafted.guesses[: len(first)] == first
