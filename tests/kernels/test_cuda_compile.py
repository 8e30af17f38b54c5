"""Every CUDA program compiles for both architectures, and nothing of it lives in slow memory."""

from __future__ import annotations

import functools
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ess.errors import Unavailable
from ess.kernels.cuda import driver, program
from ess.kernels.cuda.program import ARCHITECTURES, Compiled, Program
from ess.kernels.cuda.rows import SHARED_BYTES_MAX, flat_form, ring_form
from ess.pool import cuda_programs
from ess.pool.lru.cuda_shape import PHASE_THREADS, resolve_program
from tests.support.own_python import python

needs_nvrtc = pytest.mark.skipif(
    program.why_missing() is not None, reason=str(program.why_missing())
)
ROOT = Path(__file__).resolve().parents[2]
TRIED = [
    *(replace(flat_form(656), in_flight=in_flight).program for in_flight in (1, 2)),
    *(cuda_programs.rival_form(656, unit_bytes).program for unit_bytes in (8, 16)),
    flat_form(1152, 16).program,
    Program(file="gate.cu"),
]
"""What benchmarks load beside what serving loads: other depths, rivals, a gate; odd places."""
EVERY = [*TRIED, *cuda_programs.programs()]
COMPILED = functools.cache(program.compile_program)
"""Tests that look at what all programs become share it."""
SMALL = cuda_programs.rival_form(32).program
SPILLING = """extern "C" __global__ void __launch_bounds__(1024, 1) crowded(volatile float* at) {
    float held[96], total = 0;
#pragma unroll
    for (int i = 0; i < 96; i++) total += held[i] = at[i];
#pragma unroll
    for (int i = 0; i < 96; i++) at[i] = held[i] * total;
}"""


def one_of_each(programs):
    """One size of row for each unit, and residency with scores; in others some constants differ."""
    made = {(each.file, dict(each.defines).get("ESS_UNIT_BYTES")): each for each in programs}
    return [*made.values()]


SPILLS = [
    (ARCHITECTURES[0], EVERY),
    (ARCHITECTURES[1], one_of_each(EVERY)),
    pytest.param(ARCHITECTURES[1], EVERY, marks=pytest.mark.long),
]


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "programs"), SPILLS)
def test_no_kernel_spills(arch, programs):
    for each in programs:
        for used in COMPILED(each, arch).resources:
            assert used.stack_bytes == used.spill_bytes == 0, f"{each} for {arch}: {used}"
            assert used.register_count <= 64, f"{each} for {arch}: {used}"
            assert used.shared_bytes <= driver.STATIC_SHARED_BYTES, f"{each} for {arch}: {used}"


@pytest.mark.parametrize("row_bytes", cuda_programs.ROW_BYTES)
def test_a_launch_keeps_to_what_its_kernel_is_compiled_for(row_bytes):
    """A block has 65,536 registers, 64 for each of 1,024 threads, and 227 KiB of shared memory; an
    arrival counts up to 2^20 - 1 bytes."""
    forms = [flat_form(row_bytes), cuda_programs.rival_form(row_bytes)]
    forms += [ring_form(row_bytes)] if row_bytes % 16 == 0 else []
    for form in forms:
        text = program.source_text(form.program.file)
        bound = int(re.search(r"__launch_bounds__\((\d+), 1\)", text)[1])
        assert form.threads <= bound <= 1024, form
        assert form.shared_bytes <= SHARED_BYTES_MAX, form
        assert row_bytes < 1 << 20, form


@needs_nvrtc
def test_a_spill_would_be_seen(monkeypatch):
    texts = program.source_text
    monkeypatch.setattr(
        program, "source_text", lambda name: SPILLING if name == "crowded.cu" else texts(name)
    )
    (used,) = program.compile_program(Program(file="crowded.cu"), "sm_90a").resources
    assert used.spill_bytes > 0
    assert used.entry == "crowded"


LOG = ROOT / "docs" / "log.md"
TABLED = [
    resolve_program(file, threads=PHASE_THREADS, is_scored=False)
    for file in ("resolve.cu", "together.cu", "each.cu")
]
COLUMNS = ("registers", "shared", "instructions", "loads", "stores", "atomics", "barriers")


@needs_nvrtc
@pytest.mark.slow
def test_the_table_of_the_log_is_what_the_compiler_makes(monkeypatch):
    """Of the version of the compiler that the section names, and of programs without scores."""
    pytest.importorskip("triton", reason="its package has the disassembler")
    from tests.support.machine_code import figures

    section = LOG.read_text().split("## Resolve on a device")[1].split("\n## ")[0]
    if f"{program.compiler_version()} makes" not in section:
        pytest.skip(f"the table is of another compiler than {program.compiler_version()}")
    monkeypatch.setattr(program, "compile_program", COMPILED)
    told = dict(re.findall(r"^\| (ess_\w+) \| (.+) \|$", section, re.MULTILINE))
    made = {}
    for each in TABLED:
        by_arch = [dict(figures(each, arch)) for arch in ARCHITECTURES]
        for entry in by_arch[0]:
            pairs = [[getattr(of[entry], name) for of in by_arch] for name in COLUMNS]
            made[entry] = " | ".join(f"{first:,} / {second:,}" for first, second in pairs)
    assert made == told


@needs_nvrtc
def test_a_program_is_compiled_once(tmp_path, monkeypatch):
    first = program.cubin(SMALL, "sm_90a", folder=tmp_path)
    assert first[:4] == b"\x7fELF"
    monkeypatch.setattr(program, "compile_program", None)
    assert program.cubin(SMALL, "sm_90a", folder=tmp_path) == first
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]


def test_what_was_built_ahead_needs_no_compiler(tmp_path, monkeypatch):
    def missing():
        raise Unavailable("there is no NVRTC")

    monkeypatch.setattr(
        program, "compile_program", lambda *_: Compiled(code=b"built", resources=())
    )
    program.build(SMALL, "sm_90a", folder=tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(program, "_nvrtc", missing)
    assert program.cubin(SMALL, "sm_90a", folder=tmp_path) == b"built"
    with pytest.raises(Unavailable, match="no NVRTC"):
        program.cubin(SMALL, "sm_100a", folder=tmp_path)
    assert program.why_missing() == "there is no NVRTC"
    monkeypatch.setattr(driver, "call", answers(cuDeviceGetCount=1, cuDeviceGetAttribute=9))
    monkeypatch.setenv("ESS_CACHE_DIR", str(tmp_path))
    assert driver.why_missing() == "there is no NVRTC", "that is for other devices: sm_90a"
    monkeypatch.setattr(driver, "_arch", lambda capability: "sm_90a")
    assert driver.why_missing() is None
    assert driver.why_missing(1) == "there is no CUDA device 1"


def answers(**numbers):
    """Of a driver: 0 where nothing else is given, None of what starts it."""
    return lambda name, *_: None if name == "cuInit" else numbers.get(name, 0)


def test_a_driver_of_an_earlier_generation_is_named_beside_the_compiler(monkeypatch):
    monkeypatch.setattr(program, "_version", lambda: (13, 5))
    for version, sentence in (
        (12080, "the driver is of CUDA 12.8 and does not load what NVRTC 13.5 compiles: "),
        (13000, None),
        (14010, None),
    ):
        given = answers(cuDeviceGetCount=1, cuDriverGetVersion=version)
        monkeypatch.setattr(driver, "call", given)
        said = driver.why_missing()
        assert said == sentence or said.startswith(sentence)


@needs_nvrtc
def test_machine_code_that_a_device_refuses_is_named(monkeypatch):
    """A file that was damaged, for one."""
    device = object.__new__(driver.Device)
    device.capability, device._folder = (9, 0), None
    monkeypatch.setattr(program, "cubin", lambda *_, **__: b"no machine code")
    answers = {"cuModuleLoadData": 200}
    monkeypatch.setattr(driver, "attempt", lambda name, *_: (answers.get(name, 0),))
    with pytest.raises(Unavailable, match=r"rival.cu .* for sm_90a .*\(200\); `ess build-kernels`"):
        device._module(SMALL)


def test_a_full_disk_is_not_left_with_drafts(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    made = Compiled(code=b"built", resources=())
    monkeypatch.setattr(program, "compile_program", lambda *_: made)
    monkeypatch.setattr(os, "replace", full)
    assert program.cubin(SMALL, "sm_90a", folder=tmp_path) == b"built"
    assert list(tmp_path.iterdir()) == []


def test_others_can_read_what_is_kept_and_what_cannot_be_read_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr(
        program, "compile_program", lambda *_: Compiled(code=b"built", resources=())
    )
    program.cubin(SMALL, "sm_90a", folder=tmp_path)
    (kept,) = tmp_path.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o644
    kept.unlink()
    kept.mkdir()
    assert program.cubin(SMALL, "sm_90a", folder=tmp_path) == b"built"
    (tmp_path / "file").touch()
    assert program.cubin(SMALL, "sm_90a", folder=tmp_path / "file") == b"built"


@needs_nvrtc
def test_machine_code_is_kept_under_what_it_follows_from(tmp_path, monkeypatch):
    wider = cuda_programs.rival_form(48).program
    for each, arch in ((SMALL, "sm_90a"), (SMALL, "sm_100a"), (wider, "sm_90a")):
        program.cubin(each, arch, folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    texts = program.source_text
    monkeypatch.setattr(program, "source_text", lambda name: texts(name) + "// changed")
    program.cubin(SMALL, "sm_90a", folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


@needs_nvrtc
def test_what_does_not_compile_is_told_in_the_compilers_words(tmp_path):
    wrong = Program(file="rows.cu", defines=(("ESS_ROW_BYTES", 10), *SMALL.defines[1:]))
    with pytest.raises(Unavailable, match="ESS_UNIT_BYTES"):
        program.cubin(wrong, "sm_90a", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_where_builds_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("ESS_CACHE_DIR", str(tmp_path))
    assert program.default_folder() == tmp_path
    monkeypatch.setenv("ESS_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert program.default_folder() == tmp_path / "home" / "ess"


@needs_nvrtc
@pytest.mark.slow
def test_build_kernels_leaves_nothing_to_compile(tmp_path, monkeypatch, capsys):
    from ess.server.commands import cli

    monkeypatch.setattr(program, "compile_program", COMPILED)
    assert cli.main(["build-kernels", "--arch", "sm_90a", "--folder", str(tmp_path), "--json"]) == 0
    built = json.loads(capsys.readouterr().out)
    assert {each["spill_bytes"] for each in built} == {0}
    assert len(list(tmp_path.iterdir())) == len(list(cuda_programs.programs()))
    monkeypatch.setattr(program, "compile_program", None)
    for each in cuda_programs.programs():
        assert program.cubin(each, "sm_90a", folder=tmp_path)


@pytest.mark.parametrize("arch", ["hopper", "sm_80", "sm_89a", "sm_90f"])
def test_build_kernels_refuses_what_no_kernel_runs_on(arch, capsys):
    from ess.server.commands import cli

    assert cli.main(["build-kernels", "--arch", arch]) == 2
    streams = capsys.readouterr()
    assert arch in streams.err
    assert streams.err.count("\n") == 1


@needs_nvrtc
@pytest.mark.slow
def test_programs_of_a_device_before_hopper_compile():
    """It has e4m3, but neither clusters nor bulk copies."""
    of_ada = one_of_each(cuda_programs.programs((8, 9)))
    of_all = {each.file for each in cuda_programs.programs()}
    assert of_all - {each.file for each in of_ada} == {"ring.cu", "together.cu"}
    for each in of_ada:
        program.compile_program(each, "sm_89")


BARE = """
import sys

NOT_THERE = {"msgspec", "cyclopts", "rich", "starlette", "tokenizers", "hypothesis"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NOT_THERE:
            raise ModuleNotFoundError(f"{name} is not on a bare machine", name=name)

sys.meta_path.insert(0, Refuse())
import ess.bench.gpu.suite, pytest
collected = pytest.main(["--collect-only", "-qq", "-m", "gpu", "tests/gpu", "tests/kernels"])
assert collected == 0, collected
print("benchmark:", ess.bench.gpu.suite.main(["--only", "layer"]))
"""


@pytest.mark.slow
def test_tests_and_benchmark_of_a_device_need_no_packages_of_ours():
    """Without a device the benchmark says so and measures nothing."""
    run = python("-c", BARE, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "not measured" in run.stderr or "nothing is measured" in run.stderr
