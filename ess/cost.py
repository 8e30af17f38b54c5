"""What offload adds to a layer: the arithmetic that policy, engine and simulator share.

A layer whose selection misses m rows in each of b requests moves T = m * b * row_bytes / rate
through the host link. What of T shows depends on what runs beside it:

    none   attention waits, pre-attention of P need not: T on a CPU, which copies at once,
           and on a device                                            max(0, T - P)
    DA     pre-attention and attention over resident rows run beside the fetch, a window of W;
           two partials instead of one cost c_da:                         max(c_da, T - W)
    DBA    the second half of the indexer hides the first half's fetch too;
           two half indexers cost more than a whole one:       max(c_dba, T - W - W_index / 2)

W is a net window: what DA hides less what it costs, so that the two branches meet. A window is
attention over resident rows, so it shrinks as misses grow: `Hiding` belongs to a miss count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

BYTES_PER_GIB: Final = 1 << 30


class Exposed(NamedTuple):
    """Microseconds that a layer takes longer than without offload, by schedule."""

    none: float
    da: float
    dba: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiding:
    """The times that can hide a layer's fetch, and what splitting costs, in microseconds."""

    window_us: float
    index_us: float
    da_cost_us: float
    dba_cost_us: float
    ahead_us: float = 0.0
    """What runs beside a fetch that is waited for in front of attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants of one model on one machine; `hiding` gives the windows of any batch.

    Times are `fixed + each * queries`; the indexer's follow the keys read, over all requests.
    """

    pre_attn_fixed_us: float
    pre_attn_query_us: float
    attend_query_us: float
    index_fixed_us: float
    index_key_us: float
    split_fixed_us: float
    split_query_us: float
    index_split_us: float

    def hiding(
        self, *, query_count: int, key_count: int, missing_share: float, waits_late: bool = False
    ) -> Hiding:
        return hiding(
            pre_attn_us=self.pre_attn_fixed_us + self.pre_attn_query_us * query_count,
            attend_us=self.attend_query_us * query_count,
            index_us=self.index_fixed_us + self.index_key_us * key_count,
            split_us=self.split_fixed_us + self.split_query_us * query_count,
            index_split_us=self.index_split_us,
            missing_share=missing_share,
            waits_late=waits_late,
        )


def transfer_us(
    *, miss_count: float, request_count: float, row_bytes: int, bytes_per_us: float
) -> float:
    """How long the missing rows of one layer are on the link; misses are per request.

    >>> round(transfer_us(miss_count=128, request_count=80, row_bytes=656, bytes_per_us=39728))
    169
    """
    return miss_count * request_count * row_bytes / bytes_per_us


def bytes_per_us(gib_per_s: float) -> float:
    return gib_per_s * BYTES_PER_GIB / 1e6


def hiding(
    *,
    pre_attn_us: float,
    attend_us: float,
    index_us: float,
    split_us: float,
    index_split_us: float,
    missing_share: float,
    waits_late: bool = False,
) -> Hiding:
    """Windows from a layer's stage times; `missing_share` of its attention waits for the fetch.
    `waits_late`: without a split pre-attention does not wait."""
    return Hiding(
        window_us=max(0.0, pre_attn_us + attend_us * (1.0 - missing_share) - split_us),
        index_us=index_us,
        da_cost_us=split_us,
        dba_cost_us=split_us + index_split_us,
        ahead_us=pre_attn_us if waits_late else 0.0,
    )


def exposed(moved_us: float, behind: Hiding) -> Exposed:
    hidden_us = behind.window_us + behind.index_us / 2
    return Exposed(
        none=max(0.0, moved_us - behind.ahead_us),
        da=max(behind.da_cost_us, moved_us - behind.window_us),
        dba=max(behind.dba_cost_us, moved_us - hidden_us),
    )
