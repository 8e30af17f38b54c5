"""An engine without a model: it speaks the engine's side of the wire at a given pace.

    python -m ess.engine.process.fake_engine ENDPOINT...     (a Launch as one JSON line on stdin)

For measuring a server by itself, and for routers and clients under test. Every request gets the
tokens of its script, `per_step` at a time; a step's tokens of all requests leave in one message, as
those of a real engine do. A prompt that is handed over is done after one step, and one that comes
from another worker is there at once: no rows move. Of a worker with stages rank 0 does all that,
and the other ranks wait for the end. Needs no torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from ess.engine.process.holding import Holding
from ess.engine.process.lifeline import first_line
from ess.engine.process.messages import (
    Abort,
    Aborted,
    AbortNamed,
    Add,
    Flush,
    Flushed,
    Held,
    Hold,
    Launch,
    Lost,
    Meet,
    Met,
    Piece,
    Progress,
    Ready,
    RequestLine,
    StageLine,
    Status,
    Stop,
    ToEngine,
    Trace,
    Traced,
    Tracing,
)
from ess.engine.process.wire import Wire, open_counts, open_wire
from ess.engine.requests.request import FinishReason
from ess.engine.tokens.chance import Chance
from ess.errors import BadInput
from ess.transfer.endpoint import Identity
from ess.transfer.members import members_of
from ess.transfer.messages import Seal, new_epoch

IDLE_S: Final = 0.02
STATUS_EVERY_S: Final = 0.1

Script = Callable[[Add], Iterable[int]]


@dataclass(slots=True, eq=False)
class PacedRequest:
    """`ahead` is the token that comes next, None behind the last."""

    add: Add
    left: Iterator[int]
    ahead: int | None
    began_s: float
    made_count: int = 0

    def take(self) -> int:
        token, self.ahead = self.ahead, next(self.left, None)
        assert token is not None, f"request {self.add.number} has ended"
        self.made_count += 1
        return token


class PacedEngine:
    """The oldest `running_max` requests get tokens, the others wait."""

    def __init__(
        self,
        script: Script,
        *,
        pace_s: float = 0.0,
        per_step: int = 1,
        running_max: int = 1 << 20,
        cached_count: int = 0,
        identity: Identity | None = None,
        layers: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.is_stopped = False
        self._layers = layers
        self._script = script
        self._pace_s = pace_s
        self._per_step = per_step
        self._running_max = running_max
        self._cached_count = cached_count
        self._going: dict[int, PacedRequest] = {}
        self._step_count = self._made_count = self._prompt_count = 0
        self._told_at_s = 0.0
        self._is_tracing = False
        self._holding = Holding()
        self._front_count = 1
        self._identity = identity

    def run(self, wire: Wire) -> None:
        while not self.is_stopped:
            self.turn(wire)

    def turn(self, wire: Wire) -> None:
        self._front_count = wire.front_count
        for message in wire.take(timeout_s=IDLE_S if self._is_idle else 0.0):
            self.obey(message, wire)
        if not self._is_idle:
            began_s = time.monotonic()
            running = list(islice(self._going.values(), self._running_max))
            pieces = tuple(self._piece(going) for going in running)
            wire.give(Progress(pieces, time.monotonic()))
            self._step_count += 1
            time.sleep(max(0.0, began_s + self._pace_s - time.monotonic()))
        if time.monotonic() - self._told_at_s >= STATUS_EVERY_S:
            self._told_at_s = time.monotonic()
            wire.give(self.status())

    @property
    def _is_idle(self) -> bool:
        return self._holding.is_on or not self._going

    def obey(self, message: ToEngine, wire: Wire) -> None:
        match message:
            case Add():
                prior_count = len(message.prior_output)
                left = iter(islice(self._script(message), prior_count, None))
                going = PacedRequest(message, left, next(left), time.monotonic(), prior_count)
                self._going[message.number] = going
                self._prompt_count += len(message.prompt)
            case Abort(number):
                self._going.pop(number, None)
            case AbortNamed():
                wire.give(Aborted(self._abort(message, wire), message.front))
            case Lost(front):
                for number in [n for n in self._going if n % wire.front_count == front]:
                    del self._going[number]
            case Flush(front):
                busy = f"{len(self._going)} requests are running or waiting"
                wire.give(Flushed(busy if self._going else "", front))
            case Hold(is_on, front, None):
                self._holding.hear(is_on=is_on, at_s=time.monotonic())
                wire.give(Held(is_on, front, self._holding.at_s))
            case Hold(is_on, _, float(said_at_s)):
                self._holding.hear(is_on=is_on, at_s=said_at_s)
            case Trace(is_on, front):
                wire.give(self._trace(is_on, front))
            case Meet(address, metadata, front):
                wire.give(self._meet(address, metadata, front))
            case Stop():
                self.is_stopped = True

    def _meet(self, address: str, metadata: bytes, front: int) -> Met:
        if self._identity is None:
            return Met(address, 0, sentence="there is no secret to meet with", front=front)
        try:
            members = members_of(self._identity.seal, metadata)
            epoch, *_ = (self._identity.greeted(each.metadata)[0].sender for each in members)
        except BadInput as error:
            return Met(address, 0, sentence=str(error), front=front)
        return Met(address, epoch, self._identity.hello(), front=front)

    def _trace(self, is_on: bool, front: int) -> Tracing | Traced:
        if is_on == self._is_tracing:
            return Tracing(f"a trace is {'' if is_on else 'not '}being taken", front)
        self._is_tracing = is_on
        return Tracing("", front) if is_on else Traced((), 0, front)

    def _abort(self, asked: AbortNamed, wire: Wire) -> int:
        met = [going.add for going in self._going.values()]
        met = [add for add in met if asked.means(add.name, add.call)]
        for add in met:
            del self._going[add.number]
        wire.give(Progress(tuple(Piece(add.number, reason="cancelled") for add in met)))
        return len({add.name for add in met})

    def status(self) -> Status:
        running = min(len(self._going), self._running_max)
        return Status(
            step_count=self._step_count,
            step_s=self._pace_s,
            made_count=self._made_count,
            prompt_count=self._prompt_count,
            running_count=running,
            waiting_count=len(self._going) - running,
            requests=tuple(map(_line, islice(self._going.values(), running))),
            open_counts=open_counts(self._going, self._front_count),
            is_held=self._holding.is_on,
            held_at_s=self._holding.at_s,
            stages=tuple(
                StageLine(rank, layers, float(running > 0), self._step_count)
                for rank, layers in enumerate(self._layers)
            ),
        )

    def _piece(self, going: PacedRequest) -> Piece:
        handoff = going.add.handoff
        if handoff is not None and handoff.kind == "give":
            del self._going[going.add.number]
            return Piece(going.add.number, reason="sent", cached_count=self._cached_count)
        sampling = going.add.sampling
        tokens: list[int] = []
        reason: FinishReason | None = None
        is_first = going.made_count == len(going.add.prior_output)
        cached_count = self._cached_count if is_first else None
        scored = going.add.prompt[sampling.prompt_start + 1 :] if is_first else []
        while reason is None and len(tokens) < self._per_step:
            tokens.append(going.take())
            if tokens[-1] in sampling.stop_ids and going.made_count >= sampling.tokens_min:
                reason = "stop"
            elif going.ahead is None or going.made_count >= sampling.tokens_max:
                reason = "length"
        assert tokens, f"request {going.add.number} got no token in a step"
        if reason is not None:
            del self._going[going.add.number]
        self._made_count += len(tokens)
        return Piece(
            going.add.number,
            tuple(tokens),
            reason,
            cached_count,
            _chances(tokens, sampling.logprobs),
            prompt_chances=_chances(scored, sampling.prompt_logprobs),
        )


def _line(going: PacedRequest) -> RequestLine:
    add = going.add
    return RequestLine(
        add.number,
        "decoding",
        len(add.prompt),
        len(add.prompt),
        going.made_count,
        add.sampling.tokens_max,
        name=add.name,
        age_s=time.monotonic() - going.began_s,
    )


def _chances(tokens: Sequence[int], count: int | None) -> tuple[Chance, ...]:
    """Invented values in the right form."""
    if count is None:
        return ()
    tops = [tuple((token + i, -0.5 - i) for i in range(count)) for token in tokens]
    return tuple(Chance(-0.5, 1, top) for top in tops)


def walking(vocabulary: int) -> Script:
    """Another token at every step, up to `tokens_max`; ids of text, not of control bytes."""
    first = min(300, vocabulary // 2)
    span = vocabulary - first

    def script(add: Add) -> Iterator[int]:
        start = len(add.prompt) + add.number
        return (first + (start + 7919 * i) % span for i in range(add.sampling.tokens_max))

    return script


def identity_of(secret: str) -> Identity:
    """Without rows there is no layout to agree on."""
    return Identity(epoch=new_epoch(), seal=Seal(secret.encode()), layout=bytes(32))


def main(arguments: list[str]) -> int:
    launch = msgspec.json.decode(first_line(), type=Launch)
    raw = msgspec.json.decode((Path(launch.model) / "config.json").read_bytes())
    if launch.rank is not None and launch.rank.rank > 0:
        sys.stdin.buffer.read()
        return 0
    identity = identity_of(launch.secret) if launch.secret else None
    ready = Ready(
        vocabulary=raw["vocab_size"],
        length_max=launch.length_max,
        load_s=0.0,
        metadata=b"" if identity is None else identity.hello(),
    )
    engine = PacedEngine(
        walking(raw["vocab_size"]),
        identity=identity,
        pace_s=launch.config.pace_ms / 1e3,
        running_max=launch.config.max_running,
        layers=() if launch.rank is None else launch.rank.layers,
    )
    with open_wire(arguments) as (wire, _):
        wire.give(ready)
        engine.run(wire)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
