"""Asynchronous sends against synchronous ones, over links as slow as between machines.

A frame takes `LINK_SHARE` of a chunk's time in a stage. Both pipelines run in turn.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Final

from ess import console
from ess.bench.harness.report import Row, compare
from ess.bench.prefill.rig import embedded, ends_of, layers_of, plan_of, sharing, stage_s, text
from ess.prefill.trial.pipe import Pipe, TrialTimes
from ess.prefill.trial.pipe_messages import Slow
from ess.sim.prefill.stage_clock import Links, clocked
from ess.sim.prefill.tuning import AHEAD

STAGES: Final = 2
LINK_SHARE: Final = 0.4
LATENCY_SHARE: Final = 0.1
STATE_BYTES: Final = 4


def send_rows(plain: TrialTimes, context: int, chunk: int, *, rounds: int) -> list[Row]:
    """`plain` ran over links at full speed: its chunk times set the rate of the slow ones."""
    layers, links = layers_of(STAGES), _links(plain, chunk)
    console.note(f"  sends over {links.bytes_per_s / 1e6:.3g} MB/s and {links.latency_s:.3g} s ...")
    spans: dict[bool, list[TrialTimes]] = {True: [], False: []}
    with contextlib.ExitStack() as stack:
        pipes = {
            is_async: stack.enter_context(
                Pipe(plan_of(layers, context, links=_slow(links, is_async=is_async)))
            )
            for is_async in spans
        }
        for number in range(rounds + 1):
            for is_async, pipe in pipes.items():
                ran = pipe.run([text(context, number=number)], ends_of(context, chunk))
                spans[is_async] += [ran] if number else []
    return [_real(spans, links, context, chunk), _on_clock(spans[True][-1], links, context)]


def _links(plain: TrialTimes, chunk: int) -> Slow:
    config, _ = embedded()
    each_s = statistics.median(max(times) for times in stage_s(plain, "wall"))
    frame = chunk * config.hidden_dim * STATE_BYTES
    return Slow(latency_s=LATENCY_SHARE * each_s, bytes_per_s=frame / (LINK_SHARE * each_s))


def _slow(links: Slow, *, is_async: bool) -> Slow:
    return Slow(latency_s=links.latency_s, bytes_per_s=links.bytes_per_s, is_async=is_async)


def _real(spans: dict[bool, list[TrialTimes]], links: Slow, context: int, chunk: int) -> Row:
    return compare(
        name=f"PP{STAGES}, {context:,} tokens, slow links, wall clock",
        unit="s",
        ours=[ran.span_s for ran in spans[True]],
        baseline=("synchronous sends", [ran.span_s for ran in spans[False]]),
        config={
            "cores": sharing(STAGES),
            "chunk": chunk,
            "latency_ms": round(1e3 * links.latency_s, 2),
            "mb_per_s": round(links.bytes_per_s / 1e6, 3),
        },
    )


def _on_clock(ran: TrialTimes, links: Slow, context: int) -> Row:
    """Spans with the stage times of one asynchronous round."""
    config, _ = embedded()
    seconds = stage_s(ran, "wall")
    sent = [chunk.count * config.hidden_dim * STATE_BYTES for chunk in ran.chunks]
    spans = [
        clocked(
            seconds,
            under_way_max=STAGES + AHEAD,
            links=Links(
                latency_s=links.latency_s, bytes_per_s=links.bytes_per_s, is_async=is_async
            ),
            sent_bytes=sent,
        ).span_s
        for is_async in (True, False)
    ]
    return compare(
        name=f"PP{STAGES}, {context:,} tokens, slow links, virtual clock",
        unit="s",
        ours=spans[:1],
        baseline=("synchronous sends", spans[1:]),
        config={"times": "wall clock, of one asynchronous round"},
    )
