"""The start values of the live policy: the embedded model's stage times, link rate and misses.

Decode steps run under NONE, DA and DBA over text of the Python manual, in an arena of a fifth of
the context. The cost of a schedule beyond NONE is the difference between the same steps under both:
two attentions and a merge instead of one, two selections instead of one. Each constant is a line
`fixed + each * count` through the times of all batches, or a multiple where a line would start
below zero. Misses are per request and step of two tokens, by layer and context.

`ess-bench calibrate --out FILE` writes what `ess serve --calibration FILE` and
`EngineConfig(calibration=FILE)` read.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from ess.bench.harness.report import Row
from ess.bench.harness.text import token_ids
from ess.bench.harness.threads import compute_threads
from ess.cost import Calibration
from ess.door import Offload
from ess.door.stats import Stats
from ess.engine.engine import Engine, EngineConfig
from ess.engine.ranks.agreement import Ranks
from ess.engine.step.tuning import ATTENTION
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.models.load import load_model
from ess.models.model import Model
from ess.overlap.calibration import LAYOUT, MISSES, PREFIX, RATE, shape_of
from ess.units import PAGE_ROWS, div_ceil

RATIO: Final = 0.2
SETTLE_STEPS: Final = 6
CHUNK: Final = 512
UNDISTURBED: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """Times at one context and several batches, misses at several contexts and the second batch."""

    context: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int


FULL: Final = CalibrationRun(context=1024, batches=(1, 2, 4), contexts=(1024, 4096), steps=24)
SMOKE: Final = CalibrationRun(context=320, batches=(1, 2), contexts=(320,), steps=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Per layer, over the steps of one batch: a low quantile, because other work on the machine can
    only make a step longer."""

    query_count: int
    key_count: float
    pre_attn_us: float
    attend_us: float
    select_us: float
    bytes_per_us: float


@compute_threads()
def calibrate_benchmark(*, smoke: bool = False) -> list[Row]:
    plan, model = SMOKE if smoke else FULL, load_model()
    rows = _constant_rows(model, plan)
    return rows + [
        row for context in plan.contexts for row in _measured_misses(model, context, plan)
    ]


def _constant_rows(model: Model, plan: CalibrationRun) -> list[Row]:
    seen = {
        mode: [_times(model, mode, batch, plan) for batch in plan.batches]
        for mode in ("none", "da", "dba")
    }
    constants = fitted(seen["none"], seen["da"], seen["dba"])
    config = {"context": plan.context, "batches": list(plan.batches), "mtp": 1}
    rate = statistics.median(times.bytes_per_us for times in seen["none"])
    return constant_rows(constants, rate, {**config, LAYOUT: shape_of(model.config.layout())})


def constant_rows(constants: Calibration, rate: float, config: dict[str, Any]) -> list[Row]:
    times = [
        Row(name=PREFIX + field.name, value=getattr(constants, field.name), unit="us")
        for field in fields(constants)
    ]
    return [*times, Row(name=PREFIX + RATE, value=rate, unit="B/us", config=config)]


def fitted(none: Sequence[Times], da: Sequence[Times], dba: Sequence[Times]) -> Calibration:
    """Constants from times of the same batches under three schedules."""
    queries = [times.query_count for times in none]
    pre_fixed, pre_each = line(queries, [times.pre_attn_us for times in none])
    keys = [times.key_count for times in none]
    index_fixed, index_each = line(keys, [times.select_us for times in none])
    splits = [max(0.0, b.attend_us - a.attend_us) for a, b in zip(none, da, strict=True)]
    split_fixed, split_each = line(queries, splits)
    halving = [
        b.select_us - a.select_us for a, b in zip(none, dba, strict=True) if b.query_count > 1
    ]
    return Calibration(
        pre_attn_fixed_us=pre_fixed,
        pre_attn_query_us=pre_each,
        attend_query_us=statistics.median(times.attend_us / times.query_count for times in none),
        index_fixed_us=index_fixed,
        index_key_us=index_each,
        split_fixed_us=split_fixed,
        split_query_us=split_each,
        index_split_us=max(0.0, statistics.median(halving)),
    )


def line(counts: Sequence[float], times_us: Sequence[float]) -> tuple[float, float]:
    """(fixed, each) of the best line; if one is below zero it becomes 0 and the other is fitted."""
    each, fixed = np.polyfit(counts, times_us, 1)
    if fixed < 0:
        return 0.0, float(np.dot(counts, times_us) / np.dot(counts, counts))
    if each < 0:
        return float(np.mean(times_us)), 0.0
    return float(fixed), float(each)


def _times(model: Model, mode: str, batch: int, plan: CalibrationRun) -> Times:
    made = settled_engine(model, context=plan.context, batch=batch, steps=plan.steps, modes=mode)
    steps = []
    for before, after in _steps(made, plan.steps):
        timeline = made.tuning.timeline
        layers = made.offload.layout.layer_count
        moved_ns = int((after.transfer_ns - before.transfer_ns).sum())
        moved = int((after.fetched_bytes - before.fetched_bytes).sum())
        steps.append(
            (
                timeline.total_us("pre_attn") / layers,
                timeline.total_us(*ATTENTION) / layers,
                timeline.total_us("select") / layers,
                moved_ns / moved if moved else math.nan,
            )
        )
    made.offload.close()
    pre_attn_us, attend_us, select_us, byte_ns = np.nanquantile(
        np.array(steps), UNDISTURBED, axis=0
    ).tolist()
    return Times(
        query_count=batch,
        key_count=batch * (plan.context + SETTLE_STEPS + plan.steps / 2),
        pre_attn_us=pre_attn_us,
        attend_us=attend_us,
        select_us=select_us,
        bytes_per_us=1e3 / byte_ns,
    )


def _measured_misses(model: Model, context: int, plan: CalibrationRun) -> list[Row]:
    batch = plan.batches[1]
    made = settled_engine(
        model, context=context, batch=batch, steps=plan.steps, mtp=2, modes="none"
    )
    pairs = list(_steps(made, plan.steps))
    first, last = pairs[0][0], pairs[-1][1]
    step_count = last.step_count - first.step_count
    missed = (last.miss_count - first.miss_count) / (step_count * batch)
    made.offload.close()
    layout = made.offload.layout
    of_layers = [float(missed[layout.group_of(layer)]) for layer in range(layout.layer_total)]
    return miss_rows(of_layers, {"context": context, "ratio": RATIO, "mtp": 2})


def miss_rows(misses: Sequence[float], config: dict[str, Any]) -> list[Row]:
    return [
        Row(name=PREFIX + MISSES, value=value, unit="rows", config={**config, "layer": layer})
        for layer, value in enumerate(misses)
    ]


def _steps(made: Engine, count: int) -> Iterator[tuple[Stats, Stats]]:
    """The statistics before and after each of `count` steps, once every request decodes."""
    for _ in range(SETTLE_STEPS):
        made.step()
    for _ in range(count):
        made.offload.drain()
        before = made.offload.stats()
        made.step()
        yield before, made.offload.stats()


def settled_engine(
    model: Model,
    *,
    context: int,
    batch: int,
    steps: int,
    mtp: int = 1,
    ranks: Ranks | None = None,
    **config: Any,
) -> Engine:
    """`batch` prompts of `context` tokens, prefilled, over an arena of `RATIO` of their rows."""
    layout = model.config.layout(name="ess-embedded", has_mtp=mtp > 1)
    chunk_count = batch * div_ceil(context, CHUNK)
    tokens_max = mtp * (steps + SETTLE_STEPS + chunk_count + 2)
    longest = context + tokens_max
    floor = max(int(RATIO * context), layout.top_k + mtp)
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.page_bytes * div_ceil(batch * floor, PAGE_ROWS),
        host_bytes=batch * div_ceil(longest, PAGE_ROWS) * layout.host_page_bytes,
        length_max=longest,
        slot_floor=floor,
    )
    settings = EngineConfig(mtp=mtp, chunk_tokens=CHUNK, **config)
    made = Engine(model, offload, settings, ranks=ranks)
    requests = [made.add(ids, Sampling(tokens_max=tokens_max)) for ids in texts(batch, context)]
    while any(request.state != "decoding" for request in requests):
        made.step()
    return made


def texts(count: int, length: int) -> list[list[int]]:
    """Different pages of the text that comes with Python."""
    ids, name = token_ids()
    if len(ids) < count * length:
        raise BadInput(f"{name} has {len(ids)} tokens, {count} contexts of {length} need more")
    return [ids[at * length : (at + 1) * length] for at in range(count)]
