"""Decode and prefill together: what each GPU of a deployment yields, and what a token costs.

A decode GPU at its full batch ends a number of requests a second. The uncached part of each prompt
took seconds of a prefill GPU before. So every decode GPU needs a number of prefill GPUs, and a gain
that counts decode GPUs alone is not the gain of the machines that were bought. Both tiers are
counted fully busy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ess.engine.chunking.sizes import PrefillTime
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.sim.planning.bands import EXACT, Band, inverse, moved
from ess.sim.planning.batches import Point
from ess.sim.planning.node import Node
from ess.units import PAGE_ROWS

OUTPUT_TOKENS: Final = 1024
CACHED_SHARE: Final = 0.9
TOKENS_PRICED: Final = 1e6
SECONDS_PRICED: Final = 3600.0
NIC: Final = "NIC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A request: `context` tokens at its end, `output_tokens` of them its output; this share of the
    prompt was cached, as in a continued conversation."""

    context: int
    output_tokens: int = OUTPUT_TOKENS
    cached_share: float = CACHED_SHARE

    def __post_init__(self) -> None:
        if not 1 <= self.output_tokens < self.context:
            raise BadInput(
                f"an output of {self.output_tokens:,} tokens in a context of {self.context:,}: "
                "there must be at least one, and a prompt before them"
            )
        if not 0.0 <= self.cached_share <= 1.0:
            raise BadInput(f"a cached share of {self.cached_share} is outside 0..1")

    @property
    def prompt_tokens(self) -> int:
        return self.context - self.output_tokens

    @property
    def cached_tokens(self) -> int:
        """Cached tokens in whole pages; decode runs the last token of a prompt."""
        pages = int(self.cached_share * self.prompt_tokens) // PAGE_ROWS
        return min(pages * PAGE_ROWS, (self.prompt_tokens - 1) // PAGE_ROWS * PAGE_ROWS)

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - 1 - self.cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilling:
    """What prefill takes of one GPU in a group that shares the experts, and how far that may be
    off."""

    time: PrefillTime
    group_gpus: int = 8
    band: Band = EXACT
    marks: tuple[str, ...] = ()

    def seconds(self, work: Work) -> float:
        """Seconds of one GPU for one request."""
        return self.time.of(work.computed_tokens, after=work.cached_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemRate:
    """One system over all its GPUs. `prefill_gpus` are for each decode GPU; `tokens_per_s` and
    `requests_per_s` are those of one GPU of either kind, with `band` for both. `limiter` is set if
    the network of a node limits decode."""

    prefill_gpus: float
    prefill_band: Band
    tokens_per_s: float
    requests_per_s: float
    band: Band
    limiter: str | None = None
    cost_per_million: float | None = None
    cost_band: Band = EXACT


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The question for both tiers together. `price` is of one GPU for an hour; `accepted_band` says
    how far the tokens of a step may be off, on both sides of a comparison."""

    work: Work
    prefilling: Prefilling
    layout: ModelLayout
    node: Node
    gpu_count: int
    price: float | None = None
    accepted_band: Band = EXACT

    def __post_init__(self) -> None:
        if self.price is not None and not 0.0 < self.price < math.inf:
            raise BadInput(f"a price of {self.price} for a GPU and hour must be above 0")

    def shared(self, point: Point) -> SystemRate:
        """The point's decode GPUs with the prefill GPUs that feed them."""
        ended = point.tokens_per_s / self.work.output_tokens
        landed = self.landing_max()
        prefill_s = self.prefilling.seconds(self.work)

        def prefill_gpus(rate: float, prefill: float) -> float:
            return min(rate * ended, landed) * prefill * prefill_s

        def requests(rate: float, prefill: float) -> float:
            return min(rate * ended, landed) / (1.0 + prefill_gpus(rate, prefill))

        off = {"rate": point.rate_band, "prefill": self.prefilling.band}
        band, tokens = moved(requests, **off), requests(1.0, 1.0) * self.work.output_tokens
        return SystemRate(
            prefill_gpus=prefill_gpus(1.0, 1.0),
            prefill_band=moved(prefill_gpus, **off),
            tokens_per_s=tokens,
            requests_per_s=requests(1.0, 1.0),
            band=band,
            limiter=NIC if landed < ended else None,
            cost_per_million=self.cost(tokens),
            cost_band=inverse(band),
        )

    def cost(self, tokens_per_s: float) -> float | None:
        """The cost of a million output tokens, in the currency of the price."""
        if self.price is None:
            return None
        return self.price / SECONDS_PRICED / tokens_per_s * TOKENS_PRICED

    def landing_max(self) -> float:
        """The most requests a second whose rows the network brings to one decode GPU."""
        token_bytes = self.layout.host_page_bytes / PAGE_ROWS
        request_bytes = max(1, self.work.computed_tokens) * token_bytes
        rate = self.node.nic_rate / self.node.neighbours(self.gpu_count)
        return rate * 1e6 / request_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Offload against resident over all GPUs; gains are None if there is no resident side. GPUs
    prefill in groups of `prefill_group`."""

    prefill_group: int
    offload: SystemRate
    resident: SystemRate | None
    gain: float | None
    gain_band: Band


def compared(deployment: Deployment, offload: Point, resident: Point | None) -> Comparison:
    """Compares the two sides, which have the same prefill."""
    ours, group = deployment.shared(offload), deployment.prefilling.group_gpus
    if resident is None:
        return Comparison(
            prefill_group=group, offload=ours, resident=None, gain=None, gain_band=EXACT
        )
    theirs = deployment.shared(resident)
    return Comparison(
        prefill_group=group,
        offload=ours,
        resident=theirs,
        gain=ours.tokens_per_s / theirs.tokens_per_s,
        gain_band=gain_band(
            (1.0, offload.band),
            (_decode_s(theirs) / _decode_s(ours), resident.band),
            (ours.prefill_gpus, deployment.prefilling.band),
            accepted=deployment.accepted_band,
        ),
    )


def _decode_s(shared: SystemRate) -> float:
    """Seconds of one decode GPU for one request."""
    return 1.0 / (shared.requests_per_s * (1.0 + shared.prefill_gpus))


def gain_band(
    ours: tuple[float, Band],
    theirs: tuple[float, Band],
    prefill: tuple[float, Band],
    *,
    accepted: Band = EXACT,
) -> Band:
    """The band of (theirs + prefill) / (ours + prefill), each with its band; both sides decode
    `accepted` times as much a step."""
    (ours_s, ours_band), (theirs_s, theirs_band), (prefill_s, prefill_band) = ours, theirs, prefill

    def gain(ours: float, theirs: float, prefill: float, accepted: float) -> float:
        prefilled_s = accepted * prefill * prefill_s
        return (theirs * theirs_s + prefilled_s) / (ours * ours_s + prefilled_s)

    return moved(gain, ours=ours_band, theirs=theirs_band, prefill=prefill_band, accepted=accepted)
