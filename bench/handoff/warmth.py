"""Misses of the first steps after a handoff, with the windows that travelled and without.

Both workers are in one process. The decode worker has slots for a fifth of the context, filled from
the windows of the prompt's last queries, or empty, as in a decode worker that gets nothing but the
rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ess import console
from ess.bench.handoff.workers import Worker, WorkerSizes
from ess.bench.harness.report import Row
from ess.bench.harness.text import token_ids
from ess.engine.requests.request import Take
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadState
from ess.models.load import load_model

STEPS: Final = 32
SLOT_SHARE: Final = 0.2
CHUNK_TOKENS: Final = 64
"""Both workers have one thread between chunks: a chunk of seconds on a busy machine outlasts the
time in which a message must be read, and then the decode worker computes the rows itself."""


def warmth_rows(length: int) -> list[Row]:
    console.note(f"  {length:,} tokens, misses with windows and without ...")
    carried, cold = (_misses(length, warm=warm) for warm in (True, False))
    config = {"ctx": length, "slots": f"{SLOT_SHARE:g} of it", "mtp": 2}
    return [
        _row("the first step", float(carried[0]), float(cold[0]), config),
        _row(f"the first {STEPS} steps", float(carried.mean()), float(cold.mean()), config),
    ]


def _row(what: str, carried: float, cold: float, config: dict[str, object]) -> Row:
    return Row(
        name=f"misses in {what} after a handoff, windows carried",
        value=carried,
        unit="of rows asked",
        baseline="without windows",
        baseline_value=cold,
        ratio=cold / carried if carried else None,
        config=config,
    )


def _misses(length: int, *, warm: bool) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """For each step after landing, the share of requested rows that were not in a slot."""
    model, ids = load_model(), token_ids()[0]
    shape = WorkerSizes(context=length, output=STEPS * 2 + 2, chunk_tokens=CHUNK_TOKENS)
    prefill = Worker(shape, model=model)
    few = WorkerSizes(context=length, output=shape.output, slot_share=SLOT_SHARE, sequences=1)
    decode = Worker(few, model=model, warm=warm)
    try:
        prefill.port.meet(decode.port.metadata())
        peer = decode.port.meet(prefill.port.metadata())
        return _decoded(prefill, decode, ids[:length], peer)
    finally:
        decode.close()
        prefill.close()


def _decoded(
    prefill: Worker, decode: Worker, prompt: list[int], peer: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    wish = Sampling(tokens_max=2 * STEPS, ignore_eos=True)
    given = prefill.engine.add(prompt, Sampling(tokens_max=1), give=1)
    taken = decode.engine.add(prompt, wish, take=Take(1, peer))
    while taken.state != "finished":
        if given.state != "finished":
            prefill.engine.step()
        prefill.engine.pump()
        if decode.engine.step().chunks:
            raise BadState("rows were missed, and the decode worker computes them itself")
    warmth = decode.engine.warmth
    asked = warmth.asked[:STEPS]
    return 1 - warmth.hits[:STEPS][asked > 0] / asked[asked > 0]
