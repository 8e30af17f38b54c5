"""CUDA sources to machine code: compiled by NVRTC at first use and kept under their content.

Neither a device, nor a driver, nor a CUDA toolkit is needed to compile, and where a program has
been built ahead no compiler either. The key of a program is its source with all that it includes,
its options and the architecture, so a kept file does what it should; the compiler's version is not
in it, since then only a compiler could find what another has built, and within a generation of CUDA
any driver loads what any compiler has made. `ess build-kernels` compiles anew. Ranks that build at
the same time are no trouble: each writes a draft and renames it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from ess.caches import cache_folder
from ess.errors import Unavailable, not_installed

FOLDERS: Final = ("flashtrans", "residency")
HEADERS: Final = ("device.cuh", "move.cuh", "phases.cuh", "resolve.cuh", "victims.cuh")
ARCHITECTURES: Final = ("sm_90a", "sm_100a")
CAPABILITY_MIN: Final = 8, 9
"""The compute capability since which there are e4m3 numbers."""
HOPPER: Final = 9, 0
"""The one since which a thread copies a row of any length, and blocks form clusters."""

_ENTRY: Final = re.compile(r"Compiling entry function '(\w+)'")
_SPILL: Final = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_USED: Final = re.compile(r"Used (\d+) registers")
_SHARED: Final = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One source file with the constants that it is compiled for."""

    file: str
    defines: tuple[tuple[str, int], ...] = ()

    @property
    def options(self) -> list[str]:
        return ["-std=c++17", *(f"-D{name}={value}" for name, value in self.defines)]

    def __str__(self) -> str:
        constants = ", ".join(f"{name[4:].lower()} {value}" for name, value in self.defines)
        return f"{self.file} ({constants})" if constants else self.file


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What the assembler says that a kernel takes; bytes are per thread, shared ones per block."""

    entry: str
    register_count: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    code: bytes
    resources: tuple[Resources, ...]


def source_text(file: str) -> str:
    folders = (resources.files("ess") / "csrc" / folder for folder in FOLDERS)
    [path] = [folder / file for folder in folders if (folder / file).is_file()]
    return path.read_text(encoding="utf-8")


def compile_program(program: Program, arch: str) -> Compiled:
    """Unavailable without NVRTC, and with the compiler's own words when it refuses."""
    nvrtc = _nvrtc()
    headers = [name.encode() for name in HEADERS]
    texts = [source_text(name).encode() for name in HEADERS]
    text, name = source_text(program.file).encode(), program.file.encode()
    handle = _checked(nvrtc.nvrtcCreateProgram(text, name, len(headers), texts, headers))
    options = [f"--gpu-architecture={arch}", "--ptxas-options=-v", *program.options]
    try:
        status = nvrtc.nvrtcCompileProgram(
            handle, len(options), [option.encode() for option in options]
        )
        log = _output(handle, "ProgramLog").decode(errors="replace").rstrip("\0")
        if int(status[0]):
            raise Unavailable(f"{program} does not compile for {arch}:\n{log}")
        return Compiled(code=_output(handle, "CUBIN"), resources=tuple(_resources(log)))
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def cubin(program: Program, arch: str, *, folder: Path | None = None) -> bytes:
    """The machine code, from the folder of earlier builds when it is there and can be read."""
    path = _path(program, arch, default_folder() if folder is None else folder)
    try:
        return path.read_bytes()
    except OSError:
        compiled = compile_program(program, arch)
    with contextlib.suppress(OSError):
        _keep(path, compiled.code)
    return compiled.code


def build(program: Program, arch: str, *, folder: Path) -> Compiled:
    """Compiles, even if an earlier build is kept, and keeps the machine code."""
    compiled = compile_program(program, arch)
    _keep(_path(program, arch, folder), compiled.code)
    return compiled


def _path(program: Program, arch: str, folder: Path) -> Path:
    return folder / f"{Path(program.file).stem}-{_key(program, arch)}.{arch}.cubin"


def default_folder() -> Path:
    """$ESS_CACHE_DIR, else the folder `ess` in the user's cache folder."""
    named = os.environ.get("ESS_CACHE_DIR")
    return Path(named) if named else cache_folder()


def compiler_version() -> str:
    return "NVRTC {}.{}".format(*_version())


def compiler_generation() -> int:
    """The version of CUDA whose drivers, and all later drivers, load what is compiled here."""
    return int(_version()[0])


def _version() -> tuple[Any, ...]:
    return _checked_pair(_nvrtc().nvrtcVersion())


def why_missing() -> str | None:
    """A line for people, or None where programs can be compiled."""
    try:
        compiler_version()
    except Unavailable as error:
        return str(error)
    return None


def built_ahead(arch: str) -> bool:
    """Whether any program is kept for these devices, which may then do without a compiler."""
    return any(default_folder().glob(f"*.{arch}.cubin"))


def _key(program: Program, arch: str) -> str:
    digest = hashlib.sha256()
    texts = (source_text(name) for name in (*HEADERS, program.file))
    for part in (*texts, *program.options, arch):
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()[:32]


def _keep(path: Path, code: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
            file.flush()
            os.fsync(file.fileno())  # or a machine that stops may leave a name and no code
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except OSError:  # a full disk is not left with drafts
        os.unlink(draft)
        raise


def _resources(log: str) -> Iterator[Resources]:
    """From the assembler's lines, a paragraph for each kernel."""
    for paragraph in re.split(r"(?=Compiling entry function)", log)[1:]:
        entry, stack, used = (pattern.search(paragraph) for pattern in (_ENTRY, _SPILL, _USED))
        shared = _SHARED.search(paragraph)
        if not (entry and stack and used):
            raise Unavailable(f"the assembler's report cannot be read:\n{paragraph}")
        yield Resources(
            entry=entry[1],
            register_count=int(used[1]),
            stack_bytes=int(stack[1]),
            spill_bytes=int(stack[2]) + int(stack[3]),
            shared_bytes=int(shared[1]) if shared else 0,
        )


def _output(handle: Any, name: str) -> bytes:
    size = _checked(getattr(_nvrtc(), f"nvrtcGet{name}Size")(handle))
    text = bytearray(size)
    _checked_pair(getattr(_nvrtc(), f"nvrtcGet{name}")(handle, text))
    return bytes(text)


def _checked(results: tuple[Any, ...]) -> Any:
    return _checked_pair(results)[0]


def _checked_pair(results: tuple[Any, ...]) -> tuple[Any, ...]:
    if int(results[0]):
        raise Unavailable(f"the CUDA compiler refused a call: {results[0]}")
    return results[1:]


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise not_installed(f"cuda-bindings ({error})", extra="cuda") from None
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:
        raise Unavailable(f"the NVRTC library cannot be loaded: {error}") from None
    return nvrtc
