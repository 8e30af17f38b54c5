"""Ranks that divide a model have a disk for each stage: a page comes back where all have it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from ess.comm.link import LinkLost
from ess.door.handoff.incoming.receiver import Receiver
from ess.door.memory.shelf import PageLoad, Shelf
from ess.door.sequences import shelved
from ess.engine.config import ProcessConfig
from ess.engine.mesh import process
from ess.engine.mesh.engines import Lead
from ess.engine.mesh.lockstep import Lockstep
from ess.engine.process.messages import Launch, Rank
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadState
from ess.models.load import EMBEDDED
from ess.models.weights.checkpoint import Checkpoint
from ess.pool.disk.elsewhere import Elsewhere
from ess.pool.disk.folder import SLAB
from ess.pool.disk.tier import DiskTier
from tests.mesh.rig import Shape, StageDisk, run_mesh
from tests.mesh.test_arrivals import Tier
from tests.mesh.test_tokens import add, ended
from tests.model.test_engine import expected, prompt

COUNT = 9
LENGTH = 200
FULL = 3 * 64
WISH = Sampling(tokens_max=COUNT)


def life(shape: Shape, folder: Path, act: Callable[[Lead], object], **config) -> object:
    """What `act` makes while one engine lives; then all that it has to store is stored."""

    def acted(lead: Lead) -> object:
        made = act(lead)
        lead.offload.drain()
        return made

    return run_mesh(shape, acted, disk=folder, modes="none", **config)


def cached(shape: Shape, folder: Path) -> int:
    """How much of the prompt one life of the engine need not compute. Its answer is right."""

    def act(lead: Lead) -> int:
        request = add(lead, LENGTH, COUNT)
        for _ in lead.run():
            lead.check()
        assert request.output == expected("v32", LENGTH, COUNT)
        return request.cached_count

    count = life(shape, folder, act)
    assert isinstance(count, int)
    return count


def loading(lead: Lead) -> Request:
    request = add(lead, LENGTH, COUNT)
    lead.step()
    assert request.state == "loading"
    return request


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What rank 0 counts, whenever all ranks say what they count."""
    counted, least = [], Lockstep.least

    def noted(self: Lockstep, counts: list[int]) -> list[int]:
        if self.is_lead:
            counted.append(counts)
        return least(self, counts)

    monkeypatch.setattr(Lockstep, "least", noted)
    return counted


SHAPES = [Shape(pp=2), Shape(tp=2, mtp=2), Shape(tp=2, pp=2), Shape(pp=3, mtp=4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_another_engine_reads_what_the_first_has_stored(shape: Shape, tmp_path: Path):
    assert cached(shape, tmp_path) == 0
    assert cached(shape, tmp_path) == FULL - 64 * (shape.mtp > 1)


def test_steps_in_which_nothing_loads_have_no_exchange_more(tmp_path: Path, rounds):
    def act(lead: Lead) -> None:
        short = add(lead, 64, COUNT)
        ended(lead)
        assert rounds == [], "no whole page can be on a disk"
        add(lead, LENGTH, COUNT)
        ended(lead)
        assert rounds == [[0]], "asked at the opening alone"
        assert short.output == expected("v32", 64, COUNT)

    life(Shape(pp=2), tmp_path, act)


@pytest.mark.parametrize("stage", [0, 1])
def test_what_one_stage_has_lost_all_compute(stage: int, tmp_path: Path):
    shape = Shape(tp=2, pp=2)
    cached(shape, tmp_path)
    shutil.rmtree(tmp_path / f"stage {stage}")
    assert cached(shape, tmp_path) == 0
    assert cached(shape, tmp_path) == FULL, "it was stored anew"


@pytest.mark.parametrize("stage", [0, 1])
def test_fewer_pages_of_one_stage_are_fewer_for_all(stage: int, tmp_path: Path):
    shape = Shape(pp=2)
    life(shape, tmp_path, lambda lead: [lead.add(prompt(LENGTH)[:140], WISH), ended(lead)])
    shutil.copytree(tmp_path / f"stage {stage}", tmp_path / "short")
    cached(shape, tmp_path)
    shutil.rmtree(tmp_path / f"stage {stage}")
    (tmp_path / "short").rename(tmp_path / f"stage {stage}")
    assert cached(shape, tmp_path) == 2 * 64
    assert cached(shape, tmp_path) == FULL


@pytest.mark.parametrize(("stage", "mtp"), [(0, 1), (1, 2)])
def test_a_torn_page_of_one_stage_counts_on_no_rank(stage: int, mtp: int, tmp_path: Path):
    shape = Shape(tp=2, pp=2, mtp=mtp)
    cached(shape, tmp_path)
    slab = tmp_path / f"stage {stage}" / SLAB
    torn = bytearray(slab.read_bytes())
    middle = len(torn) // 2
    torn[middle : middle + 500] = b"\xaa" * 500
    slab.write_bytes(torn)
    assert cached(shape, tmp_path) == 64, "the second page is torn"


def test_others_run_and_one_is_cancelled_while_pages_come(
    tmp_path: Path, held_reads: threading.Event, rounds
):
    """With a pump between steps, a request that is preempted, and the pages of the cancelled one
    taken for another prompt."""
    shape = Shape(tp=2, pp=2)
    held_reads.set()
    cached(shape, tmp_path)
    held_reads.clear()

    def act(lead: Lead) -> None:
        late, again = loading(lead), loading(lead)
        other = add(lead, 90, COUNT)
        while len(other.output) < 3:
            lead.step()
            lead.pump()
            assert late.state == again.state == "loading"
        with pytest.raises(BadState, match="not running"):
            lead.preempt(late)
        lead.preempt(other)
        lead.pump()
        held_reads.set()
        before = len(rounds)
        lead.cancel(late)
        assert len(rounds) == before + 1, "no disk writes into its pages any more"
        fresh = add(lead, 130, COUNT)
        lead.resume(other)
        ended(lead)
        assert late.reason == "cancelled"
        assert again.cached_count == FULL
        for request, length in ((again, LENGTH), (other, 90), (fresh, 130)):
            assert request.output == expected("v32", length, COUNT)

    life(shape, tmp_path, act)


def test_the_slowest_stage_decides_when_a_prompt_has_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shape, go_on, load = Shape(pp=2), threading.Event(), StageDisk.load
    cached(shape, tmp_path)

    def late(self: StageDisk, *each: object) -> bool:
        assert self.stage == 0 or go_on.wait(60)
        return load(self, *each)

    monkeypatch.setattr(StageDisk, "load", late)

    def act(lead: Lead) -> None:
        request = loading(lead)
        request.sequence.wait()
        for turn in (lead.step, lead.pump, lead.step):
            turn()
            assert request.state == "loading", "rank 0 has all of its pages"
        go_on.set()
        ended(lead)
        assert request.output == expected("v32", LENGTH, COUNT)
        assert request.cached_count == FULL

    life(shape, tmp_path, act)


@pytest.mark.parametrize("place", ["load", "begin"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_rank_that_is_lost_while_a_request_loads_ends_all(
    stage: int, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In a step, or as it opens the request: then it tells the others at once, and asks them
    nothing."""
    shape, load, bring = Shape(pp=2), StageDisk.load, Shelf.bring
    cached(shape, tmp_path)

    def killed(self: StageDisk, *each: object) -> bool:
        if self.stage == stage and place == "load":
            raise MemoryError("lost")
        return load(self, *each)

    def brought(self: Shelf, page_load: PageLoad) -> None:
        bring(self, page_load)
        if self._tier.stage == stage and place == "begin":
            raise MemoryError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(StageDisk, "load", killed)
        patch.setattr(Shelf, "bring", brought)
        with pytest.raises(ExceptionGroup) as wrong:
            cached(shape, tmp_path)
    lost, told = wrong.value.exceptions[:: 1 - 2 * stage]
    assert isinstance(lost, MemoryError)
    assert isinstance(told, LinkLost)


def test_rows_come_into_pages_that_all_ranks_have_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A stage that is behind rank 0 could have such a page on its way to its disk, under the hash
    of what it held before."""
    tier, taken, locksteps, least = Tier(), [], [], Lockstep.least

    def noted(self: Lockstep, counts: list[int]) -> list[int]:
        if self.is_lead:
            locksteps[:] = [self]
        if not counts:
            taken.append(self.latent.taken_digest)
        return least(self, counts)

    expect = Receiver.expect

    def expected_late(self: Receiver, *given: object, **more: object) -> None:
        assert taken == [locksteps[0].latent.taken_digest] * 4
        taken.clear()
        expect(self, *given, **more)

    monkeypatch.setattr(Lockstep, "least", noted)
    monkeypatch.setattr(Receiver, "expect", expected_late)

    def act(lead: Lead) -> list[list[int]]:
        made = []
        for length in (200, 130, 200):
            made.append(tier.add(lead, length))
            tier.run(lead)
        assert made[2].cached_count == 192
        return [request.output for request in made]

    made = run_mesh(Shape(tp=2, pp=2), act, port_of=tier.port_of, disk=tmp_path, host_pages=8)
    assert made == [expected("v32", length, COUNT) for length in (200, 130, 200)]


def test_a_process_of_a_stage_has_the_disk(tmp_path: Path):
    """And ranks of which only some have a disk do not begin."""
    config = ProcessConfig(tp_size=2, pp_size=2, prefix_cache_dir=str(tmp_path))
    sizes = dict.fromkeys(("length_max", "slot_bytes", "host_bytes", "index_bytes"), 1)
    with Checkpoint(EMBEDDED) as checkpoint:
        whole = checkpoint.model_config.layout(has_mtp=True)
    layers = ((0, 2), (2, 6))
    kinds = []
    for number in range(4):
        rank = Rank(rank=number, size=4, init="", layers=layers, team=2)
        launch = Launch(model=str(EMBEDDED), config=config, rank=rank, **sizes)
        disk = process.part_disk(launch, whole, SimpleNamespace(writes=number % 2 == 0))
        assert disk.page_bytes == whole.part(*layers[number // 2]).host_page_bytes
        kinds.append(type(disk))
        disk.close()
    assert kinds == [DiskTier, Elsewhere] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layers-0-1", "layers-2-5"]
    without = structs.replace(launch, config=replace(config, prefix_cache_dir=""))
    assert process.part_disk(without, whole, SimpleNamespace(writes=False)) is None
    assert process.facts(launch) != process.facts(without)


def test_preempted_requests_wait_on_the_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ten host pages: two requests of four pages, and a third one that needs them."""
    monkeypatch.setattr(shelved, "STORE_S", 60.0)

    def act(lead: Lead) -> None:
        first, second = (add(lead, length, 12) for length in (200, 201))
        while min(len(first.output), len(second.output)) < 3:
            lead.step()
        lead.preempt(first)
        lead.preempt(second)
        third = add(lead, 202, COUNT)
        ended(lead)
        assert third.output == expected("v32", 202, COUNT)
        assert second.sequence.is_shelved
        with pytest.raises(BadState, match="held by"):
            lead.forget_prefixes()
        for request, length in ((second, 201), (first, 200)):
            lead.resume(request)
            ended(lead)
            assert request.output == expected("v32", length, 12)
        assert lead.offload.stats().disk.loaded_count > 0
        lead.forget_prefixes()
        assert lead.offload.stats().disk.page_count == 0

    life(Shape(tp=2, pp=2), tmp_path, act, host_pages=10)
