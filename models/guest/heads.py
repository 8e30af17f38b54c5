"""The indexer that was trained for a guest, in the small form that the repository keeps.

An index query is a linear map of the model's own query of one head, before rotation; the index key
is a linear map of the model's own keys of all key heads. So a layer needs, beside a norm, one
matrix [heads, dim, dim], one [dim, key heads * dim] and one [heads, hidden]: a sixth of a free
indexer. Values are kept as int8, with one float32 scale for each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput

HEADS: Final = Path(__file__).parent / "indexer" / "smollm2.safetensors"
PARTS: Final = ("query_mix", "key_mix", "weights_proj")
NORMS: Final = ("k_norm.weight", "k_norm.bias")

Floats = npt.NDArray[np.float32]
Layer = Mapping[str, Floats]


class Heads:
    def __init__(self, path: Path) -> None:
        from safetensors.numpy import load_file

        self._path = path
        self._stored = load_file(path)

    def layers(self, count: int) -> Iterator[Layer]:
        kept = len(self._stored) // (2 * len(PARTS) + len(NORMS))
        if kept != count:
            raise BadInput(f"{self._path.name} has indexers for {kept} layers, not for {count}")
        for layer in range(count):
            yield {
                **{name: self._widened(f"{layer}.{name}") for name in PARTS},
                **{name: self._stored[f"{layer}.{name}"] for name in NORMS},
            }

    def _widened(self, name: str) -> Floats:
        scale: Floats = self._stored[f"{name}.scale"]
        return self._stored[name].astype(np.float32) * scale[..., None]


def narrowed(values: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """Values and scales as they are kept."""
    scale = np.maximum(np.abs(values).max(-1), 1e-12).astype(np.float32) / 127
    return np.rint(values / scale[..., None]).astype(np.int8), scale


def indexer_tensors(layer: Layer, keys: Floats, prefix: str) -> dict[str, Floats]:
    """Under the names of a checkpoint, written out in full; `keys` is the layer's k_proj."""
    mixes = layer["query_mix"]
    heads, dim = mixes.shape[:2]
    queries = np.zeros((heads, dim, heads, dim), np.float32)
    queries[np.arange(heads), :, np.arange(heads)] = mixes
    tensors = {
        "wq_b.weight": queries.reshape(heads * dim, heads * dim),
        "wk.weight": layer["key_mix"] @ keys,
        "weights_proj.weight": layer["weights_proj"],
        **{name: layer[name] for name in NORMS},
    }
    return {
        f"{prefix}indexer.{name}": np.ascontiguousarray(value) for name, value in tensors.items()
    }
