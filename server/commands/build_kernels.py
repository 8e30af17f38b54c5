"""`ess build-kernels`: every CUDA program as machine code, before the first request needs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec
from rich.table import Table

from ess import console
from ess.errors import BadInput
from ess.kernels.cuda import program
from ess.pool import cuda_programs

ARCH: Final = re.compile(r"sm_(\d{2,3}|90a|\d{3}[af])")


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel of a program. Bytes are per thread, those of shared memory per block."""

    arch: str
    program: str
    entry: str
    register_count: int
    spill_bytes: int
    shared_bytes: int


def build_kernels(
    *, arch: str = ",".join(program.ARCHITECTURES), folder: Path | None = None, json: bool = False
) -> None:
    """Compile the CUDA kernels ahead of time; no GPU is needed.

    Parameters
    ----------
    arch
        Architectures from sm_89 on, separated by commas.
    folder
        Where machine code is kept; ESS_CACHE_DIR or the system's place for such files by default.
    json
        Print one JSON document.
    """
    names = [name.strip() for name in arch.split(",")]
    home = program.default_folder() if folder is None else folder
    capabilities = [_capability(name) for name in names]
    built = [
        kernel
        for name, capability in zip(names, capabilities, strict=True)
        for kernel in _build(name, capability, home)
    ]
    if json:
        console.print_json(built)
        return
    _print(built)
    console.note(f"{len(built)} kernels by {program.compiler_version()} in {home}")


def _capability(arch: str) -> tuple[int, int]:
    match = ARCH.fullmatch(arch)
    if match is None:
        raise BadInput(f"--arch {arch!r} is not an architecture, such as sm_90a or sm_100a")
    capability = divmod(int(match[1].rstrip("af")), 10)
    if capability < program.CAPABILITY_MIN:
        raise BadInput(f"--arch {arch}: the kernels need sm_89 or a newer one")
    return capability


def _build(arch: str, capability: tuple[int, int], folder: Path) -> list[Built]:
    built = []
    for source in cuda_programs.programs(capability):
        compiled = program.build(source, arch, folder=folder)
        built += [
            Built(
                arch=arch,
                program=str(source),
                entry=used.entry,
                register_count=used.register_count,
                spill_bytes=used.spill_bytes,
                shared_bytes=used.shared_bytes,
            )
            for used in compiled.resources
        ]
    return built


def _print(built: list[Built]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("architecture", "kernel", "program"):
        table.add_column(heading)
    for heading in ("registers", "spills", "shared"):
        table.add_column(heading, justify="right")
    for kernel in built:
        numbers = (kernel.register_count, kernel.spill_bytes, kernel.shared_bytes)
        table.add_row(kernel.arch, kernel.entry, kernel.program, *map(str, numbers))
    console.tables().print(table)
