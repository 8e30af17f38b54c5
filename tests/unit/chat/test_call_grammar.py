"""Grammars of calls: texts that they allow, token by token, and texts that they do not."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ess.engine.tokens.grammar import Grammar, Grammars
from ess.errors import BadInput
from ess.models.chat.grammars import dots, objects
from ess.models.chat.grammars import dsml as dsml_grammar
from ess.models.chat.grammars import glm as glm_grammar
from ess.models.chat.grammars.calls import Calls
from ess.models.chat.replies import hy
from ess.models.chat.styles import DeepSeekStyle
from ess.models.load import EMBEDDED
from ess.models.text.tokenizer import Tokenizer

END, VOCABULARY = 1, 4096
Write = Callable[[Tokenizer, Calls], str]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["m", "ft"]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer"}},
}
TOOLS: list[dict[str, Any]] = [{"name": "tide", "parameters": PARAMETERS}, {"name": "now"}]
DSML = (
    "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="tide">\n'
    '<｜DSML｜parameter name="city" string="true">Bad "Ulm" </b>\nÄ < 3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="note" string="false">null</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>"
)
GLM = (
    "<tool_call>tide<arg_key>city</arg_key><arg_value>Ulm < </arg</arg_value>"
    "\n<arg_key>unit</arg_key><arg_value>\"ft\"</arg_value>"
    "<arg_key>days</arg_key><arg_value>[1, 2]</arg_value></tool_call>"
    "\n<tool_call>now\n</tool_call>"
)  # fmt: skip
HY = "<tool_calls:x>" + GLM.replace(">", ":x>") + "</tool_calls:x>"
HY_ENDED = HY.replace("tide", "tide<tool_sep:x>").replace("now", "now<tool_sep:x>")
HERMES = (
    '<tool_call>\n{"name": "tide", "arguments": {"city": "Ulm </tool", "days": [1, 2]}}\n'
    '</tool_call>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
MISTRAL = '[TOOL_CALLS]tide[ARGS]{"city": "Ulm", "days": [1, 2]}[TOOL_CALLS]now[ARGS]{}'
DOTS = (
    '<dots_function_call>\n<invoke name="tide">\n<parameter name="city">Ulm < </p</parameter>\n'
    '<parameter name="unit">ft</parameter>\n<parameter name="days">[1, 2]</parameter>\n'
    '<parameter name="note">no < quotes</parameter>\n</invoke>\n'
    '<invoke name="now">\n</invoke>\n</dots_function_call>'
)
FORMATS = [
    (dsml_grammar.write, DSML),
    (DeepSeekStyle.v4().call_grammar, DSML.replace("function_calls", "tool_calls")),
    (glm_grammar.write, GLM),
    (hy(":x", ends_names=False).grammar, HY),
    (hy(":x", ends_names=True).grammar, HY_ENDED),
    (objects.hermes, HERMES),
    (objects.mistral, MISTRAL),
    (dots.write, DOTS),
]
THINKS = {
    objects.mistral: "[THINK]I think < so\n[/THINK]",
    dots.write: "<think>I think < so\n</think>",
}


@functools.cache
def plain() -> Tokenizer:
    return Tokenizer(EMBEDDED)


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With special tokens inside of DSML's marks, and for GLM's whole marks."""
    folder = tmp_path_factory.mktemp("marked")
    shutil.copy(EMBEDDED / "tokenizer.json", folder)
    path: Path = folder / "tokenizer.json"
    made = json.loads(path.read_text())
    words = made["model"]["vocab"]
    ends = {number: word for word, number in words.items() if number >= VOCABULARY - 3}
    for number, mark in enumerate(("｜DSML｜", "<tool_call>", "</arg_value>"), VOCABULARY - 3):
        last = ends[number]
        words[mark] = words.pop(last)
        made["model"]["merges"] = [
            pair for pair in made["model"]["merges"] if "".join(pair).replace(" ", "") != last
        ]
        sides = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        made["added_tokens"].append({"id": number, "content": mark, "special": True, **sides})
    path.write_text(json.dumps(made))
    tokenizer = Tokenizer(folder)
    assert {4093, 4094, 4095} <= tokenizer.special_ids
    return tokenizer


@functools.cache
def compiled(tokenizer: Tokenizer) -> Grammars:
    """Its processes are started once: a test asks about many texts of few grammars."""
    return Grammars(tokenizer, vocabulary=VOCABULARY, ends=frozenset({END}))


def allows(tokenizer: Tokenizer, text: str, said: str) -> bool:
    """Whether the text may be said to its end."""
    grammars, grammar = compiled(tokenizer), Grammar("lark", text)
    grammars.want(grammar)
    while (matcher := grammars.matcher(grammar)) is None:
        grammars.wait()
    output: list[int] = []
    with contextlib.closing(matcher):
        for token in [*tokenizer.encode(said), END]:
            if not matcher.allowed(output, [])[0][token]:
                return False
            output.append(token)
    return True


def calls(**given: Any) -> Calls:
    return Calls(**{"tools": TOOLS, "must": True, "several": True, "thinking": False, **given})


@pytest.fixture(params=[False, True], ids=["text", "special"])
def tokenizer(request: pytest.FixtureRequest, marked: Tokenizer) -> Tokenizer:
    return marked if request.param else plain()


@pytest.mark.parametrize(("write", "said"), FORMATS)
@pytest.mark.parametrize("think", ["", "I think < so\n</think>"])
def test_required_calls_and_nothing_else(tokenizer: Tokenizer, write: Write, said: str, think: str):
    think = think and THINKS.get(write, think)
    if write not in THINKS and said in (HY, HY_ENDED):
        think = think.replace(">", ":x>")
    text = write(tokenizer, calls(thinking=bool(think)))
    assert allows(tokenizer, text, think + said)
    for wrong in (
        "It is noon.",
        "",
        said + "more",
        said.replace("[1, 2]", "[1, x]"),
        said.replace("[1, 2]", '"x"'),
        said.replace("tide", "tides", 1),
        said.replace("city", "town"),
    ):
        assert not allows(tokenizer, text, think + wrong), wrong


NOW = '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
BLOCK = "\n\n<｜DSML｜function_calls>\n%s</｜DSML｜function_calls>"


@pytest.mark.parametrize(
    ("write", "call", "around"),
    [
        (dsml_grammar.write, NOW, BLOCK),
        (glm_grammar.write, "<tool_call>now</tool_call>", "%s"),
        (
            hy(":x", ends_names=False).grammar,
            "<tool_call:x>now</tool_call:x>",
            "<tool_calls:x>%s</tool_calls:x>",
        ),
        (objects.hermes, '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "%s"),
        (objects.mistral, "[TOOL_CALLS]now[ARGS]{}", "%s"),
        (
            dots.write,
            '<invoke name="now">\n</invoke>\n',
            "<dots_function_call>\n%s</dots_function_call>",
        ),
    ],
)
@pytest.mark.parametrize("must", [True, False])
def test_one_call_alone_where_they_may_not_be_several(tokenizer, write, call, around, must):
    several = write(tokenizer, calls(must=must))
    alone = write(tokenizer, calls(must=must, several=False))
    for count, text, is_allowed in (
        (1, alone, True),
        (2, alone, False),
        (2, several, True),
    ):
        assert allows(tokenizer, text, around % (call * count)) == is_allowed, count


@pytest.mark.parametrize(("write", "said"), FORMATS)
def test_where_the_model_chooses_only_strict_arguments_are_bound(tokenizer, write, said):
    strict = [{**TOOLS[0], "strict": True}, TOOLS[1]]
    wrong = said.replace("[1, 2]", '"x"')
    for tools, is_bound in ((strict, True), (TOOLS, False)):
        text = write(tokenizer, calls(tools=tools, must=False, thinking=True))
        for free in ("It is < noon.", "", f"So.</think>Well,{said}"):
            assert allows(tokenizer, text, free), free
        assert allows(tokenizer, text, f"Well,{wrong}") != is_bound


@pytest.mark.parametrize("write", [write for write, _ in FORMATS])
@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ({"name": 'a"b'}, "the name"),
        ({"name": "a", "parameters": {"properties": {"x>": {}}}}, "the name 'x>'"),
        ({"name": "a", "strict": True, "parameters": {"anyOf": [{}]}}, "a is strict"),
    ],
)
def test_tools_that_no_call_can_carry_are_refused(write: Write, tool, says):
    with pytest.raises(BadInput, match=says):
        write(plain(), calls(tools=[tool]))
