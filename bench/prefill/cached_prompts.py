"""`ess-bench prefix`: the second turn of a conversation, nine tenths of which are cached.

    none    all of the prompt is computed
    host    the first turn's pages are in the host pool
    warm    they are only on disk, and the system still has the file in memory
    cold    they are only on disk: the system was told to drop the file (POSIX_FADV_DONTNEED)

Every turn has its own engine, so that warm and cold are what a restarted process finds. The tier's
rates are compared with plain pwrite and preadv of the same records by one thread, whose writes also
end in one fdatasync.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np

from ess.array_types import Bytes
from ess.bench.harness.lists import amount, sizes
from ess.bench.harness.prefix import check_memory
from ess.bench.harness.report import Row
from ess.bench.harness.text import token_ids
from ess.bench.harness.threads import compute_threads
from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.layout import ModelLayout
from ess.models.load import load_model
from ess.models.model import Model
from ess.pool.disk.folder import SLAB
from ess.pool.disk.slab import Slab
from ess.pool.disk.tier import DiskTier
from ess.units import PAGE_ROWS, align_up

CACHED: Final = 0.9
IDENTITY: Final = b"a benchmark"


def prefix_benchmark(
    *, ctx: str = "4k,16k", pages: int = 256, rounds: int = 3, smoke: bool = False
) -> list[Row]:
    """A second turn's first token with 90 % cached: computed, from the host, from the disk.

    Parameters
    ----------
    ctx
        Prompt lengths, a list.
    pages
        Pages written and read for the disk's rates.
    rounds
        How many rounds to run; the result is their median.
    """
    if smoke:
        return [*_rates(8, 1), *_turns(256, 1)]
    lengths, pages, rounds = (
        sizes("--ctx", ctx),
        amount("--pages", pages),
        amount("--rounds", rounds),
    )
    check_memory(max(lengths))
    turns = [row for length in lengths for row in _turns(length, rounds)]
    return [*_rates(pages, rounds), *turns]


# ---- the second turn


def _turns(length: int, rounds: int) -> list[Row]:
    ids, _ = token_ids()
    model = load_model()
    layout = model.config.layout()
    seconds: dict[str, list[float]] = {name: [] for name in ("none", "host", "warm", "cold")}
    with compute_threads():
        for _ in range(rounds):
            _round(model, layout, _prompts(ids, length), seconds)
    none = statistics.median(seconds["none"])
    return [_turn_row(length, name, listed, none) for name, listed in seconds.items()]


def _prompts(ids: list[int], length: int) -> Iterator[list[int]]:
    """The first turn, then second turns that share no page behind it."""
    first = ids[: int(CACHED * length)]
    yield first
    for start in count(length, length - len(first)):
        yield [*first, *ids[start : start + length - len(first)]]


def _round(
    model: Model,
    layout: ModelLayout,
    prompts: Iterator[list[int]],
    seconds: dict[str, list[float]],
) -> None:
    first, second = next(prompts), next(prompts)
    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(model, layout, len(second), Path(folder))
        _first_token_s(engine, first)
        seconds["host"].append(_first_token_s(engine, second))
        engine.offload.close()
        for name in ("warm", "cold", "none"):
            if name == "cold":
                _forget_file(Path(folder) / SLAB)
            where = None if name == "none" else Path(folder)
            engine = _engine(model, layout, len(second), where)
            seconds[name].append(_first_token_s(engine, next(prompts)))
            engine.offload.close()


def _engine(model: Model, layout: ModelLayout, length: int, folder: Path | None) -> Engine:
    pages = 2 * length // PAGE_ROWS + 8
    disk = None if folder is None else _tier(folder, layout.host_page_bytes, pages)
    offload = Offload.create(
        layout,
        slot_bytes=2 * layout.slot_floor * layout.slot_bytes,
        host_bytes=pages * layout.host_page_bytes,
        length_max=length + PAGE_ROWS,
        disk=disk,
    )
    return Engine(model, offload, EngineConfig())


def _first_token_s(engine: Engine, prompt: list[int]) -> float:
    began_s = time.perf_counter()
    request = engine.add(prompt, Sampling(tokens_max=1, ignore_eos=True))
    for _ in engine.run():
        if request.output:
            break
    return time.perf_counter() - began_s


def _turn_row(length: int, name: str, seconds: list[float], none: float) -> Row:
    value = statistics.median(seconds)
    return Row(
        name=f"second turn of {length:,}, 90 % cached: {name}",
        value=round(1e3 * value, 1),
        unit="ms to the first token",
        baseline="none",
        baseline_value=round(1e3 * none, 1),
        ratio=round(none / value, 2),
        samples=[round(1e3 * second, 1) for second in seconds],
    )


# ---- rates


def _rates(pages: int, rounds: int) -> list[Row]:
    """Rates of whole pages of the embedded model, written and read in order."""
    page_bytes = load_model().config.layout().host_page_bytes
    memory = np.random.default_rng(0).integers(0, 256, (pages, page_bytes), dtype=np.uint8)
    room = np.zeros_like(memory)
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            _plain(Path(folder), memory, room, taken)
        with tempfile.TemporaryDirectory() as folder:
            _tiered(Path(folder), memory, room, taken)
    gb_per_s = {
        name: round(memory.nbytes / statistics.median(listed) / 1e9, 3)
        for name, listed in taken.items()
    }
    return [
        Row(
            name=f"{name} {pages} pages of {page_bytes:,} B",
            value=gb_per_s[name],
            unit="GB/s",
            baseline=f"plain {name}",
            baseline_value=gb_per_s[f"plain {name}"],
            ratio=round(gb_per_s[name] / gb_per_s[f"plain {name}"], 2),
        )
        for name in ("store", "load, warm", "load, cold")
    ]


def _plain(folder: Path, memory: Bytes, room: Bytes, taken: dict[str, list[float]]) -> None:
    slab = Slab(folder / SLAB, record_bytes=memory.shape[1])

    def write() -> None:
        for record, page in enumerate(memory):
            slab.write(record, page)
        slab.sync()

    def read() -> None:
        for record, page in enumerate(room):
            assert slab.read(record, [page]), f"record {record} is cut short"

    _timed(taken, "plain store", write)
    _timed(taken, "plain load, warm", read)
    _forget_file(folder / SLAB)
    _timed(taken, "plain load, cold", read)
    slab.close()


def _tiered(folder: Path, memory: Bytes, room: Bytes, taken: dict[str, list[float]]) -> None:
    tier = _tier(folder, memory.shape[1], len(memory))
    contents = [number.to_bytes(16, "little") for number in range(len(memory))]

    def write() -> None:
        for content, page in zip(contents, memory, strict=True):
            tier.store(content, _copies(page))
        tier.flush()

    def read() -> None:
        loading = tier.loading(contents, lambda place: [room[place]])
        loading.begin()
        loading.wait()
        assert loading.count == len(contents), f"{loading.count} of {len(contents)} pages"

    _timed(taken, "store", write)
    _timed(taken, "load, warm", read)
    _forget_file(folder / SLAB)
    _timed(taken, "load, cold", read)
    tier.close()


def _timed(taken: dict[str, list[float]], name: str, act: Callable[[], None]) -> None:
    began_s = time.perf_counter()
    act()
    taken.setdefault(name, []).append(time.perf_counter() - began_s)


def _tier(folder: Path, page_bytes: int, pages: int) -> DiskTier:
    capacity = pages * align_up(page_bytes, 4096)
    return DiskTier(folder, identity=IDENTITY, page_bytes=page_bytes, capacity_bytes=capacity)


def _copies(page: Bytes) -> Callable[[Bytes], bool]:
    def copy(out: Bytes) -> bool:
        out[:] = page
        return True

    return copy


def _forget_file(path: Path) -> None:
    """Drops the file's pages from the system's memory, as far as the system obeys."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
