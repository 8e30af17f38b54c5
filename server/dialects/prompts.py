"""From a body's bytes to its parameters and the ids of its prompts: reading, templates, encoding.

All of it is independent of the event loop, because it runs in two places: in the server's process
for short bodies, in a text process for long ones (`ess.server.process.texts`). Whatever can be
counted is counted before it is worked on. The result is small: the prompts as ids, what they ask of
the form of the answer, and the ask without its texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

import msgspec

from ess.errors import BadInput
from ess.models.chat.messages import Conversation, places_of, read_messages, with_values
from ess.models.chat.quoting import Quoting
from ess.models.chat.styles import ChatStyle
from ess.models.text.tokenizer import Tokenizer
from ess.server.dialects import message_blocks, schemas
from ess.server.dialects.forms.asked import NO_FORMS, Forms, forms_of
from ess.server.dialects.logprobs import token_text
from ess.server.dialects.response_items import messages_of
from ess.server.dialects.schemas import Ask
from ess.server.dialects.tools import (
    Templated,
    choice_of_messages,
    choice_of_responses,
    goes_on,
    instructed,
    message_thinks,
    names_of,
    offered_tools,
    response_thinks,
    settle,
    thinks,
    tools_of_messages,
    tools_of_responses,
    wants_thinking,
)
from ess.server.process.bounds import (
    BIASES_MAX,
    MESSAGES_MAX,
    PROMPT_IDS_MAX,
    PROMPTS_MAX,
    TEXT_CHARS_MAX,
)
from ess.units import counted

T = TypeVar("T")
COUNTS: Final = (
    ("messages", MESSAGES_MAX),
    ("logit_bias", BIASES_MAX),
    ("stop_token_ids", BIASES_MAX),
)
NOTHING: Final = msgspec.Raw(b"\xc0")
PROMPT_FIELDS: Final[Mapping[str, Any]] = {
    "prompt": NOTHING,
    "text": None,
    "input_ids": NOTHING,
    "token_ids": (),
    "messages": (),
    "system": None,
    "tokens": NOTHING,
}
NAMES: Final[Mapping[type[msgspec.Struct], str]] = {
    schemas.ChatAsk: "messages: the prompt",
    schemas.MessagesAsk: "messages: the prompt",
    schemas.ResponsesAsk: "input: the prompt",
    schemas.TokensAsk: "token_ids: the prompt",
}


def _name_of(ask: msgspec.Struct) -> str:
    """The prompt, by its field."""
    if isinstance(ask, schemas.GenerateAsk):
        return f"{'input_ids' if ask.text is None else 'text'}: the prompt"
    return NAMES.get(type(ask), "the prompt")


@dataclass(slots=True, kw_only=True)
class Prepared(Generic[Ask]):
    """`ask` has lost its prompt; `is_many` says that this was a list. A route that generates
    nothing has its whole answer in `document`. `forms` are one for all prompts, or one for each."""

    ask: Ask
    prompts: list[list[int]] = field(default_factory=list)
    is_many: bool = False
    document: bytes = b""
    forms: Sequence[Forms] = (NO_FORMS,)

    def each(self, given: Iterable[T]) -> list[T]:
        """One for each prompt, from one for all prompts or one for each."""
        made = list(given)
        return made * len(self.prompts) if len(made) == 1 else made


class PromptReader:
    """`template_names` are for the chat template where a request does not say them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        style: ChatStyle,
        *,
        length_max: int,
        vocabulary: int,
        template_names: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._tokenizer = tokenizer
        self._style = style
        self._length_max = length_max
        self._vocabulary = vocabulary
        self._template_names = template_names

    @property
    def _thinks(self) -> bool:
        """Whether an answer thinks whose request does not say: as the operator wants it, or else as
        the chat template has it."""
        wanted = wants_thinking(self._template_names, None)
        return self._style.thinks() if wanted is None else wanted

    def _names(self, ask: Templated) -> dict[str, Any]:
        return {**self._template_names, **names_of(ask)}

    def read(self, raw: bytes, kind: type[Ask]) -> Prepared[Ask]:
        try:
            return self._read(raw, kind)
        except RecursionError:
            raise BadInput("the body is nested too deeply") from None

    def _read(self, raw: bytes, kind: type[Ask]) -> Prepared[Ask]:
        ask = schemas.read(raw, kind)
        _check_counts(ask)
        prepared: Prepared[Ask] = Prepared(ask=ask)
        match ask:
            case schemas.CompletionAsk():
                prepared.prompts = self._completion(ask)
            case schemas.ChatAsk():
                prepared.prompts = [self._chat(ask)]
            case schemas.ResponsesAsk():
                is_cut = ask.truncate_prompt_tokens is not None
                prepared.prompts = [self._response(ask, is_cut=is_cut)]
            case schemas.InputTokensAsk():
                count = len(self._response(ask))
                counted = {"object": "response.input_tokens", "input_tokens": count}
                prepared.document = _json(counted)
            case schemas.MessagesAsk():
                is_cut = ask.truncate_prompt_tokens is not None
                prepared.prompts = [self._conversation(ask, is_cut=is_cut)]
            case schemas.CountTokensAsk():
                ids = self._conversation(ask)
                prepared.document = _json({"input_tokens": len(ids)})
            case schemas.GenerateAsk():
                prepared.prompts, prepared.is_many = self._generate(ask)
                _join_samplings(ask, len(prepared.prompts))
            case schemas.TokensAsk():
                prepared.prompts = [ask.token_ids]
            case schemas.TokenizeAsk():
                prepared.document = self._tokenize(ask)
            case schemas.DetokenizeAsk():
                prepared.document = self._detokenize(ask)
        prepared.prompts = self._truncated(prepared)
        for prompt in prepared.prompts:
            self._check_prompt(prompt, name=_name_of(ask))
        prepared.forms = forms_of(ask, self._style, self._tokenizer)
        _drop_prompt(ask)
        return prepared

    # ---- by form

    def _completion(self, ask: schemas.CompletionAsk) -> list[list[int]]:
        given = schemas.read_texts(ask.prompt)
        if not given:
            raise BadInput("the prompt is an empty list: give at least one")
        add_special = ask.add_special_tokens is not False
        is_cut = ask.truncate_prompt_tokens is not None
        return self._encoded(given, where="prompt", add_special=add_special, is_cut=is_cut)

    def _generate(self, ask: schemas.GenerateAsk) -> tuple[list[list[int]], bool]:
        has_ids = bytes(ask.input_ids) != b"null"
        if has_ids == (ask.text is not None):
            raise BadInput("give text or input_ids, one of the two")
        if has_ids:
            ids = schemas.read_ids(ask.input_ids, where="input_ids")
            return ids, schemas.is_many(ask.input_ids)
        texts = [ask.text] if isinstance(ask.text, str) else list(ask.text or ())
        if not texts:
            raise BadInput("text is an empty list: give at least one prompt")
        parts = schemas.sglang_samplings(ask).values()
        is_cut = any(part.truncate_prompt_tokens is not None for part in parts)
        prompts = self._encoded(texts, where="text", add_special=True, is_cut=is_cut)
        return prompts, isinstance(ask.text, list)

    def _chat(self, ask: schemas.ChatAsk) -> list[int]:
        """The prompt. `ask`, which loses its messages, then says whether the answer goes on: the
        rest of a message is not preceded by thinking."""
        ask.continue_final_message = goes_on(ask)
        names = self._names(ask)
        thinking = settle(ask, thinks(ask), default=self._thinks)
        return self._rendered(
            (ask.messages, places_of(ask.messages)),
            offered_tools(ask.tools, ask.tool_choice),
            thinking and not ask.continue_final_message,
            goes_on=ask.continue_final_message,
            is_cut=ask.truncate_prompt_tokens is not None,
            names=names,
        )

    def _response(
        self, ask: schemas.ResponsesAsk | schemas.InputTokensAsk, *, is_cut: bool = False
    ) -> list[int]:
        choice = choice_of_responses(ask.tool_choice)
        names = self._names(ask)
        return self._rendered(
            messages_of(ask.input, ask.instructions),
            offered_tools(tools_of_responses(ask.tools), choice),
            settle(ask, response_thinks(ask), default=self._thinks),
            field="input",
            is_cut=is_cut,
            names=names,
        )

    def _conversation(
        self, ask: schemas.MessagesAsk | schemas.CountTokensAsk, *, is_cut: bool = False
    ) -> list[int]:
        """The prompt. An answer whose beginning is given does not think, which `ask` then says."""
        goes_on = message_blocks.goes_on(ask.messages)
        if goes_on:
            ask.thinking = None
            if ask.chat_template_kwargs:
                ask.chat_template_kwargs = {**ask.chat_template_kwargs, "thinking": False}
        tools = offered_tools(tools_of_messages(ask.tools), choice_of_messages(ask.tool_choice))
        return self._rendered(
            message_blocks.messages_of(ask.messages, ask.system),
            tools,
            message_thinks(ask),
            goes_on=goes_on,
            is_cut=is_cut,
            names=self._names(ask),
        )

    def _rendered(
        self,
        given: tuple[Sequence[Mapping[str, Any]], Sequence[str]],
        tools: Sequence[Mapping[str, Any]],
        thinking: bool,
        *,
        field: str = "messages",
        goes_on: bool = False,
        is_cut: bool = False,
        names: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        messages, places = with_values(instructed(given[0])), given[1]
        joined_count = len(places) - len(messages)
        quoting = Quoting([messages, tools, names], self._tokenizer.special_texts)
        turns = read_messages(
            quoting.split(messages),
            tools=quoting.split(tools),
            places=[*places[:1], *places[1 + joined_count :]],
        )
        if self._style.without_tools and any(message.tools for message in turns):
            raise BadInput(
                f"tools: {self._style.without_tools}; --chat-template gives the server one that"
                " does, and tool_choice none is served"
            )
        text = self._style.encode(
            Conversation(turns, thinking=thinking, goes_on=goes_on, names=quoting.split(names))
        )
        if not quoting.separator:
            [ids] = self._encoded([text], where=field, add_special=False, is_cut=is_cut)
            return ids
        self._check_texts([text], where=field, is_cut=is_cut)
        return self._tokenizer.encode_quoted(text, quoting.separator)

    def _tokenize(self, ask: schemas.TokenizeAsk) -> bytes:
        if (ask.prompt is None) == (ask.messages is None):
            raise BadInput("give prompt or messages, one of the two")
        add_special = ask.add_special_tokens is not False
        if ask.prompt is None:
            is_begun = goes_on(ask)
            asked = wants_thinking(ask.chat_template_kwargs, None)
            thinking = self._thinks if asked is None else asked
            lists = [
                self._rendered(
                    (ask.messages or [], places_of(ask.messages or [])),
                    offered_tools(ask.tools, None),
                    thinking and not is_begun,
                    goes_on=is_begun,
                    names=self._names(ask),
                )
            ]
        else:
            texts = ask.prompt if isinstance(ask.prompt, list) else [ask.prompt]
            lists = self._encoded(texts, where="prompt", add_special=add_special)
        if isinstance(ask.prompt, list):
            counts = [len(ids) for ids in lists]
            room = self._length_max
            return _json({"tokens": lists, "count": counts, "max_model_len": room})
        [ids] = lists
        document: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._length_max,
            "tokens": ids,
        }
        if ask.return_token_strs:
            document["token_strs"] = [token_text(self._tokenizer, token) for token in ids]
        return _json(document)

    def _detokenize(self, ask: schemas.DetokenizeAsk) -> bytes:
        keep_special = ask.skip_special_tokens is not True
        texts = []
        for ids in schemas.read_ids(ask.tokens, where="tokens"):
            if len(ids) > self._length_max:
                raise BadInput(
                    f"tokens has {len(ids):,} ids in a list; at most {self._length_max:,} are read"
                )
            if ids and not 0 <= min(ids) <= max(ids) < self._vocabulary:
                raise BadInput(f"tokens must be ids 0..{self._vocabulary - 1}")
            texts.append(self._tokenizer.decode(ids, keep_special=keep_special))
        shown: Any = texts if schemas.is_many(ask.tokens) else texts[0]
        return _json({"prompt": shown, "text": shown})

    # ---- common to all forms

    def _encoded(
        self,
        given: Sequence[str] | list[list[int]],
        *,
        where: str,
        add_special: bool,
        is_cut: bool = False,
    ) -> list[list[int]]:
        if len(given) > PROMPTS_MAX:
            raise BadInput(f"{where} has {len(given):,} prompts; at most {PROMPTS_MAX} are read")
        texts = [text for text in given if isinstance(text, str)]
        self._check_texts(texts, where=where, is_cut=is_cut)
        prompts, left = [], PROMPT_IDS_MAX
        for prompt in given:
            if isinstance(prompt, str):
                prompt = self._tokenizer.encode(prompt, add_special=add_special)
            left -= len(prompt)
            if left < 0:
                raise BadInput(f"{where} has more than {PROMPT_IDS_MAX:,} tokens, the most read")
            prompts.append(prompt)
        return prompts

    def _check_texts(self, texts: Sequence[str], *, where: str, is_cut: bool) -> None:
        """Refuses texts, before they are encoded, that are too long for any encoding. Where the
        prompt will be truncated, keeps only the end of the text."""
        total = sum(map(len, texts))
        if total > TEXT_CHARS_MAX:
            raise BadInput(
                f"{where} has {total:,} characters; at most {TEXT_CHARS_MAX:,} are read here"
            )
        longest = max(map(len, texts), default=0)
        if is_cut or longest <= self._length_max:
            return
        token = self._tokenizer.longest_chars
        if token is not None and longest > self._length_max * token:
            raise BadInput(
                f"{where} has {longest:,} characters: with tokens of at most {token} they are"
                f" more than the {self._length_max:,} positions of the longest request"
            )

    def _truncated(self, prepared: Prepared[Any]) -> list[list[int]]:
        parts = prepared.each(schemas.sampled_of(prepared.ask).items())
        kept = zip(prepared.prompts, parts, strict=True)
        return [prompt[-self._kept_count(place, part) :] for prompt, (place, part) in kept]

    def _kept_count(self, place: str, part: msgspec.Struct) -> int:
        """How many of a prompt's last tokens `truncate_prompt_tokens` keeps, where -1 asks for as
        many as the model takes. The result 0 means all."""
        count = getattr(part, "truncate_prompt_tokens", None)
        if count is not None and count != -1 and count < 1:
            what = f"{place}truncate_prompt_tokens is {count}"
            raise BadInput(f"{what}; must be at least 1, or -1 for all")
        return self._length_max - 1 if count == -1 else count or 0

    def _check_prompt(self, prompt: Sequence[int], *, name: str) -> None:
        if not prompt:
            raise BadInput(f"{name} is empty")
        if len(prompt) >= self._length_max:
            raise BadInput(
                f"{name} has {len(prompt):,} tokens, but at most {self._length_max - 1:,} leave"
                f" room to answer: the longest request has {self._length_max:,} positions"
            )
        if not 0 <= min(prompt) <= max(prompt) < self._vocabulary:
            wrong = next(token for token in prompt if not 0 <= token < self._vocabulary)
            raise BadInput(f"{name} has the token id {wrong}, not 0..{self._vocabulary - 1}")


def _check_counts(ask: msgspec.Struct) -> None:
    for place, asked in schemas.sampled_of(ask).items():
        for name, most in COUNTS:
            count = len(getattr(asked, name, None) or ())
            if count > most:
                raise BadInput(f"{place}{name} has {count:,} entries; at most {most:,} are read")


def _join_samplings(ask: schemas.GenerateAsk, prompt_count: int) -> None:
    """One entry for all prompts where the entries for each are equal."""
    asked = ask.sampling_params
    if not isinstance(asked, list):
        return
    if len(asked) != prompt_count:
        entries, prompts = counted(len(asked), "entry", "entries"), counted(prompt_count, "prompt")
        raise BadInput(f"sampling_params has {entries} for {prompts}")
    if len({entry.n or 1 for entry in asked}) > 1:
        raise BadInput("sampling_params: n must be the same for all prompts")
    if all(entry == asked[0] for entry in asked):
        ask.sampling_params = asked[0]


def _drop_prompt(ask: msgspec.Struct) -> None:
    """Deletes the prompt. A ResponsesAsk has it in `input`; its `prompt` is something else."""
    if isinstance(ask, schemas.ResponsesAsk | schemas.InputTokensAsk):
        ask.input = ""
        return
    for name, nothing in PROMPT_FIELDS.items():
        if name in ask.__struct_fields__:
            setattr(ask, name, list(nothing) if nothing == () else nothing)


def _json(document: Any) -> bytes:
    return msgspec.json.encode(document)
