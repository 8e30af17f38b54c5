"""The CUDA sources as a library of this CPU, on the device that device/emulated.h plays."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ess.kernels.cuda.program import Program

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc" / "flashtrans"
DEVICE = Path(__file__).resolve().parent / "device"
FLAGS = (
    *("-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-U_FORTIFY_SOURCE"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function"),
    *("-Wno-clobbered", "-Wno-maybe-uninitialized", "-Wno-unused-parameter"),
)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")

Launch = Callable[..., None]


def emulated(program: Program, kernels: dict[str, str], folder: Path) -> dict[str, Launch]:
    """Kernels by name; `kernels` says what record each one takes. Built once per folder."""
    text, name = source_of(program, kernels)
    library = folder / f"{name}.so"
    if not library.exists():
        build(text, program, library)
    loaded = ctypes.CDLL(str(library))
    return {kernel: _bound(loaded, kernel) for kernel in kernels}


def source_of(program: Program, kernels: dict[str, str]) -> tuple[str, str]:
    """The C++ around the kernels, and a name for what it becomes."""
    lines = [f'#include "{program.file}"']
    lines += [f"ESS_EMULATE({kernel}, {record})" for kernel, record in kernels.items()]
    text = "\n".join(["#define ESS_EMULATED", *lines, ""])
    return text, hashlib.sha256((text + str(program.options)).encode()).hexdigest()[:16]


def build(text: str, program: Program, library: Path) -> None:
    source = library.with_suffix(".cpp")
    source.write_text(text)
    folders = [f"-I{SOURCES}", f"-I{DEVICE}"]
    command = ["g++", *FLAGS, *program.options, *folders, str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _bound(library: ctypes.CDLL, kernel: str) -> Launch:
    symbol = getattr(library, f"emulate_{kernel}")
    number = ctypes.c_int32
    symbol.argtypes = [ctypes.c_void_p, number, number, number, ctypes.c_uint64]
    symbol.restype = None

    def launch(
        record: ctypes.Structure, *, blocks: int, threads: int, shared_bytes: int = 0, seed: int = 1
    ) -> None:
        symbol(ctypes.addressof(record), blocks, threads, shared_bytes, seed)

    return launch
