"""Row movers against plain copies, in one process and in turn.

Every sample draws new random rows from a pool many times larger than the last-level cache, so its
source rows are cold; all arms write to the same target. The one big memcpy reads a new region of
the pool that is as large as the rows together. Samples of all arms are interleaved, so that other
load on the machine affects them alike; the values are medians. With one thread the clock is that
thread's processor time, which other load slows but does not stop; with two it is the wall's.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ess.bench.harness.report import Row, compare
from ess.flashtrans.native_rows import pack
from ess.flashtrans.rows import run
from ess.flashtrans.views import check
from ess.flashtrans.ways import COUNTS, settle
from ess.flashtrans.ways import ROW_BYTES as ROW_BYTES_OF_CLASSES
from ess.kernels.cpu import native
from ess.kernels.memory import host_memory
from ess.kernels.streams import RowCopy

ROW_BYTES = 656
OTHER_ROW_BYTES = (264, 2304)
Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RowsWork:
    pool_bytes: int
    row_bytes: int
    row_count: int
    sample_count: int
    threads: int


@dataclass
class RowsArm:
    """One way to copy `rows` between the pool and the target; seconds per sample."""

    name: str
    copy: Callable[[Rows], object]
    samples_s: list[float] = field(default_factory=list)

    def sample(self, rows: Rows, clock: Callable[[], float]) -> None:
        started = clock()
        self.copy(rows)
        self.samples_s.append(clock() - started)


def rows_benchmark(*, smoke: bool) -> list[Row]:
    """Rows of 656 B by count, gathered and scattered by one thread and by two; then rows of other
    sizes, gathered by one."""
    pool_bytes = 64 << 20 if smoke else 2304 << 20
    samples = 3 if smoke else 15
    memory = host_memory(pool_bytes, touch_threads=1)
    results: list[Row] = []
    for row_count in (2048,) if smoke else (512, 2048, 65536):
        for threads in (1, 2):
            shape = RowsWork(pool_bytes, ROW_BYTES, row_count, samples, threads)
            for verb in ("gather", "scatter"):
                results += _compare(verb, shape, memory)
    for row_bytes in OTHER_ROW_BYTES:
        for row_count in (2048,) if smoke else (2048, 16384):
            shape = RowsWork(pool_bytes, row_bytes, row_count, samples, 1)
            results += _compare("gather", shape, memory)
    return results


def _compare(verb: str, shape: RowsWork, memory: Bytes) -> list[Row]:
    row_bytes, rng = shape.row_bytes, np.random.default_rng(shape.row_count)
    pool_rows = shape.pool_bytes // row_bytes
    pool = memory[: pool_rows * row_bytes].reshape(-1, row_bytes)
    place = host_memory(shape.row_count * row_bytes, touch_threads=1).reshape(-1, row_bytes)
    arms = _arms(verb, pool, place, shape.threads)
    clock = time.thread_time if shape.threads == 1 else time.perf_counter
    for _ in range(1 + shape.sample_count):
        for arm in arms:
            arm.sample(rng.integers(0, pool_rows, shape.row_count), clock)
    for arm in arms:
        del arm.samples_s[0]
    return [_row(verb, shape, arms[0], baseline) for baseline in arms[1:]]


def _row(verb: str, shape: RowsWork, ours: RowsArm, baseline: RowsArm) -> Row:
    return compare(
        name=f"{verb} {shape.row_count} rows of {shape.row_bytes} B, threads {shape.threads}",
        unit="GB/s",
        ours=_gigabytes(shape, ours),
        baseline=(baseline.name, _gigabytes(shape, baseline)),
        better="higher",
        target=_target(verb, shape, baseline),
        config={
            "row_bytes": shape.row_bytes,
            "pool_bytes": shape.pool_bytes,
            "threads": shape.threads,
            "isa": native.isa() if native.available() else "numpy",
            "way": _way(shape) if verb == "gather" else None,
            "clock": "thread" if shape.threads == 1 else "wall",
            "rows": "cold: random, new for every sample",
        },
    )


def _target(verb: str, shape: RowsWork, baseline: RowsArm) -> float | None:
    if verb != "gather" or shape.pool_bytes < 2 << 30:
        return None
    if baseline.name == "one memcpy":
        return 0.85 if shape.row_count >= 16384 else None
    return 1.5 if baseline.name.startswith("torch") else None


def _way(shape: RowsWork) -> str:
    """The way that gathers of this shape take on this machine."""
    settled = {(choice.row_bytes, choice.count): choice.way for choice in settle()}
    sizes = [least for least in ROW_BYTES_OF_CLASSES if least >= shape.row_bytes]
    counts = [least for least in COUNTS if least >= shape.row_count]
    return settled.get((min(sizes), min(counts)), "NumPy")


def _gigabytes(shape: RowsWork, arm: RowsArm) -> list[float]:
    return [shape.row_count * shape.row_bytes / seconds / 1e9 for seconds in arm.samples_s]


def _arms(verb: str, pool: Bytes, target: Bytes, threads: int) -> list[RowsArm]:
    gather = verb == "gather"

    def row_copy(rows: Rows) -> RowCopy:
        if gather:
            return RowCopy(source=pool, source_rows=rows, target=target)
        return RowCopy(source=target, target=pool, target_rows=rows)

    def one_memcpy(rows: Rows) -> None:
        first = int(rows[0]) % (len(pool) - len(target))
        region, dense = native.address(pool[first:]), native.address(target)
        ctypes.memmove(*((dense, region) if gather else (region, dense)), target.nbytes)

    return [
        RowsArm("ours", lambda rows: run(check(row_copy(rows)), threads=threads)),
        *_loop_arms(row_copy, pool.shape[1]),
        *_torch_arm(pool, target, threads, gather=gather),
        RowsArm("one memcpy", one_memcpy),
    ]


def _loop_arms(of: Callable[[Rows], RowCopy], row_bytes: int) -> list[RowsArm]:
    """One memcpy per row, without prefetching: from Python, and from C."""

    def python(rows: Rows) -> None:
        copy = check(of(rows))
        sources = copy.source.row_numbers() * copy.source.stride_bytes + copy.source.address
        targets = copy.target.row_numbers() * copy.target.stride_bytes + copy.target.address
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            ctypes.memmove(target, source, row_bytes)

    arms = [RowsArm("memmove per row, Python loop", python)]
    if native.available():
        per_row = native.function("ess_rows_memcpy_loop", [ctypes.c_void_p])
        arms.append(
            RowsArm(
                "memcpy per row, C loop",
                lambda rows: per_row(ctypes.byref(pack(check(of(rows))))),
            )
        )
    return arms


def _torch_arm(pool: Bytes, target: Bytes, threads: int, *, gather: bool) -> list[RowsArm]:
    try:
        import torch
    except ImportError:
        return []
    torch_pool, torch_target = torch.from_numpy(pool), torch.from_numpy(target)

    def index_select(rows: Rows) -> None:
        torch.set_num_threads(threads)
        torch.index_select(torch_pool, 0, torch.from_numpy(rows), out=torch_target)

    def index_copy(rows: Rows) -> None:
        torch.set_num_threads(threads)
        torch_pool.index_copy_(0, torch.from_numpy(rows), torch_target)

    return [
        RowsArm("torch.index_select", index_select)
        if gather
        else RowsArm("torch.index_copy_", index_copy)
    ]
