"""The embedded model's byte-level BPE, and text files turned into token files.

`python -m ess.models.tiny.trainer.texts.vocabulary --folder FOLDER` reads train.txt and
held_out.txt and writes tokenizer.json, train.npy and held_out.npy (uint16). Training text alone
decides the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ess.errors import BadInput
from ess.models.tiny.trainer.texts.corpus import DOCUMENT_END

VOCABULARY_SIZE: Final = 4096
BEGIN: Final = "<|begin|>"
END: Final = "<|end|>"
BEGIN_ID: Final = 0
END_ID: Final = 1
READ_BYTES: Final = 1 << 22
ENCODE_BATCH: Final = 256

# Words with the space before them, numbers of at most three digits, punctuation with the line
# ends after it, and runs of white space that leave one space to the word that follows.
_WORDS: Final = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_documents(path: Path) -> Iterator[str]:
    """Documents of a corpus file, streamed."""
    rest = ""
    with path.open(encoding="utf-8") as source:
        while piece := source.read(READ_BYTES):
            *whole, rest = (rest + piece).split(DOCUMENT_END)
            yield from whole
    if rest:
        yield rest


def train_tokenizer(path: Path, *, size: int = VOCABULARY_SIZE) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_documents(path), trainer)
    if tokenizer.get_vocab_size() != size:
        raise BadInput(f"{path} gives {tokenizer.get_vocab_size()} tokens, wanted {size}")
    return tokenizer


def encode_file(tokenizer: Tokenizer, path: Path) -> npt.NDArray[np.uint16]:
    """All documents, each between its begin and end tokens, in one flat array."""
    parts: list[npt.NDArray[np.uint16]] = []
    texts = list(read_documents(path))
    for at in range(0, len(texts), ENCODE_BATCH):
        for encoding in tokenizer.encode_batch(texts[at : at + ENCODE_BATCH]):
            parts.append(np.array([BEGIN_ID, *encoding.ids, END_ID], dtype=np.uint16))
    if not parts:
        raise BadInput(f"{path} holds no documents")
    return np.concatenate(parts)


def main(*, folder: Path, tokenizer_file: Path | None = None) -> None:
    """Train the tokenizer on train.txt and encode both sides.

    Parameters
    ----------
    folder: where corpus.py wrote its two files, and where the results go.
    tokenizer_file: encode with this tokenizer.json instead of training one.
    """
    if tokenizer_file is None:
        tokenizer = train_tokenizer(folder / "train.txt")
    else:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.save(str(folder / "tokenizer.json"))
    for side in ("train", "held_out"):
        text = folder / f"{side}.txt"
        tokens = encode_file(tokenizer, text)
        np.save(folder / f"{side}.npy", tokens)
        byte_count = text.stat().st_size
        print(f"{side}: {tokens.size:,} tokens, {byte_count / tokens.size:.3f} bytes per token")


if __name__ == "__main__":
    import cyclopts

    cyclopts.run(main)
