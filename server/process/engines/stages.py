"""The stages of a pipelined worker as its server shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ess.engine.process.messages import StageLine


def stage_name(stage: int, layers: tuple[int, int]) -> str:
    """
    >>> stage_name(1, (4, 8))
    'stage 1 (layers 4 to 7)'
    """
    first, stop = layers
    return f"stage {stage} (layers {first} to {stop - 1})"


def missing(layers: Sequence[tuple[int, int]], lines: Sequence[StageLine]) -> list[str]:
    """The stages that have not reported.

    >>> missing([(0, 4), (4, 8)], [StageLine(0, (0, 4))])
    ['stage 1 (layers 4 to 7)']
    """
    heard = {line.rank for line in lines}
    return [stage_name(stage, part) for stage, part in enumerate(layers) if stage not in heard]


def view(lines: Sequence[StageLine]) -> list[dict[str, Any]]:
    """The stages for dashboards; `last_layer` is the last layer of a stage."""
    return [
        {
            "stage": line.rank,
            "first_layer": line.layers[0],
            "last_layer": line.layers[1] - 1,
            "busy_share": line.busy_share,
            "chunks": line.chunk_count,
            "heard_s": line.beat_s,
        }
        for line in lines
    ]
