"""DeepSeek-V4 through the engine under random calls and little memory: always the plain model's."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from ess.door import Offload
from ess.door.sequences import kept
from ess.engine.engine import Engine, EngineConfig
from ess.engine.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.errors import PoolFull
from tests.compressed import drafting, world
from tests.support import checkpoints
from tests.support.greedy import greedy
from tests.support.manual_lane import ManualLane

LENGTHS = (1, 3, 8, 31, 256, 257, 259, 300, 511, 513, 530)
TEXTS = [checkpoints.tokens(530, 96, seed=seed) for seed in (1, 2)]
MADE = 7
TURNS = 60


@functools.cache
def told(text: int, length: int) -> list[int]:
    return greedy(world.tiny(), TEXTS[text][:length], MADE)


def engine(seed: int) -> Engine:
    """Less of everything than the requests want: lines, pages of both kinds, slots."""
    model, draw, mtp = world.tiny(), random.Random(seed), (4, 1, 2)[seed % 3]
    layout = world.layout(mtp=mtp)
    offload = Offload.create(
        layout,
        slot_bytes=draw.choice((1, 2)) * layout.group_count * layout.page_bytes,
        host_bytes=9 * layout.host_page_bytes,
        index_bytes=6 * layout.index_page_bytes,
        length_max=768,
        sequence_max=4,
        slot_floor=8,
        lane=ManualLane(seed=seed, delay_max=3),
        poison=True,
    )
    config = EngineConfig(
        modes=draw.choice(("none", "da", "dba", "layerwise", "resident")),
        chunk_tokens=draw.choice((48, 150)),
        depth=draw.choice((0, 1)),
        mtp=mtp,
        promise="some",
    )
    return Engine(model, offload, config)


class Walk:
    """Requests that begin with one of two `texts`."""

    def __init__(self, seed: int, engine: Engine, texts: Sequence[list[int]] = TEXTS) -> None:
        self.draw, self.engine, self._texts = random.Random(seed), engine, texts
        self.asked: list[tuple[Request, int, int]] = []
        self.cancelled: set[int] = set()

    def add(self) -> None:
        text, length = self.draw.randrange(2), self.draw.choice(LENGTHS)
        sampling = Sampling(tokens_max=MADE, ignore_eos=True)
        salt = self.draw.choice((b"", b"", b"other"))
        leader = None
        for _ in range(self.draw.choice((1, 1, 3))):
            request = self.engine.add(
                self._texts[text][:length], sampling, leader=leader, salt=salt
            )
            leader = leader or request
            self.asked.append((request, text, length))

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
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_answers_are_the_plain_model_s(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(kept, "KEPT_TOKENS", 256)
    drafting.known(monkeypatch, world.tiny(), seed=seed)
    walk = Walk(seed, engine(seed))
    checked(walk, told)


def checked(walk: Walk, told: Callable[[int, int], list[int]]) -> None:
    """To its end: `told(text, length)` is what each request says, and nothing is left behind."""
    for number in range(TURNS):
        walk.turn()
        if number % 5 == 0:
            walk.engine.offload.check()
            walk.engine.check()
    walk.end()
    for request, text, length in walk.asked:
        if request.number not in walk.cancelled:
            assert request.output == told(text, length), (request.number, text, length)
    stats = walk.engine.offload.stats()
    assert stats.free_index_page_count == stats.index_page_count
    assert not stats.used_slot_count.any()
    walk.engine.offload.close()
