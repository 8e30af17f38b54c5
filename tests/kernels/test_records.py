"""The records that Python writes and C++ reads: every field at one place, of one size.

The C++ compiler says so of each field by name, over the very sources; nothing is run.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from ess.flashtrans import native_rows, staging
from ess.kernels.cpu import records
from ess.kernels.cuda import rows
from ess.pool.lru import cuda_new_rows, cuda_records, cuda_seal, planner
from tests.support.emulate import DEVICE, ROOT, SOURCES, needs_compiler

pytestmark = needs_compiler

ON_CPU = {
    "kernels.h": ["Matrix", "Attend", "Merge", "Index", "Op", "Experts", "Stage", "Bound"],
    "encoding.h": ["Strides", "Encoding"],
    "keys.h": ["Append"],
    "layer.cpp": ["StepSide", "Layer"],
    "step.cpp": ["Opening"],
}
NATIVE = {
    f"cpu/{file}": {f"ess::{name}": getattr(records, name) for name in names}
    for file, names in ON_CPU.items()
} | {
    "cpu/moves/rows.h": {
        "ess::RowSide": native_rows._NativeSide,
        "ess::RowCopy": native_rows.NativeCopy,
        "ess::Fault": native_rows.NativeFault,
        "ess::RowJob": staging.HostJob,
    },
    "cpu/moves/copy_engine.cpp": {
        "ess::StagedFetch": staging.StagedFetch,
        "ess::Move": rows.MoveRecord,
    },
    "residency/planner.h": {
        "ess::Arena": planner._ArenaRecord,
        "ess::Split": planner._SplitRecord,
        "ess::Lookup": planner._LookupRecord,
    },
}
CUDA = {
    "rows.cu": {"Move": rows.MoveRecord},
    "seal.cu": {"Seal": cuda_seal.SealRecord},
    "audit.cu": {"Audit": cuda_records.AuditRecord},
    "upkeep.cu": {"Upkeep": cuda_records.UpkeepRecord},
    "locate.cu": {"Locate": cuda_records.LocateRecord},
    "scores.cu": {"Observe": cuda_records.ObserveRecord},
    "each.cu": {
        "Each": cuda_new_rows.EachRecord,
        "Resolve": cuda_records.ResolveRecord,
        "Arena": cuda_records.ArenaRecord,
        "Moment": cuda_records.MomentRecord,
        "Selection": cuda_records.SelectionRecord,
    },
}
DEFINES = ("ESS_EMULATED", "ESS_THREADS=64", "ESS_ROW_BYTES=656", "ESS_UNIT_BYTES=16")
MORE = ("ESS_SPAN_BYTES=768", "ESS_IN_FLIGHT=4")


def claims(name: str, record: type[ctypes.Structure]) -> list[str]:
    lines = [f'static_assert(sizeof({name}) == {ctypes.sizeof(record)}, "{name}");']
    for field in (field[0] for field in record._fields_):
        at, own = getattr(record, field), field.rstrip("_")
        place = f"offsetof({name}, {own}) == {at.offset}"
        size = f"sizeof({name}::{own}) == {at.size}"
        lines.append(f'static_assert({place} && {size}, "{name}::{own}");')
    return lines


def refusals(file: str, every: dict[str, type[ctypes.Structure]], *flags: str) -> str:
    """What the compiler says of claims that are wrong."""
    lines = [line for name, record in every.items() for line in claims(name, record)]
    text = "\n".join([f'#include "{file}"', "#include <cstddef>", *lines, ""])
    command = ["g++", "-std=c++17", "-fsyntax-only", "-w", *flags, "-x", "c++", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (not done.stderr), done.stderr
    return done.stderr


@pytest.mark.parametrize("file", NATIVE)
def test_of_native_code(file: str) -> None:
    assert not refusals(file, NATIVE[file], f"-I{ROOT / 'csrc'}")


@pytest.mark.parametrize("file", CUDA)
def test_of_kernels(file: str) -> None:
    folders = [f"-I{folder}" for folder in (*SOURCES, DEVICE)]
    defines = [f"-D{define}" for define in (*DEFINES, *MORE)]
    assert not refusals(file, CUDA[file], *folders, *defines)


def test_every_record_is_compared() -> None:
    known = {record for each in (*NATIVE.values(), *CUDA.values()) for record in each.values()}
    for module in (records, native_rows, staging, rows, cuda_records, cuda_seal, planner):
        here = [each for each in vars(module).values() if isinstance(each, type)]
        made = {each for each in here if issubclass(each, ctypes.Structure)} - {ctypes.Structure}
        assert made <= known, f"{module.__name__}: {made - known}"


class Swapped(ctypes.Structure):
    _fields_ = (("copy", ctypes.c_int64), ("place", ctypes.c_int64), ("side", ctypes.c_int64))


def test_a_field_that_lies_elsewhere_is_named() -> None:
    said = refusals("cpu/moves/rows.h", {"ess::Fault": Swapped}, f"-I{ROOT / 'csrc'}")
    assert "ess::Fault::side" in said
    assert "ess::Fault::copy" not in said


def test_all_structures_of_the_package_are_known_here() -> None:
    """A record in another module has to be compared too."""
    named = {Path(module.__file__ or "") for module in (records, native_rows, staging, rows)}
    named |= {Path(module.__file__ or "") for module in (cuda_records, cuda_seal, planner)}
    files = (
        path for path in (ROOT / "ess").rglob("*.py") if "(ctypes.Structure)" in path.read_text()
    )
    assert {path.resolve() for path in files} == {path.resolve() for path in named}
