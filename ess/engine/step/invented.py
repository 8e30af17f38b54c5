"""Rows of a prompt that nobody has computed: valid ones, to measure decoding by itself."""

from __future__ import annotations

import torch

from ess.door import Sequence
from ess.engine.layers.batch import key_records, row_bytes
from ess.engine.step.runner import Runner
from ess.units import PAGE_ROWS, div_ceil


def invent(runner: Runner, sequence: Sequence) -> None:
    """One page of random rows, again and again: which they are costs nothing and means nothing."""
    layout, start = runner.offload.layout, sequence.cached_count
    count = len(sequence.tokens) - 1 - start
    if count == 0:
        return
    page_count = div_ceil(count, PAGE_ROWS)
    rows = row_bytes(_noise(runner.model.config.row_dim), layout, runner.ops)
    for layer in range(layout.layer_total):
        sequence.import_rows(layer, start, rows.repeat(page_count, 1)[:count])
    if layout.index is None:
        return
    keys = key_records(_noise(layout.index.key_dim), layout, runner.ops)
    for group in layout.groups:
        sequence.import_keys(group[0], start, keys.repeat(page_count, 1)[:count])


def _noise(width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(PAGE_ROWS, width, generator=generator)
