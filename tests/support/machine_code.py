"""What the compiler makes of the CUDA programs of serving, for devices that are not there.

`python -m tests.support.machine_code [word ...]` prints a line for each kernel of the programs of
which a file has one of the words: registers of a thread, spilled bytes, shared bytes of a block,
and how many instructions, of these loads and stores of global memory, atomic ones and barriers.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import triton

from ess.kernels.cuda import program
from ess.kernels.cuda.program import Program
from ess.pool import cuda_programs

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
FUNCTION = re.compile(r"^\s+Function : (\w+)", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)", re.MULTILINE)


class Figures(NamedTuple):
    registers: int
    spilled: int
    shared: int
    instructions: int
    loads: int
    stores: int
    atomics: int
    barriers: int


def figures(source: Program, arch: str) -> Iterator[tuple[str, Figures]]:
    """By entry."""
    compiled = program.compile_program(source, arch)
    code = dict(functions(compiled.code))
    for used in compiled.resources:
        names = [name for name in code[used.entry] if name != "NOP"]

        def count(*starts: str, names: list[str] = names) -> int:
            return sum(name.startswith(starts) for name in names)

        yield (
            used.entry,
            Figures(
                registers=used.register_count,
                spilled=used.stack_bytes + used.spill_bytes,
                shared=used.shared_bytes,
                instructions=len(names),
                loads=count("LDG", "LD."),
                stores=count("STG", "ST."),
                atomics=count("ATOM", "RED"),
                barriers=count("BAR"),
            ),
        )


def functions(cubin: bytes) -> Iterator[tuple[str, list[str]]]:
    """The names of the instructions of each kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        said = subprocess.run(
            [TOOLS / "cuobjdump", "-sass", path], capture_output=True, text=True, check=True
        ).stdout
    _, *parts = FUNCTION.split(said)
    for entry, text in zip(parts[::2], parts[1::2], strict=True):
        yield entry, INSTRUCTION.findall(text)


def main(words: list[str]) -> None:
    print(f"{'':<8}{'':<40}{'':<22}", *(f"{name:>12}" for name in Figures._fields))
    for source in cuda_programs.programs():
        if words and not any(word in source.file for word in words):
            continue
        for arch in program.ARCHITECTURES:
            for entry, numbers in figures(source, arch):
                print(f"{arch:<8}{source!s:<40}{entry:<22}", *(f"{each:>12}" for each in numbers))


if __name__ == "__main__":
    main(sys.argv[1:])
