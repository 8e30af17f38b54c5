"""How much of a decode step is not model math, in thread time, so that a busy machine counts less.

Model math is the compiled stages (projections, experts, head, and the norms and rotations between
them), the indexer and attention. Where layers run in one native call, its thread time is divided in
proportion to the wall time of the call's parts, the model's ending among them. The share of matrix
products in the stages is measured in further steps, which use schedules and run every stage again
and then its products alone; in the stricter of the two rows, stage time outside products counts as
overhead.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import numpy as np

from ess.bench.engine.arms.decode_arm import DecodeArm, DecodeWay, DecodeWork
from ess.bench.harness.folders import default_folder
from ess.bench.harness.lists import amount, size, sizes
from ess.bench.harness.prefix import Prefix, check_memory, embedded_prefix
from ess.bench.harness.report import Row
from ess.bench.harness.threads import compute_threads
from ess.engine.layers.direct import DirectLayers
from ess.errors import Unavailable
from ess.kernels.cpu import attend, index, layer, native, records, stage

STEPS: Final = 24
WARM_UP_STEPS: Final = 4
INSIDE_STEPS: Final = 5
TARGET: Final = 0.15
MODES: Final = ("resident", "none")
MATH: Final = (
    (layer.Part.FRONT, "stages"),
    (layer.Part.SELECT, "ess_index_top_k"),
    (layer.Part.ASK, "stages"),
    (layer.Part.ATTEND, "ess_attend"),
    (layer.Part.BACK, "stages"),
)


class Meter:
    """Thread time inside native compute calls, by name."""

    def __init__(self) -> None:
        self.ns: dict[str, float] = defaultdict(float)
        self._products: dict[int, Any] = {}

    def timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.thread_time_ns()
            result = run(*arguments)
            self.ns[name] += time.thread_time_ns() - started
            return result

        return call

    def layers(self, run: Callable[..., int]) -> Callable[..., int]:
        """Times the parts of layers that run in one call."""

        def call(layers: layer.Layers, which: range, step: Any, **more: Any) -> int:
            begun, started = time.monotonic_ns(), time.thread_time_ns()
            done = run(layers, which, step, **more)
            spent = time.thread_time_ns() - started
            began, ended = layers.column("began", which), layers.column("ended", which)
            taken = np.where(began >= begun, ended - began, 0).sum(axis=0)
            whole = max(1.0, float(taken.sum()) + step.ending_ns)
            for part, name in MATH:
                self.ns[name] += spent * float(taken[part]) / whole
            self.ns["stages"] += spent * step.ending_ns / whole
            return done

        return call

    def twice(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Runs a stage, then again, then its products alone: the last two with warm weights."""
        first, again = self.timed("stages", run), self.timed("again", run)
        products = self.timed("products", run)

        def call(ready: Any, bound: Any, tokens: int, threads: int) -> None:
            first(ready, bound, tokens, threads)
            again(ready, bound, tokens, threads)
            products(self._products_of(ready), bound, tokens, threads)

        return call

    @contextmanager
    def reading(self, *, twice: bool) -> Iterator[None]:
        untimed = attend.function

        def function(name: str, *types: Any) -> Callable[..., int]:
            return self.timed(name, untimed(name, *types))

        run = self.twice(stage._run()) if twice else self.timed("stages", stage._run())
        alone: Any = lambda *_: 0  # noqa: E731
        layers = layer.Layers
        with ExitStack() as stack:
            for home, name, value in (
                (attend, "function", function),
                (index, "function", function),
                (stage, "_run", lambda: run),
                (layers, "run", self.layers(layers.run)),
                (DirectLayers, "count", alone if twice else DirectLayers.count),
            ):
                stack.enter_context(mock.patch.object(home, name, value))
            yield

    def _products_of(self, ready: Any) -> Any:
        if id(ready) not in self._products:
            kinds = [stage.KINDS.index(name) for name in ("linear", "experts")]
            chosen = [op for op in ready.ops[: ready.op_count] if op.kind in kinds]
            kept = (records.Op * len(chosen))(*chosen)
            made = records.Stage(kept, len(chosen), ready.widths, ready.register_count)
            self._products[id(ready)] = (ready, made)
        return self._products[id(ready)][1]


def overhead_benchmark(
    *, ctx: str = "4k", batch: str = "16", mtp: int = 1, steps: int = STEPS, smoke: bool = False
) -> list[Row]:
    """The share of a decode step that is not model math, one compute thread.

    Parameters
    ----------
    ctx
        The context.
    batch
        Requests per step, a list.
    mtp
        Tokens verified per request and step.
    steps
        Measured steps.
    """
    if smoke:
        return rows_of(512, [2], steps=4)
    context, batches = size("--ctx", ctx), sizes("--batch", batch)
    check_memory(context * max(batches))
    return rows_of(context, batches, mtp=amount("--mtp", mtp), steps=amount("--steps", steps))


@compute_threads(1)
def rows_of(context: int, batches: Sequence[int], *, mtp: int = 1, steps: int) -> list[Row]:
    if not native.available():
        raise Unavailable(native.why_missing())
    prefix = embedded_prefix(context, folder=default_folder())
    return [
        row
        for batch in batches
        for mode in MODES
        for row in _rows(
            prefix, DecodeWork(context=context, batch=batch, mtp=mtp, steps=steps), mode
        )
    ]


def _rows(prefix: Prefix, shape: DecodeWork, mode: str) -> list[Row]:
    run = replace(shape, steps=shape.steps + WARM_UP_STEPS + INSIDE_STEPS)
    arm = DecodeArm(prefix, run, DecodeWay(name=mode, mode=mode, ratio=1.0))
    for _ in range(WARM_UP_STEPS):
        arm.step()
    taken = _measured(arm, shape.steps)
    inside = statistics.median(_inside(arm) for _ in range(INSIDE_STEPS))
    arm.offload.close()
    medians = {
        name: statistics.median(ns[name] for ns in taken) / 1e6
        for name in sorted(set().union(*taken))
    }
    config = {"context": shape.context, "batch": shape.batch, "mtp": shape.mtp, "mode": mode}
    config |= {"products": round(inside, 2)}
    config |= {f"{name}_ms": round(ms, 2) for name, ms in medians.items() if name != "step"}
    wide = statistics.median(_outside(ns, 1.0) for ns in taken)
    strict = statistics.median(_outside(ns, inside) for ns in taken)
    return [
        Row(name="step, thread time", value=medians["step"], unit="ms", config=config),
        _share("overhead: outside of native compute", wide, mode, shape.batch),
        _share("overhead: all but products, indexer and attention", strict, mode, shape.batch),
    ]


def _measured(arm: DecodeArm, count: int) -> list[Mapping[str, float]]:
    """Thread time of each step: of everything, and of each kind of native call."""
    taken: list[Mapping[str, float]] = []
    meter = Meter()
    with meter.reading(twice=False):
        for _ in range(count):
            meter.ns = defaultdict(float)
            started = time.thread_time_ns()
            arm.engine.step()
            meter.ns["step"] = time.thread_time_ns() - started
            taken.append(meter.ns)
    return taken


def _inside(arm: DecodeArm) -> float:
    """The share of the stages' time that goes into products."""
    meter = Meter()
    with meter.reading(twice=True):
        arm.step()
    return min(1.0, meter.ns["products"] / meter.ns["again"])


def _outside(ns: Mapping[str, float], inside: float) -> float:
    math = inside * ns["stages"] + ns["ess_attend"] + ns["ess_index_top_k"]
    return 1 - math / ns["step"]


def _share(name: str, share: float, mode: str, batch: int) -> Row:
    return Row(
        name=name,
        value=100 * share,
        unit="%",
        baseline="at most",
        baseline_value=100 * TARGET,
        ratio=TARGET / max(share, 1e-9),
        target=1.0,
        met=share <= TARGET,
        config={"mode": mode, "batch": batch},
    )
