"""How a checkpoint marks up its replies, as far as its vocabulary and its template tell.

A template writes its own prompts; the answers of its model are read by one of these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ess.models.chat.grammars import dots, objects
from ess.models.chat.grammars import glm as glm_grammar
from ess.models.chat.grammars.calls import Calls
from ess.models.chat.parsers import glm, hermes
from ess.models.chat.parsers.dots import CALLS as DOTS_CALLS
from ess.models.chat.parsers.dots import DotsParser
from ess.models.chat.reply import PlainParser, ReplyParser

if TYPE_CHECKING:
    from ess.models.text.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]
# Hy ends all its marks with a word of the checkpoint, such as ":opensource".
_HY_CALLS: Final = re.compile(r"<tool_calls(:[^<>\s]{1,64})?>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """`names` are what a template may know thinking by, and the effort that is asked for, beside
    the names that all get."""

    name: str
    parser: Callable[[bool, Tools], ReplyParser]
    grammar: Callable[[Tokenizer, Calls], str] | None = None
    names: Callable[[bool, object], Mapping[str, Any]] = lambda thinking, effort: {}


PLAIN: Final = Replies(name="plain", parser=lambda thinking, tools: PlainParser())
GLM: Final = Replies(
    name="glm",
    parser=lambda thinking, tools: glm.GlmParser(thinking=thinking, tools=tools),
    grammar=glm_grammar.write,
)
HERMES: Final = Replies(
    name="hermes",
    parser=lambda thinking, tools: hermes.HermesParser(thinking=thinking),
    grammar=objects.hermes,
)
MISTRAL: Final = Replies(
    name="mistral",
    parser=lambda thinking, tools: hermes.MistralParser(),
    grammar=objects.mistral,
)
DOTS: Final = Replies(
    name="dots", parser=lambda thinking, tools: DotsParser(tools=tools), grammar=dots.write
)


def hy(suffix: str, *, ends_names: bool) -> Replies:
    """`ends_names`: a mark is behind the name of a call, as in all published checkpoints."""
    tags = glm.Tags(
        think=f"<think{suffix}>",
        think_end=f"</think{suffix}>",
        call=f"<tool_call{suffix}>",
        call_end=f"</tool_call{suffix}>",
        name_end=f"<tool_sep{suffix}>" if ends_names else "",
        key=f"<arg_key{suffix}>",
        key_end=f"</arg_key{suffix}>",
        value=f"<arg_value{suffix}>",
        value_end=f"</arg_value{suffix}>",
        outer=f"<tool_calls{suffix}>",
        outer_end=f"</tool_calls{suffix}>",
    )
    return Replies(
        name="hy",
        parser=lambda thinking, tools: glm.GlmParser(
            thinking=thinking, tools=tools, tags=tags, ends=()
        ),
        grammar=lambda tokenizer, calls: glm_grammar.write(tokenizer, calls, tags=tags),
        names=_hy_effort,
    )


def _hy_effort(thinking: bool, effort: object) -> Mapping[str, Any]:
    """Its template knows three efforts."""
    level = "low" if effort in ("low", "minimal") else "high"
    return {"reasoning_effort": level if thinking else "no_think"}


def replies_of(tokenizer: Tokenizer, source: str) -> Replies:
    """`source` is the template."""
    known = tokenizer.added_texts
    outer = next(filter(None, map(_HY_CALLS.fullmatch, sorted(known))), None)
    if outer is not None:
        suffix = outer[1] or ""
        return hy(suffix, ends_names=f"<tool_sep{suffix}>" in known)
    if tokenizer.id_of(glm.KEY) is not None:
        return GLM
    marks = hermes.MISTRAL_CALL, hermes.MISTRAL_ARGS
    if all(tokenizer.id_of(mark) is not None for mark in marks):
        return MISTRAL
    if DOTS_CALLS in source:
        return DOTS
    return HERMES if hermes.CALL in source else PLAIN
