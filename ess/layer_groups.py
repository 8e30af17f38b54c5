"""Groups of layers that share one selection."""

from __future__ import annotations

from collections.abc import Sequence

from ess.errors import BadInput


def check_part(groups: Sequence[Sequence[int]], layer_count: int, first: int, stop: int) -> None:
    """May main layers first..stop-1 stand alone? Layers that share a selection stay together."""
    if not 0 <= first < stop <= layer_count:
        raise BadInput(f"layers {first}..{stop - 1} are no part of layers 0..{layer_count - 1}")
    for group in groups:
        for edge in (first, stop):
            if group[0] < edge <= group[-1]:
                raise BadInput(
                    f"a part cannot begin at layer {edge}: layers {group[0]}..{group[-1]} share one"
                    f" selection, so a part begins at {group[0]} or {group[-1] + 1}"
                )
