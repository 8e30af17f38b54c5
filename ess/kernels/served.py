"""The names of the sets of ops, and what those of libraries take. Needs no torch."""

from __future__ import annotations

from typing import Final, Literal

BackendName = Literal["reference", "cpu", "cuda"]

ROOM_UNIT: Final = 256
ROOM_BYTES_MAX: Final = 1 << 30
"""The most bytes of codes that DeepGEMM's products of experts multiply; their results take as
many."""
