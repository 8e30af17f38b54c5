"""Log probabilities in the forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final

import msgspec

from ess.engine.tokens.chance import Chance
from ess.models.text.tokenizer import Tokenizer

PART: Final = 64


def json_list(items: Iterable[Any]) -> msgspec.Raw:
    """JSON of a list, PART items at a time: no encoding holds the interpreter for long, and of a
    long list few items exist at once."""
    left = iter(items)
    parts = iter(lambda: msgspec.json.encode([*islice(left, PART)])[1:-1], b"")
    return msgspec.Raw(b"[%b]" % b",".join(parts))


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; bytes that are not valid text alone are written as escapes."""
    raw = tokenizer.bytes_of(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def text_length(tokenizer: Tokenizer, tokens: Sequence[int]) -> int:
    return sum(len(token_text(tokenizer, token)) for token in tokens)


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    chances: Sequence[Chance | None],
    offset: int,
    *,
    by_id: bool = False,
) -> dict[str, Any]:
    """Parallel lists; `offset` is where the first token's text begins. The first token of a text
    has no log probability. A token that was chosen is always in its top_logprobs, as with OpenAI:
    it is added if it is not among the likeliest.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token_text(tokenizer, token))
    tops = (
        chance
        and {
            _name(tokenizer, other, by_id): logprob
            for other, logprob in (*chance.top, (token, chance.logprob))
        }
        for token, chance in zip(tokens, chances, strict=True)
    )
    return {
        "tokens": json_list(_name(tokenizer, token, by_id) for token in tokens),
        "token_logprobs": json_list(chance and chance.logprob for chance in chances),
        "top_logprobs": json_list(tops),
        "text_offset": json_list(offsets),
    }


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], chances: Sequence[Chance], *, by_id: bool = False
) -> dict[str, Any]:
    content = chat_entries(tokenizer, tokens, chances, by_id=by_id)
    return {"content": json_list(content), "refusal": None}


def chat_entries(
    tokenizer: Tokenizer, tokens: Sequence[int], chances: Sequence[Chance], *, by_id: bool = False
) -> Iterator[dict[str, Any]]:
    for token, chance in zip(tokens, chances, strict=True):
        tops = [_entry(tokenizer, other, value, by_id) for other, value in chance.top]
        yield {**_entry(tokenizer, token, chance.logprob, by_id), "top_logprobs": tops}


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], chances: Sequence[Chance]
) -> msgspec.Raw:
    """vLLM's form: for each token of the prompt, by id, itself and the likeliest in its place. The
    first has none; an aborted prompt has fewer."""
    return json_list(chain((None,), _prompt_entries(tokenizer, prompt, chances)))


def _prompt_entries(
    tokenizer: Tokenizer, prompt: Sequence[int], chances: Sequence[Chance]
) -> Iterator[dict[str, Any]]:
    for token, chance in zip(prompt[1:], chances, strict=False):
        ranked = [
            (token, logprob, rank) for rank, (token, logprob) in enumerate(chance.top, start=1)
        ]
        shown = [(token, chance.logprob, chance.rank), *ranked]
        yield {
            str(token): {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": token_text(tokenizer, token),
            }
            for token, logprob, rank in reversed(shown)
        }


def _name(tokenizer: Tokenizer, token: int, by_id: bool) -> str:
    """A token's text, or vLLM's way to write its id."""
    return f"token_id:{token}" if by_id else token_text(tokenizer, token)


def _entry(tokenizer: Tokenizer, token: int, logprob: float, by_id: bool) -> dict[str, Any]:
    return {
        "token": _name(tokenizer, token, by_id),
        "logprob": logprob,
        "bytes": list(tokenizer.bytes_of(token)),
    }
