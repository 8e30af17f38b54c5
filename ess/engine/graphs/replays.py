"""Graphs of decode steps: which steps run as graphs, which eagerly, and why.

    eager     the first steps of a kind: kernels load, copies are prepared
    captured  then all that is queued between a step's beginning and its seal becomes a graph
    replayed  by every later step of the kind

A kind is all that decides what is queued: the bucket, the modes of all layers, the drafts, and
whether logits are kept. What differs from step to step lies in memory of the device that stays
where it is: the step's arrays, maps and tickets at the door, spans and columns here. This owner
alone launches graphs, in turn, on the stream that computes. So all graphs share their memory, and
what a graph makes there is read before the next graph is launched. That holds for the scratch
memory of cuBLAS too: torch keeps it by stream, all captures have one stream of their own, and where
torch lets go of it with any graph of that stream (2.13 does) it comes back to what these graphs
share.

A rank without tokens of its own also replays its part of the exchanges as a graph. The kind of such
a graph is the agreed sizes and the number of drafts. It takes no other graph's place: if all places
are taken, the rank runs its part eagerly. It does so too beside a step that fits no bucket. Such a
step is eager itself and launches more; a graph for its sizes would be captured while requests wait,
and be replayed rarely.

A timed step has events between its stages, so it needs a second graph of its kind. That graph is
captured in the rehearsal, for kinds with all drafts, or, for a kind that comes later, in the step
after the first graph's capture; if there is no room, it is not captured. No step is captured
because its turn to be timed has come: without a graph for it, the turn is skipped.

A graph holds addresses: pools, workspaces and weights are made once and stay.
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ess.door import Step
from ess.door.steps.step_answers import Recording
from ess.engine.graphs.buckets import EAGER_STEPS, bucket_of
from ess.engine.layers.batch import Course
from ess.engine.plan import Turn
from ess.engine.process.messages import GraphLine
from ess.engine.ranks.agreement import StepAgreement
from ess.engine.step.feeding import StepOutput
from ess.engine.step.runner import Runner
from ess.engine.step.warmth import HitCounter
from ess.engine.step_bytes import graph_bytes
from ess.overlap.timeline import Stopwatch

Cause = Literal["host logits", "no bucket", "verified", "first steps", "memory"]

KINDS_MAX: Final = 1024

Cuda: Any = torch.cuda
Key: TypeAlias = tuple[Course | None, Hashable]
"""Without a course: of steps in which this rank stands by."""


@dataclass(frozen=True, slots=True)
class DeviceResults:
    """The results of a step, on its device."""

    output: StepOutput
    hits: HitCounter


@dataclass(frozen=True, slots=True)
class StepForm:
    """How a step runs: padded to a bucket, so that it may be a graph; or for a cause as it is.
    Other ranks make room for a step of this `shape`, so that they need no graph for other sizes."""

    counts: tuple[int, ...]
    shape: tuple[int, ...]
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph. `step` is set for a step of this rank's own requests: its results, and its recording
    at the door."""

    graph: Any
    ran: npt.NDArray[np.int64]
    step: tuple[DeviceResults, Recording] | None


class Replays:
    """The counts are for logs and metrics: steps that were replayed or captured, eager steps by
    their cause, and graphs that were dropped to make room for others. `_untimed` are kinds whose
    next step is to be captured with times, `_fitting` the tokens of all buckets."""

    def __init__(
        self,
        runner: Runner,
        *,
        sizes: tuple[int, ...],
        verified_max: int,
        graph_max: int,
        byte_max: int | None,
        beside_bytes: int = 0,
    ) -> None:
        """`sizes` are of the buckets. Without `byte_max` all have what they are estimated to
        take. `beside_bytes` are what steps and prompts take of the device outside of graphs."""
        assert graph_max > 0, "no graph is kept: leave out the owner of graphs"
        self.replayed_count = 0
        self.captured_count = 0
        self.dropped_count = 0
        self.eager_counts: Counter[Cause] = Counter()
        self._runner = runner
        layout, pools = runner.offload.layout, runner.offload.sizes
        expert_ranks = runner.model.expert_ranks
        self._takes = partial(
            graph_bytes,
            runner.model.config,
            layout,
            length_max=pools.length_max,
            value_bytes=runner.model.layers[0].mla.dtype.itemsize,
            rank_count=1 if expert_ranks is None else expert_ranks.team.size,
        )
        self._query_max = pools.query_max
        self.sizes = sizes
        self._fitting = {
            sum(self.bucket((1,) * size, width))
            for size, width in product(sizes, range(1, verified_max + 1))
        }
        self.graph_max = graph_max
        largest = max(sizes, default=0) * verified_max
        estimated = self._takes(query_max=largest, graph_count=graph_max)
        self._byte_max = estimated if byte_max is None else byte_max
        self._beside_bytes = beside_bytes
        self._pool_bytes = 0
        self._held: OrderedDict[Key, Captured] = OrderedDict()
        self._seen: OrderedDict[Key, int] = OrderedDict()
        self._untimed: set[Key] = set()
        self._stream = Cuda.Stream(runner.model.device)
        self._pool = Cuda.graph_pool_handle()

    @property
    def byte_count(self) -> int:
        """The bytes held: the memory that all graphs share, as torch reports it, and the driver's,
        estimated."""
        held = len(self._held)
        return self._takes(query_max=0, graph_count=held, pool_bytes=self._pool_bytes)

    def fit(self, turns: Sequence[Turn], width: int) -> StepForm:
        """How the step will run; called before it begins. `width` is the number of queries that a
        request with all its drafts brings."""
        own = tuple(turn.query_count for turn in turns)
        bucket = self.bucket(own, width)
        if any(turn.request.sampling.changes_logits for turn in turns):
            return StepForm(own, bucket or own, "host logits")
        return StepForm(bucket, bucket) if bucket else StepForm(own, own, "no bucket")

    def bucket(self, counts: Sequence[int], width: int) -> tuple[int, ...]:
        return bucket_of(counts, self.sizes, query_max=self._query_max, width=width)

    def run(
        self,
        step: Step,
        fit: StepForm,
        course: Course,
        more: Hashable,
        compute: Callable[[], DeviceResults],
    ) -> DeviceResults:
        """Runs `compute`, as a graph where that is allowed. `more` holds everything else that
        decides which work is queued."""
        kind = _timed(course, more, is_timed=False)
        cause = fit.cause or ("verified" if course.verified_layer is not None else None)
        cause = cause or self._cause(kind, sum(course.counts))
        if cause is not None:
            self.eager_counts[cause] += 1
            return compute()
        key = self._in_time(kind, course, more)
        held = self._held.get(key)
        if held is None:
            held = self._capture(key, lambda: (compute(), step.record()))
            if key == kind and _timed(course, more) not in self._held:
                self._untimed.add(kind)
        else:
            assert held.step is not None, "a step of others"
            step.replay(held.step[1])
            self._replay(key, held)
        assert held.step is not None, "a graph of no step"
        return held.step[0]

    def stand_by(self, agreement: StepAgreement) -> None:
        """Runs this rank's part of a step that other ranks decode."""
        kind: Key = None, (agreement.sizes, agreement.draft_count)
        compute = partial(self._runner.standby.decode, agreement)
        fits = agreement.rooms.batch in self._fitting
        cause = self._cause(kind, agreement.rooms.batch) if fits else "no bucket"
        if cause is None and kind not in self._held and self.is_full:
            cause = "memory"
        if cause is not None:
            self.eager_counts[cause] += 1
            compute()
        elif kind in self._held:
            self._replay(kind, self._held[kind])
        else:
            self._capture(kind, compute)

    def _in_time(self, kind: Key, course: Course, more: Hashable) -> Key:
        """The kind with times or without: which of its graphs runs, or is captured now."""
        timed = _timed(course, more)
        if self._is_due(kind, sum(course.counts)):
            return timed
        if course.is_timed and timed not in self._held:
            self._watch.skip()
            return kind
        return timed if course.is_timed else kind

    def _is_due(self, kind: Key, query_count: int) -> bool:
        """Whether the kind's graph with times is captured in this step, the first that can be
        timed. Where there is no room for it then, it will not be captured."""
        if kind not in self._untimed:
            return False
        fits = not self.is_full and self.has_bytes(query_count)
        if fits and not self._watch.start():
            return False
        self._untimed.discard(kind)
        return fits

    @property
    def _watch(self) -> Stopwatch:
        watch = self._runner.offload.stopwatch
        assert watch is not None, "a step of a device is timed without a stopwatch"
        return watch

    def _drop(self) -> None:
        (course, more), _ = self._held.popitem(last=False)
        kind = _timed(course, more, is_timed=False)
        self._seen.pop(kind, None)
        self._untimed.discard(kind)
        self.dropped_count += 1

    def close(self) -> None:
        """Drops all graphs: a communicator of NCCL can end only after the graphs that hold its
        exchanges."""
        self._held.clear()
        self._untimed.clear()

    def rehearsed(self) -> None:
        """The rehearsal is over: kinds that have no timed graph, for want of room or because they
        have no drafts, will not get one."""
        self.eager_counts.clear()
        self._untimed.clear()

    def _cause(self, kind: Key, query_count: int) -> Cause | None:
        """Why a step runs eagerly whose kind has no graph yet. Where there were no bytes for one,
        the device is asked again when the kind has come twice as often: not in each step."""
        if kind in self._held:
            return None
        count = self._seen[kind] = self._seen.pop(kind, 0) + 1
        if len(self._seen) > KINDS_MAX:
            self._seen.popitem(last=False)
        if count <= EAGER_STEPS:
            return "first steps"
        asks = count & (count - 1) == 0
        return None if asks and self.has_bytes(query_count) else "memory"

    @property
    def is_full(self) -> bool:
        """Whether the next graph replaces the graph that was unused for longest."""
        return len(self._held) == self.graph_max

    def has_bytes(self, query_count: int) -> bool:
        """Whether there are bytes for a graph of such a step beside the graphs that stay."""
        count = len(self._held) + (not self.is_full)
        takes = self._takes(query_max=query_count, graph_count=count, pool_bytes=self._pool_bytes)
        return takes <= self._byte_max and self.left_bytes >= self._beside_bytes

    @property
    def left_bytes(self) -> int:
        """What is free of the device, also in torch's cache: the driver's part of a graph is only
        estimated, and all graphs of the rehearsal are captured before the first prompt runs."""
        device = self._runner.model.device
        cached = Cuda.memory_reserved(device) - Cuda.memory_allocated(device) - self._pool_bytes
        free, _ = Cuda.mem_get_info(device)
        return int(free + max(0, cached))

    def _replay(self, key: Key, held: Captured) -> None:
        self._held.move_to_end(key)
        held.graph.replay()
        self._runner.tuning.mode_counts += held.ran
        if self._runner.on_layer is not None:
            self._runner.on_layer()
        self.replayed_count += 1

    def _capture(
        self, key: Key, compute: Callable[[], tuple[DeviceResults, Recording] | None]
    ) -> Captured:
        """Captures the step and launches it: it has run when this returns."""
        graph, tuning = Cuda.CUDAGraph(), self._runner.tuning
        ran_before = tuning.mode_counts.copy()
        with self._capturing(graph):
            made = compute()
        graph.replay()
        self.captured_count += 1
        self._held[key] = held = Captured(graph, tuning.mode_counts - ran_before, made)
        if len(self._held) > self.graph_max:
            self._drop()
        return held

    @contextmanager
    def _capturing(self, graph: Any) -> Iterator[None]:
        """Captures on a stream of its own, because torch's default stream cannot be captured.
        During the capture nothing may be freed, and `on_layer` is not called, because it would
        query events."""
        device, between = self._runner.model.device, self._runner.on_layer
        collects, held_bytes = gc.isenabled(), Cuda.memory_reserved(device)
        gc.disable()
        self._runner.on_layer = None
        try:
            with Cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    yield
                except BaseException:
                    with suppress(RuntimeError):  # it says only that something before has failed
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            self._runner.on_layer = between
            if collects:
                gc.enable()
        self._pool_bytes += Cuda.memory_reserved(device) - held_bytes

    def line(self) -> GraphLine:
        return GraphLine(
            held=len(self._held),
            most=self.graph_max,
            bytes=self.byte_count,
            byte_max=self._byte_max,
            replayed=self.replayed_count,
            captured=self.captured_count,
            dropped=self.dropped_count,
            eager={str(cause): count for cause, count in self.eager_counts.items()},
        )

    def check(self) -> None:
        assert len(self._held) <= self.graph_max, f"{len(self._held)} graphs are held"
        held = self.captured_count - self.dropped_count
        assert held == len(self._held), f"{len(self._held)} graphs are held, not {held}"
        assert self._untimed <= self._held.keys(), "a kind without a graph is to be timed"
        assert len(self._seen) <= KINDS_MAX, f"{len(self._seen)} kinds are remembered"


def _timed(course: Course | None, more: Hashable, *, is_timed: bool = True) -> Key:
    return (None if course is None else replace(course, is_timed=is_timed)), more
