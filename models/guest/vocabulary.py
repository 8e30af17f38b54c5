"""tokenizer.json from what a GGUF file says of its vocabulary. Byte-level BPE alone is read."""

from __future__ import annotations

from typing import Any, Final

from ess.errors import BadInput
from ess.models.guest.packed import Packed

SPLITTERS: Final = ("smollm",)
_PLAIN, _CONTROL = 1, 3


def tokenizer_json(packed: Packed, vocab_size: int) -> dict[str, Any]:
    """Digits alone, then words with the space before them: what the "smollm" splitter does."""
    _check_kind(packed)
    tokens = packed.listed("tokenizer.ggml.tokens", str)
    kinds = packed.listed("tokenizer.ggml.token_type", int)
    if len(tokens) != vocab_size or len(kinds) != vocab_size or len(set(tokens)) != vocab_size:
        raise BadInput(
            f"the vocabulary has {len(set(tokens)):,} different tokens of {len(tokens):,} and"
            f" {len(kinds):,} kinds, the embedding has {vocab_size:,} rows"
        )
    if not set(kinds) <= {_PLAIN, _CONTROL}:
        raise BadInput(f"token kinds {sorted(set(kinds))[:8]}: only 1 (plain) and 3 (control)")
    ids = {token: number for number, token in enumerate(tokens)}
    special = [number for number, kind in enumerate(kinds) if kind == _CONTROL]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(number, tokens[number]) for number in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", **_BYTES, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **_BYTES, "use_regex": True},
        "model": {"type": "BPE", **_BPE, "vocab": ids, "merges": _merges(packed, ids)},
    }


_BYTES: Final = {"add_prefix_space": False, "trim_offsets": True}
_BPE: Final = {
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
}


def _check_kind(packed: Packed) -> None:
    kind, splitter = packed.text("tokenizer.ggml.model"), packed.text("tokenizer.ggml.pre")
    if kind != "gpt2" or splitter not in SPLITTERS:
        raise BadInput(
            f"a vocabulary of kind {kind!r:.40} split by {splitter!r:.40} is not supported, only"
            f" 'gpt2' split by {', '.join(SPLITTERS)}"
        )


def _merges(packed: Packed, ids: dict[str, int]) -> list[list[str]]:
    pairs = [merge.split(" ") for merge in packed.listed("tokenizer.ggml.merges", str)]
    for pair in pairs:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= ids.keys():
            raise BadInput(f"the merge {' '.join(pair)!r:.60} is not of two tokens to a third")
    return pairs


def _added(number: int, content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, **flags, "special": True}
