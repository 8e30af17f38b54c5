"""`python -m ess.models.tiny.trainer.evaluate --folder FOLDER`: every number of the model card.

Measures the checkpoint as it is stored (fp8 blocks restored) and as it is served (top-k selection
by its own indexer), on all of the held-out packages: bits per byte against xz and a 5-gram model
on the same bytes, first drafts of the MTP module, and the attention mass its indexers keep.
"""

from __future__ import annotations

import json
import lzma
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import track
from tokenizers import Tokenizer
from torch import Tensor

from ess.errors import BadInput
from ess.models.tiny.trainer.card import card_text
from ess.models.tiny.trainer.export import CHECKPOINT, load_network
from ess.models.tiny.trainer.losses import token_nats
from ess.models.tiny.trainer.network import Network, Trace
from ess.models.tiny.trainer.shape import ModelShape
from ess.models.tiny.trainer.stored import read_checkpoint
from ess.models.tiny.trainer.texts import ngram
from ess.models.tiny.trainer.texts.corpus import DOCUMENT_END
from ess.models.tiny.trainer.texts.vocabulary import BEGIN_ID, END_ID

WINDOW: Final = 1024
CONTEXT: Final = 256
ROWS: Final = 4
DRAFT_WINDOWS: Final = 64
PROMPTS: Final = ("The server ", "To create a new table, ")
SAMPLE_TOKENS: Final = 48

Tokens = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Nats of the tokens at the positions `where`."""

    where: npt.NDArray[np.int64]
    nats: npt.NDArray[np.float32]


@dataclass(slots=True)
class Drafts:
    """First drafts on held-out text, counted against the trunk's own next choice."""

    count: int = 0
    agreed: int = 0
    chance: float = 0.0

    def add(self, drafted: Tensor, target: Tensor) -> None:
        """Logits [n, vocabulary] of the module and of the trunk for the same tokens."""
        draft = drafted.argmax(-1)
        self.count += draft.numel()
        self.agreed += int((draft == target.argmax(-1)).sum())
        self.chance += float(target.softmax(-1).gather(1, draft[:, None]).sum())


@dataclass(slots=True)
class Recall:
    """Attention mass inside the selection, per layer, and the most that top-k could hold."""

    captured: list[list[float]] = field(default_factory=list)
    best: list[list[float]] = field(default_factory=list)

    def add(self, trace: Trace) -> None:
        self.captured.append(trace.captured)
        self.best.append(trace.best)

    def rows(self) -> list[dict[str, float]]:
        means = zip(np.mean(self.captured, 0), np.mean(self.best, 0), strict=True)
        return [
            {"layer": layer, "captured": round(float(held), 4), "best": round(float(most), 4)}
            for layer, (held, most) in enumerate(means)
        ]


def windows(tokens: Tokens, device: torch.device) -> list[tuple[int, Tensor]]:
    """Batches of windows that overlap by `CONTEXT`: each scores what the one before it did not."""
    stride = WINDOW - CONTEXT
    starts = range(0, max(tokens.size - WINDOW, 1), stride)
    whole = [start for start in starts if start + WINDOW + 1 <= tokens.size]
    if not whole:
        raise BadInput(f"{tokens.size} tokens are too few, need more than {WINDOW}")
    batches = []
    for at in range(0, len(whole), ROWS):
        rows = [
            tokens[start : start + WINDOW + 1].astype(np.int64) for start in whole[at : at + ROWS]
        ]
        batches.append((whole[at], torch.from_numpy(np.stack(rows)).to(device)))
    return batches


@torch.no_grad()
def score_tokens(network: Network, tokens: Tokens, *, share: float) -> ScoredTokens:
    """An even share of all windows; no token twice, the first and the last few never."""
    batches = windows(tokens, network.lm_head.weight.device)
    chosen = np.linspace(0, len(batches) - 1, max(int(len(batches) * share), 1)).astype(int)
    where, nats = [], []
    for first, batch in track([batches[at] for at in chosen], "held-out text"):
        hidden = network(batch[:, :-1], mode="sparse")
        scored = token_nats(hidden, network.lm_head.weight, batch[:, 1:])
        for row, row_nats in enumerate(scored):
            skip = CONTEXT if first or row else 0
            start = first + row * (WINDOW - CONTEXT) + 1
            where.append(np.arange(start + skip, start + WINDOW))
            nats.append(row_nats[skip:].cpu().numpy())
    return ScoredTokens(np.concatenate(where), np.concatenate(nats))


@torch.no_grad()
def draft_and_recall(network: Network, tokens: Tokens) -> tuple[Drafts, Recall]:
    """On windows spread over the held-out text; the text is never the model's own."""
    drafts, recall = Drafts(), Recall()
    batches = windows(tokens, network.lm_head.weight.device)
    chosen = np.linspace(0, len(batches) - 1, min(DRAFT_WINDOWS // ROWS, len(batches))).astype(int)
    for at in track(chosen, "drafts and recall"):
        batch = batches[at][1]
        trace = Trace(measure=True)
        hidden = network(batch[:, :-1], mode="sparse", trace=trace)
        drafted = network.draft(hidden[:, :-1], batch[:, 1:-1], mode="sparse", trace=trace)
        recall.add(trace)
        head = network.lm_head.weight.float()
        for row_draft, row_hidden in zip(drafted, hidden[:, 1:], strict=True):
            drafts.add(row_draft.float() @ head.t(), row_hidden.float() @ head.t())
    return drafts, recall


def token_bytes(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Bytes of text behind every token: byte-level tokens have a character for each byte."""
    sizes = [len(tokenizer.id_to_token(token) or "") for token in range(tokenizer.get_vocab_size())]
    sizes[BEGIN_ID], sizes[END_ID] = 0, len(DOCUMENT_END)
    return np.array(sizes)


def package_bits(
    scored: ScoredTokens, tokens: Tokens, sizes: npt.NDArray[np.int64], corpus: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Bits per byte of each held-out package, by the begin tokens of its documents."""
    document = (np.cumsum(tokens == BEGIN_ID) - 1)[scored.where]
    rows, seen = [], 0
    for package in (row for row in corpus if row["role"] == "held-out"):
        inside = (document >= seen) & (document < seen + package["documents"])
        seen += package["documents"]
        if inside.any():
            bits = float(scored.nats[inside].sum()) / math.log(2)
            byte_count = int(sizes[tokens[scored.where[inside]]].sum())
            rows.append({"package": package["package"], "bits_per_byte": bits / byte_count})
    return rows


@torch.no_grad()
def continue_text(
    network: Network, tokenizer: Tokenizer, prompt: str, *, seed: int, temperature: float
) -> str:
    """A sample, by running the whole text again for each token: this is not an engine."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [BEGIN_ID, *tokenizer.encode(prompt.rstrip()).ids]
    for _ in range(SAMPLE_TOKENS):
        hidden = network(torch.tensor([tokens]), mode="sparse")[0, -1].float()
        chance = (hidden @ network.lm_head.weight.float().t() / temperature).softmax(-1)
        token = int(torch.multinomial(chance, 1, generator=generator))
        if token == END_ID:
            break
        tokens.append(token)
    return str(tokenizer.decode(tokens[1:]))


def evaluate(*, folder: Path, checkpoint: Path, dtype: torch.dtype, share: float) -> dict[str, Any]:
    """All numbers of one checkpoint as one JSON-able object."""
    config, tensors = read_checkpoint(checkpoint)
    network = load_network(ModelShape(), tensors).to(dtype).eval()
    network.cos, network.sin = network.cos.float(), network.sin.float()
    text = (folder / "held_out.txt").read_bytes()
    tokens: Tokens = np.load(folder / "held_out.npy")
    corpus = json.loads((folder / "corpus.json").read_text())
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    sizes = token_bytes(tokenizer)
    scored = score_tokens(network, tokens, share=share)
    byte_count = int(sizes[tokens[scored.where]].sum())
    levels = ngram.train(np.load(folder / "train.npy"))
    ngram_bits = float(ngram.bits(levels, tokens)[scored.where].sum())
    drafts, recall = draft_and_recall(network, tokens)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "weights": sum(tensor.numel() for tensor in tensors.values()),
        "file_bytes": sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")),
        "top_k": config["index_topk"],
        "held_out_bytes": len(text),
        "held_out_tokens": int(tokens.size),
        "share": share,
        "scored": int(scored.nats.size),
        "nats_per_token": float(scored.nats.mean()),
        "bits_per_byte": float(scored.nats.sum()) / math.log(2) / byte_count,
        "xz_bits_per_byte": 8
        * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
        / len(text),
        "ngram_bits_per_byte": ngram_bits / byte_count,
        "packages": package_bits(scored, tokens, sizes, corpus),
        "draft_count": drafts.count,
        "draft_agreement": drafts.agreed / drafts.count,
        "draft_chance": drafts.chance / drafts.count,
        "recall": recall.rows(),
        "samples": [
            continue_text(network, tokenizer, prompt, seed=7, temperature=0.6) for prompt in PROMPTS
        ],
        "corpus": corpus,
    }


def main(
    *,
    folder: Path,
    checkpoint: Path = CHECKPOINT,
    threads: int = 2,
    f32: bool = False,
    share: float = 1.0,
    card: bool = False,
    note: str = "",
) -> None:
    """Measure a checkpoint on the held-out packages and print its numbers.

    Parameters
    ----------
    folder: token files and corpus.json.
    checkpoint: the checkpoint folder.
    threads: for torch.
    share: of the held-out windows to score, spread evenly; xz always takes all of the text.
    f32: compute in f32 in place of bf16.
    card: also write the model card, README.md, into the checkpoint folder.
    note: what the card says about the history of the weights, if they had more than one run.
    """
    torch.set_num_threads(threads)
    dtype = torch.float32 if f32 else torch.bfloat16
    numbers = evaluate(folder=folder, checkpoint=checkpoint, dtype=dtype, share=share)
    print(json.dumps({name: held for name, held in numbers.items() if name != "corpus"}, indent=1))
    if card:
        training = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
        (checkpoint / "README.md").write_text(card_text(numbers, training, note))


if __name__ == "__main__":
    import cyclopts

    cyclopts.run(main)
