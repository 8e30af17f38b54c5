"""ESS: sparse-attention decoding with the latent cache in host memory.

Names are loaded when they are first used, so `import ess` needs neither torch nor a GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ess.door import Offload, Resolution, Sequence, Step
    from ess.door.handoff.port import Port
    from ess.errors import BadInput, BadState, EssError, PoolFull, Unavailable
    from ess.kernels.merge import merge
    from ess.layout import IndexCodec, ModelLayout, RowCodec

__version__ = "0.1.0"

_HOME = {
    "BadInput": "ess.errors",
    "BadState": "ess.errors",
    "EssError": "ess.errors",
    "IndexCodec": "ess.layout",
    "ModelLayout": "ess.layout",
    "Offload": "ess.door",
    "PoolFull": "ess.errors",
    "Port": "ess.door.handoff.port",
    "Resolution": "ess.door",
    "RowCodec": "ess.layout",
    "Sequence": "ess.door",
    "Step": "ess.door",
    "Unavailable": "ess.errors",
    "merge": "ess.kernels.merge",
}

__all__ = [
    "BadInput",
    "BadState",
    "EssError",
    "IndexCodec",
    "ModelLayout",
    "Offload",
    "PoolFull",
    "Port",
    "Resolution",
    "RowCodec",
    "Sequence",
    "Step",
    "Unavailable",
    "merge",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'ess' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
