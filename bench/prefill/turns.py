"""The second turn of a conversation: nine tenths of its prompt were in the first.

They come from the host's pools, in a timed pipeline and in `ess serve`; and from disk, in an `ess
serve` that was restarted between the two turns.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from typing import Final

from ess import console
from ess.bench.engine.serve import started
from ess.bench.harness.measure.streaming import streamed
from ess.bench.harness.report import Row, compare
from ess.bench.prefill.rig import ends_of, layers_of, plan_of, sharing, text
from ess.prefill.trial.pipe import Pipe, TrialTimes

STAGES: Final = 2
CACHED: Final = 0.9
DISK: Final = "2GiB"
WARM: Final = 300


def turn_rows(context: int, chunk: int, *, rounds: int) -> list[Row]:
    return [*_pipeline_rows(context, chunk, rounds=rounds), *_served_rows(context, rounds=rounds)]


def turns_of(context: int, number: int) -> tuple[list[int], list[int]]:
    """Two prompts of one length; the second begins like the first."""
    shared = int(CACHED * context)
    first = text(context, number=2 * number)
    return first, [*first[:shared], *text(context - shared, number=2 * number + 1)]


def _pipeline_rows(context: int, chunk: int, *, rounds: int) -> list[Row]:
    console.note(f"  second turns of {context:,} tokens, {STAGES} stages ...")
    rans: tuple[list[TrialTimes], list[TrialTimes]] = ([], [])
    with Pipe(plan_of(layers_of(STAGES), context, prompts=2)) as pipe:
        pipe.run([text(chunk + 1)], [chunk])
        for number in range(rounds):
            first, second = turns_of(context, number)
            rans[0].append(pipe.run([first], ends_of(context, chunk)))
            rans[1].append(pipe.run([second], ends_of(context, chunk), forgets=False))
    cached = rans[1][-1].answer.cached_counts[0]
    counts = [len(arm[-1].chunks) for arm in rans]
    return [
        compare(
            name=f"PP{STAGES}, {context:,} tokens, second turn from host",
            unit="s",
            ours=[ran.span_s for ran in rans[1]],
            baseline=("first turn", [ran.span_s for ran in rans[0]]),
            config={"cores": sharing(STAGES), "cached": cached, "chunk": chunk},
        ),
        compare(
            name=f"PP{STAGES}, {context:,} tokens, chunks of a second turn",
            unit="chunks",
            ours=[counts[1]],
            baseline=("first turn", [counts[0]]),
        ),
    ]


def _served_rows(context: int, *, rounds: int) -> list[Row]:
    """A server's first turns and its second turns from the host; then a new server's second turns
    from disk."""
    talks = [turns_of(context, number) for number in range(rounds)]
    with tempfile.TemporaryDirectory(prefix="ess-turns-") as folder:
        flags = ("--threads", "1", "--prefix-cache-dir", folder, "--prefix-cache-disk", DISK)
        with started("serve", *flags) as (_, url):
            console.note("  second turns from the host pool of ess serve ...")
            firsts = _first_tokens(url, [first for first, _ in talks])
            hosted = _first_tokens(url, [_last_changed(second) for _, second in talks])
        with started("serve", *flags) as (_, url):
            console.note("  second turns from disk, after a restart ...")
            stored = _first_tokens(url, [second for _, second in talks])
    arms = (("from host", hosted), ("after a restart, from disk", stored))
    return [
        compare(
            name=f"ess serve, {context:,} tokens, second turn {where}",
            unit="s",
            ours=seconds,
            baseline=("first turn", firsts),
            config={"cached_share": CACHED, "to": "the first token, over HTTP"},
        )
        for where, seconds in arms
    ]


def _last_changed(prompt: Sequence[int]) -> list[int]:
    """A different second turn, so that the turn from disk was never computed before."""
    shared = int(CACHED * len(prompt))
    return [*prompt[:shared], *reversed(prompt[shared:])]


def _first_tokens(url: str, prompts: Sequence[list[int]]) -> list[float]:
    """Seconds of each, one after the other, once the server is warm."""
    asyncio.run(streamed(url, _request_body(text(WARM, number=777))))
    return [asyncio.run(streamed(url, _request_body(prompt))).first_s for prompt in prompts]


def _request_body(prompt: list[int]) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "stream": True}
