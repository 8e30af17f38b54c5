"""Families with states under random calls and little memory: always the plain model's tokens."""

from __future__ import annotations

import random

import pytest

from ess.door.sequences import kept
from ess.engine.engine import Engine, EngineConfig
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.errors import PoolFull
from tests.compressed import drafting
from tests.states.world import EACH, GLM5, LINE, MADE, OTHER, V4, World
from tests.support.few import few
from tests.support.manual_lane import ManualLane

LENGTHS = (1, 3, 8, 31, 256, 257, 259, 300, 511, 513, 530)
HOST_PAGES = {GLM5: 30, V4: 9}
INDEX_PAGES = {GLM5: 20, V4: 6}
TURNS = 60


def engine(world: World, seed: int) -> Engine:
    """Less of everything than the requests want: lines, pages of both kinds, slots."""
    draw, mtp = random.Random(seed), (4, 1, 2)[seed % 3] if world is V4 else 1
    layout = world.layout(mtp=mtp)
    offload = world.offload(
        chunks=draw.choice((1, 2)),
        mtp=mtp,
        host_bytes=HOST_PAGES[world] * layout.host_page_bytes,
        index_bytes=INDEX_PAGES[world] * layout.index_page_bytes,
        length_max=768,
        sequence_max=4,
        lane=ManualLane(seed=seed, delay_max=3),
    )
    config = EngineConfig(
        modes=draw.choice(("none", "da", "dba", "layerwise", "resident")),
        chunk_tokens=draw.choice((48, 150)),
        depth=draw.choice((0, 1)),
        tbo="off" if world is V4 else draw.choice(("off", 2)),
        mtp=mtp,
        promise="some",
    )
    return Engine(world.model(), offload, config)


class Walk:
    """Requests that begin with one of two lines."""

    def __init__(self, seed: int, engine: Engine) -> None:
        self.draw, self.engine = random.Random(seed), engine
        self.asked: list[tuple[Request, int, int]] = []
        self.cancelled: set[int] = set()

    def add(self) -> None:
        line, length = self.draw.randrange(2), self.draw.choice(LENGTHS)
        sampling = Sampling(tokens_max=MADE, ignore_eos=True)
        salt = self.draw.choice((b"", b"", b"other"))
        prompt, leader = (LINE, OTHER)[line][:length], None
        for _ in range(self.draw.choice((1, 1, 3))):
            request = self.engine.add(prompt, sampling, leader=leader, salt=salt)
            leader = leader or request
            self.asked.append((request, line, length))

    def running(self, *states: str) -> list[Request]:
        return [request for request, _, _ in self.asked if request.state in states]

    def turn(self) -> None:
        if len(self.running("waiting", "prefilling", "decoding", "preempted")) < 6:
            self.add()
        going, held = self.running("prefilling", "decoding"), self.running("preempted")
        what = self.draw.randrange(8)
        if what == 0 and going:
            self.engine.preempt(self.draw.choice(going))
        elif what == 1 and going:
            self.cancel(self.draw.choice(going))
        elif what < 4 and held:
            self.resume(self.draw.choice(held))
        self.engine.step()

    def cancel(self, request: Request) -> None:
        self.engine.cancel(request)
        self.cancelled.add(request.number)

    def resume(self, request: Request) -> None:
        try:
            self.engine.resume(request)
        except PoolFull:
            self.engine.step()

    def end(self) -> None:
        while held := [request for request in self.running("preempted") if request.is_held]:
            self.resume(held[0])
            self.engine.step()
        for _ in self.engine.run():
            pass
        self.engine.offload.drain()


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("seed", few(range(3), all_of=range(6)))
def test_whatever_happens_answers_are_the_plain_model_s(
    seed: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "KEPT_TOKENS", max(128, world.page))
    if world is V4:
        drafting.known(monkeypatch, V4.model(), seed=seed)
    walk = Walk(seed, engine(world, seed))
    for number in range(TURNS):
        walk.turn()
        if number % 5 == 0:
            walk.engine.offload.check()
            walk.engine.check()
    walk.end()
    for request, line, length in walk.asked:
        if request.number not in walk.cancelled:
            assert request.output == world.told(length, line=line), (request.number, line, length)
    stats = walk.engine.offload.stats()
    assert stats.free_index_page_count == stats.index_page_count
    assert not stats.used_slot_count.any()
    walk.engine.offload.close()
