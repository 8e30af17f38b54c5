"""The engine process among other workers: how rows travel, and which peers it has met."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Final, Literal

from ess.clock import Clock
from ess.door import Offload
from ess.door.handoff.endings import Landed, Lapsed, Missed, Sent
from ess.door.handoff.geometry import Ground
from ess.door.handoff.port import Port
from ess.engine.config import ProcessConfig
from ess.engine.devices import is_device
from ess.engine.handoff import Ended
from ess.engine.process.arithmetic import arithmetic
from ess.engine.process.messages import (
    HandoffLine,
    HandoffStatus,
    Launch,
    Meet,
    Met,
    PeerLine,
)
from ess.errors import BadInput, EssError
from ess.layout import ModelLayout
from ess.models.weights.files.fingerprint import fingerprint
from ess.transfer.endpoint import SILENT_S, Identity
from ess.transfer.messages import Seal, layout_hash, new_epoch
from ess.transfer.transports.kinds import open_transport

ADDRESSES_MAX: Final = 1024


def open_port(
    launch: Launch,
    offload: Offload,
    clock: Clock,
    *,
    whole: ModelLayout | None = None,
    ground: Ground | None = None,
) -> Port | None:
    """None for a worker that has no secret: it hands nothing over. `whole` is the layout of the
    model where the offload has a part of it. With a `ground`, which has all rows of several
    processes, ends of handoffs are concluded when they all can (`engine.mesh.port`)."""
    config = launch.config
    if not launch.secret:
        if config.role != "both":
            raise BadInput(f"role is {config.role!r}: its workers need a secret, and there is none")
        return None
    seal = Seal(launch.secret.encode())
    identity = Identity(
        epoch=new_epoch(),
        seal=seal,
        layout=layout_digest(launch, whole or offload.layout),
        silent_s=silent_s(config),
    )
    host, port = config.transfer_host, config.transfer_port
    return Port(
        offload,
        open_transport(config.transport, identity, host=host, port=port, clock=clock),
        seal,
        clock=clock,
        wait_s=config.handoff_wait_s,
        lease_s=config.handoff_lease_s,
        ground=ground,
        defers=ground is not None,
    )


def silent_s(config: ProcessConfig) -> float:
    """How long a peer may send nothing before it counts as lost. Peers send from the thread that
    computes, and on a device a library may compile a program there for longer than SILENT_S."""
    return max(SILENT_S, config.handoff_wait_s) if is_device(config.device) else SILENT_S


def layout_digest(launch: Launch, layout: ModelLayout) -> bytes:
    """Equal where rows of one worker mean the same to another: to the last bit, where that is asked
    for. A prompt that a handoff brings is then the prompt that this worker would compute itself."""
    chosen, weights = launch.config, fingerprint(launch.model).hex()
    if chosen.deterministic:
        weights = f"{arithmetic(chosen)} {weights}"
    return layout_hash(layout, weights=f"{chosen.form} {weights}")


class Peers:
    """The workers that this worker has met, by the addresses of their servers. A worker of several
    stages is met as their lead: `stages` holds the metadata and the layers of each, its own first,
    and `on_meet` is called with the metadata of each worker that was met."""

    def __init__(
        self,
        port: Port | None,
        *,
        stages: Sequence[tuple[bytes, range]] = (),
        on_meet: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        self._port = port
        self._stages = stages
        self._on_meet = on_meet
        self._epochs: dict[str, int] = {}

    @property
    def metadata(self) -> bytes:
        return b"" if self._port is None else self._port.metadata(self._stages)

    def meet(self, message: Meet) -> Met:
        if self._port is None:
            why = "this engine takes part in no handoffs"
            return Met(message.address, 0, sentence=why, front=message.front)
        try:
            epoch = self._port.meet(message.metadata)
        except EssError as error:
            return Met(message.address, 0, sentence=str(error), front=message.front)
        self._on_meet(message.metadata)
        self._epochs.pop(message.address, None)
        if len(self._epochs) == ADDRESSES_MAX:
            del self._epochs[next(iter(self._epochs))]
        self._epochs[message.address] = epoch
        return Met(message.address, epoch, self.metadata, front=message.front)

    def status(self, ended: Iterable[Ended]) -> HandoffStatus | None:
        """None for a worker that hands nothing over."""
        if self._port is None:
            return None
        lines = tuple(map(_line, ended))
        return HandoffStatus(
            open_arrival_count=len(self._port.receiver),
            open_departure_count=len(self._port.sender),
            **asdict(self._port.counts),
            peers=self._peer_lines(),
            recent=lines[::-1],
        )

    def _peer_lines(self) -> tuple[PeerLine, ...]:
        """A worker that was met under several addresses has a line for each."""
        assert self._port is not None, "a worker without a port has peers"
        heard_s = {peer.epoch: peer.heard_s_ago for peer in self._port.peers()}
        return tuple(
            PeerLine(address, epoch, epoch in heard_s, heard_s.get(epoch, 0.0))
            for address, epoch in self._epochs.items()
        )


def _line(ended: Ended) -> HandoffLine:
    kind: Literal["give", "take"]
    outcome: Literal["landed", "missed", "sent", "lapsed"]
    match ended:
        case Landed():
            kind, outcome, sentence = "take", "landed", ""
        case Missed():
            kind, outcome, sentence = "take", "missed", ended.sentence
        case Sent():
            kind, outcome, sentence = "give", "sent", ""
        case Lapsed():
            kind, outcome, sentence = "give", "lapsed", ended.sentence
    began_s, marks = ended.timeline.began_s, ended.timeline.marks
    return HandoffLine(ended.uid, kind, outcome, marks, sentence, began_s)
