"""The names of the sets of ops. Needs no torch."""

from __future__ import annotations

from typing import Literal

BackendName = Literal["reference", "cpu", "cuda"]
