"""Costs around the measured operators, each argued by itself and none fitted to servings.

Inside a layer, between attention and experts, run kernels that are in no table. Inside a graph each
takes at least `Machine.launch_us`, and beyond that the time of the bytes it moves:

    two norms with the residual    read two states, write two
    the gate                       a measured product of 256 columns
    the choice of experts          one kernel over 256 scores of a token: a launch and a half
    the sum of routed and shared   read two states, write one

Between two steps the GPU waits for the host, however well the next step was prepared: tokens are
sampled, the batch's tables are written, ranks agree on what they run next, and a graph of some two
thousand kernels is launched. RTP-LLM measured 1.5 ms between its steps on H800 (without graphs, and
2 ms more of launches inside). We use 1.5 ms for all frameworks that prepare the next step while the
present one runs. Without that the wait is longer: SGLang's own figures with and without its
overlapped scheduler, all else equal, are 6.1 ms of a step apart.

Drafting launches two graphs, as SGLang captures them, and vLLM with most kernels: the first pass,
and all passes behind it. A graph waits for the one before and not for the scheduler: a third of the
gap. If the host does not run ahead, every pass waits for the host as a step does: SGLang's fourth
token took 6.0 ms of a step at 65,536 tokens (D9), of which 4.6 are work by this model.
"""

from __future__ import annotations

from typing import Final

STEP_GAP_US: Final = 1500.0
LAUNCHED_US: Final = STEP_GAP_US + 2000.0
SERIAL_US: Final = STEP_GAP_US + 6100.0
CHOICE_LAUNCHES: Final = 1.5
NORM_STATES: Final = 8
SUM_STATES: Final = 3
STATE_BYTES: Final = 2
PRODUCT_SHARE: Final = 0.6
"""The share of the fp8 peak that an unmeasured product reaches."""
HOP_US: Final = 10.0
NIC_RATE: Final = 50e3
"""Nominal: between GPUs of two nodes, and 400 Gbit/s for each of them."""
SAMPLED_BYTES: Final = 4 * 4
"""Bytes for each score of the vocabulary: written, read and written as float32 once more, read for
the sum and for the draw."""


def draft_gaps_us(step_gap_us: float, pass_count: int) -> float:
    """Time that the GPU waits for the host before and between a step's draft passes.

    >>> [draft_gaps_us(gap_us, 5) for gap_us in (STEP_GAP_US, SERIAL_US)]
    [1000.0, 7500.0]
    """
    if step_gap_us >= SERIAL_US:
        return pass_count * STEP_GAP_US
    return min(pass_count, 2) * STEP_GAP_US / 3
