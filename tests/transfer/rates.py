"""How fast pages of a layer move: `python -m tests.transfer.rates [--json]`.

Two processes, pages scattered on both sides, 16 to a transfer, each transfer accepted by the
receiver. Beside them what the machine can do: the same copy in one process, and a plain socket.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from ess.bench.harness.machine import build, machine
from ess.bench.harness.report import SCHEMA
from ess.clock import RealClock
from ess.transfer.messages import checksum
from ess.transfer.transport import Completed
from tests.transfer.rigs import Rig, region, write

PAGE = 41_984
PAGES = 1_536
PER_POST = 16
UNDER_WAY = 8
REPEATS = 5
SIZE = PAGE * PAGES


def serve(kind: str) -> None:
    rig = Rig(kind, RealClock())
    end = rig.end()
    end.register([region(kind, SIZE)])
    print(end.metadata().hex(), flush=True)
    end.connect(bytes.fromhex(sys.stdin.readline()))
    while os.getppid() != 1:
        if not end.poll():
            os.sched_yield()


def moved(kind: str) -> list[float]:
    rig = Rig(kind, RealClock())
    end = rig.end()
    end.register([region(kind, SIZE, fill=1)])
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.transfer.rates", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    peer = end.connect(bytes.fromhex(process.stdout.readline()))
    process.stdin.write(end.metadata().hex() + "\n")
    process.stdin.flush()
    try:
        return [rate(lambda: push(end, peer)) for _ in range(REPEATS + 1)][1:]
    finally:
        process.kill()
        process.wait()
        rig.close()


def push(end, peer: int) -> None:
    draw = np.random.default_rng(0)
    here, there = (draw.permutation(PAGES).reshape(-1, PER_POST) for _ in range(2))
    posted = over = 0
    while over < len(here):
        while posted < len(here) and posted - over < UNDER_WAY:
            end.post(write(peer, here[posted], there[posted], PAGE, note=b"landed"))
            posted += 1
        done = sum(isinstance(event, Completed) for event in end.poll())
        over += done
        if not done:
            os.sched_yield()


def in_process() -> list[float]:
    rig = Rig("inprocess", RealClock())
    sender, receiver, _, _ = rig.pair(SIZE)
    rates = [rate(lambda: push(sender, receiver.epoch)) for _ in range(REPEATS + 1)][1:]
    rig.close()
    return rates


def rate(act: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    act()
    return SIZE / (time.perf_counter() - begin_s) / 1e9


def copied() -> list[float]:
    here, there = np.ones((PAGES, PAGE), np.uint8), np.zeros((PAGES, PAGE), np.uint8)
    orders = (
        np.random.default_rng(0).permutation(PAGES),
        np.random.default_rng(1).permutation(PAGES),
    )

    def copy() -> None:
        for source, target in zip(*orders, strict=True):
            there[target] = here[source]

    return [rate(copy) for _ in range(REPEATS + 1)][1:]


def checked() -> list[float]:
    memory = np.ones((PAGES, PAGE), np.uint8)
    return [rate(lambda: checksum(row.data for row in memory)) for _ in range(REPEATS)]


def plain_socket() -> list[float]:
    """One large send to a process that reads into one place."""
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        sock, _ = listener.accept()
        memory = memoryview(bytearray(SIZE))
        while True:
            at = 0
            while at < SIZE:
                count = sock.recv_into(memory[at:])
                if not count:
                    os._exit(0)
                at += count
            sock.sendall(b"x")
    sock = socket.create_connection(listener.getsockname())
    memory = bytes(SIZE)
    rates = [rate(lambda: (sock.sendall(memory), sock.recv(1))) for _ in range(REPEATS + 1)][1:]
    sock.close()
    listener.close()
    os.waitpid(child, 0)
    return rates


def main() -> None:
    base = {"memcpy": copied(), "plain socket": plain_socket(), "crc32": checked()}
    ours = {"inprocess": in_process()}
    ours |= {kind: moved(kind) for kind in ("shared", "nixl", "tcp")}
    rows = []
    for name, samples in (base | ours).items():
        rival = "plain socket" if name == "tcp" else "memcpy"
        best, against = max(samples), max(base[rival])
        rows.append(
            {
                "name": f"transfer {name}", "value": best, "unit": "GB/s", "baseline": rival,
                "baseline_value": against, "ratio": best / against, "target": None, "met": None,
                "config": {"page_bytes": PAGE, "pages": PAGES, "per_post": PER_POST},
                "samples": samples,
            }
        )  # fmt: skip
    if "--json" in sys.argv:
        told = {"build": build().__dict__, "machine": machine().__dict__}
        print(json.dumps({"schema": SCHEMA, **told, "rows": rows}, default=str))
        return
    print(machine())
    for row in rows:
        print(f"{row['name']:24} {row['value']:6.2f} GB/s  {row['ratio']:5.2f} x {row['baseline']}")


if __name__ == "__main__":
    serve(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1] != "--json" else main()
