"""Where the time of a step goes: spans of a running engine, and timelines that a browser shows.

Nothing in the engine is changed. The model's layers, the offload and its lane are stood in for by
subclasses that note when they are called; what lies between two calls is named by what came before
and after it, since the calls of a layer come in one order:

    enter | index | append | (select) | resolve | wait | (attend) | output | mlp

In DA and DBA (attend) begins before the wait, which is then a span within it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from ess.bench.lanes import Job
from ess.door import Offload
from ess.models.decoder import DecoderLayer
from ess.models.model import Model
from ess.sim.timeline import COMPUTE, FETCH, STORE, Span

T = TypeVar("T")
BETWEEN: Final = {"resolve": "select", "locate": "select", "wait": "attend", "output": "attend"}
REST: Final = "rest"


class Call(NamedTuple):
    name: str
    start_ns: int
    end_ns: int


class Watch:
    """Calls of one step, in the order of their ends."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def call(self, name: str, function: Callable[[], T]) -> T:
        start = time.monotonic_ns()
        result = function()
        self._calls.append(Call(name, start, time.monotonic_ns()))
        return result

    def take(self) -> list[Call]:
        taken, self._calls = self._calls, []
        return taken


class WatchedLayer(DecoderLayer):
    def __init__(self, layer: DecoderLayer, watch: Watch) -> None:
        self.__dict__.update(layer.__dict__)
        self._watch = watch

    def enter(self, *given: Any) -> Any:
        return self._watch.call("enter", lambda: super(WatchedLayer, self).enter(*given))

    def index(self, *given: Any) -> Any:
        return self._watch.call("index", lambda: super(WatchedLayer, self).index(*given))

    def output(self, *given: Any) -> Any:
        return self._watch.call("output", lambda: super(WatchedLayer, self).output(*given))

    def mlp(self, *given: Any) -> Any:
        return self._watch.call("mlp", lambda: super(WatchedLayer, self).mlp(*given))


class WatchedModel(Model):
    def __init__(self, model: Model, watch: Watch) -> None:
        self.__dict__.update(model.__dict__)
        self.layers = tuple(WatchedLayer(layer, watch) for layer in model.layers)
        if model.mtp is not None:
            self.mtp = copy.copy(model.mtp)
            self.mtp.layer = WatchedLayer(model.mtp.layer, watch)


class WatchedOffload(Offload):
    """`watch` is set after `create`."""

    watch: Watch | None = None

    def _noted(self, name: str, function: Callable[[], T]) -> T:
        return function() if self.watch is None else self.watch.call(name, function)

    def append(self, *given: Any, **named: Any) -> Any:
        above = super().append
        return self._noted("append", lambda: above(*given, **named))

    def resolve(self, *given: Any, **named: Any) -> Any:
        above = super().resolve
        return self._noted("resolve", lambda: above(*given, **named))

    def locate(self, *given: Any, **named: Any) -> Any:
        above = super().locate
        return self._noted("locate", lambda: above(*given, **named))

    def commit(self, *given: Any, **named: Any) -> Any:
        above = super().commit
        return self._noted("commit", lambda: above(*given, **named))


def step_spans(
    calls: Iterable[Call], jobs: Sequence[Job], begin_ns: int, end_ns: int
) -> list[Span]:
    """One step on two lanes; the compute lane without holes."""
    waits = [
        Call("wait", start, end) for job in jobs for start, end in job.waits_ns if start < end_ns
    ]
    spans: list[Span] = []
    at_ns = begin_ns
    for call in sorted([*calls, *waits], key=lambda one: one.start_ns):
        if call.start_ns > at_ns:
            name = BETWEEN.get(call.name, REST)
            spans.append(_span(COMPUTE, name, at_ns, call.start_ns, begin_ns))
        start_ns = max(call.start_ns, at_ns)
        if call.end_ns > start_ns:
            spans.append(_span(COMPUTE, call.name, start_ns, call.end_ns, begin_ns))
        at_ns = max(at_ns, call.end_ns)
    if end_ns > at_ns:
        spans.append(_span(COMPUTE, REST, at_ns, end_ns, begin_ns))
    for job in jobs:
        lane = FETCH if any(start < end_ns for start, _ in job.waits_ns) else STORE
        name = f"{lane} {job.byte_count:,} B"
        spans.append(_span(lane, name, job.started_ns, job.finished_ns, begin_ns))
    return spans


def _span(lane: str, name: str, start_ns: int, end_ns: int, begin_ns: int) -> Span:
    return Span(lane, name, (start_ns - begin_ns) / 1e3, (end_ns - begin_ns) / 1e3)
