"""Row moves on a device against plain copies and the rate of the link.

A sample takes rows that no recent sample took: eight lists over a pool far larger than any cache,
and larger than what address translation covers, if the host has the memory. Kernels are timed as
graphs of eight launches, a lane from the start of its job on the device; what the host takes to
submit the job is a row of its own. A copy a row, one driver call each, is timed with them.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ess.bench.gpu.rig import WARMUPS, GpuRig, Row, median_rate, rate_row, row
from ess.errors import BadState, Unavailable
from ess.flashtrans.stream_lane import StreamLane
from ess.free_resources import memory_free
from ess.kernels.cpu import native
from ess.kernels.cuda.arrays import DeviceArray
from ess.kernels.cuda.driver import call, entry
from ess.kernels.cuda.pinned import pinned_memory
from ess.kernels.cuda.program import source_text
from ess.kernels.cuda.rows import MoveForm, flat_form, move_record, ring_form
from ess.kernels.cuda.streams import CudaStream
from ess.kernels.streams import RowCopy
from ess.pool.cuda_programs import rival_form

ROW_BYTES: Final = 656
IN_STREAM_ORDER: Final = 1
POOL_BYTES: Final = 64 << 30
BRIEF_POOL_BYTES: Final = 24 << 30
"""Three layers of the largest pools: a larger one takes longer to lock than all rows to measure."""
RESULTS: Final = Path(__file__).resolve().parents[1] / "results"
MEASURED_BEFORE: Final = re.compile(
    r"gather (512|4096|65536) rows(, flat|, copy engine| within \d+ GiB, flat)"
    r"|scatter 65536 rows(, flat| within \d+ GiB, flat)"
)
TURNS: Final = 8
BLOCKS: Final = (1, 2, 4, 8)
REQUESTS: Final = 160
MISSES: Final = 100
CONTEXT_ROWS: Final = 128 << 10
Bytes = npt.NDArray[np.uint8]
PUBLISHED: Final = {"gather": ("ESS, 37 GiB/s", 39.7), "scatter": ("ESS, 43 GiB/s", 46.2)}
SMALL_GATHER: Final = ("wanted at 512 rows", 25.0)
BATCH_EDITION: Final = 13000
"""CUDA 12.8 declares the call with one argument more."""


class BatchAttributes(ctypes.Structure):
    """CUmemcpyAttributes: the order of access, where the two sides lie, flags."""

    _fields_ = (
        ("access_order", ctypes.c_int32),
        ("locations", ctypes.c_int32 * 4),
        ("flags", ctypes.c_uint32),
    )


class Moves:
    """A pool, a slab, and lists of `row_count` rows on both sides: those of the pool in order, at
    random, or of `requests` one after the other, in the order of each."""

    def __init__(
        self,
        rig: GpuRig,
        verb: str,
        row_count: int,
        pool: Bytes,
        *,
        in_order: bool = False,
        requests: int = 0,
    ) -> None:
        self.rig, self.verb, self.row_count = rig, verb, row_count
        self.row_bytes = pool.shape[1]
        self.byte_count = row_count * self.row_bytes
        random = np.random.default_rng(row_count)
        self.pool = pool
        self.slab = DeviceArray(rig.device, np.zeros((2 * row_count, self.row_bytes), np.uint8))
        far, near = (
            [random.choice(of, row_count, replace=False).astype(np.int32) for _ in range(TURNS)]
            for of in (len(pool), 2 * row_count)
        )
        self.far = [np.sort(rows) for rows in far] if in_order else far
        if requests:
            self.far = [in_turn(random, len(pool), row_count, requests) for _ in range(TURNS)]
        self.near = near
        self.far_there = [DeviceArray(rig.device, rows) for rows in self.far]
        self.near_there = [DeviceArray(rig.device, rows) for rows in self.near]

    def kernel_us(self, form: MoveForm, block_count: int) -> list[float]:
        kernel = self.rig.device.kernel(form.program, form.entry, shared_bytes=form.shared_bytes)

        def queue(turn: int) -> None:
            kernel.launch(
                self.record(turn),
                blocks=form.blocks(self.row_count, block_count_max=block_count),
                threads=form.threads,
                stream=self.rig.stream.handle,
                shared_bytes=form.shared_bytes,
            )

        return self.rig.graph_us(queue, TURNS)

    def record(self, turn: int) -> Any:
        pool = int(self.pool.__array_interface__["data"][0])
        sides = [
            (pool, self.far_there[turn].data_ptr()),
            (self.slab.data_ptr(), self.near_there[turn].data_ptr()),
        ]
        source, target = sides if self.verb == "gather" else sides[::-1]
        return move_record(
            source=source[0],
            source_rows=source[1],
            source_stride=self.row_bytes,
            target=target[0],
            target_rows=target[1],
            target_stride=self.row_bytes,
            pair_count=self.row_count,
            lines_of_target=self.verb == "scatter",
        )

    def lane_us(self, threads: int) -> tuple[list[float], list[float]]:
        """Microseconds of the job on the device, and of the host while it submits."""
        turns = iter(range(1 << 30))
        submitted: list[float] = []

        def run() -> None:
            turn = next(turns) % TURNS
            fetch = RowCopy(
                source=self.pool,
                source_rows=self.far[turn],
                target=self.slab,
                target_rows=self.near[turn],
            )
            begun_ns = time.monotonic_ns()
            lane.submit([fetch]).hold(self.rig.stream.handle)
            submitted.append((time.monotonic_ns() - begun_ns) / 1e3)

        with StreamLane(
            self.rig.device,
            compute_stream=lambda: self.rig.stream.handle,
            way="staged",
            threads=threads,
        ) as lane:
            return self.rig.us(run), submitted[WARMUPS:]

    def batch_us(self) -> list[float] | None:
        """cuMemcpyBatchAsync, one call for all rows; None where the driver lacks it."""
        try:
            copies, turns = BatchCopies(self), iter(range(1 << 30))
            return self.rig.us(lambda: copies.queue(next(turns) % TURNS), gated=False)
        except (Unavailable, BadState):
            return None

    def loop_us(self, loop: Callable[..., int]) -> list[float]:
        turns = iter(range(1 << 30))

        def run() -> None:
            turn = next(turns) % TURNS
            far, near = (side[turn].ctypes.data for side in (self.far, self.near))
            pool, slab = int(self.pool.__array_interface__["data"][0]), self.slab.data_ptr()
            sides = (slab, pool, near, far) if self.verb == "gather" else (pool, slab, far, near)
            status = loop(self.verb, *sides, self.row_count, self.rig.stream.handle)
            assert status == 0, f"the driver answers {status}"

        return self.rig.us(run, gated=False)


class BatchCopies:
    """The copies of every turn as arrays of the driver: targets, sources, sizes, one attribute."""

    def __init__(self, moves: Moves) -> None:
        pool, slab = int(moves.pool.__array_interface__["data"][0]), moves.slab.data_ptr()
        self._lists = []
        for far, near in zip(moves.far, moves.near, strict=True):
            sides = [
                at + rows.astype(np.uint64) * np.uint64(moves.row_bytes)
                for at, rows in ((np.uint64(pool), far), (np.uint64(slab), near))
            ]
            self._lists.append(sides[::-1] if moves.verb == "gather" else sides)
        self._sizes = np.full(moves.row_count, moves.row_bytes, np.uint64)
        self._attributes = BatchAttributes(access_order=IN_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        form = ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 3, size, *[pointer] * 2, size, pointer)
        self._call = form(entry("cuMemcpyBatchAsync", edition=BATCH_EDITION))
        self._stream = moves.rig.stream.handle

    def queue(self, turn: int) -> None:
        lists = [side.ctypes.data for side in (*self._lists[turn], self._sizes)]
        attribute = ctypes.addressof(self._attributes), ctypes.addressof(self._first), 1
        status = self._call(*lists, len(self._sizes), *attribute, self._stream)
        if status:
            raise BadState(f"cuMemcpyBatchAsync answers {status}")


def brief_rows_benchmark(*, smoke: bool) -> Iterator[Row]:
    yield from rows_benchmark(smoke=smoke, wanted_bytes=BRIEF_POOL_BYTES)


def rows_benchmark(*, smoke: bool, wanted_bytes: int = POOL_BYTES) -> Iterator[Row]:
    rig = GpuRig(repeats=3 if smoke else 15)
    pool_rows = ((8 << 20) if smoke else pool_bytes(wanted_bytes)) // ROW_BYTES
    pool = pinned_memory(rig.device, pool_rows * ROW_BYTES, row_bytes=ROW_BYTES, touch_threads=16)
    raw, pool = pool, pool.reshape(-1, ROW_BYTES)
    loop = memcpy_loop()
    yield from steps(rig, pool, smoke=smoke)
    for verb in ("gather", "scatter"):
        for row_count in (64,) if smoke else (512, 4096, 65536):
            moves = Moves(rig, verb, row_count, pool)
            yield from compare(moves, loop)
    yield from sizes(rig, raw, (8 << 10) if smoke else (32 << 20))
    yield from orders(rig, pool, (64,) if smoke else (512, 4096, 65536))
    yield from reaches(rig, pool, 64 if smoke else 65536)
    yield from ceilings(rig, (1 << 20) if smoke else (256 << 20))
    yield from both_at_once(rig, 64 if smoke else 65536, pool)
    yield from measured_before()


def pool_bytes(wanted: int) -> int:
    """What is wanted where half as much again is free, on the host and for this process's group;
    else an eighth of what is."""
    spare = memory_free()
    return wanted if 2 * spare >= 3 * wanted else spare // 8


def measured_before(folder: Path = RESULTS) -> Iterator[Row]:
    """What other machines gave: for each name their best, to be held against the rows above."""
    for path in sorted(folder.glob("gpu-*.json")):
        document = json.loads(path.read_text())
        on = {name: document["machine"][name] for name in ("device", "date")}
        best: dict[str, Row] = {}
        for line in document["rows"]:
            measured = line["config"].get("kind") == "measured"
            if measured and line["unit"] == "GB/s" and MEASURED_BEFORE.fullmatch(line["name"]):
                known = best.setdefault(line["name"], line)
                best[line["name"]] = max(known, line, key=itemgetter("value"))
        for name, line in best.items():
            yield row(name, "GB/s", line["samples"], **line["config"] | {"kind": "before"} | on)


def compare(moves: Moves, loop: Callable[..., int] | None) -> Iterator[Row]:
    small = moves.verb == "gather" and moves.row_count == 512
    wanted = SMALL_GATHER if small else PUBLISHED[moves.verb]
    name, byte_count = f"{moves.verb} {moves.row_count} rows", moves.byte_count
    rivals = {}
    for blocks in BLOCKS:
        us = moves.kernel_us(rival_form(ROW_BYTES), blocks)
        rivals[blocks] = ("warp per row", median_rate(us, byte_count))
        yield rate_row(f"{name}, warp per row", us, byte_count, blocks=blocks)
        us = moves.kernel_us(rival_form(ROW_BYTES, 8), blocks)
        yield rate_row(f"{name}, warp per row, 8 bytes a lane", us, byte_count, blocks=blocks)
    batched = moves.batch_us() if moves.row_count <= 4096 else None
    if batched is not None:
        yield rate_row(f"{name}, one batch of copies", batched, byte_count, baseline=rivals[4])
    if loop is not None and moves.row_count <= 4096:
        us = moves.loop_us(loop)
        yield rate_row(f"{name}, a memcpy each", us, byte_count, baseline=rivals[4])
    forms: list[MoveForm] = [flat_form(ROW_BYTES), ring_form(ROW_BYTES)]
    for form in forms:
        for blocks in BLOCKS:
            us = moves.kernel_us(form, blocks)
            given: dict[str, Any] = {"blocks": blocks, "in_flight": form.in_flight}
            yield rate_row(f"{name}, {form.way}", us, byte_count, baseline=rivals[blocks], **given)
            goal = 1.0 if form.way == "flat" and blocks in (2, 4) else None
            yield rate_row(
                f"{name}, {form.way}", us, byte_count, baseline=wanted, target=goal, **given
            )
    for threads in (2, 4, 8) if moves.verb == "gather" and native.available() else ():
        us, submitted = moves.lane_us(threads)
        link = ("45 GB/s", 45.0)
        goal = 1.0 if moves.row_count == 65536 else None
        yield rate_row(
            f"{name}, copy engine", us, byte_count, baseline=link, target=goal, threads=threads
        )
        yield row(f"{name}, copy engine, submitted in", "us", submitted, threads=threads)


def sizes(rig: GpuRig, raw: Bytes, byte_count: int) -> Iterator[Row]:
    """The same bytes in small and in large rows, to see whether bytes or requests are the limit."""
    for row_bytes in (128, ROW_BYTES, 4096):
        pool = raw[: raw.size // row_bytes * row_bytes].reshape(-1, row_bytes)
        moves = Moves(rig, "gather", byte_count // row_bytes, pool)
        for blocks in (*BLOCKS, 16):
            us = moves.kernel_us(flat_form(row_bytes), blocks)
            name = f"gather rows of {row_bytes} bytes, flat"
            yield rate_row(name, us, moves.byte_count, blocks=blocks, rows=moves.row_count)


def orders(rig: GpuRig, pool: Bytes, row_counts: Sequence[int]) -> Iterator[Row]:
    for row_count in row_counts:
        form = flat_form(ROW_BYTES)
        us = {
            in_order: Moves(rig, "gather", row_count, pool, in_order=in_order).kernel_us(form, 4)
            for in_order in (False, True)
        }
        byte_count = row_count * ROW_BYTES
        rival = "at random", median_rate(us[False], byte_count)
        name = f"gather {row_count} rows in order, flat"
        yield rate_row(name, us[True], byte_count, baseline=rival, blocks=4)


def reaches(rig: GpuRig, pool: Bytes, row_count: int) -> Iterator[Row]:
    """The same moves within ever more of the pool: how far does the translation of addresses
    reach?"""
    for gib in (1, 2, 4, 8, 16, 32, 64):
        part = pool[: (gib << 30) // ROW_BYTES]
        if len(part) == len(pool) and gib > 1:
            return
        for verb in ("gather", "scatter"):
            moves = Moves(rig, verb, row_count, part)
            us = moves.kernel_us(flat_form(ROW_BYTES), 4)
            name = f"{verb} {row_count} rows within {gib} GiB, flat"
            yield rate_row(name, us, moves.byte_count, blocks=4)


def steps(rig: GpuRig, pool: Bytes, *, smoke: bool) -> Iterator[Row]:
    """What a step fetches: some rows of each request, whose pages lie side by side. At a time few
    requests are on the wire, however large the pool is."""
    each = 8 if smoke else MISSES
    for gib in (0,) if smoke else (1, 8, 16, 32, 64):
        part = pool if smoke else pool[: (gib << 30) // ROW_BYTES]
        if len(part) == len(pool) and gib > 1:
            return
        requests = min(REQUESTS, len(part) // CONTEXT_ROWS) or 2
        count = each * requests
        us = {
            many: Moves(rig, "gather", count, part, requests=many).kernel_us(
                flat_form(ROW_BYTES), 4
            )
            for many in (0, requests)
        }
        byte_count = count * ROW_BYTES
        yield rate_row(
            f"gather {each} rows of each of {requests} requests within {gib} GiB, flat",
            us[requests],
            byte_count,
            baseline=("at random", median_rate(us[0], byte_count)),
            blocks=4,
        )


def in_turn(
    random: np.random.Generator, row_total: int, row_count: int, requests: int
) -> npt.NDArray[np.int32]:
    """Equally many rows of each request, ascending; each request's context lies at its own
    place."""
    context = min(CONTEXT_ROWS, row_total // requests)
    places = random.permutation(row_total // context)[:requests]
    each = [np.sort(random.permutation(context)[: row_count // requests]) for _ in places]
    rows: npt.NDArray[np.int64] = np.stack(each) + context * places[:, None]
    return rows.reshape(-1).astype(np.int32)


def ceilings(rig: GpuRig, byte_count: int) -> Iterator[Row]:
    """One large copy each way by the copy engine, alone and beside the other."""
    host = pinned_memory(rig.device, byte_count, touch_threads=8)
    there = DeviceArray(rig.device, np.zeros(byte_count, np.uint8))
    here, over = int(host.__array_interface__["data"][0]), there.data_ptr()
    stream = rig.stream.handle
    down = rig.us(lambda: call("cuMemcpyHtoDAsync", over, here, byte_count, stream))
    up = rig.us(lambda: call("cuMemcpyDtoHAsync", here, over, byte_count, stream))
    yield rate_row("one large copy, host to device", down, byte_count)
    yield rate_row("one large copy, device to host", up, byte_count)
    other, back = CudaStream(rig.device), DeviceArray(rig.device, np.zeros(byte_count, np.uint8))
    there_too = pinned_memory(rig.device, byte_count, touch_threads=8)
    target = int(there_too.__array_interface__["data"][0])

    def both() -> None:
        rig.event().record(stream).hold(other.handle)
        call("cuMemcpyHtoDAsync", over, here, byte_count, stream)
        call("cuMemcpyDtoHAsync", target, back.data_ptr(), byte_count, other.handle)
        other.record().hold(stream)

    yield rate_row("one large copy each way at once", rig.us(both), 2 * byte_count)


def both_at_once(rig: GpuRig, row_count: int, pool: Bytes) -> Iterator[Row]:
    """A gather on one stream beside a scatter on another: the bytes of both, over the longer."""
    sides = [Moves(rig, verb, row_count, pool) for verb in ("gather", "scatter")]
    other = CudaStream(rig.device)
    form = flat_form(ROW_BYTES)
    kernel = rig.device.kernel(form.program, form.entry)
    records = [[moves.record(turn) for turn in range(TURNS)] for moves in sides]

    def run() -> None:
        rig.event().record(rig.stream.handle).hold(other.handle)
        for stream, turns in zip((rig.stream, other), records, strict=True):
            for record in turns:
                kernel.launch(record, blocks=4, threads=form.threads, stream=stream.handle)
        other.record().hold(rig.stream.handle)

    byte_count = 2 * TURNS * row_count * ROW_BYTES
    yield rate_row(
        f"gather and scatter at once, {row_count} rows", rig.us(run), byte_count, blocks=4
    )


def memcpy_loop() -> Callable[..., int] | None:
    """cuMemcpyAsync once a row from C; None without a C++ compiler."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "loop.cpp", Path(folder) / "loop.so"
        source.write_text(source_text("memcpy_loop.cpp"))
        command = ["g++", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        loop = ctypes.CDLL(str(library)).ess_memcpy_loop
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    loop.argtypes = [pointer, number, number, pointer, pointer, number, number, pointer]
    copies = {"gather": "cuMemcpyHtoDAsync", "scatter": "cuMemcpyDtoHAsync"}
    entries = {verb: entry(name) for verb, name in copies.items()}

    def run(verb: str, to: int, source: int, to_rows: int, rows: int, count: int, at: int) -> int:
        return int(loop(entries[verb], to, source, to_rows, rows, count, ROW_BYTES, at))

    return run
