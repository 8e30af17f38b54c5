"""The targets of a device, every line of their Python, beside a device that is not there."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from ess.bench.gpu import suite
from ess.bench.harness.output import table
from tests.device.measured import END, expectations
from tests.support import beside

TESTS = (
    "tests/gpu/test_device.py::test_a_lane_follows_torch",
    "tests/gpu/test_device.py::test_a_thousand_replays_of_one_graph[together]",
    "tests/gpu/test_experts.py::test_replays_follow_the_counts",
    "tests/kernels/test_grouped.py::test_every_token_meets_its_expert[cuda-token3-weight3]",
    "tests/kernels/test_triton_index.py::test_shared_lists_are_those_of_one_program[cuda]",
    "tests/kernels/test_attend.py::test_one_key_returns_its_value[cuda-656-dtype1]",
    "tests/kernels/test_rowcodec.py::test_a_row_has_the_golden_bytes[cuda]",
)

UNPLAYED = (
    *("slice: ", "one GPU of ", "a step, ", "decode, ", "context ", "tokens per "),
    *("misses per ", "FlashMLA", "DeepGEMM", "attention", "top-k", "logits"),
)
"""How rows begin that need a library, that another test compares, or (shapes) that none prints."""

pytestmark = [pytest.mark.slow, *beside.NEEDS]


def test_tests_of_a_device(emulated: Path) -> None:
    printed = beside.run_tests(*TESTS, built=emulated)
    assert f"{len(TESTS)} passed" in printed, printed


def test_benchmarks_of_a_device(emulated: Path, tmp_path: Path) -> None:
    names = "rows", "resolve", "layer", "attend", "experts"
    given = "tests.support.pretended", "tests.device.measured", tmp_path, *names
    *printed, rest = beside.run(*given, built=emulated).stdout.split(f"{END}\n")
    assert rest == ""
    known, met = expectations(), set()
    for name, text in zip(names, printed, strict=True):
        rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        assert rows, name
        for row in rows:
            fits = {each for each, pattern in known.items() if pattern.fullmatch(row["name"])}
            assert fits, f"docs/cuda.md does not say what to expect of {row['name']}"
            met |= fits
        lines = text.splitlines()
        assert max(map(len, lines)) <= 120, name
        shown = [line for row in rows for line in (*table.lines(row), *table.config_lines(row))]
        assert lines == [*table.heading(), *shown], name
        batches = [row["name"] for row in rows if row["name"].endswith("one batch of copies")]
        assert bool(batches) == (name == "rows"), "the driver has lost a call"
    assert [each for each in known if each not in met and not each.startswith(UNPLAYED)] == []


LAUNCHED = ("layer", "attend", "experts", "shapes"), ("step", "slice")


@pytest.mark.parametrize(
    "names", [LAUNCHED[0], pytest.param(LAUNCHED[1], marks=pytest.mark.long)], ids=" ".join
)
def test_what_benchmarks_compile_ahead_is_launched(names: tuple[str, ...], emulated: Path) -> None:
    done = beside.run("tests.support.pretended", "tests.device.launched", *names, built=emulated)
    said = [line for line in done.stdout.splitlines() if line.endswith("has launched its kernels")]
    assert [line.partition(" ")[0] for line in said] == list(names)


def test_all_that_is_compiled_ahead_is_launched_here() -> None:
    """But for what NVRTC compiles, of which `tests/unit/bench/test_bench_gpu.py` has the names, and
    for what other libraries compile."""
    assert {*LAUNCHED[0], *LAUNCHED[1], "resolve", "others"} == set(suite.KERNELS)


def test_libraries_that_are_missing_are_named(emulated: Path, tmp_path: Path) -> None:
    """There is nothing to time beside our kernels, and the reason is said for each library."""
    given = "ess.bench.gpu.suite", "--smoke", "--only", "others", "--json"
    done = beside.run("tests.support.pretended", *given, built=emulated)
    assert done.stdout == ""
    for said in ("attention: triton (", "indexer: triton (", "experts: triton ("):
        assert said in done.stderr


NEW_MEMORY = """
import torch

one = torch.empty(300, device="cuda")
for new in (one, one.new_empty(300), torch.empty_like(one)):
    assert new.tolist() == [0.0] * 300, new
"""


def test_memory_that_no_kernel_of_a_benchmark_writes_is_zero(
    emulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine reads it as logits, and ends where these happen to be no numbers."""
    monkeypatch.setenv("MALLOC_PERTURB_", "90")  # the C library fills memory that it gives
    (tmp_path / "new_memory.py").write_text(NEW_MEMORY)
    path = f"{beside.ROOT}:{tmp_path}"
    beside.run("tests.support.pretended", "new_memory", built=emulated, path=path)


WRONG = {
    "torch.zeros(3, device='cuda') + torch.zeros(3)": "same device",
    "torch.zeros(3, device='cuda').numpy()": "to numpy",
    "merge_into(half, Partial(torch.zeros(2, 3, 8), half.lse), half)": "cpu tensor",
    "capture(lambda: there[0].tolist())": "not permitted",
    "capture(lambda: there[0].copy_(torch.zeros(2, 8)))": "not permitted",
    "capture(lambda: there[0].add_(there[0], alpha=there[0].sum()))": "not permitted",
    "capture(torch.cuda.synchronize)": "not permitted",
    "torch.cuda.Event(True).elapsed_time(torch.cuda.Event(True))": "has no time yet",
    "capture(lambda: aside(Stream()))": "has not joined",
    "capture(lambda: now().wait_event(queued))": "only one of both sides is captured",
    "capture(lambda: forked(waited=0))": "a stream that has joined was not waited for",
    "capture(lambda: forked(waited=1))": "a stream that has joined was not waited for",
}
WAITING = """
them.sum().item(); them.tolist(); str(them[0]); bool(them.any()); 3 in them; them.equal(them)
them.nonzero(); them.argwhere(); torch.where(them > 3); them.masked_select(them > 3); them[them > 3]
them.unique(); them.bincount(); them.repeat_interleave(them); torch.repeat_interleave(them)
them.float().multinomial(1); them.add(them, alpha=them[0]); them.narrow(0, 0, them[3])
them[[1, 2]]; them[them[3]]; them[: them[3]]; torch.arange(them[3], device="cuda")
torch.full((2,), them[0], device="cuda"); torch.tensor([1, 2], device="cuda"); them.new_tensor([1])
them.cpu(); them.to("cpu", non_blocking=True); pinned.cuda(); them.copy_(pinned); pinned.copy_(them)
them.copy_(pinned + 1, non_blocking=True); torch.full((2,), fill_value=them[0], device="cuda")
them.narrow(0, start=them[3], length=1); them.topk(them[3]); them.tile(them[2])
torch.tensor([them[0]]); torch.where(condition=them > 3); them.float().histc(4)
torch.nn.functional.one_hot(them); them.narrow(0, 0, them[3:4]); them.topk(them[2:3])
them.to(pinned); pinned.to(them); them[numpy.arange(2)]; them[range(2)]
torch.linspace(them[0], 3, 2, device="cuda"); them.new_ones(1, 1).double().inverse()
torch.linalg.inv(them.new_ones(1, 1).double())
"""
QUEUED = """
them.copy_(pinned, non_blocking=True); pinned.copy_(them, non_blocking=True); them.new_zeros(3)
pinned.cuda(non_blocking=True); pinned.to(them, non_blocking=True); them.to(them.float())
them.view(2, 4); them.where(them > 3, 0); them.repeat_interleave(3)
them[2:4]; them[3]; them[None]; them[them]; them.masked_fill(them > 3, 0); them.clamp(max=them[3])
torch.equal(pinned, pinned); them.pow(them[0]); them.masked_fill(them > 3, them[0])
them.add(them, alpha=pinned[1]); torch.stack([them[0], them[1]]); them.repeat_interleave(repeats=3)
"""
SCRIPT = """
import os, signal
from tests.support import pretended
import numpy
import torch
from ess.kernels.cuda.driver import shared_device
from ess.kernels.cuda.rows import flat_form, move_record
from ess.kernels.cuda.triton.attend import merge_into
from ess.kernels.merge import Partial

def capture(work):
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        work()

def aside(stream):
    with torch.cuda.stream(stream):
        there[0].add_(1)
    return stream.record_event()

def forked(waited):
    home, side = now(), Stream()
    side.wait_stream(home)
    for event in [aside(side), aside(side)][:waited]:
        home.wait_event(event)

Stream, now = torch.cuda.Stream, torch.cuda.current_stream
queued = now().record_event()
there = [torch.zeros(2, 8, dtype=torch.uint8, device="cuda")]
half = Partial(torch.zeros(2, 3, 8, device="cuda"), torch.zeros(2, 3, device="cuda"))
merge_into(half, half, half)
for line, says in WRONG.items():
    try:
        eval(line)
    except (RuntimeError, TypeError, ValueError) as error:
        assert says in str(error), (line, error)
    else:
        raise AssertionError(f"{line} was not refused")
names = {"torch": torch, "them": torch.arange(8, device="cuda")}
names |= {"numpy": numpy, "pinned": torch.arange(8).pin_memory()}
for line in [*WAITING, *QUEUED]:
    told = ""
    try:
        with pretended.without_waits():
            eval(line, names)
    except RuntimeError as error:
        told = str(error)
    assert told.startswith("the host waits for the device") == (line in WAITING), (line, told)
capture(lambda: forked(waited=2))
graph, one = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda")
with torch.cuda.graph(graph):
    two = one + 1
    two *= 2
one.fill_(4)
graph.replay()
assert two.cpu().tolist() == [10, 10, 10]
other = torch.cuda.CUDAGraph()
with torch.cuda.graph(other):
    three = one - 1
assert two.isnan().all(), "graphs share their memory"
graph.replay()
other.replay()
assert two.isnan().all(), "graphs share their memory"
assert three.cpu().tolist() == [3, 3, 3]
del one
try:
    graph.replay()
except RuntimeError as error:
    assert "the graph names memory of 12 bytes that is gone" in str(error), error
else:
    raise AssertionError("a graph keeps what it was given")
rows = torch.zeros(4 * 656, dtype=torch.uint8, device="cuda")  # the children write to it
form, at, ends = flat_form(656), rows.data_ptr(), []
kernel = shared_device(0).kernel(form.program, form.entry)
for odd in (16, 8):
    sides = {"source": at + odd, "source_stride": 656, "target": at + 2 * 656, "target_stride": 656}
    child = os.fork()
    if not child:
        kernel.launch(move_record(**sides, pair_count=1), blocks=1, threads=32, stream=0)
        os._exit(0)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert ends == [0, -signal.SIGABRT], f"16 bytes at a multiple of 16, then of 8: {ends}"
"""


def test_the_pretence_refuses_what_a_device_does(emulated: Path, tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    waiting, queued = (
        [line.strip() for line in text.replace("\n", ";").split(";") if line.strip()]
        for text in (WAITING, QUEUED)
    )
    given = f"WRONG = {WRONG!r}\nWAITING, QUEUED = {waiting!r}, {queued!r}\n"
    script.write_text(given + SCRIPT)
    beside.run(script.stem, built=emulated, path=f"{beside.ROOT}:{tmp_path}")


HEAD = """
from types import SimpleNamespace as Names

from tests.support import pretended
import torch
from ess.door.device.memory.lane import DeviceLane
from ess.engine.prompt.plain_rows import PlainRows
from ess.kernels.cuda.pinned import pinned_memory
from ess.kernels.streams import RowCopy

lane = DeviceLane(0)
slab = torch.zeros(64, 656, dtype=torch.uint8, device="cuda")

def rows():
    return torch.ones(64, 656, dtype=torch.uint8, device="cuda")

def queue(source):
    lane.mover.queue([RowCopy(source=source, target=slab)], lane.steps.handle)
"""
DROPPED = "queue(rows())", "queue(torch.ones(64, 656, dtype=torch.uint8).pin_memory())"
KEPT = """
source = rows()
queue(source)
source.record_stream(torch.cuda.Stream(handle=lane.steps.handle))
del source
source = rows()
queue(source)
lane.hold_compute()
torch.zeros(1, device="cuda").add_(1)
del source
lane.submit([RowCopy(source=rows(), target=slab)])

host = torch.from_numpy(pinned_memory(lane.device, 656 * 128)).view(128, 656)
layers = [Names(number=0), Names(number=1)]
computer = Names(
    model=Names(device=lane.home, layers=layers, mtp=None),
    offload=Names(
        layout=Names(row_bytes=656, mtp_layer_count=0), memory=lambda layer: Names(host=host)
    ),
)
sequence = Names(host_rows=lambda first, count: torch.arange(count))
plain = PlainRows(computer, [Names(start=64, stop=70, sequence=sequence)])
plain.enter(0)
del plain, computer, host
assert (slab == 1).all()
print("all is kept")
"""


def test_memory_of_the_device_goes_when_no_other_stream_uses_it(emulated: Path) -> None:
    """A tensor that a queued copy of another stream reads may not go; it may if that stream was
    recorded for it, if compute has waited, and if the lane keeps it. Nor may page-locked memory
    of torch. Rows of a prompt that ends midway stay as long as they are copied to."""
    assert "all is kept" in beside.run_script(HEAD + KEPT, built=emulated).stdout
    for dropped in DROPPED:
        done = beside.run_script(HEAD + dropped, built=emulated)
        assert done.returncode == -signal.SIGABRT
        assert "memory is let go that queued work names: ess_move_rows" in done.stderr
