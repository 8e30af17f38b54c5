"""Writes families.npz: what transformers 5.23 answers for two small random checkpoints.

    python tests/golden/make_families.py     (extra `oracle`; from the top of the repository)

The weights are not in the file: tests/support/checkpoints.py draws the same ones anywhere.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.support import checkpoints  # noqa: E402
from tests.support.oracle import Oracle  # noqa: E402
from tests.support.walk import walk  # noqa: E402

PREFILL, STEPS, SAMPLED = 72, 24, 8
MARGIN = 2e-5


def record(raw: dict[str, Any], folder: Path) -> dict[str, np.ndarray]:
    length = PREFILL + STEPS
    model = checkpoints.model(raw, latent_norm_eps=1e-6)
    tokens = _clear_tokens(model, length)
    weights = checkpoints.tensors(model.config)
    oracle = Oracle(folder / "sparse", raw, weights)
    whole = oracle.read(tokens, [length])
    pieces = oracle.read(tokens, [PREFILL] + [1] * STEPS)
    dense = Oracle(folder / "dense", {**raw, "index_topk": length}, weights)
    arrays = {
        "tokens": np.array(tokens, np.int16),
        "logits": whole.logits.numpy(),
        "logits_cached": pieces.logits[PREFILL:].numpy(),
        "logits_dense": dense.read(tokens, [length]).logits.numpy(),
        "greedy": np.array(oracle.greedy(tokens, STEPS), np.int16),
        "selections": np.stack([s.sort().values.numpy() for s in whole.selections]),
        "rows": np.stack([r[::SAMPLED].numpy() for r in whole.rows]),
        "keys": np.stack([k[::SAMPLED].numpy() for k in whole.keys if k is not None]),
    }
    arrays["selections"] = arrays["selections"].astype(np.int16)
    return arrays


def _clear_tokens(model: checkpoints.Model, length: int) -> list[int]:
    """Tokens for which no selection hangs on rounding."""
    for seed in range(100):
        tokens = checkpoints.tokens(length, model.config.vocab_size, seed=seed)
        if walk(model, tokens).margin(model.config.top_k) > MARGIN:
            return tokens
    raise SystemExit("no tokens with clear selections in 100 tries")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arrays = {
            f"{raw['model_type']}.{name}": values
            for raw in (checkpoints.TINY_V32, checkpoints.TINY_GLM)
            for name, values in record(raw, Path(folder) / raw["model_type"]).items()
        }
    np.savez_compressed(HERE / "families.npz", **arrays)
    print((HERE / "families.npz").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
