"""The members of a stage have its host rows once: one writes, the others read behind it."""

from __future__ import annotations

import faulthandler
import os
from collections import Counter
from pathlib import Path

import pytest

from ess.comm.local import local_group
from ess.door import Offload
from ess.door.memory.common_host import TOLD_S, CommonHost
from ess.engine.mesh.engines import Lead
from ess.engine.process.rank import LOAD_S
from ess.errors import BadInput
from ess.kernels.memory import map_memory_file, memory_file
from tests.mesh.rig import Shape, run_mesh
from tests.mesh.test_tokens import COUNT, add, busy, ended
from tests.model.test_engine import expected, prompt
from tests.support.layouts import PLAIN


def forks(lead: Lead) -> list[list[int]]:
    """Two that have a prompt in common, and part in the middle of a page."""
    first = add(lead, 90)
    second = lead.add(prompt(90), first.sampling, leader=first)
    ended(lead)
    return [first.output, second.output]


@pytest.mark.parametrize(
    ("late", "pp", "mtp", "mode"),
    [
        ("writer", 1, 4, "da"),
        ("writer", 2, 1, "none"),
        ("reader", 1, 2, "layerwise"),
        ("reader", 2, 2, "da"),
    ],
)
def test_however_late_the_writer_or_the_reader_is(late, pp, mtp, mode):
    """Slots are few and freed rows are poisoned: a row that is read before it is written, or behind
    the end of its page, is no number."""

    def act(lead: Lead) -> list[list[int]]:
        return [*busy(lead), *forks(lead)]

    shape = Shape(tp=2, pp=pp, mtp=mtp)
    made = run_mesh(shape, act, late=late, modes=mode)
    lengths = (130, 2, 90, 64, 130, 130, 90, 90)
    assert made == [expected("v32", length, COUNT) for length in lengths]


def test_a_pool_is_waited_for_as_long_as_weights_are():
    assert TOLD_S >= LOAD_S == 3600.0


def test_pages_that_run_short_are_written_again_while_others_read():
    def act(lead: Lead) -> tuple[int, list[list[int]]]:
        made = [add(lead, length, 20) for length in (50, 60, 62)]
        ended(lead)
        return lead.preempted_count, [request.output for request in made]

    shape = Shape(tp=2, index_pages=4, chunks=2)
    count, made = run_mesh(shape, act, late="reader", modes="da", promise="some")
    assert count > 0
    assert made == [expected("v32", length, 20) for length in (50, 60, 62)]


def pools() -> list[tuple[str, str]]:
    """Inode and access of each mapping of a team's pool in this process."""
    lines = map(str.split, Path("/proc/self/maps").read_text().splitlines())
    return [(words[4], words[1]) for words in lines if words[5:6] == ["/memfd:ess-host-pool"]]


def test_pages_with_other_numbers_end_the_engine():
    """As many are free on both ranks, in another order."""

    def act(lead: Lead) -> None:
        pages = lead.offload.owner.pools.latent.pages
        taken = pages.take(2)
        pages.give_back(pages.drop(taken))
        add(lead, 40)
        ended(lead)

    with pytest.raises(ExceptionGroup) as wrong:
        run_mesh(Shape(tp=2), act)
    sentences = " ".join(str(each) for each in wrong.value.exceptions)
    assert "rank 1 has come apart from rank 0 at 0" in sentences


def test_members_map_one_file_and_only_the_first_may_write():
    def act(lead: Lead) -> list[tuple[str, str]]:
        add(lead, 70)
        ended(lead)
        return [each for each in pools() if each not in before]

    before = pools()
    files = run_mesh(Shape(tp=2, pp=2), act)
    assert len({inode for inode, _ in files}) == 1
    # Rank 0 has all of it; each other rank has the rows of its layers, and the keys.
    assert Counter(way for _, way in files) == {"rw-s": 1 + 2, "r--s": 2 * 2}


def test_what_is_mapped_for_reading_follows_the_file_and_is_not_written_to():
    made = memory_file(3 << 20)
    seen = map_memory_file(os.getpid(), made.fd, 8192, begin=4096 + 1, writes=False)
    made.memory[4097] = 7
    assert seen[0] == 7
    child = os.fork()
    if not child:
        faulthandler.disable()
        seen[0] = 1
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert made.memory[4097] == 7


def test_pools_of_other_sizes_are_refused():
    hosts = [CommonHost(group, PLAIN, PLAIN) for group in local_group(2, team=2)]
    hosts[0].memory(3)
    with pytest.raises(BadInput, match="pays for 5 pages on rank 1, for 3 on rank 0"):
        hosts[1].memory(5)


def test_common_memory_has_no_device():
    common = CommonHost(local_group(1)[0], PLAIN, PLAIN)
    sizes = {"slot_bytes": "1MiB", "host_bytes": "1MiB", "common": common}
    with pytest.raises(BadInput, match="common is given, but 'cuda' has its own"):
        Offload.create(PLAIN, **sizes, device="cuda")
