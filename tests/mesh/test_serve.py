"""`ess serve --tp-size 2 --pp-size 2`: one server whose engine is four processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ess.door.memory.common_host import NAME
from ess.kernels.mappings import mappings
from ess.models.load import load_model
from tests.ranks.test_serve import COUNT, PROMPT, tokens
from tests.server.harness import until
from tests.server.test_dashboard import metrics
from tests.support.greedy import greedy
from tests.support.kin import is_running, kin, told
from tests.support.process import Process

pytestmark = pytest.mark.slow

POOL = f"/memfd:ess-{NAME}"
FLAGS = ("--dtype", "f32", "--row", "f32", "--recover", "resume", "--mtp-auto", "--tpot-ms", "200")
CASES = [(2, 1, 2, 1), (1, 2, 4, 0), (2, 2, 1, 3)]
"""Each process is a real start. Of two stages of two one is killed, with a stream under way, in
`test_machines.py`; what all have mapped, `test_split.py` checks too."""


def engines(process: Process) -> list[int]:
    return [pid for pid in kin(process.process.pid) if "mesh.process" in told(pid, "cmdline")]


def check_pools(pids: list[int], tp: int, pp: int, *, writer: int | None = None) -> set[int]:
    """All have one file mapped, a process of each stage for writing, and no other memory that is so
    large; what it costs them together is its pages, once. Returns the file. A `writer` is another
    worker, which has mapped it to hand rows over."""
    mapped = {pid: mappings(pid) for pid in pids}
    pools = [m for each in mapped.values() for m in each if m.file.startswith(POOL)]
    ways = [{m.access for m in each if m.file.startswith(POOL)} for each in mapped.values()]
    assert sorted(map(sorted, ways)) == [["r--s"]] * (tp - 1) * pp + [["rw-s"]] * pp
    blocks = [path.stat().st_blocks for pid in pids for path in files(pid)]
    shared = (
        [*pools, *(m for m in mappings(writer) if m.file.startswith(POOL))] if writer else pools
    )
    together, pool = sum(each.share_bytes for each in shared), 512 * max(blocks)
    print(f"{pool >> 10} KiB of rows and keys, {together >> 10} KiB of {tp * pp} processes")
    assert 0.95 * pool < together < 1.05 * pool
    least = max(pool.byte_count for pool in pools) // pp // 2
    for each in mapped.values():
        others = [m for m in each if m.byte_count >= least and not m.file.startswith(POOL)]
        assert not [m for m in others if m.resident_bytes and "w" in m.access], "a second copy"
    [file] = {pool.inode for pool in pools}
    return {file}


def files(pid: int) -> list[Path]:
    """The pool, where the process has it open."""
    paths = Path(f"/proc/{pid}/fd").iterdir()
    return [path for path in paths if os.readlink(path).startswith(POOL)]


@pytest.mark.long
@pytest.mark.parametrize(("tp", "pp", "mtp", "victim"), CASES)
def test_one_text_from_several_processes_and_again_when_one_is_killed(
    tp, pp, mtp, victim, tmp_path: Path
):
    expected = greedy(load_model(form="f32"), PROMPT, COUNT)
    size = ("--tp-size", str(tp), "--pp-size", str(pp), "--mtp", str(mtp), "--host-bytes", "1GiB")
    disk = ("--prefix-cache-dir", str(tmp_path))
    with Process(*FLAGS, *size, *disk, has_real_children=True).wait_ready() as process:
        assert list(tokens(process.url)) == expected
        before = sorted(engines(process))
        assert len(before) == tp * pp
        pools = check_pools(before, tp, pp)
        going = tokens(process.url)
        first = [next(going), next(going)]
        os.kill(before[victim], signal.SIGKILL)
        assert [*first, *going] == expected
        after = sorted(engines(process))
        assert not {*before} & {*after}, "a process has outlived its engine"
        assert not pools & check_pools(after, tp, pp), "a pool of lost members is used again"
        everybody = [process.process.pid, *kin(process.process.pid)]
        process.process.terminate()
        assert process.ended(120) == 0
        until(lambda: not any(map(is_running, everybody)), "the end of everybody")


@pytest.mark.long
def test_the_next_server_reads_what_the_stages_have_stored(tmp_path: Path):
    expected = greedy(load_model(form="f32"), PROMPT, COUNT)
    size = ("--tp-size", "2", "--pp-size", "2", "--mtp", "1", "--host-bytes", "1GiB")
    for life in range(2):
        disk = ("--prefix-cache-dir", str(tmp_path))
        with Process(*FLAGS, *size, *disk, has_real_children=True).wait_ready() as process:
            assert list(tokens(process.url)) == expected
            assert metrics(process.url)["ess_disk_moved_pages_total", "loaded"] == life
            process.process.terminate()
            assert process.ended(120) == 0
    assert len(list(tmp_path.iterdir())) == 2
