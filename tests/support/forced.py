"""Teacher forcing through the whole engine: the logits of given tokens, whatever it would say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ess.engine.engine import Engine
from ess.engine.step.prompt import run_chunk


@torch.inference_mode()
def forced_logits(eng: Engine, lines: Sequence[Sequence[int]], *, start: int) -> list[Tensor]:
    """Prefill `start` tokens of each line, then decode the rest of all lines as one batch.

    Returns logits [tokens, vocabulary] per line. `eng` serves nothing else and is used up.
    """
    runner, offload = eng._runner, eng.offload
    sequences = []
    for line in lines:
        sequence = offload.open(line[: start + 1], length_max=len(line))
        low = sequence.cached_count
        prefilled = run_chunk(runner, sequence, line[low:start], low, line[low + 1 : start + 1])
        sequence.warm(prefilled.windows)
        sequences.append(sequence)
    made: list[Tensor] = []
    for at in range(start, len(lines[0])):
        step = offload.begin(sequences, query_counts=[1] * len(lines))
        now = [line[at] for line in lines]
        made.append(runner.decode(runner.batch(step), now).logits)
        step.commit(accepted=[1] * len(lines), tokens=[[token] for token in now])
    for sequence in sequences:
        sequence.close()
    return list(torch.stack(made, dim=1))
