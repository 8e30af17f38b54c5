"""What the host does to page-locked memory beside a device, under the watch for races: prompts that
are imported, handed over and taken, and pages that go to a disk and come back. Run by `test_races`.

The watch sees torch, kernels and copies, and nothing that NumPy, sockets and files do. Here these
say themselves what they touch: a transfer and a disk where they may begin and where they must have
ended, whenever they run.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import pytest
import torch

from ess.door import Offload, Sequence
from ess.door.device.steps.sealing import SealedStep
from ess.door.handoff.incoming.receiver import Receiver
from ess.door.handoff.outgoing.transfers import Transfers
from ess.door.memory.inflight import Pending
from ess.door.memory.shelf import Shelf
from ess.engine.prompt.downloads import Downloads
from ess.engine.tokens.sampling import Sampling
from ess.pool.disk.tier import DiskTier
from ess.pool.keys import KeyPages
from ess.pool.latent import LatentPool
from ess.transfer.runs import views
from ess.units import PAGE_ROWS
from tests.device import engines
from tests.device.handoffs import TEXT, Pair
from tests.device.races import within
from tests.support.checkpoints import tokens
from tests.support.pretended import PRETENCE, RACES
from tests.support.pretended_touches import slices

pytestmark = pytest.mark.usefixtures("alone")

HOST_PAGES = 11
CASE = {"mtp": "2", "depth": "1", "mode": "da", "graphs": "few"}


# ---- what the host says


def say(*, reads=(), writes=()):
    """Arrays, or arrays and the numbers of those of their rows that are touched."""
    if RACES.is_on:
        with torch._C.DisableTorchFunction():
            told = [list(map(touch, arrays)) for arrays in (reads, writes)]
            PRETENCE.tell(*told, RACES.place_of("itself"))


def touch(given):
    if not isinstance(given, tuple):
        return torch.from_numpy(np.frombuffer(given, np.uint8))
    array, rows = given
    return slices(torch.from_numpy(array), 0, torch.from_numpy(np.asarray(rows, np.int64)))


def parts(latent, pages):
    return [part for page in pages for part in latent.parts(int(page))]


def of_rows(sequence, layer, start, rows):
    latent = sequence.owner.pools.latent
    say(writes=[(latent.layers[layer], sequence.holding.host_rows(start, len(rows)))])


def of_keys(keys, layer, rows, _):
    say(writes=[(keys.pages[layer], rows // PAGE_ROWS)])


def of_a_step(sealed, _):
    say(reads=[sealed._place.host_keys.reshape(-1)])


def of_a_disk_that_stores(shelf, content, **_):
    say(reads=parts(shelf._latent, shelf._latent.prefix.find([content])))


def of_pages_that_go(latent, pages):
    """A disk may read them until then."""
    say(reads=parts(latent, pages))


def of_a_disk_that_loads(shelf, load):
    say(writes=parts(shelf._latent, load.pages))


def of_a_disk_that_has_loaded(shelf, load, _):
    say(writes=parts(shelf._latent, load.pages))


def of_a_transfer(transfers, departure, part, local):
    say(reads=views(local, transfers._regions(departure, part)))


def of_a_transfer_that_ends(transfers, handle):
    if (job := transfers._jobs.get(handle)) is not None:
        of_a_transfer(transfers, job.departure, job.part, job.local)


def of_a_peer(receiver, _, room):
    say(writes=parts(receiver._pools.latent, room.pages))


def of_a_peer_that_is_done(receiver, entry):
    say(writes=parts(receiver._pools.latent, entry.pages))


TOUCHES = {
    (Sequence, "import_rows"): of_rows,
    (KeyPages, "write"): of_keys,
    (SealedStep, "_finish"): of_a_step,
    (Shelf, "published"): of_a_disk_that_stores,
    (LatentPool, "_clear"): of_pages_that_go,
    (Shelf, "bring"): of_a_disk_that_loads,
    (Shelf, "_end"): of_a_disk_that_has_loaded,
    (Transfers, "_piece"): of_a_transfer,
    (Transfers, "_ended"): of_a_transfer_that_ends,
    (Receiver, "_leg"): of_a_peer,
    (Receiver, "_end"): of_a_peer_that_is_done,
}


def saying(real, says, said):
    @functools.wraps(real)
    def call(*given, **named):
        said.add(says)
        says(*given, **named)
        return real(*given, **named)

    return call


@contextlib.contextmanager
def watched() -> Iterator[tuple[Callable[[], list[str]], set[object]]]:
    """Gives what gives the races, and what has said something so far."""
    said = set()
    with contextlib.ExitStack() as stack:
        for (owner, name), says in TOUCHES.items():
            call = saying(getattr(owner, name), says, said)
            stack.enter_context(mock.patch.object(owner, name, call))
        yield stack.enter_context(RACES.watched()), said


# ---- what runs


@pytest.fixture
def disks(tmp_path, monkeypatch):
    """Each worker has few pages on the host, and a disk behind them."""
    create, numbers = Offload.create, iter(range(2))

    def created(layout, **given):
        page_bytes = layout.host_page_bytes
        disk = DiskTier(
            tmp_path / str(next(numbers)),
            identity=b"tiny",
            page_bytes=page_bytes,
            capacity_bytes=64 * page_bytes,
        )
        return create(layout, disk=disk, **given | {"host_bytes": HOST_PAGES * page_bytes})

    monkeypatch.setattr(Offload, "create", created)


class Unchecked(Pair):
    """Checks wait for all that is under way, and would put the host behind it."""

    def step(self) -> None:
        for eng in self.workers:
            eng.step()


class Seen(Exception):
    """A race that a test waits for."""


class Looking(Unchecked):
    """Ends with the step in which `is_seen`."""

    def __init__(self, is_seen: Callable[[], bool]) -> None:
        super().__init__("cuda-cuda", **CASE)
        self._is_seen = is_seen

    def step(self) -> None:
        super().step()
        if self._is_seen():
            raise Seen


def handed(pair):
    """Prompts of which one finds rows that steps have made, one is given up midway, and more than
    the host has pages for: those of the first come from the disk again."""
    said = tokens(118, engines.VOCABULARY, seed=6)
    own = pair.giver.add(said, Sampling(tokens_max=18, ignore_eos=True))
    pair.run()
    yield own
    pair.add([*said, *own.output, 5, 6], {})
    pair.run()
    yield own
    gives, takes = pair.add(TEXT[:200], {})
    pair.until(lambda: 0 < gives.prefilled_count < gives.prefill_count)
    pair.taker.cancel(takes)
    pair.run()
    yield takes
    for seed in (11, 12):
        pair.add(tokens(200, engines.VOCABULARY, seed=seed), {})
    pair.run()
    again, _ = pair.add([*said, *own.output, 7], {})
    pair.run()
    assert again.cached_count
    assert pair.giver.offload.stats().disk.loaded_count
    yield again


@pytest.mark.usefixtures("disks")
def test_nothing_that_the_host_does_races():
    with watched() as (races, said):
        pair = Unchecked("cuda-cuda", **CASE)
        for _ in handed(pair):
            assert races() == []
        pair.close()
        assert races() == []
    assert said == set(TOUCHES.values())


MISTAKES = {
    "rows of a prompt are stored before they are there": (
        within(Downloads, "_hand_on", torch.cuda.Event, "synchronize"),
        r"on the host reads what \S+ copy_ on compute writes",
    ),
    "keys of a step are read before they are there": (
        mock.patch.object(Pending, "track", lambda _, __, commit: commit()),
        r"sealing\.py:\d+ itself on the host reads what .*ess_move_rows on lane\S+ writes",
    ),
    "pages go while rows of a step are on their way there": (
        mock.patch.object(Pending, "after", lambda _, commit: commit()),
        r"itself on the host reads what .*ess_move_rows on lane\S+ writes",
    ),
}


@pytest.mark.usefixtures("disks")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_touch_that_comes_too_early_is_found(name):
    mistake, says = MISTAKES[name]
    with mistake, watched() as (races, _):
        pair = Looking(lambda: any(re.search(says, sentence) for sentence in races()))
        with pytest.raises(Seen):
            for _ in handed(pair):
                pass
