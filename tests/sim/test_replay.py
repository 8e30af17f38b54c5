"""Requests through tier and rank: times worked out by hand, and what must hold of any replay."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from ess.engine.chunking.sizes import PrefillTime
from ess.engine.step import way
from ess.engine.tokens.sampling import Sampling
from ess.engine.tpot_control import TPOT
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.pool.capacity import HOST_PAGES, INDEX_PAGES, SLOTS
from ess.pool.ledger import Account, Ledger
from ess.sim.memory_budget import Budget
from ess.sim.prefill.prefill_time import Handoff, Tier
from ess.sim.serving.arrivals import Arrival
from ess.sim.serving.decode_rank import BATCH, Life, Rank, Running, mean_misses
from ess.sim.serving.goodput import Objective, summarise, tpot_s, ttft_s
from ess.sim.serving.prefixes import reused, shared
from ess.sim.serving.replay import PREFILL, Drafting, Replay, replay
from ess.sim.serving.traffic import Mix, at_rate, chance_of, draw, right_drafts
from ess.sim.step_grid import StepTime
from tests.model.test_engine import engine, prompt

GIB = 1 << 30
SECOND_PER_TOKEN = PrefillTime(quadratic=1e-12, linear=1.0)


@dataclass
class Plain:
    """A step takes 8 s, and 1 s for every query, and 1 s for every ten rows missed by each."""

    asked: list[tuple[int, int, float, float]] = field(default_factory=list)

    def at(self, *, requests: int, queries: int, context: float, misses: float) -> StepTime:
        self.asked.append((requests, queries, context, misses))
        exposed_us = 1e6 * requests * misses / 10
        return StepTime(1e6 * (8 + requests * queries) + exposed_us, exposed_us)


def rank(slots: int = 1000, *, host_pages: int = 1000, **changes: object) -> Rank:
    def ledger() -> Ledger:
        sizes = {SLOTS: slots, INDEX_PAGES: 1000, HOST_PAGES: host_pages}
        return Ledger([Account(name=name, unit_bytes=1, capacity=n) for name, n in sizes.items()])

    settings = {
        "make_ledger": ledger,
        "slot_count": slots,
        "slot_floor": 100,
        "times": Plain(),
        "missed": lambda length, share: length - share,
        "chunk_time": SECOND_PER_TOKEN,
        "chunk_max": 64,
    }
    return Rank(**(settings | changes))


def asks(*sizes: tuple[float, int, int]) -> list[Arrival]:
    return [Arrival(at_s=at, prompt_tokens=p, output_tokens=o) for at, p, o in sizes]


def times(played: Replay) -> list[tuple[float | None, float | None]]:
    return [
        tuple(None if at is None else round(at, 6) for at in (life.first_s, life.end_s))
        for life in played.lives
    ]


def test_decode_by_hand():
    """Prompts of one token need no prefill. The second joins when the step under way has ended.

    0-9 the first alone; 9-19 and 19-29 both; the first has its 3 tokens; 29-38 the second alone.
    """
    played = replay(asks((0, 1, 3), (5, 1, 3)), rank(), drafting=Drafting(chance=0.0))
    assert times(played) == [(9, 29), (19, 38)]
    assert [ttft_s(life) for life in played.lives] == [9, 14]
    assert [tpot_s(life) for life in played.lives] == [10, 9.5]
    seen = summarise(played, Objective(ttft_s=10, tpot_s=10))
    assert (seen.served_count, seen.good_share, seen.batch_peak) == (2, 0.5, 2)
    assert seen.tokens_per_s == pytest.approx(6 / 38)
    assert seen.batch_mean == pytest.approx((9 + 20 + 20 + 9) / 38)


def test_chunks_run_beside_decode_by_hand():
    """The second's 99 prompt tokens go in chunks of 64 and 35, a second each, behind the decode.

    0-9 the first; 9-82 it and 64 tokens; 82-126 it and 35; 126-136 both.
    """
    played = replay(asks((0, 1, 4), (1, 100, 1)), rank(), drafting=Drafting(chance=0.0))
    assert times(played) == [(9, 136), (136, 136)]
    assert tpot_s(played.lives[1]) is None


def test_prompts_share_a_step_by_hand():
    """Two prompts of 32 fill the first step; the third runs beside the decode of both.

    0-64 both prompts; 64-106 both decode, and the third prompt; 106-115 it decodes alone.
    """
    played = replay(asks(*[(0, 33, 1)] * 3), rank(), drafting=Drafting(chance=0.0))
    assert times(played) == [(106, 106), (106, 106), (115, 115)]


def test_long_cached_prefixes_are_not_read_together_by_hand():
    """Two prompts of 33, of which 30 are cached, and a limit that only the first page is within.

    0-2 the first's 2; 2-13 it decodes, and the second's 2; 13-22 the second decodes.
    """
    told = {"drafting": Drafting(chance=0.0), "cached": [30, 30]}
    both = [(0, 33, 1)] * 2
    played = replay(asks(*both), rank(positions_max=64.0), **told)
    assert times(played) == [(13, 13), (22, 22)]
    played = replay(asks(*both), rank(positions_max=128.0), **told)
    assert times(played) == [(14, 14), (14, 14)]


def test_steps_hold_what_the_engine_s_steps_hold(monkeypatch: pytest.MonkeyPatch):
    """The same arrivals, step by step: chunks with their ends, how many requests decode, and the
    tokens of each, where as many drafts are right as were in the engine."""
    mtp, token, made_drafts = 3, 7, way.draft
    draws = torch.Generator().manual_seed(1)

    def often_right(*asked: Any) -> torch.Tensor:
        guesses = made_drafts(*asked)
        return torch.where(torch.rand(guesses.shape, generator=draws) < 0.6, token, token + 1)

    monkeypatch.setattr(way, "draft", often_right)
    eng = engine("v32", mtp=mtp, modes="none", chunks=40, chunk_tokens=256)
    lengths = (40, 300, 1, 64, 200, 65, 66, 2, 129, 90)
    for length in lengths:
        eng.add(
            prompt(length), Sampling(tokens_max=5, ignore_eos=True, allowed_ids=frozenset({token}))
        )
    steps = []
    while not eng.is_idle:
        result = eng.step()
        chunks = [(chunk.request.number, chunk.start, chunk.stop) for chunk in result.chunks]
        made = {each.request.number: len(each.tokens) for each in result.made}
        steps.append((chunks, result.turn_count, made))
    simulated = Running(rank(chunk_max=256, slot_floor=24, depth=mtp))
    for number, length in enumerate(lengths):
        right = bytes(made[number] - 1 for *_, made in steps if number in made)
        [arrival] = asks((0, length, 5))
        simulated.waiting.append(
            Life(number=number, arrival=arrival, right=right, draft_count=mtp - 1)
        )
    for chunks, turn_count, made in steps:
        flight = simulated.launch(0.0)
        assert flight is not None
        assert [(life.number, *ends) for life, *ends in flight.chunks] == chunks
        assert len(flight.turns) == turn_count
        before = {life.number: life.made for life, _ in flight.turns}
        simulated.land(flight, 0.0)
        assert {life.number: life.made - before[life.number] for life, _ in flight.turns} == made
    assert simulated.launch(0.0) is None
    assert sum(len(chunks) > 1 for chunks, *_ in steps) > 2
    assert {count for *_, made in steps for count in made.values()} == {1, 2, 3}


def test_a_tier_by_hand():
    """One pipeline of one GPU: 10 s and 20 s of prompts in turn, then 2 s until they may decode."""
    tier = Tier(
        pipelines=1,
        stages=1,
        time=SECOND_PER_TOKEN,
        handoff=Handoff(token_bytes=0, index_page_bytes=64, link_rate=64 / 2e6),
        layer_count=61,
    )
    decode = rank(chunk_time=None)
    played = replay(asks((0, 11, 1), (1, 21, 1)), decode, tier=tier, drafting=Drafting(chance=0.0))
    assert times(played) == [(10 + 2 + 9, 21), (10 + 20 + 2 + 9, 41)]


def test_cached_tokens_are_not_prefilled():
    """Of 201 tokens 128 are cached: 72 s of prefill, as chunks of 64 and 8 beside no decode."""
    asked = asks((0, 201, 1))
    assert times(replay(asked, rank(), cached=[128], drafting=Drafting(chance=0.0))) == [(81, 81)]
    tier = Tier(
        pipelines=1,
        stages=1,
        time=SECOND_PER_TOKEN,
        handoff=Handoff(token_bytes=0, index_page_bytes=0, link_rate=1.0),
        layer_count=61,
    )
    alone = rank(chunk_time=None)
    played = replay(asked, alone, tier=tier, cached=[128], drafting=Drafting(chance=0.0))
    assert times(played) == [(81, 81)]
    assert tier.seconds(201, cached=192)[0] == pytest.approx(8.0)
    assert tier.seconds(193, cached=192) == (0.0, 0.0)


def test_blocks_are_found_again_until_they_are_pushed_out():
    """512 tokens a block; with MTP the last cached page is computed again."""
    blocks = [(1, 2, 3), (1, 2, 4), (1, 2, 3), (9,), (1, 2, 3)]
    arrivals = [
        Arrival(at_s=0.0, prompt_tokens=512 * len(names), output_tokens=1, prefix_blocks=names)
        for names in blocks
    ]
    assert reused(arrivals, has_mtp=False) == [0, 1024, 1472, 0, 1472]
    assert reused(arrivals, has_mtp=True) == [0, 960, 1408, 0, 1408]
    assert reused(arrivals, token_max=1536, has_mtp=False) == [0, 1024, 1024, 0, 1024]
    assert shared(arrivals, 0.5) == [768, 768, 768, 256, 768]
    assert shared(arrivals, 1.0)[3] == 448
    with pytest.raises(BadInput, match=r"share of 1\.5"):
        shared(arrivals, 1.5)


def test_right_drafts_make_tokens():
    """Two queries a step and every draft right: 2 + 2 + 1 tokens in three steps of 10 s."""
    played = replay(asks((0, 1, 5)), rank(depth=2), drafting=Drafting(chance=1.0))
    assert times(played) == [(10, 30)]
    none_right = replay(asks((0, 1, 5)), rank(depth=2), drafting=Drafting(chance=0.0))
    assert times(none_right) == [(10, 50)]


def test_misses_take_time_and_end_when_rows_fit():
    """Lengths 150 and 50 in 120 slots: 50 take 50, 70 are left for 150: 80 missed by one of two."""
    asked = asks((0, 150, 1), (0, 50, 1))
    plain = Plain()
    held = rank(slots=150, slot_floor=75, times=plain, chunk_max=1 << 20)
    replay(asked, replace(held, slot_count=120), drafting=Drafting(chance=0.0))
    assert mean_misses([150, 50], 120, held.missed) == 40
    assert plain.asked[0] == (2, 1, 100, 40), "both prompts went into one step"
    assert mean_misses([150, 50], 200, held.missed) == 0
    assert mean_misses([10, 10, 300, 400], 220, held.missed) == 125


def test_who_does_not_fit_waits_or_is_refused_by_name():
    small = rank(slots=150, host_pages=4)
    played = replay(asks((0, 90, 2), (0, 90, 2), (0, 300, 2)), small)
    assert [life.refused for life in played.lives] == [None, None, HOST_PAGES]
    first, second = played.lives[:2]
    assert second.first_s > first.end_s
    assert summarise(played, Objective(ttft_s=1, tpot_s=1)).waited_s.keys() == {SLOTS}
    alone = replay(asks(*[(0, 1, 2)] * 3), rank(batch_max=1), waiting_max=2)
    assert [life.refused for life in alone.lives] == [None, None, PREFILL]
    late = replay(asks((0, 1, 9), (1, 1, 9), (10, 1, 9)), rank(batch_max=1), waiting_max=1)
    assert [life.refused for life in late.lives] == [None, None, BATCH]


def test_a_time_per_token_bounds_the_batch():
    """At 14.5 s a token six requests fit a step of 8 s and 1 s for each; without it all ten do."""
    asked = asks(*[(float(n), 1, 40) for n in range(10)])
    free = replay(asked, rank())
    paced = replay(asked, rank(target_ms=14_500.0))
    assert (free.rank.batch_peak, paced.rank.batch_peak) == (10, 6)
    assert paced.rank.waited_s.keys() == {TPOT}


def test_nothing_is_lost_and_nothing_overlaps():
    """A random load under pressure: every token is made, the ledger ends empty, order is kept."""
    mix = Mix(rate=0.05, count=80, prompt_tokens=120, output_tokens=12, spread=0.8)
    played = replay(draw(mix, seed=3), rank(slots=400, depth=3), waiting_max=20)
    served = [life for life in played.lives if life.refused is None]
    assert {life.refused for life in played.lives} > {None}
    assert all(life.made == life.arrival.output_tokens for life in served)
    assert all(life.length == life.arrival.prompt_tokens + life.made for life in served)
    assert all(life.arrival.at_s < life.first_s <= life.end_s <= played.seconds for life in served)
    assert [life.prefilled_count for life in served] == [
        life.arrival.prompt_tokens - 1 for life in served
    ]
    played.rank.ledger.check()
    assert played.rank.ledger.promised(SLOTS) == 0


def test_the_same_seed_is_the_same_replay():
    mix = Mix(rate=0.1, count=30, prompt_tokens=50, output_tokens=8, spread=0.5)
    again = [times(replay(draw(mix, seed=seed), rank(depth=2))) for seed in (1, 1, 2)]
    assert again[0] == again[1] != again[2]


def test_offload_changes_no_draws():
    """Two systems make the same tokens in as many steps; only when is different."""
    mix = Mix(rate=0.1, count=30, prompt_tokens=50, output_tokens=8)
    arrivals = draw(mix, seed=1)
    both = [replay(arrivals, rank(200, depth=2, slot_floor=floor)) for floor in (20, None)]
    steps = [[life.step_count for life in replayed.lives] for replayed in both]
    assert steps[0] == steps[1]
    assert times(both[0]) != times(both[1])


def test_drawn_lengths_and_rates():
    mix = Mix(rate=4.0, count=20_000, prompt_tokens=1000, output_tokens=100, spread=1.0)
    arrivals = draw(mix, seed=0)
    assert arrivals[0].at_s == 0.0
    assert len(arrivals) / arrivals[-1].at_s == pytest.approx(4.0, rel=0.03)
    mean = sum(arrival.prompt_tokens for arrival in arrivals) / len(arrivals)
    assert mean == pytest.approx(1000, rel=0.05)
    assert at_rate(arrivals, 8.0)[-1].at_s == pytest.approx(len(arrivals) / 8.0, rel=1e-3)
    assert {arrival.prompt_tokens for arrival in draw(replace(mix, spread=0.0), seed=0)} == {1000}


@pytest.mark.parametrize(("accepted", "depth"), [(1.0, 4), (1.7, 2), (2.8, 4), (4.0, 4)])
def test_drafts_are_right_as_often_as_said(accepted: float, depth: int):
    chance = chance_of(accepted, depth=depth)
    right = right_drafts(seed=0, number=0, chance=chance, steps=20_000, depth=depth)
    assert 1 + sum(right) / len(right) == pytest.approx(accepted, rel=0.02)
    assert len(right_drafts(seed=0, number=0, chance=0.5, steps=3, depth=1)) == 3


def test_slots_and_index_pages_run_out_together():
    budget = Budget(layout=ModelLayout.deepseek_v32(), device_bytes=80 * GIB)
    ledger = budget.split_for([32_768] * 10, slot_floor=6400)
    batch = budget.batch_max(context=32_768, slots_each=6400)
    needs = {SLOTS: 6400, INDEX_PAGES: 512, HOST_PAGES: 0}
    for _ in range(batch):
        ledger.reserve(needs)
    assert ledger.free(SLOTS) < 6400
    assert ledger.free(INDEX_PAGES) < 512


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (lambda: replay([], rank()), "no requests"),
        (lambda: replay(asks((0, 1, 1)), rank(chunk_time=None)), "exactly one of them"),
        (lambda: Mix(rate=0.0, count=1, prompt_tokens=1, output_tokens=1), "rate of 0.0"),
        (lambda: Mix(rate=1.0, count=0, prompt_tokens=1, output_tokens=1), "0 requests"),
        (lambda: Mix(rate=1.0, count=1, prompt_tokens=0, output_tokens=1), "prompts of 0"),
        (lambda: at_rate(asks((0, 1, 1), (0, 1, 1)), 1.0), "at one moment"),
        (lambda: chance_of(2.5, depth=2), "between 1 and 2"),
        (lambda: Objective(ttft_s=0.0, tpot_s=1.0), "objective of 0.0"),
    ],
)
def test_what_makes_no_sense_is_refused(ask, match: str):
    with pytest.raises(BadInput, match=match):
        ask()
