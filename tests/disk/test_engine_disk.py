"""Engines over a disk: the same answers whether a prompt's pages were computed, kept or loaded."""

from __future__ import annotations

import threading
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ess.door import Offload
from ess.engine.config import ProcessConfig
from ess.engine.engine import Engine, EngineConfig
from ess.engine.process import disk as engine_disk
from ess.engine.process.messages import Launch
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput, BadState
from ess.kernels.cpu import native
from ess.layout import ModelLayout
from ess.models.load import EMBEDDED
from ess.pool.disk.folder import SLAB
from ess.pool.disk.tier import DiskTier
from tests.model.grid import TOKEN_COUNT, checkpoint, expected, slot_bytes, text
from tests.support.few import few
from tests.support.manual_lane import ManualLane

CASES = [("deepseek_v32", 1), ("deepseek_v32", 2), ("glm_moe_dsa", 1), ("glm_moe_dsa", 2)]
CASES += [("dots3_note", 1), ("mistral_large4", 1)]
LENGTHS = (64, 65, 128, 129, 130, 192, 193)


def layout_of(name: str, mtp: int) -> ModelLayout:
    return checkpoint(name).config.layout(row="f32", index="f32", has_mtp=mtp > 1)


def disk_of(folder: Path, layout: ModelLayout, *, pages: int = 200) -> DiskTier:
    page_bytes = layout.host_page_bytes
    capacity = pages * (page_bytes + 4096)
    return DiskTier(folder, identity=b"these", page_bytes=page_bytes, capacity_bytes=capacity)


def engine(
    name: str, mtp: int, disk: Path | None, *, host_pages: int = 40, disk_pages: int = 200
) -> Engine:
    layout = layout_of(name, mtp)
    offload = Offload.create(
        layout,
        slot_bytes=slot_bytes(layout, "tight"),
        host_bytes=host_pages * layout.host_page_bytes,
        length_max=1024,
        slot_floor=min(24, layout.top_k),
        lane=ManualLane(seed=mtp, delay_max=3),
        poison=True,
        disk=None if disk is None else disk_of(disk, layout, pages=disk_pages),
    )
    return Engine(checkpoint(name), offload, EngineConfig(mtp=mtp, chunk_tokens=96))


def ask(eng: Engine, name: str, start: int, stop: int, **more: object) -> Request:
    sampling = Sampling(tokens_max=TOKEN_COUNT, ignore_eos=True)
    return eng.add(text(name)[start:stop], sampling, **more)


def run(eng: Engine) -> None:
    for _ in eng.run():
        eng.check()
    eng.offload.check()


def answer(eng: Engine, name: str, start: int, stop: int, **more: object) -> Request:
    request = ask(eng, name, start, stop, **more)
    run(eng)
    assert request.reason == "length"
    assert request.output == expected(name, start, stop)
    return request


@pytest.mark.parametrize(("name", "mtp"), CASES)
def test_answers_are_alike_from_host_disk_and_neither(name: str, mtp: int, tmp_path: Path) -> None:
    pages = 300 // 64 - (mtp > 1)
    eng = engine(name, mtp, tmp_path)
    assert answer(eng, name, 0, 300).cached_count == 0
    assert answer(eng, name, 0, 300).cached_count == 64 * pages
    eng.offload.close()
    eng = engine(name, mtp, tmp_path)
    assert answer(eng, name, 0, 300).cached_count == 64 * pages, "from the disk"
    disk = eng.offload.stats().disk
    assert disk is not None
    assert disk.loaded_count >= pages
    assert disk.damaged_count == 0
    assert answer(eng, name, 0, 300).cached_count == 64 * pages, "from the host"
    assert eng.offload.stats().disk.loaded_count == disk.loaded_count
    assert answer(eng, name, 0, 200).cached_count == 64 * (3 - (mtp > 1))
    eng.offload.close()


@pytest.mark.parametrize(
    ("length", "mtp"),
    few(zip(LENGTHS, (2, 1, 1, 1, 2, 1, 2), strict=True), all_of=product(LENGTHS, (1, 2))),
)
def test_whole_prompts_of_pages_come_back(length: int, mtp: int, tmp_path: Path) -> None:
    """A prompt of 64 n + 1 tokens has nothing left to prefill."""
    name = "deepseek_v32"
    for turn in range(2):
        eng = engine(name, mtp, tmp_path)
        cached = answer(eng, name, 0, length).cached_count
        full = (length - 1) // 64
        assert cached == 64 * turn * (full if mtp == 1 else max(0, full - 1))
        eng.offload.close()


def test_what_the_host_forgot_comes_from_the_disk(tmp_path: Path) -> None:
    name = "deepseek_v32"
    eng = engine(name, 1, tmp_path, host_pages=8)
    spans = [(0, 300), (300, 600), (600, 900)]
    for start, stop in spans:
        answer(eng, name, start, stop)
    for start, stop in spans:
        assert answer(eng, name, start, stop).cached_count == 256
    assert eng.offload.stats().disk.loaded_count > 0
    eng.offload.close()


def test_salts_are_apart_on_the_disk(tmp_path: Path) -> None:
    name = "deepseek_v32"
    for turn in range(2):
        eng = engine(name, 1, tmp_path)
        assert answer(eng, name, 0, 200, salt=b"one").cached_count == 192 * turn
        eng.offload.close()
    eng = engine(name, 1, tmp_path)
    assert answer(eng, name, 0, 200, salt=b"two").cached_count == 0
    assert answer(eng, name, 0, 200).cached_count == 0
    eng.offload.close()


def stored(tmp_path: Path, name: str, stop: int) -> Engine:
    """A new engine over a disk that has the prompt."""
    eng = engine(name, 1, tmp_path)
    answer(eng, name, 0, stop)
    eng.offload.close()
    return engine(name, 1, tmp_path)


def test_others_run_while_pages_come(tmp_path: Path, held_reads: threading.Event) -> None:
    name = "deepseek_v32"
    eng = stored(tmp_path, name, 300)
    late = ask(eng, name, 0, 300)
    other = ask(eng, name, 400, 500)
    while other.reason is None:
        eng.step()
        assert late.state == "loading"
    assert other.output == expected(name, 400, 500)
    assert not eng.is_idle
    assert eng.is_handing_over, "the pump should come soon"
    held_reads.set()
    run(eng)
    assert late.cached_count == 256
    assert late.output == expected(name, 0, 300)
    eng.offload.close()


def test_one_that_loads_may_be_cancelled(tmp_path: Path, held_reads: threading.Event) -> None:
    name = "deepseek_v32"
    eng = stored(tmp_path, name, 300)
    late = ask(eng, name, 0, 300)
    eng.step()
    assert late.state == "loading"
    free = eng.offload.stats().free_host_page_count
    held_reads.set()
    eng.cancel(late)
    assert eng.offload.stats().free_host_page_count > free
    run(eng)
    assert answer(eng, name, 0, 300).cached_count == 256
    eng.offload.close()


def test_a_page_that_is_broken_is_computed(tmp_path: Path) -> None:
    name = "deepseek_v32"
    eng = stored(tmp_path, name, 300)
    layout = eng.offload.layout
    stride = layout.host_page_bytes + -layout.host_page_bytes % 4096
    with (tmp_path / SLAB).open("r+b") as slab:
        slab.seek(2 * stride + 1000)
        slab.write(b"\xaa" * 500)
    request = answer(eng, name, 0, 300)
    assert request.cached_count in (0, 64, 128, 192), "not all of it came"
    assert eng.offload.stats().disk.damaged_count == 1
    eng.offload.close()
    eng = engine(name, 1, tmp_path)
    assert answer(eng, name, 0, 300).cached_count == 256, "it was stored anew"
    eng.offload.close()


def test_choices_of_one_prompt_share_what_comes(tmp_path: Path) -> None:
    name = "deepseek_v32"
    eng = stored(tmp_path, name, 300)
    leader = ask(eng, name, 0, 300)
    followers = [ask(eng, name, 0, 300, leader=leader) for _ in range(2)]
    run(eng)
    for request in (leader, *followers):
        assert request.output == expected(name, 0, 300)
    assert eng.offload.stats().disk.loaded_count == 4
    eng.offload.close()


def test_what_is_scored_is_computed(tmp_path: Path) -> None:
    name = "deepseek_v32"
    eng = stored(tmp_path, name, 300)
    sampling = Sampling(tokens_max=2, ignore_eos=True, prompt_logprobs=0, prompt_start=130)
    request = eng.add(text(name)[:300], sampling)
    run(eng)
    assert request.cached_count == 128
    eng.offload.close()


def test_forgetting_prefixes_empties_the_disk(tmp_path: Path) -> None:
    name = "deepseek_v32"
    eng = engine(name, 1, tmp_path)
    answer(eng, name, 0, 300)
    eng.offload.drain()
    assert eng.offload.forget_prefixes() == 4
    assert answer(eng, name, 0, 300).cached_count == 0
    eng.offload.forget_prefixes()
    eng.offload.close()
    eng = engine(name, 1, tmp_path)
    assert answer(eng, name, 0, 300).cached_count == 0
    eng.offload.close()


def test_a_disk_smaller_than_the_prompts_keeps_the_newest(tmp_path: Path) -> None:
    name = "deepseek_v32"
    eng = engine(name, 1, tmp_path, disk_pages=6)
    answer(eng, name, 0, 300)
    eng.offload.close()
    eng = engine(name, 1, tmp_path, disk_pages=6)
    answer(eng, name, 400, 700)
    eng.offload.close()
    eng = engine(name, 1, tmp_path, disk_pages=6)
    assert answer(eng, name, 400, 700).cached_count == 256
    assert eng.offload.stats().disk.page_count <= 6
    eng.offload.close()


def test_by_hand_a_sequence_waits_for_its_pages(tmp_path: Path) -> None:
    name = "deepseek_v32"
    eng = stored(tmp_path, name, 300)
    opened = eng.offload.open(text(name)[:300], from_disk=True)
    assert opened.is_loading
    assert opened.state == "preempted"
    with pytest.raises(BadState, match="waits for pages from the disk"):
        opened.import_rows(0, 256, [])
    opened.resume()
    assert not opened.is_loading
    assert opened.cached_count == opened.length == 256
    opened.close()
    assert not eng.offload.open(text(name)[:300]).is_loading, "the host has them"
    eng.offload.close()


def test_a_disk_of_other_pages_is_refused(tmp_path: Path) -> None:
    layout = layout_of("deepseek_v32", 1)
    disk = DiskTier(tmp_path, identity=b"", page_bytes=1000, capacity_bytes=1 << 20)
    with pytest.raises(BadInput, match=r"disk has pages of 1000 bytes, .* has \d+"):
        Offload.create(layout, slot_bytes="64MiB", host_bytes="64MiB", disk=disk)
    disk.close()


def reopened(folder: Path, **settings: Any) -> tuple[str, int]:
    """What an engine's start with these settings says, and how many pages it finds. It leaves one
    more."""
    config = ProcessConfig(prefix_cache_dir=str(folder), prefix_cache_disk="4MiB", **settings)
    sizes = dict.fromkeys(("length_max", "slot_bytes", "host_bytes", "index_bytes"), 1)
    launch = Launch(model=str(EMBEDDED), config=config, **sizes)
    tier = engine_disk.disk_of(launch, layout_of("embedded", 2))
    assert tier is not None
    count = tier.uses.page_count
    tier.store(b"page %d" % count, lambda page: True)
    tier.flush()
    tier.close()
    return tier.opened, count


def test_pages_that_another_arithmetic_has_made_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings in ({}, {"backend": "reference"}, {"form": "f32"}, {"deterministic": True}):
        assert reopened(tmp_path, **settings)[1] == 0
        assert reopened(tmp_path, **settings) == ("", 1), settings
    monkeypatch.setattr(native, "kernels", lambda: "other instructions")
    said, count = reopened(tmp_path, deterministic=True)
    assert "another model, row form, layout or version" in said
    assert count == 0
    assert reopened(tmp_path)[1] == 0
    monkeypatch.undo()
    assert reopened(tmp_path) == ("", 1), "where the last bit is not promised it does not matter"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_many_prompts_over_small_pools_are_answered_alike(seed: int, tmp_path: Path) -> None:
    name, mtp = CASES[seed]
    for _ in range(3):
        eng = engine(name, mtp, tmp_path, host_pages=16, disk_pages=20)
        requests = [(start, ask(eng, name, start % 300, start % 300 + 250)) for start in range(8)]
        run(eng)
        for start, request in requests:
            assert request.output == expected(name, start % 300, start % 300 + 250)
        eng.offload.close()
