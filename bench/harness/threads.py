"""The number of compute threads during a benchmark."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def compute_threads(count: int | None = None) -> Iterator[None]:
    """Sets compute threads, by default all cores but one, which is left to the copy lane."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or max(1, len(os.sched_getaffinity(0)) - 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)
