"""What clients ask of the form of an answer, obeyed by the engine on the embedded model.

The answers must not depend on how many tokens a step verifies: drafts break a rule, or lead up to
its edge, and nothing of that may show.
"""

from __future__ import annotations

import functools
import itertools
import json
import re

import pytest

from ess.engine.requests.request import Request
from ess.engine.tokens.grammar import Grammar
from ess.engine.tokens.sampling import Sampling
from ess.models.chat.grammars.calls import Calls
from ess.models.chat.messages import Reply
from ess.models.chat.replies import GLM
from ess.models.chat.reply import parse
from ess.models.chat.styles import ChatStyle, DeepSeekStyle, TemplateStyle
from ess.server.dialects import schemas
from ess.server.dialects.forms import constraints
from tests.model.test_answers import answers, engine, ids, said, tokenizer
from tests.support.few import few

OPTIONS = [' the "a\\b"', "naïve 漢字\n", "naïve", "/x/", "🙂 (yes|no)"]
TAGS = {
    "structures": [
        {"begin": " the a(", "schema": {"type": "integer", "maximum": 99}, "end": ")"},
        {"begin": " the b(", "schema": {"enum": ["x", None]}, "end": "\n)"},
    ],
    "triggers": [" the"],
}
TOOLS = [
    {
        "name": "tide",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Ulm", "Bad \"Urach\"", "Köln"]},
                "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2.0},
                "unit": {"anyOf": [{"enum": ["m", "ft"]}, {"type": "null"}]},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 31}},
        },
    },
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
]  # fmt: skip


def grammar_of(**asked: object) -> Grammar:
    ask = schemas.read(json.dumps({"prompt": "", **asked}).encode(), schemas.CompletionAsk)
    form = constraints.of_openai(ask, tokenizer())
    assert form is not None
    return form.grammar


def calling(style: ChatStyle, **given: object) -> Grammar:
    wish = {"tools": TOOLS, "must": True, "several": True, "thinking": False, **given}
    text = style.call_grammar(tokenizer(), Calls(**wish))
    assert text is not None
    return Grammar("lark", text)


def styles() -> list[ChatStyle]:
    return [DeepSeekStyle(), TemplateStyle("{{ tools }}", replies=GLM)]


FREE = {"tokens_max": 20, "temperature": 1.0}
CALL = {"tokens_max": 160, "temperature": 1.0}
ALLOWED = frozenset(ids(" the a of in\n,."))
BAD = tuple(tuple(ids(word)) for word in (" the", "he", "\n\n", ". The", ", and", " of the"))


@functools.cache
def wishes() -> list[Sampling]:
    choice = grammar_of(structured_outputs={"choice": OPTIONS})
    tags = grammar_of(response_format={"type": "structural_tag", **TAGS})
    return [
        *(Sampling(**FREE, seed=seed, grammar=choice) for seed in range(4)),
        *(Sampling(**FREE, seed=seed, allowed_ids=ALLOWED) for seed in range(2)),
        *(Sampling(**{**FREE, "tokens_max": 60}, seed=seed, bad_words=BAD) for seed in range(2)),
        *(Sampling(**CALL, seed=seed, grammar=tags) for seed in range(2)),
        *(
            Sampling(**CALL, seed=seed, grammar=calling(style, several=several))
            for style in styles()
            for several in (True, False)
            for seed in range(2)
        ),
    ]


@functools.cache
def plainly() -> list[Request]:
    return answers(wishes())


def test_a_choice_is_one_of_its_options():
    requests = plainly()[:4]
    assert {said(request) for request in requests} <= set(OPTIONS)
    assert {request.reason for request in requests} == {"stop"}


def test_a_request_that_has_ended_follows_no_grammar():
    """Else the grammar's process would stay."""
    matchers = [request.matcher for request in plainly() if request.sampling.grammar is not None]
    assert all(matcher is not None and matcher._room is None for matcher in matchers)
    assert len(matchers) == 14


def test_only_allowed_ids_are_drawn_and_bad_words_never():
    allowed, bad = plainly()[4:6], plainly()[6:8]
    for request in allowed:
        assert len(request.output) == 20
        assert set(request.output) <= ALLOWED
    free = answers([Sampling(**{**FREE, "tokens_max": 60}, seed=seed) for seed in range(2)])
    assert any(has_bad(request) for request in free), "else the test shows nothing"
    assert not any(has_bad(request) for request in bad)


def has_bad(request: Request) -> bool:
    spelled = " ".join(map(str, request.output))
    return any(re.search(rf"\b{' '.join(map(str, word))}\b", spelled) for word in BAD)


def test_structures_come_behind_their_triggers():
    opened = [part for r in plainly()[8:10] for part in said(r).split(" the")[1:]]
    whole = [part for part in opened if ")" in part]
    assert whole, "the model writes the trigger"
    for part in whole:
        assert re.match(r' a\(\s*-?\d+\s*\)| b\(\s*("x"|null)\s*\n\)', part), part


def replies() -> list[tuple[Reply, bool]]:
    """The calls of both formats, and whether there may be several."""
    listed = []
    for number, request in enumerate(plainly()[10:]):
        style = styles()[number // 4]
        reply = parse(style.parser(thinking=False, tools=TOOLS), said(request))
        if request.reason == "stop":
            listed.append((reply, number % 4 < 2))
    return listed


def test_required_calls_are_calls_with_right_arguments():
    assert len(replies()) >= 5, "most end before their last token"
    for reply, several in replies():
        assert (reply.content, reply.reasoning, reply.flaw) == ("", "", None)
        assert len(reply.tool_calls) == 1 or (several and reply.tool_calls)
        for call in reply.tool_calls:
            check_arguments(call.name, json.loads(call.arguments))
    assert {call.name for reply, _ in replies() for call in reply.tool_calls} == {"tide", "now"}


def check_arguments(name: str, arguments: dict[str, object]) -> None:
    if name == "now":
        assert arguments == {}
        return
    assert name == "tide"
    assert {"city", "days"} <= arguments.keys() <= {"city", "days", "unit"}
    assert arguments["city"] in ("Ulm", 'Bad "Urach"', "Köln")
    assert arguments.get("unit") in ("m", "ft", None)
    assert isinstance(arguments["days"], list)
    assert all(1 <= day <= 31 for day in arguments["days"])


WAYS = ({"mtp": 2}, {"mtp": 3, "depth": 1})
SHARES = (slice(None), slice(0, None, 2), slice(1, None, 2))


@pytest.mark.parametrize(
    ("config", "share"),
    few([*zip(WAYS, SHARES[1:], strict=True)], all_of=itertools.product(WAYS, SHARES)),
)
def test_the_same_answers_with_drafts(config, share):
    """A half of the wishes has some of every kind."""
    answered = answers(wishes()[share], **config)
    for expected, answer in zip(plainly()[share], answered, strict=True):
        assert answer.output == expected.output
        assert answer.reason == expected.reason


def test_other_tenants_prefixes_are_not_found():
    made = engine()
    prompt = ids("The module named") * 60
    counts = []
    for salt in (b"", b"", b"one", b"two", b"one"):
        request = made.add(prompt, Sampling(tokens_max=2), salt=salt)
        while request.sequence is None:
            made.step()
        counts.append(request.sequence.cached_count)
        for _ in made.run():
            pass
    assert counts[0] == counts[2] == counts[3] == 0
    assert counts[1] == counts[4] > 0
