"""Row moves on a device against plain copies and the rate of the link.

A sample takes rows that no sample before it took for a while: eight lists over a pool far larger
than any cache. Kernels are timed as graphs of eight launches, a lane as its caller sees it.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ess.bench.gpu.rig import GpuRig, Row, median_rate, rate_row
from ess.flashtrans.stream_lane import StreamLane
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
TURNS: Final = 8
BLOCKS: Final = (1, 2, 4, 8)
Bytes = npt.NDArray[np.uint8]
PUBLISHED: Final = {"gather": ("ESS, 37 GiB/s", 39.7), "scatter": ("ESS, 43 GiB/s", 46.2)}
SMALL_GATHER: Final = ("wanted at 512 rows", 25.0)


class Moves:
    """A pool, a slab, and lists of `row_count` rows on both sides, those of the pool in order or
    at random."""

    def __init__(
        self, rig: GpuRig, verb: str, row_count: int, pool: Bytes, *, in_order: bool = False
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

    def lane_us(self, threads: int) -> list[float]:
        turns = iter(range(1 << 30))

        def run() -> None:
            turn = next(turns) % TURNS
            fetch = RowCopy(
                source=self.pool,
                source_rows=self.far[turn],
                target=self.slab,
                target_rows=self.near[turn],
            )
            lane.submit([fetch]).hold(self.rig.stream.handle)

        with StreamLane(
            self.rig.device,
            compute_stream=lambda: self.rig.stream.handle,
            way="staged",
            threads=threads,
        ) as lane:
            return self.rig.us(run)

    def loop_us(self, loop: Callable[..., int]) -> list[float]:
        turns = iter(range(1 << 30))

        def run() -> None:
            turn = next(turns) % TURNS
            far, near = (side[turn].ctypes.data for side in (self.far, self.near))
            pool, slab = int(self.pool.__array_interface__["data"][0]), self.slab.data_ptr()
            sides = (slab, pool, near, far) if self.verb == "gather" else (pool, slab, far, near)
            status = loop(self.verb, *sides, self.row_count, self.rig.stream.handle)
            assert status == 0, f"the driver answers {status}"

        return self.rig.us(run)


def rows_benchmark(*, smoke: bool) -> Iterator[Row]:
    rig = GpuRig(repeats=3 if smoke else 15)
    pool_rows = ((8 << 20) if smoke else (8 << 30)) // ROW_BYTES
    pool = pinned_memory(rig.device, pool_rows * ROW_BYTES, row_bytes=ROW_BYTES, touch_threads=8)
    raw, pool = pool, pool.reshape(-1, ROW_BYTES)
    loop = memcpy_loop()
    for verb in ("gather", "scatter"):
        for row_count in (64,) if smoke else (512, 4096, 65536):
            moves = Moves(rig, verb, row_count, pool)
            yield from compare(moves, loop)
    yield from sizes(rig, raw, (64 << 10) if smoke else (32 << 20))
    yield from orders(rig, pool, (64,) if smoke else (512, 4096, 65536))
    yield from ceilings(rig, (1 << 20) if smoke else (256 << 20))
    yield from both_at_once(rig, 64 if smoke else 65536, pool)


def compare(moves: Moves, loop: Callable[..., int] | None) -> Iterator[Row]:
    small = moves.verb == "gather" and moves.row_count == 512
    wanted = SMALL_GATHER if small else PUBLISHED[moves.verb]
    name, byte_count = f"{moves.verb} {moves.row_count} rows", moves.byte_count
    rivals = {}
    for blocks in BLOCKS:
        us = moves.kernel_us(rival_form(ROW_BYTES), blocks)
        rivals[blocks] = ("warp per row", median_rate(us, byte_count))
        yield rate_row(f"{name}, warp per row", us, byte_count, blocks=blocks)
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
        us = moves.lane_us(threads)
        link = ("45 GB/s", 45.0)
        goal = 1.0 if moves.row_count == 65536 else None
        yield rate_row(
            f"{name}, copy engine", us, byte_count, baseline=link, target=goal, threads=threads
        )


def sizes(rig: GpuRig, raw: Bytes, byte_count: int) -> Iterator[Row]:
    """The same bytes in small and in large rows: is the limit one of bytes or of requests?"""
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
