"""Engines that hand prompts over to one another, in one process."""

from __future__ import annotations

from collections.abc import Sequence

from ess.door import Offload
from ess.door.handoff.port import Port
from ess.engine.engine import Engine, EngineConfig
from ess.engine.plan import StepResult
from ess.engine.requests.request import Request, Take
from ess.engine.tokens.sampling import Sampling
from ess.models.model import Model
from ess.transfer.endpoint import Identity
from ess.transfer.messages import Seal
from ess.transfer.transports.inprocess import Exchange, InProcessTransport
from tests.support.checkpoints import small
from tests.support.manual_clock import ManualClock

SEAL = Seal(b"a secret of all workers")
LAYOUT = bytes(range(32))
STEP_S = 0.002
STEPS_MAX = 4000


def offload_of(
    *,
    mtp: int = 1,
    host_pages: int = 48,
    index_pages: int | None = None,
    lines: int = 4,
    slot_pages: int = 8,
    model: Model | None = None,
    **more,
) -> Offload:
    """`more` is for `Offload.create`."""
    layout = (model or small()).config.layout(row="f32", index="f32", has_mtp=mtp > 1)
    return Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.chunk_bytes * slot_pages,
        host_bytes=host_pages * layout.host_page_bytes,
        index_bytes=None if index_pages is None else index_pages * layout.index_page_bytes,
        length_max=1024,
        slot_floor=24,
        sequence_max=lines,
        poison=True,
        **more,
    )


class Stepped:
    """An engine with a port, which moves by steps."""

    engine: Engine
    port: Port

    def step(self) -> StepResult:
        result = self.engine.step()
        self.engine.check()
        self.port.receiver.check()
        self.port.sender.check()
        return result

    @property
    def is_quiet(self) -> bool:
        return self.engine.is_idle and not self.engine.is_handing_over


class Worker(Stepped):
    """An engine with a port. `offload` has the pools named by `pools`. What `wrap` makes of the
    transport is what the port is given."""

    def __init__(
        self,
        exchange,
        epoch,
        clock,
        *,
        config,
        pools,
        arrivals_max=64,
        lease_s=30.0,
        wait_s=5.0,
        wrap=lambda transport: transport,
    ):
        model = pools.get("model") or small()
        self.offload = offload_of(mtp=config.mtp, **pools)
        identity = Identity(epoch=epoch, seal=SEAL, layout=LAYOUT)
        self.transport = wrap(
            InProcessTransport(identity, exchange=exchange, name=f"worker {epoch}", clock=clock)
        )
        self.port = Port(
            self.offload,
            self.transport,
            SEAL,
            clock=clock,
            wait_s=wait_s,
            lease_s=lease_s,
            arrivals_max=arrivals_max,
        )
        self.engine = Engine(model, self.offload, config, port=self.port, clock=clock)


class Pair:
    """A worker that prefills and one that decodes, which have met. `decode_pools` are small."""

    def __init__(self, *, pools=None, prefill_pools=None, arrivals_max=64, lease_s=30.0, **config):
        settings = EngineConfig(**{"chunk_tokens": 64, "promise": "some", **config})
        self.clock, self.exchange = ManualClock(), Exchange()
        self.prefill = self._worker(1, settings, prefill_pools or {}, arrivals_max, lease_s)
        self.decode = self._worker(2, settings, pools or {}, arrivals_max, lease_s)
        self.meet()
        self.uid = 0

    def _worker(self, epoch, config, pools, arrivals_max, lease_s):
        return Worker(
            self.exchange,
            epoch,
            self.clock,
            config=config,
            pools=pools,
            arrivals_max=arrivals_max,
            lease_s=lease_s,
        )

    def meet(self) -> None:
        self.prefill.port.meet(self.decode.port.metadata())
        self.decode.port.meet(self.prefill.port.metadata())

    def give(self, prompt: Sequence[int], **more) -> Request:
        return self.prefill.engine.add(prompt, Sampling(tokens_max=1), give=self.uid, **more)

    def take(self, prompt: Sequence[int], sampling: Sampling, **more) -> Request:
        return self.decode.engine.add(prompt, sampling, take=Take(self.uid, 1), **more)

    def add(self, prompt: Sequence[int], sampling: Sampling, **more) -> tuple[Request, Request]:
        self.uid += 1
        return self.give(prompt), self.take(prompt, sampling, **more)

    def step(self) -> None:
        self.clock.advance(STEP_S)
        self.prefill.step()
        self.decode.step()

    def run(self) -> None:
        self.until(lambda: self.prefill.is_quiet and self.decode.is_quiet)

    def until(self, is_so) -> None:
        for _ in range(STEPS_MAX):
            if is_so():
                return
            self.step()
        raise AssertionError(f"not so after {STEPS_MAX} steps")


def alone(asked, *, mtp: int = 1, model: Model | None = None) -> list[list[int]]:
    """What an engine says that prefills and decodes itself."""
    offload, config = offload_of(mtp=mtp, model=model), EngineConfig(mtp=mtp, chunk_tokens=64)
    eng = Engine(model or small(), offload, config)
    requests = [eng.add(prompt, sampling) for prompt, sampling in asked]
    for _ in eng.run():
        pass
    return [request.output for request in requests]
