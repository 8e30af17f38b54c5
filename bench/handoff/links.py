"""Links between ranks: the time of a hop, the bandwidth, and what asynchronous sends hide.

Two ranks, each a process. Asynchronous and synchronous sends carry the same micro-batches, in turn,
over the link as it is and over a slowed one. A sleep replaces a stage's computing, so that the two
ranks do not compete for the cores: this measures waiting, not arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch

from ess.bench.handoff.child import Child
from ess.bench.harness.lists import amount
from ess.bench.harness.report import Row, compare
from ess.comm.delayed import Delayed
from ess.comm.group import Group
from ess.comm.link import Link
from ess.comm.processes.meeting import join_group
from ess.errors import BadState
from ess.ports import kept_port

SHAPES: Final = ((512, 1024), (4096, 256))
COMPUTE_S: Final = 0.005
LATENCY_S: Final = 0.0005
BYTES_PER_S: Final = 1.25e9
LARGE_BYTES: Final = 16 << 20
RANK: Final = "ess.bench.handoff.links_rank"


def links_benchmark(*, batches: int = 32, repeats: int = 7, smoke: bool = False) -> list[Row]:
    """Links between two ranks over gloo.

    Parameters
    ----------
    batches
        Micro-batches of an arm.
    repeats
        How often each arm runs; arms take turns.
    """
    batches, repeats = amount("--batches", batches), amount("--repeats", repeats)
    batches, repeats = (2, 1) if smoke else (batches, repeats)
    with kept_port("127.0.0.1") as port, Child(RANK, str(port)):
        group = join_group(0, 2, init=f"tcp://127.0.0.1:{port}", timeout_s=60)
        try:
            rows = [*hops(group, 10 if smoke else 500), bandwidth(group, batches)]
            for shape in SHAPES:
                rows += sends(group, shape, batches, repeats)
        finally:
            group.close()
    return rows


def hops(group: Group, count: int) -> list[Row]:
    """Half of a round trip: of a head alone, and of a head with one row."""
    rows = []
    for name, tensor in (("head", None), ("head and row", torch.ones(1, 1024))):
        samples = []
        for _ in range(count):
            begun_s = time.perf_counter()
            _next(group).send(b"echo", tensor)
            _report(group)
            samples.append((time.perf_counter() - begun_s) / 2 * 1e6)
        middle = sorted(samples)[len(samples) // 2]
        rows.append(Row(name=f"hop, {name}, p50", value=middle, unit="us", samples=samples))
    return rows


def bandwidth(group: Group, count: int) -> Row:
    tensor = torch.ones(LARGE_BYTES // 4)
    link = _next(group)
    for _ in range(4):
        link.send(b"sink", tensor)
    link.flush()
    begun_s = time.perf_counter()
    for _ in range(count):
        link.send(b"sink", tensor)
    link.flush()
    rate = count * LARGE_BYTES / (time.perf_counter() - begun_s) / 1e9
    return Row(name="bandwidth, frames of 16 MiB", value=rate, unit="GB/s")


def sends(group: Group, shape: tuple[int, int], batches: int, repeats: int) -> list[Row]:
    rows = []
    for name, is_slow in (("as it is", False), ("0.5 ms, 1.25 GB/s", True)):
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(repeats):
            for is_async, samples in times.items():
                samples.append(_pass(group, shape, batches, is_async=is_async, is_slow=is_slow))
        rows.append(
            compare(
                name=f"asynchronous sends of {list(shape)}, link {name}",
                unit="ms",
                ours=times[True],
                baseline=("synchronous", times[False]),
                config={"batches": batches, "compute_ms": COMPUTE_S * 1e3},
            )
        )
    return rows


def _pass(
    group: Group, shape: Sequence[int], batches: int, *, is_async: bool, is_slow: bool
) -> float:
    """Milliseconds from the start of the first stage's computing to the end of the second's."""
    link = _next(group)
    latency_s, rate = (LATENCY_S, BYTES_PER_S) if is_slow else (0.0, 1e15)
    over = Delayed(link, latency_s, rate, is_async=is_async)
    hidden = [torch.ones(*shape) for _ in range(batches)]
    begun_s = time.perf_counter()
    for tensor in hidden:
        time.sleep(COMPUTE_S)
        group.advance()
        over.send(b"work", tensor)
    over.send(b"echo")
    over.flush()
    _report(group)
    over.restore()
    return (time.perf_counter() - begun_s) * 1e3


def _next(group: Group) -> Link:
    assert group.next is not None, "rank 0 of two has a next stage"
    return group.next


def _report(group: Group) -> None:
    if group.reports[1].receive(timeout_s=60) is None:
        raise BadState(f"rank 1 did not answer in 60 s; its beats: {group.beats()[1]}")
