"""Paced engines whose ranks divide a model: rank 0's clock alone says what a step has."""

from __future__ import annotations

import pytest

from ess.engine.mesh.engines import Lead
from ess.engine.mesh.relay import Relay
from ess.engine.requests.request import Request
from tests.mesh.rig import Shape, run_mesh
from tests.mesh.test_arrivals import COUNT as TAKEN
from tests.mesh.test_arrivals import Tier
from tests.mesh.test_tokens import add, busy, ended
from tests.model.test_engine import expected
from tests.model.test_paced import LoadClock


def clock_of(rank: int) -> LoadClock:
    """To rank 0 a query costs as much as a step, so that drafts do not pay; to the others nothing,
    in steps that take long."""
    return LoadClock(step_s=0.01 if rank == 0 else 9.0, query_s=0.0 if rank else 0.01)


@pytest.mark.parametrize(("tp", "pp", "depth"), [(2, 2, 0), (1, 2, 1)])
def test_all_ranks_draft_what_pays_by_the_clock_of_rank_0(tp, pp, depth):
    def act(lead: Lead) -> list[list[int]]:
        made = busy(lead)
        lasting = add(lead, 60, 60)
        ended(lead)
        assert lead.pace.depth == 1
        return [*made, lasting.output]

    settings = {"modes": "none", "mtp_auto": True, "depth": depth, "clock_of": clock_of}
    made = run_mesh(Shape(tp=tp, pp=pp, mtp=4), act, **settings)
    usual = [expected("v32", length, 9) for length in (130, 2, 90, 64, 130, 130)]
    assert made == [*usual, expected("v32", 60, 60)]


def test_no_more_enter_than_the_target_allows_by_the_clock_of_rank_0():
    """There 20 ms and two times 10 are within 45; to the others one request takes too long. Some
    leave, and one gives up its place."""

    def act(lead: Lead) -> tuple[list[int], list[Request]]:
        made = [add(lead, 1, 40) for _ in range(6)]
        counts = [lead.step().turn_count for _ in range(9)]
        lead.cancel(made[0])
        lead.preempt(made[1])
        counts += [lead.step().turn_count for _ in range(9)]
        lead.learn()
        lead.resume(made[1])
        while not lead.is_idle:
            counts.append(lead.step().turn_count)
            lead.check()
        return counts, made

    clocks = {0: LoadClock(step_s=0.02, query_s=0.01), 1: LoadClock(step_s=9.0, query_s=9.0)}
    shape = Shape(pp=2, chunks=6)
    counts, made = run_mesh(shape, act, modes="none", tpot_ms=45.0, clock_of=clocks.get)
    assert (counts[0], max(counts)) == (1, 3), "a request alone, then two, and the resumed request"
    assert made[0].reason == "cancelled"
    assert [each.output for each in made[1:]] == [expected("v32", 1, 40)] * 5


def test_a_pack_of_prompts_takes_the_time_of_all_stages(monkeypatch):
    """All of it passes in the last stage; rank 0 measures it. 29 ms are left beside a request: four
    pages of 0.1 ms a token."""
    clock, prefilled = LoadClock(step_s=0.02, query_s=0.001), Relay.prefilled

    def timed(relay, runner, spans, on_layer):
        made = prefilled(relay, runner, spans, on_layer)
        if runner.model.is_last:
            clock._passed_s += 1e-4 * sum(len(span.tokens) for span in spans)
        return made

    def act(lead: Lead) -> list[int]:
        first = add(lead, 20, 60)
        while len(first.output) < 9:
            lead.step()
        assert lead.pace.chunk_token_s == pytest.approx(1e-4)
        made, counts = [add(lead, 60) for _ in range(9)], []
        while not all(request.output for request in made):
            counts.append(sum(chunk.count for chunk in lead.step().chunks))
        ended(lead)
        assert [request.output for request in made] == [expected("v32", 60, 9)] * 9
        return counts

    monkeypatch.setattr(Relay, "prefilled", timed)
    clocks = {0: clock, 1: LoadClock(step_s=0, query_s=0)}
    more = {"tpot_ms": 50.0, "chunk_tokens": 512, "clock_of": clocks.get}
    counts = run_mesh(Shape(pp=2, chunks=12), act, modes="none", **more)
    assert 64 < max(counts) <= 256


def test_a_pace_with_prompts_that_were_made_elsewhere():
    tier, lengths = Tier(2), (130, 90, 64, 33)

    def act(lead: Lead) -> list[list[int]]:
        made = [tier.add(lead, length) for length in lengths]
        tier.run(lead)
        assert tier.port.counts.landed_count == len(lengths)
        return [request.output for request in made]

    more = {"port_of": tier.port_of, "clock_of": clock_of, "tpot_ms": 25.0}
    made = run_mesh(Shape(tp=2, pp=2, mtp=2), act, **more)
    assert made == [expected("v32", length, TAKEN) for length in lengths]
