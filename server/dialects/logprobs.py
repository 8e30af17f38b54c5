"""Log probabilities in the forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ess.engine.tokens.chance import Chance
from ess.models.text.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; bytes that are not valid text alone are written as escapes."""
    raw = tokenizer.bytes_of(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


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
    return {
        "tokens": [_name(tokenizer, token, by_id) for token in tokens],
        "token_logprobs": [chance and chance.logprob for chance in chances],
        "top_logprobs": [
            chance
            and {
                _name(tokenizer, other, by_id): logprob
                for other, logprob in (*chance.top, (token, chance.logprob))
            }
            for token, chance in zip(tokens, chances, strict=True)
        ],
        "text_offset": offsets,
    }


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], chances: Sequence[Chance], *, by_id: bool = False
) -> dict[str, Any]:
    return {
        "content": [
            {
                **_entry(tokenizer, token, chance.logprob, by_id),
                "top_logprobs": [
                    _entry(tokenizer, other, value, by_id) for other, value in chance.top
                ],
            }
            for token, chance in zip(tokens, chances, strict=True)
        ],
        "refusal": None,
    }


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], chances: Sequence[Chance]
) -> list[dict[str, Any] | None]:
    """vLLM's form: for each token of the prompt, by id, itself and the likeliest in its place. An
    aborted prompt has fewer."""
    entries: list[dict[str, Any] | None] = [None]
    for token, chance in zip(prompt[1:], chances, strict=False):
        ranked = [
            (token, logprob, rank) for rank, (token, logprob) in enumerate(chance.top, start=1)
        ]
        shown = [(token, chance.logprob, chance.rank), *ranked]
        entries.append(
            {
                str(token): {
                    "logprob": logprob,
                    "rank": rank,
                    "decoded_token": token_text(tokenizer, token),
                }
                for token, logprob, rank in reversed(shown)
            }
        )
    return entries


def _name(tokenizer: Tokenizer, token: int, by_id: bool) -> str:
    """A token's text, or vLLM's way to write its id."""
    return f"token_id:{token}" if by_id else token_text(tokenizer, token)


def _entry(tokenizer: Tokenizer, token: int, logprob: float, by_id: bool) -> dict[str, Any]:
    return {
        "token": _name(tokenizer, token, by_id),
        "logprob": logprob,
        "bytes": list(tokenizer.bytes_of(token)),
    }
