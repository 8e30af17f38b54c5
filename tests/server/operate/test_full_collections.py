"""Full garbage collections in an engine's process, which stop a step."""

from __future__ import annotations

import gc
import weakref

import zmq

from ess.clock import Clock
from ess.engine.config import ProcessConfig
from ess.engine.process.build import Built
from ess.engine.process.messages import Launch, Stop, ToEngine
from ess.engine.process.worker import serve
from tests.server.test_process import Script, build
from tests.support.manual_clock import ManualClock


class Loading:
    """Makes an engine, and garbage that only a collection finds."""

    def __init__(self) -> None:
        self.loaded: list[object] = []

    def __call__(self, launch: Launch, clock: Clock) -> Built:
        circle = Loading()
        circle.loaded.append(circle)
        self.left = weakref.ref(circle)
        return Built(build(1), None, vocabulary=512)


class Walked(Script):
    """At its first turn it looks what a full collection would walk through."""

    def __init__(self, loading: Loading) -> None:
        super().__init__()
        self.loading = loading
        self.is_walked: bool | None = None

    def take(self, *, timeout_s: float) -> list[ToEngine]:
        self.is_walked = any(each is self.loading.loaded for each in gc.get_objects())
        return [Stop()]


def test_a_full_collection_does_not_walk_through_what_was_loaded():
    launch = Launch(
        model="",
        config=ProcessConfig(),
        length_max=64,
        slot_bytes=0,
        host_bytes=0,
        index_bytes=0,
    )
    wire = Walked(Loading())
    with zmq.Context() as context:
        serve(launch, wire, ManualClock(), context, wire.loading)
    assert wire.is_walked is False
    assert wire.loading.left() is None, "garbage of the loading stays for good"
