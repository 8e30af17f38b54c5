"""The cost of a selection for a guest in nats per token, and its indexer's recall.

A text is read, each token with the true ones before it, in float32. There are three ways to select:
`dense` selects all; `oracle` takes the k positions with the most attention, mean over heads, which
the indexer was trained for and cannot know; `trained` takes the indexer's choice. Rows and index
keys are those of a pool: rounded by the codecs, and read back. Index keys are fp8 with fp8 rows,
else f32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ess import console
from ess.bench.harness.lists import amount, size, sizes
from ess.bench.harness.report import Row
from ess.bench.harness.text import text_of
from ess.bench.harness.threads import compute_threads
from ess.errors import BadInput
from ess.kernels.backend import ops
from ess.layout import IndexForm, ModelLayout
from ess.models.decoder import DecoderLayer
from ess.models.guest.grouped import Grouped
from ess.models.guest.pins import SMOLLM2, guest_named
from ess.models.guest.place import checkpoint_folder
from ess.models.indexer import index_scores, top_k
from ess.models.layers import rotate
from ess.models.load import load_model
from ess.models.model import Model
from ess.models.registry import build, read_config
from ess.models.text.tokenizer import Tokenizer
from ess.models.weights.expected.shapes import HEAD, expected_tensors

QUERIES: Final = 256
Selecting = Literal["dense", "oracle", "trained"]
RowName = Literal["f32", "bf16", "fp8"]
ROWS: Final[tuple[RowName, ...]] = ("f32", "bf16", "fp8")
SMOKE_MODEL: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 2048,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestWay:
    select: Selecting
    rows: RowName
    k: int = 0

    @property
    def name(self) -> str:
        return f"{self.select}{f' {self.k:,}' if self.k else ''}, {self.rows} rows"


@dataclass(frozen=True, slots=True)
class Excerpt:
    ids: list[int]
    first: int
    """Loss counts from here on: before, the widest selection has everything."""


def guest_benchmark(
    *,
    model: str = SMOLLM2.name,
    ctx: str = "3k",
    k: str = "128,256,1k",
    excerpts: int = 2,
    text: Path | None = None,
    smoke: bool = False,
) -> list[Row]:
    """What a guest's selections cost: nats per token against dense attention, recall per layer.

    Parameters
    ----------
    model
        The guest's name.
    ctx
        Tokens of an excerpt; loss counts behind the widest selection.
    k
        Widths of selections, a list.
    excerpts
        How many excerpts, spread evenly over the text.
    text
        Read this text; by default Python's own reference.
    """
    if smoke:
        ids = torch.randint(256, (96,), generator=torch.Generator().manual_seed(0)).tolist()
        return quality_rows(random_model(), [Excerpt(ids, 32)], [16])
    widths, length, excerpts = sizes("--k", k), size("--ctx", ctx), amount("--excerpts", excerpts)
    written, _ = text_of(text)
    folder = checkpoint_folder(guest_named(model))
    ids = Tokenizer(folder).encode(written)
    starts = np.linspace(0, len(ids) - length - 1, excerpts + 2)[1:-1].astype(int).tolist()
    if len(ids) <= length or max(widths) >= length:
        raise BadInput(f"--ctx {length:,}: the text has {len(ids):,} tokens, --k goes to {k}")
    read = [Excerpt(ids[start : start + length], max(widths)) for start in starts]
    return quality_rows(load_model(folder, form="f32"), read, widths)


@compute_threads()
def quality_rows(model: Model, excerpts: list[Excerpt], widths: list[int]) -> list[Row]:
    rows = []
    exact = 0.0
    for way in _ways(widths):
        console.note(f"{way.name} ...")
        read = [Reading(model, way).run(excerpt) for excerpt in excerpts]
        losses = [float(loss) for loss, _ in read]
        nats, recalls = float(np.mean(losses)), np.mean([recall for _, recall in read], axis=0)
        exact = exact or nats
        rows.append(_row(way, nats, exact, recalls, excerpts, losses))
    return rows


def _ways(widths: list[int]) -> Iterator[GuestWay]:
    for form in ROWS:
        yield GuestWay(select="dense", rows=form)
    selecting: tuple[Selecting, Selecting] = ("oracle", "trained")
    for k in widths:
        for select in selecting:
            for form in ROWS:
                yield GuestWay(select=select, rows=form, k=k)


def _row(
    way: GuestWay,
    nats: float,
    exact: float,
    recalls: Any,
    excerpts: list[Excerpt],
    losses: list[float],
) -> Row:
    config = {
        "tokens": sum(len(e.ids) - 1 - e.first for e in excerpts),
        "added": f"{nats - exact:+.4f}",
    }
    if way.select == "trained":
        config |= {
            "recall": f"{recalls.mean():.3f}",
            "by_layer": " ".join(f"{value:.2f}" for value in recalls),
        }
    return Row(
        name=f"loss, {way.name}",
        value=nats,
        unit="nats per token",
        baseline="dense, f32 rows",
        baseline_value=exact,
        ratio=exact / nats,
        config=config,
        samples=losses,
    )


class Reading:
    """One pass over an excerpt."""

    def __init__(self, model: Model, way: GuestWay) -> None:
        self._model, self._way, self._kernels = model, way, ops("cpu")
        index: IndexForm = "fp8" if way.rows == "fp8" else "f32"
        self._layout: ModelLayout = model.config.layout(row=way.rows, index=index)

    @torch.inference_mode()
    def run(self, excerpt: Excerpt) -> tuple[float, list[float]]:
        """The mean loss and, per layer, the share of the oracle's selection that is selected."""
        tokens = torch.tensor(excerpt.ids)
        hidden, recalls = self._model.embed(tokens[:-1]), []
        for layer in self._model.layers:
            hidden, recall = self._layer(layer, hidden, excerpt.first)
            recalls.append(recall)
        logits = self._model.logits(self._model.finish(hidden[excerpt.first :]))
        return float(F.cross_entropy(logits, tokens[excerpt.first + 1 :])), recalls

    def _layer(self, layer: DecoderLayer, hidden: Tensor, first: int) -> tuple[Tensor, float]:
        entry, rotation = layer.enter(hidden), self._model.rotation(torch.arange(len(hidden)))
        probe = layer.index(entry, rotation)
        c, grouped = self._model.config, layer.mla
        assert isinstance(grouped, Grouped), "a guest"
        asked = rotate(entry.query.view(len(hidden), -1, c.value_dim), rotation, "half")
        rows = self._kept_rows(grouped.rows(entry.row, rotation))
        sides = [
            part.repeat_interleave(asked.shape[1] // c.key_head_count, 1).transpose(0, 1)
            for part in grouped.sides(rows)
        ]
        index, attended, shares = self._kept_keys(probe.keys), [], []
        for at in range(0, len(hidden), QUERIES):
            block, seen = slice(at, at + QUERIES), slice(0, at + QUERIES)
            weights = self._weights(asked[block].transpose(0, 1), sides[0][:, seen], at)
            asking = probe.queries[block], probe.weights[block], index[seen]
            kept, share = self._narrowed(weights, asking, at)
            attended.append((kept @ sides[1][:, seen]).transpose(0, 1))
            shares += share[max(0, first - at) :]
        output = layer.output(hidden, grouped.as_attended(torch.cat(attended)))
        return layer.mlp(output), float(np.mean(shares or [1.0]))

    def _weights(self, queries: Tensor, keys: Tensor, at: int) -> Tensor:
        """Dense attention [heads, queries, rows] of queries that begin at a position."""
        logits = (queries * self._model.config.attention_scale) @ keys.transpose(1, 2)
        count = queries.shape[1]
        future = torch.ones(count, count, dtype=torch.bool).triu(1)
        logits[:, :, at:].masked_fill_(future, -torch.inf)
        return logits.softmax(-1)

    def _narrowed(
        self, weights: Tensor, asking: tuple[Tensor, Tensor, Tensor], at: int
    ) -> tuple[Tensor, list[float]]:
        """Attention over the selection alone; for each query the share of the best rows in it."""
        way = self._way
        stop = at + weights.shape[1]
        if way.select == "dense" or stop <= way.k:
            return weights, []
        lengths = torch.arange(at, stop) + 1
        best = _chosen(weights.mean(0), lengths, way.k)
        chosen = best
        if way.select == "trained":
            chosen = _chosen(index_scores(*asking), lengths, way.k)
        kept = weights.mul_(chosen)
        shares = (best & chosen).sum(-1) / best.sum(-1)
        return kept.div_(kept.sum(-1, keepdim=True)), shares.tolist()

    def _kept_rows(self, rows: Tensor) -> Tensor:
        codec = self._layout.row
        kept = torch.empty(len(rows), codec.row_bytes, dtype=torch.uint8)
        self._kernels.encode_rows(rows, codec, kept)
        return self._kernels.decode_rows(kept, codec, torch.empty_like(rows))

    def _kept_keys(self, keys: Tensor) -> Tensor:
        """Transformed, rounded, transformed back: products with queries are the same either way."""
        codec = self._layout.index
        assert codec is not None, "an indexer without an index codec"
        if codec.form != "fp8":
            return keys
        encoded = self._kernels.encode_keys(self._kernels.hadamard(keys), codec)
        values = encoded.values.contiguous().view(torch.float8_e4m3fn).float()
        return self._kernels.hadamard(values * encoded.scales.view(-1, 1))


def _chosen(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    """The k best positions as a mask."""
    selection = top_k(scores, lengths, k).long()
    mask = torch.zeros(len(scores), scores.shape[1] + 1, dtype=torch.bool)
    mask.scatter_(1, selection.where(selection >= 0, scores.shape[1]), True)
    return mask[:, :-1]


@functools.cache
def random_model() -> Model:
    """The model for --smoke."""
    config = read_config(SMOKE_MODEL)
    source = torch.Generator().manual_seed(1)
    drawn = {
        spec.name: torch.randn(spec.shape, generator=source) * 0.1
        for spec in expected_tensors(config)
        if spec.name != HEAD or not config.tie_head
    }
    return build(config, drawn.__getitem__)
