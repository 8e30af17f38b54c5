"""Ranks that divide a model give the tokens of the plain one, and find out when they differ."""

from __future__ import annotations

import itertools

import pytest

from ess.engine.mesh.engines import Lead
from ess.engine.requests.request import Request
from ess.engine.tokens.grammar import Grammar
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from tests.mesh.rig import Shape, run_mesh
from tests.model.test_engine import expected, prompt

LENGTHS = (130, 2, 90, 64, 33)
COUNT = 9


def ended(lead: Lead) -> None:
    while not lead.is_idle:
        lead.step()
        lead.check()


def add(lead: Lead, length: int, count: int = COUNT, **wishes) -> Request:
    return lead.add(prompt(length), Sampling(tokens_max=count, **wishes))


def busy(lead: Lead) -> list[list[int]]:
    """Requests that join, are cancelled, preempted and resumed while others run; prefixes that are
    reused, and are dropped."""
    first, second = add(lead, 130), add(lead, 2)
    while len(first.output) < 2:
        lead.step()
    third, fourth, fifth = add(lead, 90), add(lead, 64), add(lead, 33, 40)
    lead.preempt(first)
    while not third.output or not fifth.output:
        lead.step()
        lead.check()
    lead.resume(first)
    lead.cancel(fifth)
    ended(lead)
    assert fifth.reason == "cancelled"
    assert fifth.output == expected_of(lead, 33, 40)[: len(fifth.output)]
    again = add(lead, 130)
    ended(lead)
    assert again.cached_count >= 64
    lead.forget_prefixes()
    fresh = add(lead, 130)
    ended(lead)
    assert fresh.cached_count == 0
    return [each.output for each in (first, second, third, fourth, again, fresh)]


def expected_of(lead: Lead, length: int, count: int) -> list[int]:
    family = "glm" if "glm" in lead.runner.model.config.family else "v32"
    return expected(family, length, count)


CASES = [
    # family, tp, pp, mode, mtp, tbo
    ("v32", 1, 2, "da", 1, "off"),
    ("v32", 1, 3, "layerwise", 4, "on"),
    ("glm", 1, 2, "none", 2, "off"),
    ("v32", 2, 1, "dba", 4, "on"),
    ("glm", 2, 1, "resident", 1, "off"),
    ("v32", 2, 2, "layerwise", 2, "on"),
]


@pytest.mark.parametrize(("family", "tp", "pp", "mode", "mtp", "tbo"), CASES)
def test_the_plain_model_s_tokens(family, tp, pp, mode, mtp, tbo):
    shape = Shape(family=family, tp=tp, pp=pp, mtp=mtp)
    made = run_mesh(shape, busy, modes=mode, tbo=tbo)
    assert made == [expected(family, length, COUNT) for length in (130, 2, 90, 64, 130, 130)]


def test_pages_that_run_short_preempt_alike_on_all_ranks():
    """Each request needs a page at first and two at its end; the device has four."""

    def act(lead: Lead) -> tuple[int, list[list[int]]]:
        made = [add(lead, length, 20) for length in (50, 60, 62)]
        ended(lead)
        return lead.preempted_count, [request.output for request in made]

    shape = Shape(pp=2, index_pages=4, chunks=2)
    count, made = run_mesh(shape, act, modes="da", promise="some")
    assert count > 0
    assert made == [expected("v32", length, 20) for length in (50, 60, 62)]


def test_sampled_tokens_and_chances_are_those_of_one_engine():
    sampling = Sampling(tokens_max=8, temperature=1.0, seed=7, logprobs=2, repetition_penalty=1.2)

    def act(lead: Lead) -> list[tuple[int, list[float]]]:
        lead.add(prompt(70), sampling)
        made = []
        while not lead.is_idle:
            made += lead.step().made
        return [(t, [c.logprob for c in m.chances]) for m in made for t in m.tokens]

    alone = run_mesh(Shape(pp=1), act, modes="none")
    assert run_mesh(Shape(pp=3), act, modes="none") == alone
    assert len(alone) == 8


def test_ranks_that_come_apart_end_in_words():
    def act(lead: Lead) -> None:
        add(lead, 40)
        lead.lockstep.say = lambda call: None
        add(lead, 50)
        del lead.lockstep.say
        ended(lead)

    with pytest.raises(ExceptionGroup) as wrong:
        run_mesh(Shape(pp=2), act)
    sentences = " ".join(str(each) for each in wrong.value.exceptions)
    assert "rank 1 has come apart from rank 0 at 0" in sentences


def test_a_call_that_is_refused_is_refused_everywhere():
    def act(lead: Lead) -> list[int]:
        with pytest.raises(BadInput, match=r"prompt ids must be 0\.\.\d+: prompt\[0\] is 1048576$"):
            lead.add([1 << 20])
        with pytest.raises(BadInput, match="grammars need an engine with a tokenizer"):
            add(lead, 4, grammar=Grammar("json_object"))
        for wrong in ({"priority": "first"}, {"prior_output": [True]}, {"salt": "tenant"}):
            with pytest.raises(BadInput):
                lead.add([3], **wrong)
        made = lead.add(iter(prompt(40)), Sampling(tokens_max=COUNT))
        ended(lead)
        return made.output

    assert run_mesh(Shape(pp=2), act) == expected("v32", 40, COUNT)


def test_a_step_under_way_is_learned_by_all_ranks():
    """As in a pause: what is cancelled then frees its pages at once."""

    def act(lead: Lead) -> list[int]:
        first = add(lead, 70, 20)
        while len(first.output) < 3:
            lead.step()
        lead.learn()
        lead.cancel(first)
        lead.forget_prefixes()
        second = add(lead, 40)
        ended(lead)
        return second.output

    assert run_mesh(Shape(pp=2), act, depth=1) == expected("v32", 40, COUNT)


def test_a_choice_that_names_a_cancelled_choice_waits_for_its_leader():
    def act(lead: Lead) -> list[list[int]]:
        first, wish = add(lead, 130), Sampling(tokens_max=COUNT)
        second = lead.add(prompt(130), wish, leader=first)
        lead.step()
        lead.cancel(second)
        lead.step()
        assert not first.has_prompt, "else none waits"
        third = lead.add(prompt(130), wish, leader=second)
        ended(lead)
        return [first.output, third.output]

    assert run_mesh(Shape(pp=2), act, chunk_tokens=32) == [expected("v32", 130, COUNT)] * 2


def test_a_long_prompt_is_said_in_pieces(monkeypatch):
    monkeypatch.setattr("ess.engine.mesh.words.PIECE_BYTES", 100)
    made = run_mesh(Shape(pp=2), busy)
    assert len(list(itertools.chain(*made))) == 6 * COUNT
