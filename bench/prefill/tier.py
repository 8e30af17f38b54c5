"""`ess-bench prefill`: the performance of a pipeline of stages."""

from __future__ import annotations

import functools
from typing import Final, Literal

from ess.bench.harness.lists import amount, size, sizes
from ess.bench.harness.prefix import check_memory
from ess.bench.harness.report import Row
from ess.bench.prefill.chunked import chunk_rows
from ess.bench.prefill.peaks import peak_rows
from ess.bench.prefill.sends import STAGES as SENDING
from ess.bench.prefill.sends import send_rows
from ess.bench.prefill.serving import Talk, serving_rows
from ess.bench.prefill.stages import arms_of, stage_rows
from ess.bench.prefill.turns import turn_rows
from ess.errors import BadInput
from ess.units import PAGE_ROWS

ROUNDS: Final = 3
LENGTH_MIN: Final = 2 * PAGE_ROWS
COMPARED: Final = 6
"""Rounds of pipelines: some are fitted, those between are predicted."""
REQUESTS: Final = 8
OUTPUT: Final = 64
GAP_S: Final = 1 / 1500
FAR: Final = tuple((4 << 10) << power for power in range(6))


def prefill_benchmark(
    *,
    ctx: str = "4k",
    pp: str = "1,2,4",
    chunk: int = 512,
    real: str = "4k,16k",
    memory: str = "4k,16k",
    turns: bool = False,
    serving: bool = False,
    length: str = "4k",
    router: Literal["smg", "vllm_router", "sglang_router"] = "smg",
    smoke: bool = False,
) -> list[Row]:
    """A real pipeline and its stage times on a virtual clock; sends; chunk sizes; memory.

    Parameters
    ----------
    ctx
        The prompt of the pipelines that are compared with one another.
    pp
        How many stages they have, a list; sends are compared where 2 are among them.
    chunk
        Tokens of a chunk, except where chunk sizes are compared.
    real
        Prompts for which chunk sizes are run, a list; longer ones are calculated, up to 128k.
    memory
        Prompts for which the peak memory is measured, a list: 4k,128k takes minutes.
    turns
        Run instead second turns whose prompts are mostly cached, on host and on disk.
    serving
        Run instead stages and decode workers behind a stock router.
    length
        The prompts of --turns and --serving.
    router
        For --serving: the stock router.
    """
    chunk, each = amount("--chunk", chunk), size("--length", length)
    context, stages = size("--ctx", ctx), sizes("--pp", pp)
    run, measured = sizes("--real", real), sizes("--memory", memory)
    shortest = min(each, context, *run, *measured)
    if shortest < LENGTH_MIN:
        raise BadInput(f"a prompt of {shortest} tokens: at least {LENGTH_MIN} are two pages")
    check_memory(max(each, context, *run, *measured))
    if turns or serving:
        return _other_benchmarks(turns, serving, each, router, chunk, smoke=smoke)
    if smoke:
        arms = arms_of([1, 2], 640, 128, rounds=1)
        return [
            *stage_rows(arms, 640, 128),
            *send_rows(arms[-1].rans[-1], 640, 128, rounds=1),
            *chunk_rows([640, FAR[0]], [640], rounds=1),
            *peak_rows([640], 128),
        ]
    arms = arms_of(stages, context, chunk, rounds=COMPARED)
    sent = functools.partial(send_rows, context=context, chunk=chunk, rounds=ROUNDS)
    return [
        *stage_rows(arms, context, chunk),
        *(row for arm in arms if arm.stages == SENDING for row in sent(arm.rans[-1])),
        *chunk_rows(FAR, run, rounds=ROUNDS),
        *peak_rows(measured, chunk),
    ]


def _other_benchmarks(
    turns: bool, serving: bool, length: int, router: str, chunk: int, *, smoke: bool
) -> list[Row]:
    length, rounds = (640, 1) if smoke else (length, ROUNDS)
    talk = Talk(
        requests=2 if smoke else REQUESTS,
        gap_s=length * GAP_S,
        length=length,
        output=8 if smoke else OUTPUT,
    )
    return [
        *(turn_rows(length, chunk, rounds=rounds) if turns else []),
        *(serving_rows(talk, router=router) if serving else []),
    ]
