"""Grammars and chances of prompts where ranks divide a model: rank 0 has the grammars, and the last
stage the chances."""

from __future__ import annotations

import functools
import importlib.util

import pytest

from ess.engine.engine import Engine
from ess.engine.requests.request import Request
from ess.engine.tokens import grammar
from ess.engine.tokens.chance import Chance
from ess.engine.tokens.grammar import Grammar
from ess.engine.tokens.sampling import Sampling
from ess.errors import Unavailable
from tests.mesh.rig import Shape, run_mesh
from tests.model.test_answers import tokenizer
from tests.model.test_engine import engine, prompt

compiles = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="llguidance is not installed"
)
LETTERS = Grammar("regex", "[a-z]{2}( [a-z]{2}){3}")
LIST = Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}, "maxItems": 4}')
DRAWN = {"tokens_max": 30, "temperature": 1.0}


def played(eng: Engine) -> list[tuple[list[int], str | None]]:
    """Requests with grammars and without join; the preempted one has written a part of its text."""
    made = [
        eng.add(prompt(70), Sampling(**DRAWN, seed=3, grammar=LETTERS)),
        eng.add(prompt(33), Sampling(tokens_max=12)),
        eng.add(prompt(20), Sampling(**DRAWN, seed=4, grammar=LIST, tokens_min=3)),
    ]
    while len(made[0].output) < 3:
        eng.step()
        eng._entry.wait()
    eng.preempt(made[0])
    made.append(eng.add(prompt(90), Sampling(**DRAWN, seed=5, grammar=LETTERS)))
    eng.step()
    eng.resume(made[0])
    ended(eng)
    return [(each.output, each.reason) for each in made]


def ended(eng: Engine) -> None:
    for _ in eng.run():
        eng.check()


@functools.cache
def alone(mtp: int) -> list[tuple[list[int], str | None]]:
    bare = engine("v32", mtp=mtp, modes="none", chunks=6)
    model, offload, config = bare.runner.model, bare.offload, bare._config
    made = Engine(model, offload, config, tokenizer=tokenizer())
    results = played(made)
    made.close()
    offload.close()
    return results


@compiles
@pytest.mark.parametrize(("tp", "pp", "mtp"), [(1, 3, 1), (2, 1, 4), (2, 2, 2)])
def test_answers_by_grammars_are_those_of_one_engine(tp, pp, mtp):
    shape = Shape(tp=tp, pp=pp, mtp=mtp, chunks=4)
    made = run_mesh(shape, played, modes="none", tokenizer=tokenizer())
    assert made == alone(mtp)
    assert {reason for _, reason in made} == {"stop", "length"}


@compiles
def test_refused_and_cancelled_grammars_leave_all_ranks_together():
    def act(lead: Engine) -> list[Request]:
        wrong = lead.add([1, 2], Sampling(grammar=Grammar("regex", "[a")))
        gone = lead.add([1, 2], Sampling(grammar=Grammar("regex", "gone")))
        lead.step()
        lead.cancel(gone)
        right = lead.add([1, 2], Sampling(grammar=Grammar("regex", "ab")))
        ended(lead)
        return [wrong, gone, right]

    wrong, gone, right = run_mesh(Shape(pp=2), act, tokenizer=tokenizer())
    assert [each.reason for each in (wrong, gone, right)] == ["refused", "cancelled", "stop"]
    assert "unclosed character class" in str(wrong.refusal)
    assert tokenizer().decode(right.output[:-1]) == "ab"


@compiles
def test_a_grammar_that_fails_midway_ends_its_request_on_all_ranks(monkeypatch):
    allowed = grammar.Matcher.allowed

    def failing(self, output, drafts):
        masks = allowed(self, output, drafts)
        if len(output) == 4:
            self.failure = "played: lost"
        return masks

    def act(lead: Engine) -> list[Request]:
        made = [lead.add(prompt(40), Sampling(**DRAWN, seed=1, grammar=LETTERS))]
        made.append(lead.add(prompt(33), Sampling(tokens_max=12)))
        ended(lead)
        return made

    monkeypatch.setattr(grammar.Matcher, "allowed", failing)
    failed, other = run_mesh(Shape(tp=2, pp=2), act, tokenizer=tokenizer())
    assert (failed.reason, len(failed.output)) == ("failed", 5)
    assert failed.matcher.failure == "played: lost"
    assert len(other.output) == 12


def test_a_refusal_of_rank_0_comes_before_the_others_hear_of_the_request(monkeypatch):
    def act(lead: Engine) -> list[int]:
        with pytest.raises(Unavailable, match="need llguidance, which is not installed"):
            lead.add([1, 2], Sampling(grammar=LETTERS))
        made = lead.add(prompt(40), Sampling(tokens_max=5))
        ended(lead)
        return made.output

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert len(run_mesh(Shape(pp=2), act, tokenizer=tokenizer())) == 5


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2)])
def test_chances_of_a_prompt_are_those_of_one_engine(tp, pp):
    """Several chunks, one of which begins before the first place that is asked for."""

    def act(eng: Engine) -> list[Chance]:
        eng.add(prompt(60), Sampling(tokens_max=3))
        eng.add(prompt(130), Sampling(tokens_max=3, prompt_logprobs=2, prompt_start=20))
        scored = []
        while not eng.is_idle:
            scored += [chance for each in eng.step().scored for chance in each]
        return scored

    bare = engine("v32", modes="none", chunks=6)
    expected = act(bare)
    bare.offload.close()
    made = run_mesh(Shape(tp=tp, pp=pp), act, modes="none")
    assert len(made) == len(expected) == 130 - 20 - 1
    assert [each.rank for each in made] == [each.rank for each in expected]
    assert [ids(each) for each in made] == [ids(each) for each in expected]
    exactly = [each.logprob for each in expected]
    assert [each.logprob for each in made] == pytest.approx(exactly, abs=1e-5 if tp > 1 else 0)


def ids(chance: Chance) -> list[int]:
    return [token for token, _ in chance.top]
