"""Preempted requests whose host pages others need: they wait on the disk and go on as they were."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ess.door.memory.shelf import Shelf
from ess.engine.engine import Engine
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadState, PoolFull, Unavailable
from ess.pool.disk.folder import SLAB
from tests.disk.test_engine_disk import CASES, ask, disk_of, engine, run
from tests.model.grid import expected, text
from tests.support.manual_lane import ManualLane
from tests.unit.door.test_door import LAYOUT, make, rows

NAME = "deepseek_v32"


def held(eng: Engine, name: str, start: int, stop: int) -> Request:
    """A request that has made some tokens and was preempted by its caller."""
    request = ask(eng, name, start, stop)
    while len(request.output) < 3:
        eng.step()
    eng.preempt(request)
    return request


@pytest.mark.parametrize(("name", "mtp"), CASES)
def test_idle_requests_make_room_and_go_on(name: str, mtp: int, tmp_path: Path) -> None:
    """Ten host pages: two requests of five pages and a third one do not fit at once."""
    eng = engine(name, mtp, tmp_path, host_pages=10)
    first = held(eng, name, 0, 290)
    second = held(eng, name, 300, 590)
    third = ask(eng, name, 600, 890)
    run(eng)
    assert third.output == expected(name, 600, 890)
    assert second.sequence is not None
    assert second.sequence.is_shelved, "the last in rank gives way first"
    for request, start in ((first, 0), (second, 300)):
        eng.resume(request)
        run(eng)
        assert request.output == expected(name, start, start + 290)
    assert eng.offload.stats().disk.loaded_count > 0
    assert first.prefilled_count == second.prefilled_count == 289, "nothing was computed twice"
    eng.offload.close()


def test_without_a_disk_the_third_waits() -> None:
    eng = engine(NAME, 1, None, host_pages=10)
    held(eng, NAME, 0, 290)
    held(eng, NAME, 300, 590)
    third = ask(eng, NAME, 600, 890)
    run(eng)
    assert third.state == "waiting"
    assert eng.refusal is not None
    assert eng.refusal.limiter == "host pages"
    eng.offload.close()


def test_pages_that_a_full_disk_did_not_take_stay_in_the_host_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two requests have four whole pages each, of which the disk takes six at most. The
    third needs five pages, and waits for the end of another."""
    left, pwrite = [6], os.pwrite

    def full(*given: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*given)

    monkeypatch.setattr(os, "pwrite", full)
    eng = engine(NAME, 1, tmp_path, host_pages=10)
    first, second = held(eng, NAME, 0, 290), held(eng, NAME, 300, 590)
    third = ask(eng, NAME, 600, 890)
    run(eng)
    assert eng.offload.stats().disk.fault.startswith("the disk takes no more pages")
    assert (third.state, second.sequence.is_shelved) == ("waiting", False)
    for request, start in ((first, 0), (second, 300)):
        eng.resume(request)
        run(eng)
        assert request.output == expected(NAME, start, start + 290)
    assert third.output == expected(NAME, 600, 890)
    eng.offload.close()


def test_a_resume_that_is_broken_off_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C, while pages are read."""
    eng = engine(NAME, 1, tmp_path, host_pages=10)
    held(eng, NAME, 0, 290)
    second, third = held(eng, NAME, 300, 590), ask(eng, NAME, 600, 890)
    run(eng)
    assert third.reason == "length"
    assert second.sequence.is_shelved
    with monkeypatch.context() as patch:
        patch.setattr(Shelf, "wait", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            eng.resume(second)
    eng.check()
    eng.resume(second)
    run(eng)
    assert second.output == expected(NAME, 300, 590)
    eng.offload.close()


def test_one_on_the_disk_may_be_cancelled(tmp_path: Path) -> None:
    eng = engine(NAME, 1, tmp_path, host_pages=10)
    first, second = held(eng, NAME, 0, 290), held(eng, NAME, 300, 590)
    third = ask(eng, NAME, 600, 890)
    run(eng)
    with pytest.raises(BadState, match="held by"):
        eng.offload.forget_prefixes()
    for request in (first, second):
        eng.cancel(request)
    run(eng)
    assert third.output == expected(NAME, 600, 890)
    stats = eng.offload.stats()
    assert stats.free_host_page_count == stats.host_page_count
    eng.offload.forget_prefixes()
    eng.offload.close()


def test_a_lost_page_ends_its_request_with_a_sentence(tmp_path: Path) -> None:
    eng = engine(NAME, 1, tmp_path, host_pages=10)
    first, second = held(eng, NAME, 0, 290), held(eng, NAME, 300, 590)
    ask(eng, NAME, 600, 890)
    run(eng)
    size = (tmp_path / SLAB).stat().st_size
    (tmp_path / SLAB).write_bytes(np.zeros(size, np.uint8).tobytes())
    eng.resume(second)
    assert second.reason == "refused"
    assert isinstance(second.refusal, Unavailable)
    assert "pages that were on disk cannot be read" in str(second.refusal)
    eng.resume(first)
    run(eng)
    assert first.reason in ("length", "refused")
    if first.reason == "length":
        assert first.output == expected(NAME, 0, 290)
    eng.offload.close()


def test_a_sequence_by_hand_comes_back_with_its_rows(tmp_path: Path) -> None:
    eng = engine(NAME, 1, tmp_path, host_pages=10)
    request = held(eng, NAME, 0, 290)
    sequence = request.sequence
    assert sequence is not None
    memory = eng.offload.memory(0).host
    before = memory[sequence.host_rows(0, 280).long()].clone()
    assert sequence.shelve(3) == 3
    assert sequence.page_count == 2
    with pytest.raises(BadState, match="waits for pages from the disk"):
        sequence.shelve(1)
    other = eng.add(text(NAME)[300:700], Sampling(tokens_max=4, ignore_eos=True))
    run(eng)
    assert other.reason == "length"
    eng.resume(request)
    assert (memory[sequence.host_rows(0, 280).long()] == before).all()
    run(eng)
    assert request.output == expected(NAME, 0, 290)
    eng.offload.close()


def test_no_room_leaves_it_on_the_disk(tmp_path: Path) -> None:
    eng = engine(NAME, 1, tmp_path, host_pages=10)
    request = held(eng, NAME, 0, 290)
    assert request.sequence is not None
    assert request.sequence.shelve(4) == 4
    other = ask(eng, NAME, 400, 900)
    while not other.output:
        eng.step()
    with pytest.raises(PoolFull):
        eng.resume(request)
    assert request.sequence.is_shelved
    run(eng)
    eng.resume(request)
    run(eng)
    assert request.output == expected(NAME, 0, 290)
    eng.offload.close()


def test_a_page_is_put_away_whose_last_row_was_on_its_way_to_the_host(tmp_path: Path) -> None:
    lane, disk = ManualLane(seed=1, delay_max=1 << 20), disk_of(tmp_path, LAYOUT)
    with make(lane=lane, disk=disk) as offload:
        sequence, keys = offload.open(list(range(128))), torch.zeros((127, 12), dtype=torch.uint8)
        for layer in range(3):
            sequence.import_rows(layer, 0, rows(127))
        for layer in (0, 2):
            sequence.import_keys(layer, 0, keys)
        step = offload.begin([sequence], query_counts=[1])
        for layer in range(3):
            step.append(layer, rows(1), keys=None if layer == 1 else keys[:1])
        step.commit(accepted=[1], tokens=[[127]])
        sequence.preempt()
        assert lane.pending_count
        assert sequence.shelve(2) == 2
        offload.drain()
