"""Valid rows of a prompt that was not computed, to measure decoding by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from ess.door import Sequence
from ess.engine.step.runner import Runner
from ess.kernels.reference.keys import key_records
from ess.units import PAGE_ROWS, div_ceil


def invent(runner: Runner, sequence: Sequence) -> None:
    """Writes one page of random rows again and again: the rows mean nothing, and one page is cheap
    to make."""
    layout, start = runner.offload.layout, sequence.cached_count
    count = len(sequence.tokens) - 1 - start
    if count == 0:
        return
    page_count, device = div_ceil(count, PAGE_ROWS), runner.model.device
    for layer in range(layout.layer_total):
        codec = layout.row_of(layer)
        rows = torch.empty((PAGE_ROWS, codec.row_bytes), dtype=torch.uint8, device=device)
        runner.ops.encode_rows(_noise(codec.latent_dim + codec.rope_dim, device), codec, rows)
        sequence.import_rows(layer, start, rows.cpu().repeat(page_count, 1)[:count])
    if layout.index is None:
        return
    encoded = runner.ops.encode_keys(_noise(layout.index.key_dim, device), layout.index)
    keys = key_records(encoded, layout.index).cpu()
    for group in layout.key_groups:
        sequence.import_keys(layout.groups[group][0], start, keys.repeat(page_count, 1)[:count])


def _noise(width: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(PAGE_ROWS, width, generator=generator).to(device)
