"""The form that an answer must have: one grammar, whichever field a client gives it in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ess.engine.tokens.grammar import Grammar, Kind
from ess.errors import BadInput
from ess.models.chat.grammars.calls import Rules, any_of, json_of, literal
from ess.models.chat.json_schemas import with_whole_counts
from ess.models.chat.messages import json_kind
from ess.models.text.tokenizer import Tokenizer
from ess.server.dialects.forms.ebnf import as_lark
from ess.server.dialects.schemas import Common, SglangSampling, StructuredOutputs


class Form(NamedTuple):
    """A grammar, and the field that it came in."""

    field: str
    grammar: Grammar


def of_openai(ask: Common, tokenizer: Tokenizer) -> Form | None:
    return _only_one(
        {
            "response_format": _of_format(ask.response_format, tokenizer),
            "structured_outputs": _of_structured(ask.structured_outputs, tokenizer),
            "guided_json": _json("guided_json", ask.guided_json),
            "guided_regex": _text("guided_regex", "regex", ask.guided_regex),
            "guided_choice": _choice("guided_choice", ask.guided_choice),
            "guided_grammar": _ebnf("guided_grammar", ask.guided_grammar),
            "regex": _text("regex", "regex", ask.regex),
            "ebnf": _ebnf("ebnf", ask.ebnf),
        }
    )


def of_structured(asked: StructuredOutputs | None, tokenizer: Tokenizer) -> Form | None:
    return _only_one({"structured_outputs": _of_structured(asked, tokenizer)})


def of_responses(text: Mapping[str, Any] | None, tokenizer: Tokenizer) -> Form | None:
    """text.format of /v1/responses."""
    form = (text or {}).get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else form
    if kind == "json_schema" and isinstance(form.get("schema"), (dict, bool)):
        return _of_schema("text", form["schema"], tokenizer)
    if kind == "json_schema":
        raise BadInput("text.format.schema must be an object")
    if kind not in ("text", "json_object"):
        raise BadInput(
            f"text.format.type is {kind!r:.40}; text, json_object and json_schema are served"
        )
    return _only_one({"text": _of_format({"type": kind}, tokenizer)})


def of_messages(config: Mapping[str, Any] | None, tokenizer: Tokenizer) -> Form | None:
    """output_config.format of /v1/messages."""
    form = (config or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise BadInput("output_config.format.type must be json_schema")
    if not isinstance(form.get("schema"), Mapping):
        raise BadInput("output_config.format.schema must be an object")
    return _of_schema("output_config", form["schema"], tokenizer)


def _of_schema(field: str, schema: Any, tokenizer: Tokenizer) -> Form | None:
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    return _only_one({field: _of_format(form, tokenizer)})


def of_sglang(asked: SglangSampling, tokenizer: Tokenizer) -> Form | None:
    return _only_one(
        {
            "json_schema": _json("json_schema", asked.json_schema),
            "regex": _text("regex", "regex", asked.regex),
            "ebnf": _ebnf("ebnf", asked.ebnf),
            "structural_tag": _tags("structural_tag", asked.structural_tag, tokenizer),
        }
    )


def _only_one(asked: Mapping[str, Iterable[Grammar]]) -> Form | None:
    forms = [Form(field, grammar) for field, grammars in asked.items() for grammar in grammars]
    if len(forms) > 1:
        raise BadInput(
            f"{len(forms)} constraints on the form of the answer: give only one of "
            "response_format, structured_outputs, guided_json and its like, regex, ebnf"
        )
    return forms[0] if forms else None


def _of_format(asked: Mapping[str, Any] | None, tokenizer: Tokenizer) -> Iterable[Grammar]:
    kind = "text" if asked is None else asked.get("type")
    match kind:
        case "text":
            return
        case "json_object":
            yield Grammar("json_object")
        case "json_schema":
            assert asked is not None, "its type was read"
            described = asked.get("json_schema")
            schema = described.get("schema") if isinstance(described, dict) else None
            if not isinstance(schema, (dict, bool)):
                raise BadInput("response_format.json_schema.schema must be an object")
            yield from _json("response_format", schema)
        case "structural_tag":
            yield from _tags("response_format", asked, tokenizer)
        case _:
            raise BadInput(
                f"response_format.type is {kind!r:.40}; text, json_object, json_schema and"
                " structural_tag are served"
            )


def _of_structured(asked: StructuredOutputs | None, tokenizer: Tokenizer) -> Iterable[Grammar]:
    if asked is None:
        return
    yield from _json("structured_outputs.json", asked.json)
    if asked.json_object:
        yield Grammar("json_object")
    yield from _text("structured_outputs.regex", "regex", asked.regex)
    yield from _ebnf("structured_outputs.grammar", asked.grammar)
    yield from _choice("structured_outputs.choice", asked.choice)
    yield from _tags("structured_outputs.structural_tag", asked.structural_tag, tokenizer)


def _text(where: str, kind: Kind, text: str | None) -> Iterable[Grammar]:
    if text is None:
        return
    try:
        yield Grammar(kind, text)
    except BadInput as refusal:
        raise BadInput(f"{where} is not served: {refusal}") from None


def _ebnf(where: str, text: str | None) -> Iterable[Grammar]:
    for given in _text(where, "lark", text):
        yield Grammar("lark", as_lark(given.text, where=where))


def _json(where: str, asked: Any) -> Iterable[Grammar]:
    """A schema as an object, or as the text of one."""
    if asked is None:
        return
    if not isinstance(asked, (str, dict, bool)):
        raise BadInput(f"{where} is {json_kind(asked)}, not a schema")
    try:
        text = asked if isinstance(asked, str) else json.dumps(asked)
    except RecursionError:
        raise BadInput(f"{where} is nested too deeply") from None
    yield from _text(where, "json_schema", with_whole_counts(text))


def _choice(where: str, options: Sequence[str] | None) -> Iterable[Grammar]:
    if options is None:
        return
    if not options or "" in options:
        raise BadInput(f"{where} must be a list of texts, none of them empty")
    yield Grammar("lark", "start: CHOICE\nCHOICE: " + " | ".join(map(literal, options)))


def _tags(
    where: str, asked: str | Mapping[str, Any] | None, tokenizer: Tokenizer
) -> Iterable[Grammar]:
    """Free text in which every trigger opens a structure: its begin, JSON of its schema, its end.

    `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`; the newer form, with a
    `format`, is not served.
    """
    if asked is None:
        return
    given = _object(where, asked)
    if "format" in given:
        raise BadInput(f"{where} has a format, which is not served: give structures and triggers")
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise BadInput(f"{where} must have structures and triggers, which are lists")
    rules = Rules(tokenizer)
    of_trigger: dict[str, list[str]] = {}
    for structure in structures:
        begin, body = _structure(where, structure, rules)
        trigger = next(
            (t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), ""
        )
        if not trigger:
            raise BadInput(f"{where} has the begin {begin!r:.80}, and no trigger that begins so")
        of_trigger.setdefault(trigger, []).append(f"{rules.mark(begin[len(trigger) :])} {body}")
    opened = [rules.until(f"trigger_{place}", trigger) for place, trigger in enumerate(of_trigger)]
    tags = [
        f"{opening} {any_of(bodies)}"
        for opening, bodies in zip(opened, of_trigger.values(), strict=True)
    ]
    rests = any_of(rules.rest(opening) for opening in opened)
    yield Grammar("lark", rules.text(f"{any_of(tags)}* {rests}"))


def _structure(where: str, asked: Any, rules: Rules) -> tuple[str, str]:
    """The begin of a structure, and the grammar of what follows it."""
    given = asked if isinstance(asked, dict) else {}
    begin, end, schema = given.get("begin"), given.get("end"), given.get("schema", {})
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
        raise BadInput(f"{where} must have structures of a begin, a schema and an end")
    return begin, f"{json_of(schema, schema, lenient=False)} {rules.mark(end)}"


def _object(where: str, asked: str | Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        parsed = json.loads(asked) if isinstance(asked, str) else asked
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, Mapping):
        raise BadInput(f"{where} must be an object, or a text that holds one as JSON")
    return parsed
