"""How long a state takes from one worker to another when a prompt is made.

Two processes without a model: the prompt has one row of one layer, and beside it a state as large
as that of DeepSeek-V4-Flash, and of the linear layers of GLM-5-next. We measure the time from the
sender's `finish` until the receiver's sequence is on the device with the state. The baseline is the
machine's own speed: the state copied four times, and its checksum taken twice.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Final

import numpy as np

from ess import console
from ess.bench.handoff.child import Child, next_line
from ess.bench.harness.report import Row
from ess.clock import RealClock
from ess.door import Offload
from ess.door.handoff.endings import Landed
from ess.door.handoff.port import Port
from ess.errors import BadState
from ess.layout import IndexCodec, ModelLayout, RowCodec
from ess.transfer.endpoint import Identity
from ess.transfer.messages import Seal, checksum, new_epoch
from ess.transfer.transports.kinds import Kind, kind_of, open_transport

SIZES: Final = {"DeepSeek-V4-Flash": 9_465_856, "GLM-5-next": 147_000_000}
KINDS: Final[tuple[Kind, ...]] = ("tcp", "shared")
ROUNDS: Final = 5
EVERY: Final = 4096
"""Bytes of the state of which the first is told from other states."""
SECRET: Final = Seal(b"both ends of a benchmark")
MODULE: Final = "ess.bench.handoff.states"


def state_rows(*, share: int = 1) -> list[Row]:
    """Rows for states of one part in `share` of these sizes."""
    sizes = {name: size // share for name, size in SIZES.items()}
    return [_row(name, size, kind) for name, size in sizes.items() for kind in KINDS]


def _row(name: str, size: int, kind: Kind) -> Row:
    console.note(f"  {name}, its state by {kind} ...")
    samples = [1e3 * each for each in _landings(size, kind)]
    floor = [1e3 * each for each in _floor(size)]
    return Row(
        name=f"{name}: its state by {kind}",
        value=min(samples),
        unit="ms",
        baseline="four copies, two checksums",
        baseline_value=min(floor),
        ratio=min(samples) / min(floor),
        config={"MB": round(size / 1e6, 1)},
        samples=samples,
    )


def _floor(size: int) -> list[float]:
    here, there = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    took = []
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        for _ in range(4):
            there[:] = here
        for _ in range(2):
            checksum([here.data])
        took.append(time.perf_counter() - begin_s)
    return took


class Worker:
    """`shared` memory where the transport needs it."""

    def __init__(self, size: int, kind: Kind) -> None:
        layout = ModelLayout(
            name="a state",
            layer_count=1,
            groups=((0,),),
            row=RowCodec(form="opaque", opaque_bytes=64),
            index=IndexCodec(key_dim=8, head_count=1),
            top_k=8,
            slot_floor=8,
            state_bytes=size,
        )
        self.offload = Offload.create(
            layout,
            slot_bytes=4 * layout.page_bytes,
            host_bytes=64 * layout.host_page_bytes,
            sequence_max=2,
            length_max=64,
            shared=kind == "shared",
        )
        identity = Identity(epoch=new_epoch(), seal=SECRET, layout=bytes(32))
        clock = RealClock()
        self.port = Port(self.offload, open_transport(kind, identity), SECRET, clock=clock)

    def given(self, uid: int) -> float:
        """When the prompt was made, by a clock that both processes read."""
        prompt = [uid, 7]
        sequence = self.offload.open(prompt)
        self.port.sender.offer(uid, sequence, prompt=prompt, salt=b"")
        sequence.import_rows(0, 0, np.ones((1, 64), np.uint8))
        sequence.import_keys(0, 0, np.ones((1, 12), np.uint8))
        sequence.beside[::EVERY] = uid % 251
        made_s = time.monotonic()
        self.port.sender.finish(uid, None)
        while self.port.is_busy:
            self.port.pump()
        return made_s

    def taken(self, uid: int, peer: int, child: Child) -> float:
        """When it was on the device."""
        sequence = self.offload.open([uid, 7], on_device=False)
        self.port.receiver.expect(sequence, uid=uid, peer=peer)
        child.tell(uid=uid)
        outcomes: list[object] = []
        while not outcomes:
            self.port.pump()
            outcomes += self.port.receiver.outcomes()
        if not isinstance(outcomes[0], Landed):
            raise BadState(f"the state did not come: {outcomes[0]}")
        sequence.resume()
        landed_s = time.monotonic()
        if not bool((sequence.beside[::EVERY] == uid % 251).all()):
            raise BadState("another state came")
        sequence.discard()
        return landed_s


def _landings(size: int, kind: Kind) -> list[float]:
    worker = Worker(size, kind)
    with worker.offload, Child(MODULE, str(size), kind) as child:
        peer = worker.port.meet(bytes.fromhex(child.hear()["metadata"]))
        child.tell(metadata=worker.port.metadata().hex())
        took = []
        for uid in range(1, ROUNDS + 2):
            landed_s = worker.taken(uid, peer, child)
            took.append(landed_s - child.hear(meanwhile=worker.port.pump)["made_s"])
        worker.port.close()
    return took[1:]


def main() -> None:
    """The worker that has made the prompts."""
    size, kind = int(sys.argv[1]), kind_of(sys.argv[2])
    worker = Worker(size, kind)
    print(json.dumps({"metadata": worker.port.metadata().hex()}), flush=True)
    asked = os.fdopen(sys.stdin.fileno(), "rb", buffering=0)
    worker.port.meet(bytes.fromhex(json.loads(asked.readline())["metadata"]))
    while line := next_line(asked, worker.port.pump):
        made_s = worker.given(json.loads(line)["uid"])
        print(json.dumps({"made_s": made_s}), flush=True)


if __name__ == "__main__":
    main()
