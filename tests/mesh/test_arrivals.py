"""Rows of prompts that arrive at several processes which are one engine: tokens as from one."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from ess.door.handoff.port import Port
from ess.engine.config import EngineConfig
from ess.engine.engine import Engine
from ess.engine.mesh.engines import Lead
from ess.engine.requests.request import Request, Take
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.transfer.endpoint import Identity
from ess.transfer.transports.inprocess import Exchange, InProcessTransport
from tests.mesh.rig import Shape, run_mesh
from tests.model.test_engine import engine, expected, prompt
from tests.pd.rigs import LAYOUT, SEAL, STEP_S, Worker
from tests.support.checkpoints import small
from tests.support.manual_clock import ManualClock

LENGTHS = (130, 2, 90, 64, 65, 200, 33)
COUNT = 9
WISH = Sampling(tokens_max=COUNT)


@dataclass
class Tier:
    """A prefill worker in the thread of rank 0, whose port it has met."""

    mtp: int = 1
    clock: ManualClock = field(default_factory=ManualClock)
    exchange: Exchange = field(default_factory=Exchange)
    uid: int = 0
    is_lost: bool = False

    def __post_init__(self) -> None:
        config = EngineConfig(mtp=self.mtp, chunk_tokens=64)
        pools = {"model": small("v32", layer_count=3)}
        self.prefill = Worker(self.exchange, 1, self.clock, config=config, pools=pools)

    def port_of(self, offload, whole) -> Port:
        identity = Identity(epoch=2, seal=SEAL, layout=LAYOUT)
        transport = InProcessTransport(
            identity, exchange=self.exchange, name="rank 0", clock=self.clock
        )
        more = {"wait_s": 5.0, "arrivals_max": 4, "ground": whole, "defers": True}
        self.port = Port(offload, transport, SEAL, clock=self.clock, **more)
        self.prefill.port.meet(self.port.metadata())
        self.port.meet(self.prefill.port.metadata())
        return self.port

    def add(self, lead: Lead, length: int, **more) -> Request:
        self.uid += 1
        self.prefill.engine.add(prompt(length), Sampling(tokens_max=1), give=self.uid)
        return self.take(lead, length, **more)

    def take(self, lead: Lead, length: int, **more) -> Request:
        return lead.add(prompt(length), WISH, take=Take(self.uid, 1), **more)

    def step(self, lead: Lead) -> None:
        self.clock.advance(STEP_S)
        if not self.is_lost:
            self.prefill.step()
        if lead.is_idle:
            lead.pump()
        else:
            lead.step()
        lead.check()
        self.port.check()

    def run(self, lead: Lead, until=lambda: False) -> None:
        for _ in range(4000):
            is_quiet = lead.is_idle and not lead.is_handing_over
            if until() or (is_quiet and (self.is_lost or self.prefill.is_quiet)):
                return
            self.step(lead)
        raise AssertionError("it goes on and on")


SHAPES = [
    Shape(tp=2, mtp=2),
    Shape(pp=2, mtp=4),
    Shape(tp=2, pp=2, mtp=1),
    Shape(tp=2, pp=3, mtp=2, chunks=2, index_pages=8),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_of_prompts_that_were_made_elsewhere(shape: Shape):
    """Rows of all layers land, also in pages of other stages, and windows warm all slots."""
    tier = Tier(shape.mtp)

    def act(lead: Lead) -> list[list[int]]:
        made = [tier.add(lead, length) for length in LENGTHS]
        tier.run(lead)
        again = tier.add(lead, 200)
        tier.run(lead)
        assert again.cached_count >= 128
        assert tier.port.counts.landed_count == len(LENGTHS) + 1
        return [request.output for request in (*made, again)]

    made = run_mesh(shape, act, port_of=tier.port_of, promise="some")
    assert made == [expected("v32", length, COUNT) for length in (*LENGTHS, 200)]


def test_what_is_given_up_or_missed_ends_alike_everywhere():
    tier = Tier()

    def act(lead: Lead) -> list[list[int]]:
        first, second = tier.add(lead, 200), tier.add(lead, 130)
        tier.run(lead, lambda: first.state == "landing" and len(tier.port.receiver) == 2)
        lead.cancel(first)
        unknown = lead.add(prompt(90), WISH, take=Take(77, 5))
        tier.uid += 1
        alone = tier.take(lead, 65)
        tier.run(lead, lambda: alone.state == "landing" and second.state != "landing")
        tier.is_lost = True
        tier.prefill.port.close()
        tier.run(lead)
        assert first.reason == "cancelled"
        assert tier.port.counts.missed_count == 2, (
            "of a peer that is not known, and of one that is gone"
        )
        return [request.output for request in (second, unknown, alone)]

    made = run_mesh(Shape(tp=2, pp=2), act, port_of=tier.port_of)
    assert made == [expected("v32", length, COUNT) for length in (130, 90, 65)]


@pytest.mark.parametrize("late", ["writer", "reader"])
def test_rows_land_however_late_a_member_is(late: str):
    tier = Tier()

    def act(lead: Lead) -> list[list[int]]:
        made = [tier.add(lead, length) for length in LENGTHS]
        tier.run(lead)
        return [request.output for request in made]

    shape = Shape(tp=2, index_pages=8, chunks=2)
    made = run_mesh(shape, act, late=late, port_of=tier.port_of, promise="some", modes="da")
    assert made == [expected("v32", length, COUNT) for length in LENGTHS]


@pytest.mark.parametrize(("tp", "pp", "mtp", "late"), [(2, 1, 2, "writer"), (1, 3, 1, None)])
def test_invented_rows_are_the_same_on_all_ranks(tp, pp, mtp, late):
    """Each rank has a salt of its own for them, so they are of no use to a later request on any."""

    def act(eng: Engine) -> list[list[int]]:
        leader = eng.add(prompt(130), WISH, take=Take(0, fake=True))
        made = [leader, eng.add(prompt(130), WISH, leader=leader, take=Take(0, fake=True))]
        eng.step()
        eng.pump()
        made.append(eng.add(prompt(90), WISH, take=Take(0, fake=True)))
        for _ in eng.run():
            eng.check()
        honest = eng.add(prompt(130), WISH)
        for _ in eng.run():
            eng.check()
        assert honest.cached_count == 0
        assert honest.output == expected("v32", 130, COUNT)
        return [request.output for request in made]

    alone = engine("v32", mtp=mtp, modes="none", chunks=4, fake_prefill=True)
    wanted = act(alone)
    alone.offload.close()
    shape = Shape(tp=tp, pp=pp, mtp=mtp, chunks=2)
    assert run_mesh(shape, act, late=late, modes="none", fake_prefill=True) == wanted


def test_what_an_engine_of_several_processes_refuses():
    def act(lead: Lead) -> list[int]:
        with pytest.raises(BadInput, match="handoff 5: no rows come to this engine"):
            lead.add(prompt(40), WISH, take=Take(5, 1))
        with pytest.raises(BadInput, match="fake_prefill is off"):
            lead.add(prompt(40), WISH, take=Take(5, fake=True))
        with pytest.raises(BadInput, match="hands no prompts over"):
            lead.add(prompt(40), WISH, give=5)
        made = lead.add(prompt(40), WISH)
        while not lead.is_idle:
            lead.step()
        return made.output

    assert run_mesh(Shape(tp=2), act) == expected("v32", 40, COUNT)
