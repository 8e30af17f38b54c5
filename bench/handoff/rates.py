"""How fast pages of a layer move between two processes, against a plain copy and a plain socket.

Pages lie scattered on both sides, 16 to a transfer, eight transfers under way; a transfer counts
when the receiver has accepted it. Rates are the best of some rounds, as others share the machine.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Final, get_args

import numpy as np

from ess import console
from ess.bench.handoff.child import Child
from ess.bench.harness.report import Row
from ess.errors import BadState, Unavailable
from ess.transfer.endpoint import Identity
from ess.transfer.messages import Seal, checksum, new_epoch
from ess.transfer.runs import Region, page_runs
from ess.transfer.transport import Completed, PeerLost, Transfer, Transport
from ess.transfer.transports.kinds import Kind, kind_of, open_transport
from ess.transfer.transports.shared import shared_region

PAGE: Final = 41_984
PER_POST: Final = 16
UNDER_WAY: Final = 8
ROUNDS: Final = 5
TICKET: Final = 1
WITHIN_S: Final = 60.0
SECRET: Final = Seal(b"both ends of a benchmark")
MODULE: Final = "ess.bench.handoff.rates"


def rate_rows(page_count: int) -> list[Row]:
    """Rates against those of a socket for TCP, of a memory copy for transports that copy."""
    console.note(f"  {page_count:,} pages by each transport ...")
    size = page_count * PAGE
    copied, plain = _copied(page_count), _plain_socket(size)
    rows = [
        _row("a copy page by page", copied, None, page_count),
        _row("a plain socket, one run", plain, None, page_count),
        _row("CRC-32 of pages", _checked(page_count), None, page_count),
    ]
    for kind in get_args(Kind):
        rival = ("plain socket", plain) if kind == "tcp" else ("copy", copied)
        try:
            rows.append(_row(f"pages by {kind}", _moved(kind, page_count), rival, page_count))
        except Unavailable as missing:
            console.note(f"{kind} is left out: {missing}")
    return rows


def _row(name: str, samples: list[float], rival: tuple[str, list[float]] | None, pages: int) -> Row:
    best = max(samples)
    against = None if rival is None else max(rival[1])
    return Row(
        name=name,
        value=best,
        unit="GB/s",
        baseline=None if rival is None else rival[0],
        baseline_value=against,
        ratio=None if against is None else best / against,
        config={"page_bytes": PAGE, "pages": pages, "per_post": PER_POST},
        samples=samples,
    )


def _rates(act: Callable[[], object], size: int) -> list[float]:
    rates = []
    for _ in range(ROUNDS + 1):
        begin_s = time.perf_counter()
        act()
        rates.append(size / (time.perf_counter() - begin_s) / 1e9)
    return rates[1:]


# ---- transports


def _end(kind: Kind, size: int) -> Transport:
    who = Identity(epoch=new_epoch(), seal=SECRET, layout=bytes(32))
    made = open_transport(kind, who)
    region = shared_region(1, size) if kind == "shared" else Region(1, np.empty(size, np.uint8))
    region.memory[:] = 1
    made.register([region])
    made.allow(TICKET)
    return made


def _moved(kind: Kind, page_count: int) -> list[float]:
    end = _end(kind, page_count * PAGE)
    try:
        with Child(MODULE, kind, str(page_count * PAGE)) as child:
            peer = end.connect(bytes.fromhex(child.hear()["metadata"]))
            child.tell(metadata=end.metadata().hex())
            return _rates(lambda: _push(end, peer, page_count), page_count * PAGE)
    finally:
        end.close()


def _push(end: Transport, peer: int, page_count: int) -> None:
    draw = np.random.default_rng(0)
    local, remote = (draw.permutation(page_count).reshape(-1, PER_POST) for _ in range(2))
    posted = over = 0
    while over < len(local):
        while posted < len(local) and posted - over < UNDER_WAY:
            end.post(
                Transfer(
                    peer=peer,
                    local=page_runs(1, local[posted], page_bytes=PAGE),
                    remote=page_runs(1, remote[posted], page_bytes=PAGE),
                    notification=b"landed",
                    ticket=TICKET,
                    within_s=WITHIN_S,
                )
            )
            posted += 1
        events = end.poll()
        lost = [event.reason for event in events if isinstance(event, PeerLost)]
        if lost:
            raise BadState(f"the peer of the benchmark is gone: {lost[0]}")
        over += sum(isinstance(event, Completed) for event in events)
        if not events:
            os.sched_yield()


def _serve(kind: Kind, size: int) -> None:
    """The peer: receives bytes until its parent is gone."""
    parent, end = os.getppid(), _end(kind, size)
    print(json.dumps({"metadata": end.metadata().hex()}), flush=True)
    end.connect(bytes.fromhex(json.loads(sys.stdin.readline())["metadata"]))
    while os.getppid() == parent:
        if not end.poll():
            os.sched_yield()


# ---- the limits of the machine


def _copied(page_count: int) -> list[float]:
    local, remote = np.ones((page_count, PAGE), np.uint8), np.zeros((page_count, PAGE), np.uint8)
    sources, targets = (np.random.default_rng(seed).permutation(page_count) for seed in (0, 1))

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            remote[target] = local[source]

    return _rates(copy, local.size)


def _checked(page_count: int) -> list[float]:
    memory = np.ones((page_count, PAGE), np.uint8)
    return _rates(lambda: checksum(page.data for page in memory), memory.size)


def _plain_socket(size: int) -> list[float]:
    """Rates of one large send to a process that reads into one place."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = os.fork()
        if child == 0:
            _read_all(listener.accept()[0], size)
            os._exit(0)
        with socket.create_connection(listener.getsockname()) as sock:
            memory = bytes(size)

            def send() -> None:
                sock.sendall(memory)
                sock.recv(1)

            rates = _rates(send, size)
        os.waitpid(child, 0)
    return rates


def _read_all(sock: socket.socket, size: int) -> None:
    memory = memoryview(bytearray(size))
    while True:
        at = 0
        while at < size:
            count = sock.recv_into(memory[at:])
            if not count:
                return
            at += count
        sock.sendall(b"x")


def main() -> None:
    name, size = sys.argv[1:]
    _serve(kind_of(name), int(size))


if __name__ == "__main__":
    main()
