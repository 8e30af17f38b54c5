"""The most memory of a stage's process, with longer and longer prompts.

Pools hold a prompt's rows and keys, so they grow with it and are shown apart. Everything else must
stay: weights, the state of a chunk, the working memory of indexer and attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ess import console
from ess.bench.harness.report import Row, compare
from ess.bench.prefill.rig import ends_of, layers_of, plan_of, text
from ess.prefill.trial.pipe import Peak, Pipe

STAGES: Final = 2
FLAT_TARGET: Final = 0.9
MB: Final = 1e6


def peak_rows(contexts: Sequence[int], chunk: int) -> list[Row]:
    """Peaks by context, with the shortest as the baseline."""
    peaks = {context: _peaks(context, chunk) for context in sorted(contexts)}
    shortest = min(peaks)
    return [
        _row(context, stage, peak, shortest, peaks[shortest][stage], chunk)
        for context, each in peaks.items()
        for stage, peak in enumerate(each)
    ]


def _peaks(context: int, chunk: int) -> list[Peak]:
    console.note(f"  memory with {context:,} tokens ...")
    with Pipe(plan_of(layers_of(STAGES), context)) as pipe:
        pipe.run([text(context)], ends_of(context, chunk))
        return pipe.peaks()


def _row(context: int, stage: int, peak: Peak, shortest: int, base: Peak, chunk: int) -> Row:
    return compare(
        name=f"peak memory without pools, stage {stage}, {context:,} tokens",
        unit="MB",
        ours=[(peak.bytes - peak.pool_bytes) / MB],
        baseline=(f"{shortest:,} tokens", [(base.bytes - base.pool_bytes) / MB]),
        target=None if context == shortest else FLAT_TARGET,
        config={
            "pools_mb": round(peak.pool_bytes / MB, 1),
            "whole_mb": round(peak.bytes / MB, 1),
            "chunk": chunk,
        },
    )
