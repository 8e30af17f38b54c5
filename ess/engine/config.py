"""How an engine is to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ess.door import Promise
from ess.engine.tokens.determinism import check_deterministic
from ess.errors import BadInput
from ess.kernels.backend import BackendName
from ess.overlap.sbo import Sbo
from ess.overlap.tbo import Tbo


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`mtp` is how many tokens a step verifies per request; 1 means no drafts.

    `modes` is "layerwise" (per layer from live counters, from `calibration` on if there is one),
    "resident", "none", "da", "dba", or a list with one of these four per layer. `tbo` runs steps
    in two halves: "off", "on", "auto", or the least tokens of a step for it; `sbo` says what the
    experts' communication runs beside.
    `depth` 1 plans and launches a step before the one before is learned. `promise` says whether a
    request's device pages are promised to its full length, or as it grows. With `tpot_ms` requests
    and chunks are admitted so that a token takes no longer; with it or with `mtp_auto` steps verify
    as many tokens as pay, `mtp` at most. Every `budget_every` steps slots move to the layer groups
    that miss most; 0 never. `verify_every` n checks one layer of every n-th step against the host's
    rows. `deterministic` makes what a request says, to the last bit of its logits, independent of
    its neighbours, of drafts and of chunks: every layer runs as NONE, prompts run slower.
    """

    modes: str | Sequence[str] = "layerwise"
    calibration: str | Path | None = None
    tbo: Tbo = "off"
    sbo: Sbo = "off"
    mtp: int = 1
    depth: int = 0
    promise: Promise = "all"
    tpot_ms: float | None = None
    mtp_auto: bool = False
    budget_every: int = 64
    batch_max: int = 16
    query_max: int = 64
    chunk_tokens: int = 512
    warm: bool = True
    backend: BackendName = "cpu"
    verify_every: int = 0
    verify_fatal: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.deterministic:
            check_deterministic(self.modes, tbo=self.tbo, sbo=self.sbo)
        for name, high in (("mtp", 8), ("depth", 1)):
            value, low = getattr(self, name), 1 if name == "mtp" else 0
            if not low <= value <= high:
                raise BadInput(f"{name} is {value}, must be {low}..{high}")

    @property
    def is_paced(self) -> bool:
        return self.mtp_auto or self.tpot_ms is not None
