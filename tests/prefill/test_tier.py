"""A pipeline and a worker that decodes: its answers are those of one engine."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import msgspec
import pytest

from ess.door import Offload
from ess.door.handoff.port import Port
from ess.engine.config import EngineConfig
from ess.engine.devices import backend_of
from ess.engine.engine import Engine
from ess.engine.requests.request import Request, Take
from ess.engine.tokens.sampling import Sampling
from ess.prefill.stages import members
from ess.transfer.endpoint import Identity
from ess.transfer.messages import Seal
from ess.transfer.transports.inprocess import Exchange, InProcessTransport
from tests.prefill.pipes import LAYER_COUNT, Pipe, Ragged, model_of, text
from tests.support.manual_clock import ManualClock

SEAL = Seal(b"a secret of all workers")
WISH = Sampling(tokens_max=12, ignore_eos=True)
LENGTHS = (1, 2, 64, 65, 66, 127, 129, 257, 300)
STEP_S = 0.002


def decoder(offload: Offload, mtp: int, port: Port | None = None, *, device: str = "cpu") -> Engine:
    config = EngineConfig(mtp=mtp, chunk_tokens=128, backend=backend_of(device))
    return Engine(model_of(None, device), offload, config, port=port)


def offload_of(mtp: int, *, device: str = "cpu") -> Offload:
    config = msgspec.structs.replace(model_of().config, mtp_layer_count=int(mtp > 1))
    layout = config.layout(row="f32", index="f32")
    return Offload.create(
        layout,
        slot_bytes=16 * layout.group_count * layout.page_bytes,
        host_bytes=64 * layout.host_page_bytes,
        length_max=1024,
        slot_floor=96,
        sequence_max=4,
        poison=True,
        device=device,
    )


class Tier:
    """All in one process, over one clock. Each stage has a port of its own."""

    def __init__(
        self,
        stage_count: int,
        *,
        mtp: int = 1,
        lease_s: float = 30.0,
        decode: str = "cpu",
        **pipe,
    ) -> None:
        self.clock, self.exchange = ManualClock(), Exchange()
        self.epochs = itertools.count(1)
        self.lease_s = lease_s
        self.pipe = Pipe(stage_count, port_of=self.port, mtp=mtp > 1, **pipe)
        self.decode_port = self.port(offload := offload_of(mtp, device=decode))
        self.decode = decoder(offload, mtp, self.decode_port, device=decode)
        self.lead_epoch = self.meet()

    def port(self, offload: Offload) -> Port:
        epoch = next(self.epochs)
        identity = Identity(epoch=epoch, seal=SEAL, layout=bytes(32))
        transport = InProcessTransport(
            identity, exchange=self.exchange, name=f"worker {epoch}", clock=self.clock
        )
        return Port(offload, transport, SEAL, clock=self.clock, wait_s=5.0, lease_s=self.lease_s)

    def meet(self) -> int:
        stages = [stage.port for stage in self.pipe.stages]
        layer_total = LAYER_COUNT + self.pipe.stages[-1].offload.layout.mtp_layer_count
        ranges = members(self.pipe.hellos, layer_total)
        stages[0].meet(self.decode_port.metadata())
        self.pipe.lead.meet(self.decode_port.metadata())
        self.pipe.settle()
        return self.decode_port.meet(stages[0].metadata(ranges))

    def add(self, prompt: list[int], uid: int, **more) -> tuple[Request, Request]:
        take = Take(uid, self.lead_epoch)
        return self.pipe.add(prompt, uid=uid, **more), self.decode.add(prompt, WISH, take=take)

    def turn(self) -> None:
        self.clock.advance(STEP_S)
        for turn in (*self.pipe.turns, self.decode.step):
            turn()

    def run(self) -> None:
        for _ in range(4000):
            is_over = self.pipe.lead.is_idle and not self.pipe.lead.is_handing_over
            if is_over and self.decode.is_idle:
                self.pipe.settle()
                self.decode.check()
                return
            self.turn()
        raise AssertionError("it never ends")


def alone(prompts: Sequence[Sequence[int]], mtp: int) -> list[list[int]]:
    return _alone(tuple(map(tuple, prompts)), mtp)


@functools.lru_cache(maxsize=8)
def _alone(prompts: tuple[tuple[int, ...], ...], mtp: int) -> list[list[int]]:
    engine = decoder(offload_of(mtp), mtp)
    requests = [engine.add(list(prompt), WISH) for prompt in prompts]
    for _ in engine.run():
        pass
    return [request.output for request in requests]


@pytest.mark.parametrize("mtp", [1, 2])
@pytest.mark.parametrize("stage_count", [1, 2, 4])
def test_answers_through_a_pipeline_are_those_of_one_engine(stage_count, mtp):
    prompts = [text(length, seed=9) for length in LENGTHS]
    tier = Tier(stage_count, mtp=mtp)
    asked = [tier.add(prompt, uid) for uid, prompt in enumerate(prompts)]
    tier.run()
    assert [take.output for _, take in asked] == alone(prompts, mtp)
    assert tier.decode_port.counts.landed_count == len(prompts)
    assert {type(ended).__name__ for ended in tier.pipe.lead.ended_handoffs} == {"Sent"}


def test_answers_are_the_same_from_chunks_of_any_size_and_from_cached_prefixes():
    base = text(300, seed=9)
    prompts = [base, base[:200] + text(50), base[:130], base]
    tier = Tier(2, sizes=Ragged())
    outputs, cached = [], []
    for uid, prompt in enumerate(prompts):
        give, take = tier.add(prompt, uid)
        tier.run()
        outputs.append(take.output)
        cached.append(give.cached_count)
    assert outputs == alone(prompts, 1)
    assert cached == [0, 192, 128, 256]


def test_a_prompt_that_is_cancelled_here_is_made_there():
    prompt = text(300, seed=9)
    tier = Tier(2)
    give, take = tier.add(prompt, 1)
    for _ in range(3):
        tier.turn()
    tier.pipe.lead.cancel(give)
    tier.run()
    assert take.output == alone([prompt], 1)[0]


def test_an_answer_that_is_not_wanted_any_more_frees_every_stage():
    tier = Tier(2, lease_s=1.0)
    give, take = tier.add(text(300, seed=9), 1)
    while give.reason is None:
        tier.turn()
    tier.decode.cancel(take)
    tier.run()
    assert len(tier.pipe.lead._prompts) == 0
