"""cuda-python over the emulated driver, in a process of its own: `python -m ... script`."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

from ess.kernels.cuda import program
from tests.support import forked
from tests.support.emulate import (
    DEVICE,
    LIBRARY,
    ROOT,
    build,
    build_watch,
    compile_cpp,
    made_once,
    source_of,
)

RECORDS = {
    "rows.cu": {"ess_move_rows": "Move"},
    "ring.cu": {"ess_ring_rows": "Move"},
    "rival.cu": {"ess_rival_rows": "Move"},
    "gate.cu": {"ess_gate": "Gate"},
    "each.cu": dict.fromkeys(
        [f"ess_each_{name}" for name in ("probe", "count", "rank", "serve")], "Each"
    ),
    "locate.cu": {"ess_locate": "Locate"},
    "resolve.cu": dict.fromkeys(
        [f"ess_{name}" for name in ("probe", "count", "rank", "assign", "serve")],
        "Resolve",
    ),
    "together.cu": {"ess_resolve_together": "Resolve"},
    "scores.cu": dict.fromkeys(("ess_scale", "ess_follow"), "Observe"),
    "upkeep.cu": dict.fromkeys(
        [f"ess_{name}" for name in ("settle", "drop", "clear_blocks")], "Upkeep"
    ),
    "seal.cu": {"ess_seal": "Seal"},
    "audit.cu": {"ess_audit": "Audit"},
}


def run_script(script: str, folder: Path, **environment: str) -> str:
    """What the script prints. It must call `begin` before anything of CUDA."""
    module = ".".join(Path(script).relative_to(ROOT).with_suffix("").parts)
    env = {**os.environ, **environment, "PYTHONPATH": str(ROOT), "ESS_EMULATED": str(folder)}
    return forked.run("interpreted", "-m", module, env=env)


def build_driver(folder: Path) -> Path:
    library = folder / "libcuda.so.1"
    watch = ["-ldl", str(build_watch(folder)), "-Wl,-rpath,$ORIGIN"]

    def make(unfinished: Path) -> None:
        flags = [*LIBRARY, "-O1", f"-Wl,-soname,{library.name}"]
        compile_cpp([*flags, str(DEVICE / "driver.cpp"), *watch, "-o", str(unfinished)])

    return made_once(library, make)


def begin(*, alone: bool = True) -> ctypes.CDLL:
    """From here on this process has one GPU, or so it seems.

    Not `alone`: kernels also get memory that the driver has not given out, torch's for one.
    """
    folder = Path(os.environ["ESS_EMULATED"])
    driver = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    if not alone:
        driver.watch_others()
        driver.reach_others()

    def emulated_cubin(one: program.Program, arch: str, *, folder: Path | None = None) -> bytes:
        home = Path(os.environ["ESS_EMULATED"])
        text, name = source_of(one, RECORDS[one.file])
        library = build(text, one, home / f"{name}.so")
        return str(library).encode() + b"\0"

    program.cubin = emulated_cubin
    tell_records(driver)
    lock_away()
    return driver


def tell_records(library: ctypes.CDLL) -> None:
    """Of each launch, how many bytes its record has: the driver knows how many the kernel takes."""
    from ess.kernels.cuda.driver import Kernel

    launch = Kernel.launch

    def told(kernel: Kernel, record: ctypes.Structure, **shape: int) -> None:
        library.driver_record(ctypes.sizeof(record))
        launch(kernel, record, **shape)

    Kernel.launch = told  # type: ignore[assignment, method-assign]


def lock_away() -> None:
    """Registered memory that is let go can be neither read nor written from then on, and no other
    memory gets its addresses: a host or kernel that uses it further ends the process there."""
    from ess.kernels.cuda import pinned

    register, mappings = pinned.register, []

    def registered(device: object, memory: pinned.Bytes, **how: object) -> None:
        owner, start = pinned._owner(memory), memory.__array_interface__["data"][0]
        locks = weakref.finalize(owner, lock, start, memory.nbytes)  # the last of its finalizers
        locks.atexit = False
        try:
            register(device, memory, **how)  # type: ignore[arg-type]
        except BaseException:
            locks.detach()
            raise
        mappings.append(owner.base)

    pinned.register = registered  # type: ignore[assignment]


def lock(start: int, byte_count: int) -> None:
    libc, words = ctypes.CDLL(None, use_errno=True), (ctypes.c_void_p(start),)
    assert libc.madvise(*words, ctypes.c_size_t(byte_count), mmap.MADV_DONTNEED) == 0
    assert libc.mprotect(*words, ctypes.c_size_t(byte_count), 0) == 0
