"""The names of the sets of ops, and what those of libraries take. Needs no torch."""

from __future__ import annotations

from typing import Final, Literal

BackendName = Literal["reference", "cpu", "cuda"]

ROOM_UNIT: Final = 256
ROOM_BYTES_MAX: Final = 1 << 30
"""The most bytes of codes that DeepGEMM's products of experts multiply; their results take as
many."""

LOGIT_BYTES: Final = 4
SELECT_BYTES: Final = (12 + 3) * LOGIT_BYTES
"""Bytes of a key in a thread of a CPU that selects: the logits of as many queries as share pages
there (`kRunQueries` in csrc/cpu/kernels.cpp), and three lists of what one query may select
(`top_k` in csrc/cpu/ops/topk.h). The memory is kept for later calls."""
