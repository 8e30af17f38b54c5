"""The CUDA sources as a library of this CPU, on the device that device/emulated.h plays.

Kernels may touch what is lent to them and nothing else; device/watch.cpp sees all they do.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest

from ess.kernels.cuda.program import FOLDERS, Program

ROOT = Path(__file__).resolve().parents[2]
SOURCES = tuple(ROOT / "csrc" / folder for folder in FOLDERS)
DEVICE = Path(__file__).resolve().parent / "device"
WATCH, PLAYED = "libwatch.so", "emulated.o"
LIBRARY = ("-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
FLAGS = (
    *("-O1", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas", "-Wno-unused-function"),
    *("-Wno-clobbered", "-Wno-maybe-uninitialized", "-Wno-unused-parameter"),
)
SEEN = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")

Array = npt.NDArray[Any]
Launch = Callable[..., None]


class DeviceFault(AssertionError):
    """What a kernel did wrong, in a sentence."""


def emulated(program: Program, kernels: dict[str, str], folder: Path) -> dict[str, Launch]:
    """Kernels by name; `kernels` says what record each one takes. Built once per folder."""
    text, name = source_of(program, kernels)
    return launches_of(build(text, program, folder / f"{name}.so"), kernels)


def launches_of(library: Path, kernels: Collection[str]) -> dict[str, Launch]:
    """Those of a library that is built."""
    loaded = ctypes.CDLL(str(library))
    return {kernel: _bound(loaded, kernel) for kernel in kernels}


@contextlib.contextmanager
def lent(
    folder: Path, arrays: Mapping[str, Array | None], *, unwritten: Collection[str] = ()
) -> Iterator[None]:
    """For the time being kernels may use these arrays, and read the unwritten once written."""
    watch = _watch(folder)
    given = {name: array for name, array in arrays.items() if array is not None and array.size}
    for name, array in given.items():
        assert array.flags.c_contiguous, name
        at = array.__array_interface__["data"][0]
        watch.watch_array(name.encode(), at, array.nbytes, name not in unwritten)
    try:
        yield
    finally:
        for array in given.values():
            watch.watch_forget(array.__array_interface__["data"][0])


def source_of(program: Program, kernels: dict[str, str]) -> tuple[str, str]:
    """The C++ around the kernels, and a name for what it becomes."""
    lines = [f'#include "{program.file}"']
    lines += [f"ESS_EMULATE({kernel}, {record})" for kernel, record in kernels.items()]
    text = "\n".join(["#define ESS_EMULATED", *lines, ""])
    return text, hashlib.sha256((text + str(program.options)).encode()).hexdigest()[:16]


def build(text: str, program: Program, library: Path) -> Path:
    """Instrumented, but without the compiler's runtime: the watch takes its place."""
    watch, device = build_watch(library.parent), build_device(library.parent)

    def make(unfinished: Path) -> None:
        source, part = library.with_suffix(".cpp"), library.with_suffix(".o")
        source.write_text(text)
        folders = [f"-I{folder}" for folder in (*SOURCES, DEVICE)]
        flags = [*LIBRARY, *FLAGS, *SEEN, *program.options, *folders]
        compile_cpp([*flags, "-c", str(source), "-o", str(part)])
        joined = ["-shared", str(part), str(device), str(watch), "-Wl,-rpath,$ORIGIN"]
        compile_cpp([*joined, "-o", str(unfinished)])

    return made_once(library, make)


def build_device(folder: Path) -> Path:
    """What all libraries have in common, each with a copy of its own; nothing watches it."""

    def make(unfinished: Path) -> None:
        source = str(DEVICE / "emulated.cpp")
        compile_cpp([*LIBRARY, *FLAGS, "-O2", "-c", source, "-o", str(unfinished)])

    return made_once(folder / PLAYED, make)


def build_watch(folder: Path) -> Path:
    def make(unfinished: Path) -> None:
        flags = [*LIBRARY, "-O2", f"-Wl,-soname,{WATCH}", "-fvisibility=default"]
        sources = [str(DEVICE / f"{name}.cpp") for name in ("watch", "races")]
        compile_cpp([*flags, *sources, "-o", str(unfinished)])

    return made_once(folder / WATCH, make)


def made_once(library: Path, make: Callable[[Path], None]) -> Path:
    """By the first of the processes that share the folder, and anew when a source has changed; the
    others wait for it."""
    made_of, sources = library.with_name(f"{library.name}.sources"), _sources()

    def is_made() -> bool:
        return library.exists() and made_of.exists() and made_of.read_text() == sources

    if not is_made():
        with library.with_name(f"{library.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_made():
                unfinished = library.with_name(f"{library.name}.part")
                make(unfinished)
                unfinished.replace(library)
                made_of.write_text(sources)
    return library


def _sources() -> str:
    """A name for all files that a library may be made of, and how it is made."""
    made = hashlib.sha256(repr((LIBRARY, FLAGS, SEEN)).encode())
    for folder in (*SOURCES, DEVICE):
        for file in sorted(filter(Path.is_file, folder.iterdir())):
            made.update(file.read_bytes())
    return made.hexdigest()


def compile_cpp(arguments: list[str]) -> None:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@functools.cache
def _watch(folder: Path) -> ctypes.CDLL:
    watch = ctypes.CDLL(str(build_watch(folder)))
    watch.watch_array.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool]
    watch.watch_forget.argtypes = [ctypes.c_void_p]
    return watch


def _bound(library: ctypes.CDLL, kernel: str) -> Launch:
    symbol = getattr(library, f"emulate_{kernel}")
    number = ctypes.c_int32
    symbol.argtypes = [ctypes.c_void_p, number, number, number, ctypes.c_uint64]
    symbol.restype = ctypes.c_char_p

    def launch(
        record: ctypes.Structure, *, blocks: int, threads: int, shared_bytes: int = 0, seed: int = 1
    ) -> None:
        wrong = symbol(ctypes.addressof(record), blocks, threads, shared_bytes, seed)
        if wrong is not None:
            raise DeviceFault(wrong.decode())

    return launch
