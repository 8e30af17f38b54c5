"""The attention block of one layer: whole modules as measured, extended beyond the tables.

Modules were measured where queries x context is at most 256K tokens. From a batch's last point on
they grow

    dense    as the attention kernel alone does, which was measured to 128K at any batch
    sparse   as the module does with one query, plus what index keys of further queries add in
             another framework's module, measured to 128K at any batch

To the dense kernel further queries of a request are further heads over the same rows, since it
reads a row once for all of them. The indexer also reads a key once for all, as long as reading is
slower than multiplying.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ess.errors import BadInput
from ess.sim.operators.silicon.bank import Bank
from ess.sim.operators.silicon.choices import choices
from ess.sim.operators.silicon.selection import HEADS_MIN
from ess.sim.operators.tables import Curve, Surface

MEASURED_TOKENS: Final = 1 << 18
MEASURED_CONTEXT: Final = 1 << 17
QUERIES: Final = tuple(float(1 << power) for power in range(11))
HEADS_MAX: Final = 128
SCAN_SHARE: Final = 0.4
"""One query's products take this share of the time to read an index key: 64 heads x 128 dimensions
are 124 operations for a byte, and a Hopper does 310 at three quarters of its peak. From the third
query on products take longer than reading."""


@dataclass(frozen=True, kw_only=True)
class Dense:
    """MLA over the whole context, `heads` of them on one GPU. With fewer than 16 heads a kernel
    takes as long as with 16."""

    bank: Bank
    heads: int

    def us(self, *, requests: float, queries_each: int, context: float) -> float:
        tokens = requests * queries_each
        if queries_each == 1:
            return self._module.at(tokens, context)
        least = self._module.sizes[0]
        around_us = self._module.at(tokens, least) - self._kernel(self._width).at(tokens, least)
        kernel_us = self.kernel_us(requests=requests, queries_each=queries_each, context=context)
        return max(0.0, around_us) + kernel_us

    def kernel_us(self, *, requests: float, queries_each: int, context: float) -> float:
        asked = self._width * queries_each
        stacked = min(HEADS_MAX, 1 << (asked - 1).bit_length())
        return self._kernel(stacked).at(requests * max(1.0, asked / stacked), context)

    @property
    def _width(self) -> int:
        return max(self.heads, HEADS_MIN)

    @cached_property
    def _module(self) -> Surface:
        kernel = self._kernel(self._width)
        return _carried(self.bank.dense_decode[self._width,], kernel.sizes, kernel.at)

    def _kernel(self, heads: int) -> Surface:
        return self.bank.dense_kernel[heads,]


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """MLA over a selection; `model` names the table of layers with an indexer or without."""

    bank: Bank
    model: str
    heads: int
    kv: str

    def us(self, *, tokens: float, context: float) -> float:
        """Time of the module; every token has its own context."""
        return self._module.at(tokens, context)

    def scan_us(self, *, requests: float, queries_each: int, context: float, top_k: int) -> float:
        """The module's growth beyond a context of `top_k`: reading keys and selecting rows."""
        grown_us = self.us(tokens=requests, context=max(context, top_k)) - self.us(
            tokens=requests, context=top_k
        )
        return max(0.0, grown_us) * max(1.0, SCAN_SHARE * queries_each)

    @cached_property
    def _module(self) -> Surface:
        module = self.bank.sparse_decode.get((self.model, self.heads, self.kv))
        if module is None:
            known = [
                (kv, heads) for model, heads, kv in self.bank.sparse_decode if model == self.model
            ]
            measured = "; ".join(f"{heads} heads over {kv} rows" for kv, heads in choices(known))
            raise BadInput(
                f"{self.model}: attention of {self.heads} heads over {self.kv} rows was not "
                f"measured; measured were {measured}"
            )
        alone = Curve(module.sizes, tuple(curve.at(1.0) for curve in module.curves))
        other = self.bank.index_growth.get((self.model,))
        if other is None:
            return _carried(module, module.sizes, lambda queries, context: alone.at(context))

        def height(queries: float, context: float) -> float:
            further_us = other.at(queries, context) - other.at(1.0, context)
            return alone.at(context) + max(0.0, further_us)

        sizes = tuple(sorted({*module.sizes, *other.sizes}))
        return _carried(module, sizes, height)


def _carried(
    module: Surface, contexts: tuple[float, ...], height: Callable[[float, float], float]
) -> Surface:
    """The module as measured, continued from its last point by the growth of `height`."""
    rows: dict[float, list[tuple[float, float]]] = {context: [] for context in contexts}
    for queries in QUERIES:
        points = [
            (context, curve.at(queries))
            for context, curve in zip(module.sizes, module.curves, strict=True)
            if queries <= curve.sizes[-1]
        ]
        if not points:
            continue
        within, (last, last_us) = Curve(*zip(*points, strict=True)), points[-1]
        for context in contexts:
            grown_us = height(queries, context) - height(queries, last) if context > last else 0.0
            us = last_us + max(0.0, grown_us) if context > last else within.at(context)
            rows[context].append((queries, us))
    curves = tuple(Curve(*zip(*points, strict=True)) for points in rows.values())
    return Surface(contexts, curves)
