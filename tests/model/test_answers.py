"""What people ask of an answer, through the engine on the embedded model: grammars, stops, chances.

The answer must not depend on how many tokens a step verifies, nor on preemption.
"""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path

import pytest
import torch

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.process.messages import Add
from ess.engine.process.worker import EngineLoop
from ess.engine.prompt import scores
from ess.engine.requests.request import Request
from ess.engine.tokens import sandbox
from ess.engine.tokens.chance import Chance
from ess.engine.tokens.grammar import Grammar
from ess.engine.tokens.sampling import Sampling
from ess.engine.tokens.sandbox import Sandbox
from ess.errors import BadInput
from ess.models.load import EMBEDDED, load_model
from ess.models.plain import Plain
from ess.models.text.tokenizer import Tokenizer
from tests.server.test_process import Script
from tests.support.manual_clock import ManualClock

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["module", "function"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
                  "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}  # fmt: skip
JSON_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))
DATE = Grammar("regex", "(19|20)[0-9]{2}-(0[1-9]|1[0-2])")


@functools.cache
def model():
    return load_model(form="f32")


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(EMBEDDED)


def ids(text: str) -> list[int]:
    return tokenizer().encode(text)


def engine(
    *,
    mtp: int = 1,
    depth: int = 0,
    mode: str = "none",
    with_tokenizer: bool = True,
    chunk_tokens: int = 512,
) -> Engine:
    layout = model().config.layout(row="f32", index="f32")
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.page_bytes * 6,
        host_bytes=32 * layout.host_page_bytes,
        length_max=1024,
        slot_floor=64,
    )
    return Engine(
        model(),
        offload,
        EngineConfig(modes=mode, mtp=mtp, depth=depth, chunk_tokens=chunk_tokens),
        tokenizer=tokenizer() if with_tokenizer else None,
    )


def answers(wishes: list[Sampling], *, preempt: bool = False, **config) -> list[Request]:
    """One request per wish, all in one batch."""
    made = engine(**config)
    requests = [made.add(ids("The module named"), wish) for wish in wishes]
    for number, _ in enumerate(made.run()):
        if preempt and number % 3 == 1 and requests[0].state == "decoding":
            made.preempt(requests[0])
            made.step()
            if requests[0].state == "preempted":
                made.resume(requests[0])
    made.offload.drain()
    assert made.offload.stats().used_slot_count.sum() == 0
    made.offload.close()
    return requests


def said(request: Request) -> str:
    return tokenizer().decode(request.output)


def check_schema(text: str) -> None:
    document = json.loads(text)
    assert list(document) == ["name", "kind", "sizes"]
    assert isinstance(document["name"], str)
    assert len(document["name"]) <= 12
    assert document["kind"] in ("module", "function")
    assert 1 <= len(document["sizes"]) <= 3
    assert all(isinstance(each, int) and 0 <= each <= 99 for each in document["sizes"])


WISHES = [
    Sampling(tokens_max=100, grammar=JSON_SCHEMA),
    Sampling(tokens_max=100, grammar=JSON_SCHEMA, temperature=1.0, seed=5),
    Sampling(tokens_max=100, grammar=JSON_SCHEMA, temperature=1.0, seed=6),
    Sampling(tokens_max=20, grammar=DATE, temperature=2.0, top_p=0.9, frequency_penalty=0.5),
    Sampling(tokens_max=20, grammar=Grammar("lark", 'start: "yes" | "no"'), tokens_min=9),
    Sampling(tokens_max=24, temperature=0.8, repetition_penalty=1.3, tokens_min=20, seed=3),
    Sampling(tokens_max=24, logit_bias={ids(" the")[0]: -100.0}, logprobs=3),
]


@functools.cache
def plainly() -> list[Request]:
    return answers(WISHES)


def test_answers_follow_their_grammars():
    first, second, third, date, word, free, biased = plainly()
    for request in (first, second, third):
        check_schema(said(request))
    assert len({said(first), said(second), said(third)}) == 3, "the model still chooses"
    assert re.fullmatch(DATE.text, said(date))
    assert said(word) in ("yes", "no"), "the grammar wins over the least length"
    for request in (first, second, third, date, word):
        assert (request.reason, request.ended_by) == ("stop", model().config.eos_ids)
    assert len(free.output) >= 20
    assert ids(" the")[0] not in biased.output


@pytest.mark.parametrize(
    "config",
    [{"mtp": 3, "preempt": True}, {"mtp": 4, "mode": "dba", "depth": 1}],
)
def test_answers_depend_on_nothing_else(config):
    for expected, answer in zip(plainly(), answers(WISHES, **config), strict=True):
        assert answer.output == expected.output
        assert (answer.reason, answer.ended_by) == (expected.reason, expected.ended_by)


def test_a_grammar_that_fails_says_so_and_ends():
    rules = "".join(f'r{i}: r{i + 1} r{i + 1} | "x"\n' for i in range(1000))
    grammar = Grammar("lark", f'start: r0\n{rules}r1000: "y"')
    [request, other] = answers([Sampling(grammar=grammar), Sampling(tokens_max=6)], mtp=3)
    assert request.reason == "failed"
    assert request.matcher is not None
    assert "max is 2000" in request.matcher.failure
    assert len(other.output) == 6, "the other request goes on"


@pytest.mark.parametrize(("mtp", "depth"), [(1, 1), (3, 0)])
def test_a_stop_string_ends_a_request_where_it_is_complete(mtp, depth):
    [free] = answers([Sampling(tokens_max=28, ignore_eos=True)])
    stop = said(free)[20:26]
    wishes = [
        Sampling(tokens_max=28, ignore_eos=True, stop=(stop, "\x00never")),
        Sampling(tokens_max=5, ignore_eos=True, stop=(said(free)[:60],)),
    ]
    stopped, short = answers(wishes, mtp=mtp, depth=depth)
    assert (stopped.reason, stopped.ended_by) == ("stop", stop)
    assert stopped.reader is not None
    assert stopped.reader.text == said(free)[: said(free).index(stop)]
    assert stop in said(stopped)
    assert stop not in tokenizer().decode(stopped.output[:-1]), "it ends with that very token"
    assert short.reader is not None
    assert short.reader.text == said(short), "what was held back is given out at the end"
    [late] = answers([Sampling(tokens_max=28, ignore_eos=True, stop=(stop,), tokens_min=27)])
    assert len(late.output) == 28


def test_the_model_s_end_ends_unless_it_is_ignored():
    [free] = answers([Sampling(tokens_max=12, ignore_eos=True)])
    end = model().config.eos_ids
    assert isinstance(end, int)
    forced = {"logit_bias": {end: 100.0}, "tokens_max": 6}
    ended, ignoring, late, own = answers(
        [
            Sampling(**forced),
            Sampling(**forced, ignore_eos=True),
            Sampling(**forced, tokens_min=4),
            Sampling(tokens_max=12, ignore_eos=True, stop_ids=frozenset({free.output[3]})),
        ]
    )
    assert (ended.output, ended.reason, ended.ended_by) == ([end], "stop", end)
    assert (ignoring.output, ignoring.reason) == ([end] * 6, "length")
    assert late.output.index(end) == 4
    assert own.ended_by == free.output[3]


def test_chances_come_with_the_tokens():
    made = engine(mtp=3, depth=1)
    request = made.add(ids("The module named"), Sampling(tokens_max=8, logprobs=4, ignore_eos=True))
    chances = [chance for step in made.run() for each in step.made for chance in each.chances]
    assert len(chances) >= 8
    tokens = request.prompt + request.output
    scores = Plain(model()).run(tokens).logits.log_softmax(-1)[len(request.prompt) - 1 :]
    for token, chance, row in zip(request.output, chances, scores, strict=False):
        assert chance.rank == 1
        assert chance.top[0] == (token, chance.logprob)
        assert math.isclose(chance.logprob, float(row[token]), abs_tol=1e-3)
        assert [each for each, _ in chance.top] == row.topk(4).indices.tolist()
    made.offload.close()


LONG = "The module named server speaks to its clients and the module named engine does not. " * 9


def scored(made: Engine, wish: Sampling, text: str = LONG) -> tuple[int, list[Chance]]:
    """From which position on the prompt was computed, and its chances."""
    made.add(ids(text), wish)
    steps = list(made.run())
    computed = [chunk.start for step in steps for chunk in step.chunks]
    chances = [chance for step in steps for scored in step.scored for chance in scored]
    return min(computed, default=0), chances


@functools.cache
def truth() -> torch.Tensor:
    return Plain(model()).run(ids(LONG)).logits.log_softmax(-1)


@pytest.mark.parametrize("config", [{}, {"mtp": 3, "depth": 1}])
@pytest.mark.parametrize("start", [0, 140])
def test_a_prompt_s_chances_are_those_of_a_full_forward(config, start, monkeypatch):
    """Over several chunks, and logits of a few tokens at a time; also where the prefix is cached:
    what lies before `start` may come from there, the rest is computed again."""
    monkeypatch.setattr(scores, "LOGITS_MAX", 7 * model().config.vocab_size)
    made = engine(**config, chunk_tokens=64)
    tokens = ids(LONG)
    assert len(tokens) > 160
    for turn in range(2):
        wish = Sampling(tokens_max=2, prompt_logprobs=3, prompt_start=start)
        cached_count, chances = scored(made, wish)
        assert len(chances) == len(tokens) - 1 - start
        for position, chance in enumerate(chances, start=start):
            row, token = truth()[position], tokens[position + 1]
            assert math.isclose(chance.logprob, float(row[token]), abs_tol=1e-3)
            assert chance.rank == 1 + int((row > row[token]).sum())
            assert [each for each, _ in chance.top] == row.topk(3).indices.tolist()
            for each, logprob in chance.top:
                assert math.isclose(logprob, float(row[each]), abs_tol=1e-3)
        reused = max(0, start // 64 - 1) * 64
        assert cached_count == (reused if turn else 0), "with MTP the last page is left out"
    cached_count, nothing = scored(made, Sampling(tokens_max=2))
    assert nothing == []
    assert cached_count >= 64, "a request without a salt finds the prefix"
    made.close()
    made.offload.close()


def test_chances_of_a_prompt_of_one_token_are_none():
    made = engine()
    assert len(ids("a")) == 1
    _, chances = scored(made, Sampling(tokens_max=2, prompt_logprobs=0), text="a")
    assert chances == []
    _, chances = scored(made, Sampling(tokens_max=2, prompt_logprobs=0, prompt_start=999))
    assert chances == []
    made.offload.close()


def test_an_engine_refuses_what_it_cannot_follow_and_stays_as_it_was():
    made = engine(with_tokenizer=False)
    for wish, sentence in (
        (Sampling(stop=("x",)), "stop strings need an engine with a tokenizer"),
        (Sampling(grammar=DATE), "grammars need an engine with a tokenizer"),
        (
            Sampling(stop_ids=frozenset({4096})),
            "stop_token_ids id 4096: the vocabulary has 4,096 ids",
        ),
        (Sampling(logit_bias={9999: 1.0}), "logit_bias id 9999"),
    ):
        with pytest.raises(BadInput, match=sentence):
            made.add([1, 2], wish)
    assert made.is_idle
    made.offload.close()


class Gate:
    """No grammar is begun until it is opened; `begun` are the processes of those that were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        self._is_open = False
        spare = Sandbox.spare

        def held(sandbox: Sandbox) -> object:
            taken = spare(sandbox) if self._is_open else None
            if taken is not None:
                self.begun.append(taken[1])
            return taken

        monkeypatch.setattr(Sandbox, "spare", held)

    def open(self) -> None:
        self._is_open = True


def test_others_keep_their_pace_while_a_grammar_is_compiled(monkeypatch):
    """A token per step, and later requests enter: none waits for the compiler."""
    gate, made = Gate(monkeypatch), engine()
    other = made.add(ids("The module named"), Sampling(tokens_max=40, ignore_eos=True))
    while not other.output:
        made.step()
    bound = made.add(ids("The module named"), Sampling(grammar=DATE, tokens_max=20))
    later = made.add(ids("A file"), Sampling(tokens_max=6, ignore_eos=True))
    for count in range(2, 13):
        assert not made.step().is_empty
        assert len(other.output) == count
    assert (later.reason, bound.state) == ("length", "waiting")
    gate.open()
    for _ in made.run():
        pass
    assert re.fullmatch(DATE.text, said(bound))
    assert len(other.output) == 40
    made.close()
    made.offload.close()


def test_who_is_cancelled_while_a_grammar_is_compiled_leaves_nothing(monkeypatch):
    gate, made = Gate(monkeypatch), engine()
    pair = [made.add([1, 2], Sampling(grammar=Grammar("regex", text))) for text in ("ab", "cd")]
    for request in pair:
        made.step()
        made.cancel(request)
        assert (request.state, request.reason) == ("finished", "cancelled")
    assert made.is_idle
    gate.open()
    third = made.add([1, 2], Sampling(grammar=Grammar("regex", "ef")))
    for _ in made.run():
        pass
    assert said(third) == "ef"
    assert len(gate.begun) == 1, "the others were never begun"
    made.close()
    made.offload.close()


def test_a_grammar_that_never_ends_is_ended_when_nobody_waits_for_it_any_more(monkeypatch):
    gate, made = Gate(monkeypatch), engine()
    gate.open()
    endless = Grammar("json_schema", '{"type": "integer", "multipleOf": 99999989}')
    pair = [made.add([1, 2], Sampling(grammar=endless)) for _ in range(2)]
    while not gate.begun:
        made.step()
    made.cancel(pair[0])
    assert Path(f"/proc/{gate.begun[0]}").exists(), "the other still waits for it"
    made.cancel(pair[1])
    assert not Path(f"/proc/{gate.begun[0]}").exists()
    assert (made.is_idle, len(gate.begun)) == (True, 1)
    made.check()
    made.close()
    made.offload.close()


def test_an_honest_grammar_does_not_wait_for_one_that_never_ends():
    made = engine()
    endless = Grammar("json_schema", '{"type": "integer", "multipleOf": 99999989}')
    bad = made.add([1, 2], Sampling(grammar=endless))
    good = made.add(ids("The module named"), Sampling(grammar=DATE, tokens_max=20))
    ended = []
    for _ in made.run():
        ended += [each for each in (good, bad) if each.reason and each not in ended]
    ended += [each for each in (good, bad) if each not in ended]
    assert ended == [good, bad]
    assert re.fullmatch(DATE.text, said(good))
    assert bad.reason == "refused"
    assert re.search("takes more than 2 s to compile|needs more than 128 MiB", str(bad.refusal))
    made.close()
    made.offload.close()


def test_a_grammar_that_is_none_refuses_its_request_with_the_reason():
    made = engine()
    wrong = made.add([1, 2], Sampling(grammar=Grammar("regex", "[a")))
    right = made.add([1, 2], Sampling(grammar=Grammar("regex", "ab")))
    for _ in made.run():
        pass
    assert wrong.reason == "refused"
    assert "unclosed character class" in str(wrong.refusal)
    assert (said(right), made.is_idle) == ("ab", True)
    made.close()
    made.offload.close()


def test_the_server_is_told_why_a_grammar_was_refused():
    wire = Script(t1=[Add(1, [1, 2], Sampling(grammar=Grammar("lark", "start: nothing")))])
    loop = EngineLoop(engine(), wire, ManualClock())
    while not wire.pieces(1):
        loop.turn()
    [piece] = wire.pieces(1)
    assert (piece.reason, piece.tokens) == ("refused", ())
    assert "nothing" in piece.sentence
    assert "grammar (lark)" in piece.sentence
    loop.close()


def test_a_fault_of_ours_is_not_the_grammar_s(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "_CHILD", tmp_path / "nothing.py")
    wire = Script(t1=[Add(1, [1, 2], Sampling(grammar=DATE))])
    loop = EngineLoop(engine(), wire, ManualClock())
    while not wire.pieces(1):
        loop.turn()
    [piece] = wire.pieces(1)
    assert (piece.reason, piece.is_ours) == ("refused", True)
    assert "does not start" in piece.sentence
    loop.close()
