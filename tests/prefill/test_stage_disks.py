"""Stages with a disk each: what all of them have is skipped, and what one lacks is computed."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ess.engine.config import ProcessConfig
from ess.engine.process.disk import disk_of
from ess.engine.process.messages import Launch
from ess.errors import EssError
from ess.models.load import EMBEDDED
from ess.models.registry import read_config
from ess.pool.disk.folder import SLAB
from ess.prefill.orders import Enter, Load
from ess.prefill.stage import Disagreement, Stage
from tests.prefill.pipes import CONFIG, CUTS, Pipe, engine_given, folder_of, pools, text
from tests.prefill.test_exact import assert_alike
from tests.prefill.test_schedules import World
from tests.support.few import few

PROMPT = text(320)
FULL = 4 * 64


@pytest.fixture(autouse=True)
def closed(monkeypatch) -> Iterator[None]:
    """A disk's threads and files last until its pipe is closed."""
    made, begin = [], Pipe.__init__

    def begin_and_note(self: Pipe, *given, **wishes) -> None:
        made.append(self)
        begin(self, *given, **wishes)

    monkeypatch.setattr(Pipe, "__init__", begin_and_note)
    yield
    for pipe in made:
        pipe.close()


def assert_quiet(pipe: Pipe) -> None:
    pipe.release_all()
    assert len(pipe.lead._prompts) == 0
    first, *others = map(pools, pipe.stages)
    assert all(other == first for other in others)
    assert not any(first["held"])
    assert not any(first["active"])


def turn(tmp_path: Path, prompt: list[int], *, stage_count: int = 2, **wishes) -> int:
    """One life of the stages: how much of the prompt was cached. What they make is right."""
    pipe = Pipe(stage_count, disk=tmp_path, **wishes)
    request = pipe.add(prompt)
    pipe.run()
    assert request.reason == "sent"
    room = {name: value for name, value in wishes.items() if name in ("row", "mtp")}
    assert_alike(pipe, [1], engine_given([prompt], **room))
    begins = [shelf.told[1][0][1] for shelf in pipe.shelves]
    assert min(begins) > request.cached_count, "a chunk that was cached has run"
    assert_quiet(pipe)
    pipe.close()
    return request.cached_count


def damage(folder: Path, places: list[int]) -> None:
    """At these bytes of the file other ones stand."""
    with (folder / SLAB).open("r+b") as slab:
        for place in places:
            slab.seek(place)
            slab.write(b"\xaa" * 3000)


GRID = [*itertools.product([1, 2, 4], [False, True], ["f32", "fp8"])]


@pytest.mark.parametrize(
    ("stage_count", "mtp", "row"),
    few([GRID[at] for at in (0, 3, 5, 6, 8, 11)], all_of=GRID),
)
def test_behind_a_restart_cached_chunks_are_skipped(tmp_path, stage_count, mtp, row):
    wishes = {"stage_count": stage_count, "mtp": mtp, "row": row}
    assert turn(tmp_path, PROMPT, **wishes) == 0
    assert turn(tmp_path, PROMPT, **wishes) == FULL - 64 * mtp
    longer = PROMPT + text(90, seed=3)
    assert turn(tmp_path, longer, **wishes) == FULL - 64 * mtp
    assert turn(tmp_path, longer, **wishes) == FULL + 64 * (2 - mtp)


def test_what_the_host_has_is_not_read(tmp_path):
    turn(tmp_path, PROMPT, mtp=False)
    pipe = Pipe(2, mtp=False, disk=tmp_path)
    for _ in range(2):
        request = pipe.add(PROMPT)
        pipe.run()
        assert request.cached_count == FULL
    counts = [stage.offload.stats().disk.loaded_count for stage in pipe.stages]
    assert counts == [4, 4]
    assert_quiet(pipe)


def test_a_prompt_that_is_all_on_disk_runs_through_no_layer(tmp_path):
    whole = PROMPT[: FULL + 1]
    turn(tmp_path, PROMPT, mtp=False)
    pipe = Pipe(2, mtp=False, disk=tmp_path)
    request = pipe.add(whole)
    pipe.run()
    assert (request.reason, request.cached_count) == ("sent", FULL)
    assert [shelf.told[1] for shelf in pipe.shelves] == [[], []]
    assert pipe.given(1).rows == engine_given([whole], mtp=False)[0].rows
    assert_quiet(pipe)


@pytest.mark.parametrize("lacking", [0, 1, 2, 3])
def test_what_one_stage_lacks_is_computed_by_all(tmp_path, lacking):
    wishes = {"stage_count": 4, "mtp": False}
    turn(tmp_path, PROMPT, **wishes)
    shutil.rmtree(folder_of(tmp_path, list(itertools.pairwise(CUTS[4]))[lacking]))
    assert turn(tmp_path, PROMPT, **wishes) == 0
    assert turn(tmp_path, PROMPT, **wishes) == FULL, "it was stored anew"


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("damaged", [0, 1])
def test_a_page_that_is_damaged_on_one_stage_counts_on_none(tmp_path, damaged, mtp):
    turn(tmp_path, PROMPT, mtp=mtp)
    folder = folder_of(tmp_path, [(0, 2), (2, 4)][damaged])
    damage(folder, [700])
    pipe = Pipe(2, mtp=mtp, disk=tmp_path)
    request = pipe.add(PROMPT)
    pipe.run()
    assert request.cached_count == 0, "the first page is the damaged one"
    assert_alike(pipe, [1], engine_given([PROMPT], mtp=mtp))
    damaged_counts = [stage.offload.stats().disk.damaged_count for stage in pipe.stages]
    assert damaged_counts == [int(damaged == 0), int(damaged == 1)]
    assert_quiet(pipe)
    pipe.close()
    assert turn(tmp_path, PROMPT, mtp=mtp) == FULL - 64 * mtp, "it was stored anew"


def test_each_disk_keeps_the_newest_of_its_capacity(tmp_path):
    wishes = {"mtp": False, "disk_pages": 5}
    turn(tmp_path, PROMPT, **wishes)
    other = text(320, seed=9)
    turn(tmp_path, other, **wishes)
    assert turn(tmp_path, other, **wishes) == FULL
    assert turn(tmp_path, PROMPT, **wishes) < FULL
    for stage in Pipe(2, disk=tmp_path, **wishes).stages:
        use = stage.offload.stats().disk
        assert use.page_count <= use.page_max == 5


def test_salts_are_apart_on_the_disks(tmp_path):
    for salt, cached in ((b"one", 0), (b"one", FULL), (b"two", 0)):
        pipe = Pipe(2, mtp=False, disk=tmp_path)
        request = pipe.add(PROMPT, salt=salt)
        pipe.run()
        assert request.cached_count == cached
        assert_quiet(pipe)
        pipe.close()


def test_forgetting_prefixes_empties_every_disk(tmp_path):
    turn(tmp_path, PROMPT)
    pipe = Pipe(2, disk=tmp_path)
    pipe.lead.forget_prefixes()
    pipe.settle()
    pipe.close()
    assert turn(tmp_path, PROMPT) == 0


# ---- while pages come


def loading(tmp_path: Path, **wishes) -> tuple[Pipe, object]:
    """Stages behind a restart that read the prompt."""
    turn(tmp_path, PROMPT, mtp=False)
    pipe = Pipe(2, mtp=False, disk=tmp_path, **wishes)
    request = pipe.add(PROMPT)
    for _ in range(2):
        for each in pipe.turns:
            each()
    assert request.state == "loading"
    return pipe, request


def test_others_run_while_pages_come(tmp_path, held_reads):
    pipe, request = loading(tmp_path)
    other = pipe.add(text(100, seed=5))
    while other.reason is None:
        for each in pipe.turns:
            each()
        pipe.lead.check()
    assert request.state == "loading"
    held_reads.set()
    pipe.run()
    assert (request.reason, request.cached_count) == ("sent", FULL)
    assert_alike(pipe, [1], engine_given([PROMPT], mtp=False))
    assert_quiet(pipe)


@pytest.mark.parametrize("turn_count", range(8))
def test_one_that_loads_may_be_cancelled_at_any_moment(tmp_path, held_reads, turn_count):
    pipe, request = loading(tmp_path)
    held_reads.set()
    if turn_count > 1:
        pipe.wait_for_disks()
    for at in range(turn_count):
        pipe.turns[at % 2]()
    pipe.lead.cancel(request)
    pipe.settle()
    assert_quiet(pipe)
    again = pipe.add(PROMPT, uid=1 if request.reason == "cancelled" else 7)
    pipe.run()
    assert (again.reason, again.cached_count) == ("sent", FULL)
    assert_quiet(pipe)


def test_one_that_has_loaded_waits_for_room_on_the_device(tmp_path, held_reads):
    pipe, request = loading(tmp_path, sequence_max=2)
    others = [pipe.add(text(700, seed=seed)) for seed in range(2)]
    pipe.lead.step()
    held_reads.set()
    pipe.wait_for_disks()
    for each in pipe.turns[::-1]:
        each()
    assert (request.state, request.cached_count) == ("preempted", FULL)
    assert [other.state for other in others] == ["prefilling"] * 2
    pipe.run()
    assert {each.reason for each in (request, *others)} == {"sent"}
    assert_alike(pipe, [1], engine_given([PROMPT], mtp=False))
    assert_quiet(pipe)


@pytest.mark.parametrize("order", [Load(0, 4), Enter(5)])
def test_a_stage_that_cannot_load_alike_says_so(tmp_path, held_reads, order):
    pipe, _ = loading(tmp_path)
    with pytest.raises(Disagreement):
        pipe.stages[1].obey(order)
    held_reads.set()
    pipe.run()


# ---- any schedule


class DiskWorld(World):
    """Several lives over the same folders. Pages on disk break at any moment."""

    def __init__(self, seed: int, disk: Path) -> None:
        chance = random.Random(seed)
        self.disk = disk
        self.room = {
            "disk": disk,
            "disk_pages": chance.choice([6, 20, 100]),
            "mtp": chance.random() < 0.5,
        }
        self.stage_count = chance.choice([1, 2, 3, 4])
        super().__init__(seed)
        self.pipe.close()
        self.begin()

    def begin(self) -> None:
        count = self.random.choice([12, 24])
        self.pipe = Pipe(self.stage_count, page_count=count, sequence_max=4, **self.room)
        self.requests = []

    def act(self) -> None:
        if self.random.random() < 0.02:
            self.damage()
        super().act()

    def damage(self) -> None:
        folder = self.random.choice(list(self.disk.iterdir()))
        size = (folder / SLAB).stat().st_size
        damage(folder, [self.random.randrange(size) for _ in range(3) if size])

    def forget(self) -> None:
        if self.random.random() < 0.1:
            super().forget()

    def release(self) -> None:
        self.pipe.wait_for_disks()
        super().release()


def run(seed: int, disk: Path, *, lives: int = 3, steps: int = 120) -> int:
    """How many pages came from disks."""
    world, loaded_count = DiskWorld(seed, disk), 0
    for _ in range(lives):
        for _ in range(steps):
            world.act()
        world.end()
        world.assert_alike()
        assert {each.reason for each in world.requests} <= {"sent", "cancelled", "refused"}
        loaded_count += sum(stage.offload.stats().disk.loaded_count for stage in world.pipe.stages)
        world.pipe.close()
        world.begin()
    world.pipe.close()
    return loaded_count


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_over_disks_leaves_all_pools_alike(tmp_path, seed):
    run(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(100, 102), all_of=range(100, 150)))
def test_many_more_schedules_over_disks(tmp_path, seed):
    run(seed, tmp_path, steps=400)


@pytest.mark.slow
def test_schedules_read_from_disks(tmp_path):
    assert sum(run(seed, tmp_path / str(seed)) for seed in range(3)) > 20


def landing_its_own(self: Stage, held, page_count: int) -> None:
    """The bug: what has come counts, whatever the others have."""
    held.sequence.land(held.sequence.loaded_count)


def test_schedules_catch_a_stage_that_counts_for_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(Stage, "_land", landing_its_own)
    with pytest.raises((AssertionError, EssError)):
        run_all(range(12), tmp_path)


def run_all(seeds: range, disk: Path) -> None:
    for seed in seeds:
        run(seed, disk / str(seed))


# ---- folders


def test_each_stage_has_a_folder_of_its_own_and_its_share_of_the_disk(tmp_path):
    whole = read_config(CONFIG).layout(row="f32", index="f32")
    launch = launch_of(tmp_path, f"{100 * whole.host_page_bytes}")
    tiers = [disk_of(launch, whole, layers) for layers in [(0, 3), (3, 4)]]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["layers-0-2", "layers-3-3"]
    bytes_max = [tier.uses.page_max * tier.page_bytes for tier in tiers]
    assert 0.8 < sum(bytes_max) / (100 * whole.host_page_bytes) <= 1
    for tier in tiers:
        tier.close()


def launch_of(folder: Path, capacity: str) -> Launch:
    config = ProcessConfig(prefix_cache_dir=str(folder), prefix_cache_disk=capacity)
    return Launch(
        model=str(EMBEDDED), config=config, length_max=2, slot_bytes=1, host_bytes=1, index_bytes=1
    )
