"""What a body asks of the form of its answer: a grammar, and words that must not come.

Both are work that grows with the body: a grammar is written from the schemas of all tools, and
words are encoded. So they are made where the body is read, in a text process if it is long.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ess.engine.tokens.grammar import Grammar
from ess.errors import BadInput
from ess.models.chat.styles import ChatStyle
from ess.models.text.tokenizer import Tokenizer
from ess.server.dialects import schemas
from ess.server.dialects.forms import constraints
from ess.server.dialects.forms.calls import grammar_of_calls, rules_of
from ess.server.process.bounds import BAD_WORD_CHARS_MAX, BAD_WORDS_MAX


class Forms(msgspec.Struct, frozen=True, kw_only=True):
    """`field` is the one that the grammar came in."""

    grammar: Grammar | None = None
    field: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()


NO_FORMS = Forms()


def forms_of(ask: msgspec.Struct, style: ChatStyle, tokenizer: Tokenizer) -> list[Forms]:
    """One for all prompts, or one for each."""
    made = []
    for place, part in schemas.sampled_of(ask).items():
        try:
            bad_words = _bad_words(getattr(part, "bad_words", None) or (), tokenizer)
            form = _form(ask, part, style, tokenizer)
        except BadInput as error:
            raise BadInput(f"{place}{error}") from None
        grammar, field = (None, "") if form is None else (form.grammar, place + form.field)
        made.append(Forms(grammar=grammar, field=field, bad_words=bad_words))
    return made


def _form(
    ask: msgspec.Struct, part: msgspec.Struct, style: ChatStyle, tokenizer: Tokenizer
) -> constraints.Form | None:
    if isinstance(part, schemas.SglangSampling):
        return constraints.of_sglang(part, tokenizer)
    match ask:
        case schemas.CompletionAsk():
            return constraints.of_openai(ask, tokenizer)
        case schemas.TokensAsk():
            return constraints.of_structured(ask.sampling_params.structured_outputs, tokenizer)
        case schemas.ChatAsk():
            own = constraints.of_openai(ask, tokenizer)
        case schemas.ResponsesAsk():
            own = constraints.of_responses(ask.text, tokenizer)
        case schemas.MessagesAsk():
            own = constraints.of_messages(ask.output_config, tokenizer)
        case _:
            return None
    return grammar_of_calls(rules_of(ask), own, style, tokenizer)


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The ids of each word at the beginning of a text and after a space."""
    if len(words) > BAD_WORDS_MAX:
        raise BadInput(f"bad_words has {len(words):,} words; at most {BAD_WORDS_MAX} are read")
    forms: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        if not 0 < len(bare) <= BAD_WORD_CHARS_MAX:
            raise BadInput(
                f"bad_words has a word of {len(bare):,} characters, not 1..{BAD_WORD_CHARS_MAX}"
            )
        for text in (bare, f" {bare}"):
            forms[tuple(tokenizer.encode(text))] = None
    return tuple(forms)
