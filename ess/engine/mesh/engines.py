"""The engines of a mesh: rank 0's passes on every call, the others' repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Unpack

from ess.comm.group import Group
from ess.door import Offload
from ess.door.checks import token_ids
from ess.door.handoff.port import Port
from ess.engine.config import EngineConfig
from ess.engine.engine import Engine
from ess.engine.mesh.grammars import MeshEntry
from ess.engine.mesh.lockstep import Lockstep
from ess.engine.mesh.port import EchoPort, LeadPort
from ess.engine.mesh.relay import Relay
from ess.engine.mesh.words import (
    Added,
    Call,
    Cancelled,
    Closed,
    Forgot,
    Learned,
    Preempted,
    Pumped,
    Resumed,
    Scored,
    Stepped,
)
from ess.engine.plan import Chunk, StepResult
from ess.engine.prompt.run import Prefilled
from ess.engine.requests.intake import RequestOptions, check_kinds
from ess.engine.requests.request import Request, Take
from ess.engine.tokens.chance import Chance
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput, BadState, PoolFull
from ess.models.model import Model
from ess.models.text.tokenizer import Tokenizer


class MeshEngine(Engine):
    """A rank's engine, over its part of the model."""

    def __init__(
        self,
        model: Model,
        offload: Offload,
        config: EngineConfig,
        group: Group,
        *,
        tokenizer: Tokenizer | None = None,
        port: Port | None = None,
    ) -> None:
        """Rank 0 has the `port`, where handoffs arrive."""
        self.lockstep = Lockstep(group, offload)
        self.lockstep.agree()
        self._arrivals = LeadPort(port, self.lockstep) if port is not None else None
        self._is_in_step = False
        super().__init__(
            model,
            offload,
            config,
            entry=MeshEntry(model.config, tokenizer, self.lockstep),
            port=self._arrivals if self.lockstep.is_lead else EchoPort(self.lockstep),
            ranks=self.lockstep,
            way=Relay(self.lockstep),
        )

    def _scored(
        self, prefilled: Sequence[Prefilled], chunks: Sequence[Chunk]
    ) -> tuple[tuple[Chance, ...], ...]:
        """The last stage has the head; the chances of its first member are used. Where chunks
        follow a target rank 0 waits for them though they are empty: it times a pack until they
        come, through all stages."""
        is_asked = any(chunk.request.sampling.prompt_logprobs is not None for chunk in chunks)
        if not is_asked and not self._config.tpot_ms:
            return tuple(() for _ in chunks)
        base, is_last = super()._scored, self.runner.model.is_last
        made = self.lockstep.spread(
            lambda: Scored(base(prefilled, chunks)), Scored, is_last=is_last
        )
        return made.chances


class Lead(MeshEngine):
    """The engine of rank 0. It passes each call on before it makes it; a call that is refused here
    is refused on every rank."""

    def add(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        check_kinds(sampling, options)
        prompt, asked = token_ids("prompt", prompt), sampling or Sampling()
        options["prior_output"] = token_ids("prior_output", options.get("prior_output", ()))
        _check(options)
        if asked.grammar is not None:
            self._entry.grammars()  # what rank 0 lacks is refused before the others hear of it
        leader, take = options.get("leader"), options.get("take")
        if take is not None and not take.fake and self._arrivals is None:
            raise BadInput(f"handoff {take.uid}: no rows come to this engine from elsewhere")
        if leader is not None:
            self._intake.require_own(leader)
        added = Added(
            prompt,
            asked,
            options.get("priority", 0),
            None if leader is None else leader.first_leader.number,
            options.get("salt", b""),
            list(options["prior_output"]),
            None if take is None else (take.uid, take.peer, take.fake),
        )
        self.lockstep.say(added)
        return super().add(prompt, asked, **options)

    def cancel(self, request: Request) -> None:
        self._intake.require_own(request)
        self.lockstep.say(Cancelled(request.number))
        super().cancel(request)

    def preempt(self, request: Request) -> None:
        self._intake.require_own(request)
        self.lockstep.say(Preempted(request.number))
        super().preempt(request)

    def resume(self, request: Request) -> None:
        self._intake.require_own(request)
        self.lockstep.say(Resumed(request.number))
        super().resume(request)

    def forget_prefixes(self) -> None:
        self.lockstep.say(Forgot())
        super().forget_prefixes()

    def learn(self) -> None:
        self.lockstep.say(Learned())
        super().learn()

    def step(self) -> StepResult:
        self.lockstep.say_step(self.pace.limits)
        self._is_in_step = True
        try:
            return super().step()
        finally:
            self._is_in_step = False

    def pump(self) -> None:
        """`pump` counts as a call of its own where the other ranks may be told something."""
        awaits = self._loads.is_busy or (self._arrivals is not None and self._arrivals.awaits)
        if not self._is_in_step and (awaits or self._handoffs.has_told):
            self.lockstep.say(Pumped())
        super().pump()

    def close(self) -> None:
        self.lockstep.say(Closed())
        super().close()


class Follower:
    """Owns a rank's engine that is not the first."""

    def __init__(self, engine: MeshEngine) -> None:
        assert not engine.lockstep.is_lead, "rank 0 leads"
        self.engine = engine
        self._requests: dict[int, Request] = {}
        self._is_closed = False

    def run(self) -> None:
        """Obeys until rank 0 closes. LinkLost if the group ends before."""
        while not self._is_closed:
            self.turn()

    def turn(self) -> None:
        """Makes the next call. What rank 0's engine has refused, this engine refuses as well."""
        call = self.engine.lockstep.heard()
        if isinstance(call, Stepped):
            self.engine.lockstep.begin(call)
            self.engine.step()
            self._forget_ended()
            return
        with suppress(BadInput, BadState, PoolFull):
            self._repeat(call)

    def _repeat(self, call: Call) -> None:
        engine = self.engine
        match call:
            case Added():
                self._add(call)
            case Cancelled(number) if number in self._requests:
                engine.cancel(self._requests[number])
            case Preempted(number) if number in self._requests:
                engine.preempt(self._requests[number])
            case Resumed(number) if number in self._requests:
                engine.resume(self._requests[number])
            case Forgot():
                engine.forget_prefixes()
            case Learned():
                engine.learn()
            case Pumped():
                engine.pump()
            case Closed():
                engine.close()
                self._is_closed = True

    def _add(self, added: Added) -> None:
        request = self.engine.add(
            added.prompt,
            added.sampling,
            priority=added.priority,
            leader=None if added.leader is None else self._requests.get(added.leader),
            salt=added.salt,
            prior_output=added.prior_output,
            take=None if added.take is None else Take(*added.take),
        )
        self._requests[request.number] = request

    def _forget_ended(self) -> None:
        """If rank 0 names such a request later, nothing is done."""
        self._requests = {
            number: request
            for number, request in self._requests.items()
            if request.state != "finished"
        }


def _check(options: RequestOptions) -> None:
    """BadInput names what a mesh cannot do."""
    if options.get("give") is not None:
        raise BadInput("an engine whose ranks divide the model hands no prompts over")
