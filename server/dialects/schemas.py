"""Request bodies as clients of OpenAI, Anthropic, vLLM and SGLang send them.

Keys that are not listed are refused by name if they are in `unserved`, and ignored otherwise:
routers add their own.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final, TypeVar, get_args, get_type_hints

import msgspec

from ess.decoding import UNDECODABLE
from ess.errors import BadInput
from ess.server.dialects import unserved
from ess.server.process.bounds import PROMPT_IDS_MAX, PROMPTS_MAX

Ask = TypeVar("Ask", bound=msgspec.Struct)


EXACT_MAX: Final = 1 << 53
ANYTHING: Final = frozenset([Any])
FIELDS: Final = "__struct_fields__"
_IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_MANY_IDS: Final = {"type": "array", "items": _IDS}
_TEXTS: Final = {"type": "array", "items": {"type": "string"}}
Ids = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"anyOf": [_IDS, _MANY_IDS]})]
Prompt = Annotated[
    msgspec.Raw,
    msgspec.Meta(extra_json_schema={"anyOf": [{"type": "string"}, _TEXTS, _IDS, _MANY_IDS]}),
]
"""Read later, by `read_ids` and `read_texts`; this is the form that they accept."""


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's spelling: at most one of these."""

    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool | None = None
    choice: list[str] | None = None
    structural_tag: str | dict[str, Any] | None = None


class Addressed(msgspec.Struct, kw_only=True):
    """Id, session and priority of a request; a lower priority runs earlier, as in vLLM. Requests of
    different `cache_salt` (SGLang: `extra_key`) share no cached prefix. The other four come from
    routers for prefill and decode: `legs` reads them, where they have an effect."""

    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    kv_transfer_params: Any = None
    priority: int | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class Sampled(msgspec.Struct, kw_only=True):
    """Fields with the same name in all dialects; null means absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None


class AddressedSampled(Sampled, kw_only=True):
    """A body with the sampling parameters and the fields of Addressed, which are repeated here: a
    Struct cannot have two bases with fields."""

    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    kv_transfer_params: Any = None
    priority: int | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class Common(AddressedSampled, kw_only=True):
    """The common fields of completions and chat completions."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    rid: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None


class CompletionAsk(Common, kw_only=True):
    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class ChatAsk(Common, kw_only=True):
    """`thinking` is a field of DeepSeek's and Z.ai's own servers, `reasoning` of OpenRouter's and
    `enable_thinking` of Qwen's."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning: dict[str, Any] | None = None
    modalities: list[str] | None = None


class ResponsesAsk(AddressedSampled, kw_only=True):
    """/v1/responses, with OpenAI's fields and ours."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    model: str | None = None
    max_output_tokens: int | None = None
    seed: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    prompt: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    request_id: str | None = None


class InputTokensAsk(msgspec.Struct, kw_only=True):
    """/v1/responses/input_tokens: the fields of a ResponsesAsk that make its prompt."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: str | None = None


class MessagesAsk(AddressedSampled, kw_only=True):
    """/v1/messages, with Anthropic's fields and ours. `context_management` would save context at a
    server that counts it; here every request has its whole prompt."""

    messages: list[dict[str, Any]]
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    model: str | None = None
    stop_sequences: list[str] | None = None
    seed: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    stream: bool | None = None
    request_id: str | None = None


class CountTokensAsk(msgspec.Struct, kw_only=True):
    """/v1/messages/count_tokens: the fields of a MessagesAsk that make its prompt."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


Generated = Addressed | AddressedSampled
"""The bodies of routes that generate."""


class TokenSampling(Sampled, kw_only=True):
    """vLLM's sampling parameters by name. Two change texts alone, of which there are none."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None


class TokensAsk(Addressed, kw_only=True):
    """/inference/v1/generate: ids in, ids out."""

    token_ids: list[int]
    sampling_params: TokenSampling = msgspec.field(default_factory=TokenSampling)
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None


class SglangSampling(Sampled, kw_only=True):
    """SGLang's sampling parameters by name."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class GenerateAsk(Addressed, kw_only=True):
    """SGLang's /generate: one prompt or several, as text or as ids. A list of `sampling_params` has
    an entry for each prompt."""

    text: str | list[str] | None = None
    input_ids: Ids = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    sampling_params: SglangSampling | list[SglangSampling] | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    model: str | None = None


class TokenizeAsk(msgspec.Struct, kw_only=True):
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None


class DetokenizeAsk(msgspec.Struct, kw_only=True):
    tokens: Ids
    skip_special_tokens: bool | None = None
    model: str | None = None


class AbortAsk(msgspec.Struct, kw_only=True):
    """SGLang's `rid` and `abort_all`, vLLM's `request_ids`."""

    rid: str | None = None
    abort_all: bool | None = None
    request_ids: list[str] | None = None


class PauseAsk(msgspec.Struct, kw_only=True):
    """SGLang's way to pause."""

    mode: str = "abort"


def sampled_of(ask: msgspec.Struct) -> Mapping[str, msgspec.Struct]:
    """The parts of an ask that have sampling parameters: one for all prompts, or one for each. The
    keys are what refusals say in front of a field of that part."""
    if isinstance(ask, GenerateAsk):
        return sglang_samplings(ask)
    return {"": ask.sampling_params if isinstance(ask, TokensAsk) else ask}


def sglang_samplings(ask: GenerateAsk) -> Mapping[str, SglangSampling]:
    asked = ask.sampling_params
    if isinstance(asked, list):
        return {f"sampling_params[{place}]: ": entry for place, entry in enumerate(asked)}
    return {"": asked or SglangSampling()}


def read(raw: bytes, kind: type[Ask]) -> Ask:
    """Decodes a body; all of it must be UTF-8, even fields that are ignored. A mark in front, with
    which editors on Windows begin a file, is no part of it."""
    raw = raw.removeprefix(BOM_UTF8)
    try:
        raw.decode("utf-8")
        ask: Ask = _decoded(raw or b"{}", kind)
        if issubclass(kind, (Addressed, AddressedSampled)):
            _check_served(ask, raw)
        return ask
    except msgspec.ValidationError as error:
        raise BadInput(_placed(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadInput("the body is nested too deeply") from None


def _check_served(ask: msgspec.Struct, raw: bytes) -> None:
    unserved.check(raw, type(ask))
    for name in ("sampling_params", "structured_outputs"):
        asked = getattr(ask, name, None)
        if asked is None:
            continue
        part = unserved.part_of(raw, name)
        if isinstance(asked, list):
            for entry in set(map(bytes, msgspec.json.decode(part, type=list[msgspec.Raw]))):
                unserved.check(entry, SglangSampling)
        else:
            unserved.check(part, type(asked))


def _decoded(raw: bytes, kind: Any) -> Any:
    """JSON Schema counts 16.0 among the integers, and clients with one type for all numbers, as
    Gson has, write it so."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        try:
            given = _with_integers(msgspec.json.decode(raw), _parts(kind))
            whole = msgspec.json.encode(given)
        except (msgspec.ValidationError, OverflowError):
            raise error from None
    return msgspec.json.decode(whole, type=kind)


def _with_integers(value: Any, parts: frozenset[Any]) -> Any:
    """The document with integers for numbers such as 16.0, as far as floats have all of them. What
    may be anything stays as it is, such as schemas and messages, and so do unknown fields."""
    if Any in parts:
        return value
    match value:
        case float() if value.is_integer() and abs(value) < EXACT_MAX:
            return int(value)
        case list():
            return [_with_integers(item, parts) for item in value]
        case dict():
            fields = next((_fields(part) for part in parts if hasattr(part, FIELDS)), {})
            return {
                name: _with_integers(item, fields.get(name, ANYTHING))
                for name, item in value.items()
            }
    return value


@cache
def _fields(kind: type[msgspec.Struct]) -> Mapping[str, frozenset[Any]]:
    return {name: _parts(hint) for name, hint in get_type_hints(kind).items()}


def _parts(kind: Any) -> frozenset[Any]:
    """The types that a type is made of.

    >>> sorted(part.__name__ for part in _parts(dict[str, list[int]] | None))
    ['NoneType', 'int', 'str']
    """
    inner = get_args(kind)
    return frozenset().union(*map(_parts, inner)) if inner else frozenset([kind])


def _placed(sentence: str) -> str:
    """Moves the field to the front of the sentence, as in every other error.

    >>> _placed("Expected `int | null`, got `str` - at `$.max_tokens`")
    'max_tokens: expected `int | null`, got `str`'
    >>> _placed("Object missing required field `prompt`")
    'prompt is missing from the body'
    """
    absent = sentence.removeprefix("Object missing required field `")
    if absent != sentence and absent.endswith("`"):
        return f"{absent[:-1]} is missing from the body"
    what, _, where = sentence.rpartition(" - at `$.")
    if not what:
        return f"the body: {sentence[:1].lower()}{sentence[1:]}"
    return f"{where.rstrip('`')}: {what[:1].lower()}{what[1:]}"


def read_ids(raw: msgspec.Raw, *, where: str) -> list[list[int]]:
    """Ids of one text or of several."""
    _count_ids(bytes(raw), where=where)
    many = is_many(raw)
    try:
        ids = _decoded(bytes(raw), list[list[int]] if many else list[int])
    except UNDECODABLE:
        raise BadInput(f"{where} must be a list of token ids or a list of such lists") from None
    return ids if many else [ids]


def _count_ids(raw: bytes, *, where: str) -> None:
    """Counts ids before they are read: there are no more than commas and opening brackets."""
    if raw.count(b",") > PROMPT_IDS_MAX:
        raise BadInput(f"{where} has more than {PROMPT_IDS_MAX:,} token ids, the most read")
    if (count := raw.count(b"[") - 1) > PROMPTS_MAX:
        raise BadInput(f"{where} has {count:,} lists; at most {PROMPTS_MAX} are read")


def is_many(raw: msgspec.Raw) -> bool:
    """Whether ids are lists of ids."""
    return bytes(raw).lstrip()[1:].lstrip()[:1] == b"["


def read_texts(raw: msgspec.Raw) -> list[str] | list[list[int]]:
    """A prompt as OpenAI has it: a text, texts, ids, or several lists of ids."""
    try:
        texts = msgspec.json.decode(raw, type=str | list[str])
    except UNDECODABLE:
        pass
    else:
        return [texts] if isinstance(texts, str) else texts
    if bytes(raw).startswith(b"["):
        _count_ids(bytes(raw), where="prompt")
    try:
        return read_ids(raw, where="prompt")
    except BadInput:
        raise BadInput(
            "prompt must be a text, a list of texts, token ids or lists of token ids"
        ) from None
