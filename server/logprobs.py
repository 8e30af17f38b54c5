"""Log probabilities in the two forms that OpenAI's API has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ess.engine.messages import Chance
from ess.models.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token on its own; bytes that are no text by themselves are written out."""
    raw = tokenizer.bytes_of(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], chances: Sequence[Chance], offset: int
) -> dict[str, Any]:
    """Lists beside each other; `offset` is where the first token's text begins."""
    texts = [token_text(tokenizer, token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [chance.logprob for chance in chances],
        "top_logprobs": [
            {token_text(tokenizer, token): logprob for token, logprob in chance.top}
            for chance in chances
        ],
        "text_offset": offsets,
    }


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], chances: Sequence[Chance]
) -> dict[str, Any]:
    return {
        "content": [
            {
                **_entry(tokenizer, token, chance.logprob),
                "top_logprobs": [_entry(tokenizer, other, value) for other, value in chance.top],
            }
            for token, chance in zip(tokens, chances, strict=True)
        ]
    }


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token),
        "logprob": logprob,
        "bytes": list(tokenizer.bytes_of(token)),
    }
