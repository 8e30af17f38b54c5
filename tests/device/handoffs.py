"""Prompts that one engine makes and another answers, one of them or both on the pretended device:
tokens as from an engine of the host alone. Run by `test_forward_steps`."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Final

import pytest
import torch

from ess.clock import RealClock
from ess.door.device.memory.uploads import Download
from ess.door.handoff.port import Port
from ess.engine.engine import Engine
from ess.engine.prompt.plain_rows import PlainRows
from ess.engine.requests.request import Request, Take
from ess.engine.tokens.sampling import Sampling
from ess.transfer.endpoint import Identity
from ess.transfer.messages import Seal
from ess.transfer.transport import Transport
from ess.transfer.transports import channel
from ess.transfer.transports.inprocess import Exchange, InProcessTransport
from ess.transfer.transports.kinds import open_transport
from tests.device import engines
from tests.support.checkpoints import tokens
from tests.support.few import few
from tests.support.manual_clock import ManualClock
from tests.support.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("alone")

SEAL: Final = Seal(b"a secret of all workers")
FACTORS: Final = {
    "way": ("cpu-cuda", "cuda-cpu", "cuda-cuda"),
    "family": ("v32", "glm"),
    "mode": ("none", "da", "dba", "layerwise"),
    "mtp": ("1", "2", "4"),
    "depth": ("0", "1"),
    "arena": ("ample", "tight", "smallest"),
    "over": ("memory", "tcp"),
}
CASES: Final = [
    dict(zip(FACTORS, values.split(), strict=True))
    for values in (
        "cpu-cuda v32 da 2 1 tight memory",
        "cuda-cpu glm none 4 0 ample tcp",
        "cuda-cuda v32 layerwise 1 1 smallest tcp",
    )
]
TEXT: Final = tokens(260, engines.VOCABULARY, seed=8)
WISHES: Final = (
    (TEXT[:200], {"temperature": 1.0, "seed": 3}),
    (TEXT[:1], {}),
    (TEXT[:66], {"temperature": 0.7, "seed": 4}),
    ([*TEXT[:130], *TEXT[200:230]], {}),
)
MISSED: Final = TEXT[100:190]
WAITS_S: Final = {"memory": 5.0, "tcp": 12.0}
"""How long rows are waited for. Over TCP time is the machine's, which may be busy."""
STEP_S: Final = 0.1


def wish(given) -> Sampling:
    return Sampling(tokens_max=6, ignore_eos=True, **given)


@functools.cache
def expected(family: str) -> list[list[int]]:
    eng = engines.engine("cpu", family=family)
    requests = [eng.add(prompt, wish(given)) for prompt, given in (*WISHES, (MISSED, {}))]
    for _ in eng.run():
        pass
    eng.offload.close()
    return [request.output for request in requests]


class Pair:
    """A worker that gives prompts, and one that takes them; both have met."""

    def __init__(self, way: str, *, over: str = "memory", **case: str) -> None:
        self.clock = ManualClock() if over == "memory" else RealClock()
        self._exchange = Exchange() if over == "memory" else None
        self._uid = 0
        self._wait_s = WAITS_S[over]
        self.workers = [self._worker(at, device, case) for at, device in enumerate(way.split("-"))]
        self.giver, self.taker = self.workers
        mine, others = self.ports
        others.meet(mine.metadata())
        mine.meet(others.metadata())

    def _worker(self, at: int, device: str, case: dict[str, str]) -> Engine:
        made, offload, chosen = engines.parts(device, **case)
        identity = Identity(epoch=at + 1, seal=SEAL, layout=bytes(32))
        transport = self._transport(identity, f"worker {at}")
        port = Port(offload, transport, SEAL, clock=self.clock, wait_s=self._wait_s)
        self.ports = [*getattr(self, "ports", []), port]
        return Engine(made, offload, chosen, port=port, clock=self.clock)

    def _transport(self, identity: Identity, name: str) -> Transport:
        if self._exchange is None:
            return open_transport("tcp", identity, clock=self.clock)
        return InProcessTransport(identity, exchange=self._exchange, name=name, clock=self.clock)

    def add(self, prompt, given, *, is_given: bool = True) -> tuple[Request | None, Request]:
        self._uid += 1
        gift = Sampling(tokens_max=1)
        gives = self.giver.add(prompt, gift, give=self._uid) if is_given else None
        return gives, self.taker.add(prompt, wish(given), take=Take(self._uid, 1))

    def step(self) -> None:
        for eng, port in zip(self.workers, self.ports, strict=True):
            eng.step()
            eng.check()
            port.check()

    def until(self, is_so) -> None:
        began_s = time.monotonic()
        while not is_so():
            self.step()
            if isinstance(self.clock, ManualClock):
                self.clock.advance(STEP_S)
            assert time.monotonic() - began_s < 240, "nothing happens"

    def run(self) -> None:
        self.until(lambda: all(eng.is_idle and not eng.is_handing_over for eng in self.workers))

    def close(self) -> None:
        for eng, port in zip(self.workers, self.ports, strict=True):
            port.close()
            eng.offload.drain()
            assert not eng.offload.stats().used_slot_count.sum()
            eng.offload.close()


def values(case) -> str:
    return "-".join(case.values())


MORE: Final = [pytest.param(case, marks=pytest.mark.long) for case in pairwise(FACTORS)]


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=values)
def test_the_tokens_are_those_of_the_host(case):
    """One prompt's rows do not come; the last one comes when both sides have its prefix."""
    pair, family = Pair(**case), case["family"]
    added = [pair.add(*each) for each in WISHES[:-1]]
    strange = pair.taker.add(MISSED, wish({}), take=Take(99, 77))
    pair.run()
    gives, takes = pair.add(*WISHES[-1])
    pair.run()
    assert gives.cached_count == takes.cached_count == (64 if int(case["mtp"]) > 1 else 128)
    outputs = [request.output for _, request in (*added, (gives, takes))]
    assert [*outputs, strange.output] == expected(family)
    assert [given.reason for given, _ in (*added, (gives, takes))] == ["sent"] * len(WISHES)
    assert pair.ports[1].counts.landed_count == pair.ports[0].counts.sent_count == len(WISHES)
    pair.close()


@pytest.mark.parametrize("ends", few(["giver"], all_of=["giver", "taker"]))
def test_what_is_cancelled_midway_harms_no_other(ends):
    pair = Pair("cuda-cuda", mtp="2", depth="1", mode="da", graphs="many")
    stays = pair.add(*WISHES[2])
    gives, takes = pair.add(*WISHES[0])
    pair.until(lambda: 0 < gives.prefilled_count < gives.prefill_count)
    assert takes.state == "landing"
    pair.giver.cancel(gives) if ends == "giver" else pair.taker.cancel(takes)
    again = pair.add(*WISHES[0])
    pair.run()
    wanted = expected("v32")
    assert [stays[1].output, again[1].output] == [wanted[2], wanted[0]]
    assert takes.output == (wanted[0] if ends == "giver" else [])
    assert (gives.reason, takes.reason) in (("cancelled", "length"), ("sent", "cancelled"))
    pair.close()


def test_rows_come_while_the_host_waits_for_a_device(monkeypatch):
    """Beside a quick step as many as its own pumps read; beside a slow one, all that are left."""
    pair = Pair("cpu-cuda", over="tcp", graphs="many")
    monkeypatch.setattr(channel, "READ_BYTES", 1 << 12)
    monkeypatch.setattr(channel, "VECTORS", 1)
    beside = pair.taker.add(TEXT[:66], Sampling(tokens_max=40, ignore_eos=True))
    pair.until(lambda: beside.output)
    gives, takes = pair.add(*WISHES[0])
    counts, is_slow, looks = pair.ports[1].counts, False, itertools.count()

    def done(_download):
        pair.ports[0].pump()
        return not is_slow or counts.landed_count or next(looks) > 10_000

    def came() -> int:
        before = read()
        pair.ports[0].pump()
        pair.taker.step()
        return read() - before

    def read() -> int:
        return sum(link.channel.read_bytes for link in pair.ports[1]._transport._links)

    monkeypatch.setattr(Download, "done", done)
    while not gives.is_prefilled:
        pair.giver.step()
    assert any(came() > 1 << 12 for _step in range(9)), "no row comes"
    quick = max(came() for _step in range(3))
    assert not counts.landed_count
    is_slow = True
    assert came() > 2 * quick
    assert counts.landed_count
    pair.run()
    assert takes.output == expected("v32")[0]
    pair.close()


def test_a_layer_leaves_while_the_next_one_is_made(monkeypatch):
    """The host waits for a layer's rows when the device has been given the next one to do."""
    pair, told = Pair("cuda-cpu", mtp="2"), []
    sender, enter = pair.ports[0].sender, PlainRows.enter
    made = sender.made

    def entered(rows, layer):
        told.append(("queued", layer))
        enter(rows, layer)

    def stored(uid, layer, stop):
        told.append(("made", layer))
        made(uid, layer, stop)

    monkeypatch.setattr(PlainRows, "enter", entered)
    monkeypatch.setattr(sender, "made", stored)
    pair.add(TEXT[:66], {})
    pair.run()
    last = pair.giver.offload.layout.layer_total - 1
    between = [(what, at) for at in range(1, last + 1) for what in ("queued", "made")]
    between = [(what, at - (what == "made")) for what, at in between]
    assert told == [("queued", 0), *between, ("made", last)]
    pair.close()


def test_packs_of_prompts_share_a_stream(monkeypatch):
    """Torch has 32 and lends them in turn: a pack's own would be another owner's too."""
    pair = Pair("cuda-cpu")
    pair.add(TEXT[:66], {})
    pair.run()

    def refused(*_):
        raise AssertionError("another stream")

    monkeypatch.setattr(torch.cuda, "Stream", refused)
    pair.add(MISSED, {})
    pair.run()
    pair.close()


def test_an_event_is_of_the_device_that_it_tells_of(monkeypatch):
    """Of the current one, which may be another, it would have passed before the copy."""
    pair, given, record = Pair("cuda-cpu"), [], torch.cuda.Event.record

    def recorded(event, stream=None):
        given.append(stream)
        record(event, stream)

    monkeypatch.setattr(torch.cuda.Event, "record", recorded)
    pair.add(TEXT[:66], {})
    pair.run()
    pair.giver.offload.verify(0)
    assert given
    assert None not in given
    pair.close()
