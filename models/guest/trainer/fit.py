"""`python -m ess.models.guest.trainer.fit --into FILE`: trains the indexer of SmolLM2.

The model stays as it is. In each layer the indexer's scores are to have, through a softmax, the
shape of the model's own attention, mean over its heads: the Kullback-Leibler divergence between the
two is what is made small, as DeepSeek trained theirs. Layers do not need one another; each begins
with the same seed. FILE gets what `ess.models.guest.heads` reads: every layer done so far.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from torch import Tensor, nn

from ess.models.config import INDEX_NORM_EPS
from ess.models.decoder import DecoderLayer
from ess.models.guest.convert import convert
from ess.models.guest.grouped import Grouped
from ess.models.guest.heads import HEADS, PARTS, narrowed
from ess.models.guest.pins import SMOLLM2
from ess.models.guest.place import gguf_file
from ess.models.guest.trainer.readings import texts
from ess.models.layers import Rotation, rotate
from ess.models.load import load_model
from ess.models.model import Model
from ess.models.text.tokenizer import Tokenizer

STYLE: Final = "half"
Turns = tuple[Rotation, Rotation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    seed: int = 1
    length: int = 2048
    sequences: int = 14
    held_out: int = 4
    steps: int = 80
    batch: int = 2
    queries: int = 128
    first_query: int = 128
    rate: float = 3e-3
    recall_at: int = 256


class Mixtures(nn.Module):
    """An indexer in the form that is kept: see `ess.models.guest.heads`."""

    def __init__(self, heads: int, key_heads: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.query_mix = nn.Parameter(torch.eye(dim).repeat(heads, 1, 1))
        self.key_mix = nn.Parameter(torch.eye(dim).repeat(1, key_heads) / key_heads)
        self.weights_proj = nn.Parameter(torch.randn(heads, hidden) * 0.02)
        self.k_norm = nn.LayerNorm(dim, eps=INDEX_NORM_EPS)

    def scores(self, hidden: Tensor, queries: Tensor, keys: Tensor, turns: Turns) -> Tensor:
        """[queries, keys], of queries [tokens, heads, dim] and keys before their turn."""
        asked = rotate(torch.einsum("thi,hoi->tho", queries, self.query_mix), turns[0], STYLE)
        answers = rotate(self.k_norm(keys.flatten(1) @ self.key_mix.T), turns[1], STYLE)
        weights = F.linear(hidden, self.weights_proj) * (queries[0].numel()) ** -0.5
        products = torch.relu(asked.transpose(0, 1).bfloat16() @ answers.bfloat16().T)
        return torch.einsum("htk,th->tk", products.float(), weights)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What one sequence has in one layer: normed input; queries, keys and values before
    rotation."""

    hidden: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor

    def attention(self, at: Tensor, turns: Turns) -> Tensor:
        """The mean over heads, [queries, keys]: rows of ones that are all in the past."""
        heads, dim = self.queries.shape[1], self.queries.shape[2]
        asked = rotate(self.queries[at], turns[0], STYLE).bfloat16()
        keys = rotate(self.keys, turns[1], STYLE).bfloat16()
        spread = keys.repeat_interleave(heads // keys.shape[1], 1).permute(1, 2, 0)
        logits = (asked.transpose(0, 1) @ spread).float() * dim**-0.5
        weights: Tensor = logits.masked_fill(_future(at, len(keys)), -torch.inf).softmax(-1)
        return weights.mean(0)


def _future(at: Tensor, length: int) -> Tensor:
    return torch.arange(length) > at[:, None]


class Fitting:
    """One layer: its mixtures, and each query's weights of them."""

    def __init__(self, model: Model, recipe: Recipe) -> None:
        c = model.config
        torch.manual_seed(recipe.seed)
        self._recipe = recipe
        self._model = model
        self.mixtures = Mixtures(c.head_count, c.key_head_count, c.value_dim, c.hidden_dim)

    def fit(self, sequences: list[LayerInputs]) -> None:
        recipe, parameters = self._recipe, list(self.mixtures.parameters())
        optimiser = torch.optim.AdamW(parameters, lr=recipe.rate, weight_decay=0.0)
        for step in range(recipe.steps):
            share = step / recipe.steps
            for group in optimiser.param_groups:
                group["lr"] = recipe.rate * min(1.0, (step + 1) / 10) * (1 - 0.95 * share)
            picked = torch.randint(len(sequences), (recipe.batch,)).tolist()
            loss = torch.stack([self._compared(sequences[n])[0] for n in picked]).mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()

    def _compared(self, seen: LayerInputs) -> tuple[Tensor, Tensor, Tensor]:
        """The divergence, the model's attention and the indexer's scores of some queries."""
        recipe, length = self._recipe, len(seen.hidden)
        at = torch.randint(recipe.first_query, length, (recipe.queries,))
        turns = self._model.rotation(at), self._model.rotation(torch.arange(length))
        wanted = seen.attention(at, turns)
        scores = self.mixtures.scores(seen.hidden[at], seen.queries[at], seen.keys, turns)
        shape = scores.masked_fill(_future(at, length), -torch.inf).log_softmax(-1)
        each = wanted * (wanted.clamp_min(1e-9).log() - shape.clamp_min(-1e9))
        return each.sum(-1).mean(), wanted, scores.masked_fill(_future(at, length), -torch.inf)

    @torch.no_grad()
    def tried(self, sequences: list[LayerInputs]) -> dict[str, float]:
        """On sequences that were not trained on."""
        rows = []
        for seen in sequences:
            divergence, wanted, scores = self._compared(seen)
            k = self._recipe.recall_at
            best, chosen = wanted.topk(k, -1), scores.topk(k, -1).indices
            is_chosen = torch.zeros_like(wanted).scatter_(1, chosen, 1.0)
            mass = (wanted * is_chosen).sum(-1).mean()
            recall = is_chosen.gather(1, best.indices).mean()
            rows.append([divergence, recall, mass, best.values.sum(-1).mean()])
        means = torch.tensor(rows).mean(0).tolist()
        return dict(zip(("divergence", "recall", "mass", "best_mass"), means, strict=True))


def train(model: Model, tokens: Tensor, recipe: Recipe, into: Path) -> None:
    """Layer by layer: the states of all sequences move on together."""
    rotation = model.rotation(torch.arange(recipe.length))
    states = [model.embed(line) for line in tokens]
    parts: dict[str, Any] = {}
    for layer in model.layers:
        begun = time.perf_counter()
        seen = [_seen(layer, model, state) for state in states]
        states = [_moved(layer, *pair, rotation) for pair in zip(states, seen, strict=True)]
        fitting = Fitting(model, recipe)
        fitting.fit(seen[recipe.held_out :])
        parts |= _stored(fitting.mixtures, layer.number)
        save_file(parts, into)
        seconds = {"layer": layer.number, "seconds": round(time.perf_counter() - begun)}
        print(json.dumps(seconds | fitting.tried(seen[: recipe.held_out])), flush=True)


@torch.no_grad()
def _seen(layer: DecoderLayer, model: Model, state: Tensor) -> LayerInputs:
    entry, dim = layer.enter(state), model.config.value_dim
    sides = _grouped(layer).sides(entry.row)
    return LayerInputs(entry.hidden, entry.query.view(len(state), -1, dim), *sides)


@torch.no_grad()
def _moved(layer: DecoderLayer, state: Tensor, seen: LayerInputs, rotation: Rotation) -> Tensor:
    """The layer's output for a sequence, with dense attention."""
    turned = rotate(seen.queries, rotation, STYLE), rotate(seen.keys, rotation, STYLE)
    asked, keys, values = (side.transpose(0, 1)[None] for side in (*turned, seen.values))
    out = F.scaled_dot_product_attention(asked, keys, values, is_causal=True, enable_gqa=True)
    attended = _grouped(layer).as_attended(out[0].transpose(0, 1).contiguous())
    return layer.mlp(layer.output(state, attended))


def _grouped(layer: DecoderLayer) -> Grouped:
    assert isinstance(layer.mla, Grouped), "a guest"
    return layer.mla


def reading(tokenizer: Tokenizer, recipe: Recipe) -> Tensor:
    """Texts one behind the other, cut into sequences; a text's end is the end token."""
    end, needed, ids = tokenizer.id_of("<|endoftext|>"), recipe.length * recipe.sequences, []
    for text in texts(recipe.seed):
        ids += [*tokenizer.encode(text), end]
        if len(ids) >= needed:
            return torch.tensor(ids[:needed]).view(recipe.sequences, recipe.length)
    raise AssertionError(f"{len(ids)} tokens on this machine, {needed} are read")


def untrained(into: Path, *, layers: int, heads: int, key_heads: int, dim: int) -> None:
    """What a conversion needs before any training."""
    parts: dict[str, Any] = {}
    for number in range(layers):
        parts |= _stored(Mixtures(heads, key_heads, dim, heads * dim), number)
    save_file(parts, into)


def _stored(mixtures: Mixtures, number: int) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for name, value in mixtures.state_dict().items():
        stem = f"{number}.{name}"
        if name in PARTS:
            tensors[stem], tensors[f"{stem}.scale"] = narrowed(value.numpy())
        else:
            tensors[stem] = value.numpy()
    return tensors


def main(*, into: Path = HEADS, **recipe: Any) -> None:
    chosen = Recipe(**recipe)
    print(json.dumps(asdict(chosen)), flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        untrained(folder / "first.safetensors", layers=30, heads=9, key_heads=3, dim=64)
        convert(SMOLLM2, gguf_file(SMOLLM2), folder, folder / "first.safetensors")
        model, tokenizer = load_model(folder), Tokenizer(folder)
    train(model, reading(tokenizer, chosen), chosen, into)


if __name__ == "__main__":
    import cyclopts

    cyclopts.run(main)
