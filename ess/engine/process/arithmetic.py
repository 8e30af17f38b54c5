"""What decides how an engine rounds its sums."""

from __future__ import annotations

import ess
from ess.engine.config import ProcessConfig
from ess.kernels.cpu import native


def arithmetic(chosen: ProcessConfig) -> str:
    """Names everything that may round differently. Where answers are the same to the last bit,
    rows made by another release or with other instructions do not count as the same."""
    if not chosen.deterministic:
        return chosen.backend
    kernels = f"{native.kernels()} {native.has_tiles()}" if native.available() else ""
    return f"{chosen.backend} {ess.__version__} {kernels}"
