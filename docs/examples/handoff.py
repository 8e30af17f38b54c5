"""A prompt's rows go from one worker to another over a network that loses and alters them.

The prefill worker tells its port of each layer of a chunk that it has made; the decode worker's
port takes what its own count and the checksums allow, and asks for the rest again. When nothing is
missing the sequence goes on at the decode worker as if it had made the prompt itself.

    python docs/examples/handoff.py
"""

from __future__ import annotations

import numpy as np

from ess import ModelLayout, Offload, Port, Sequence
from ess.clock import RealClock
from ess.door.handoff.endings import Landed
from ess.transfer.endpoint import Identity
from ess.transfer.messages import Seal, layout_hash, new_epoch
from ess.transfer.runs import Region
from ess.transfer.transport import Transport
from ess.transfer.transports.faulty import Fault, FaultyTransport
from ess.transfer.transports.tcp import TcpTransport

LAYOUT = ModelLayout.embedded()
SEAL = Seal(b"both workers were started with it")
PROMPT = list(range(1000))
UID = 1
CHUNK = 256
ODDS = {Fault.CORRUPT: 0.15, Fault.GARBLE: 0.15, Fault.DUPLICATE: 0.15, Fault.DELAY: 0.15}


def offload() -> Offload:
    return Offload.create(LAYOUT, slot_bytes="32MB", host_bytes="16MB", length_max=2048)


def transport() -> TcpTransport:
    return TcpTransport(Identity(epoch=new_epoch(), seal=SEAL, layout=layout_hash(LAYOUT)))


def unreliable(inner: TcpTransport) -> FaultyTransport:
    scratch = Region(99, np.zeros(16 << 20, np.uint8))
    inner.register([scratch])
    return FaultyTransport(inner, clock=RealClock(), odds=ODDS, scratch=scratch, seed=0)


def port(pools: Offload, way: Transport) -> Port:
    return Port(pools, way, SEAL, clock=RealClock())


def make(sequence: Sequence, layer: int, start: int, stop: int) -> None:
    """Rows and index keys of a layer of a chunk: here of noise, elsewhere of a model."""
    draw = np.random.default_rng((layer, start))
    shape = (stop - start, LAYOUT.row_bytes)
    sequence.import_rows(layer, start, draw.integers(0, 256, shape, np.uint8))
    keys = (stop - start, LAYOUT.key_bytes)
    sequence.import_keys(layer, start, draw.integers(0, 256, keys, np.uint8))


def prefill(prefill_port: Port, decode_port: Port, sequence: Sequence) -> None:
    """The last token is left out: the decode worker runs it, and samples what follows. Each worker
    pumps its own port; here are two in one process."""
    prefill_port.sender.offer(UID, sequence, prompt=PROMPT, salt=b"")
    last = len(PROMPT) - 1
    for start in range(0, last, CHUNK):
        stop = min(start + CHUNK, last)
        for layer in range(LAYOUT.layer_total):
            make(sequence, layer, start, stop)
            prefill_port.sender.made(UID, layer, stop)
            prefill_port.pump()
            decode_port.pump()
    late = np.arange(last - 32 - LAYOUT.top_k, last - LAYOUT.top_k, dtype=np.int32)[:, None]
    windows = late + np.arange(LAYOUT.top_k, dtype=np.int32)
    prefill_port.sender.finish(UID, np.broadcast_to(windows, (LAYOUT.group_count, *windows.shape)))


def rows_of(sequence: Sequence, pools: Offload) -> list[bytes]:
    at = sequence.host_rows(0, len(PROMPT) - 1)
    return [pools.memory(layer).host[at].numpy().tobytes() for layer in range(LAYOUT.layer_total)]


def main() -> None:
    with offload() as made, offload() as served:
        way = unreliable(transport())
        prefill_port, decode_port = port(made, way), port(served, transport())
        prefill_port.meet(decode_port.metadata())
        peer = decode_port.meet(prefill_port.metadata())

        awaited = served.open(PROMPT, on_device=False)
        decode_port.receiver.expect(awaited, uid=UID, peer=peer)
        sequence = made.open(PROMPT)
        prefill(prefill_port, decode_port, sequence)
        expected = rows_of(sequence, made)

        while prefill_port.is_busy or decode_port.is_busy:
            prefill_port.pump()
            decode_port.pump()
        (landed,) = decode_port.receiver.outcomes()
        assert isinstance(landed, Landed), landed.sentence
        awaited.resume()
        awaited.warm_from(*landed.windows)
        assert rows_of(awaited, served) == expected

        print(f"{awaited.length} rows of {LAYOUT.layer_total} layers landed, all right")
        print("the network did:", {fault.value: count for fault, count in way.injected.items()})
        counts = decode_port.counts
        print(f"refused were {counts.refused_count}, asked for again {counts.again_count}")
        print("on its way:", ", ".join(f"{name} {at:.3f} s" for name, at in landed.timeline.marks))
        prefill_port.close()
        decode_port.close()


if __name__ == "__main__":
    main()
