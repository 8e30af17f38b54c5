from __future__ import annotations

import numpy as np
import pytest

from ess.kernels.cpu import native
from ess.pool.index import IndexPool, PageTables, page_rows
from ess.pool.latent import LatentPool
from tests.support.layouts import PLAIN as LAYOUT


@pytest.fixture
def pools():
    latent = LatentPool(LAYOUT, np.zeros(6 * LAYOUT.host_page_bytes, np.uint8))
    memory = np.zeros(4 * LAYOUT.index_page_bytes, np.uint8)
    return latent, IndexPool(LAYOUT, memory, page_count=4, host_page_count=6)


def keys(count: int, fill: int) -> np.ndarray:
    return np.full((count, 12), fill, np.uint8)


def test_activation_loads_the_keys_of_fresh_pages_only(pools):
    """And of pages that have any."""
    latent, index = pools
    index.keys.pages.fill(5)
    host = latent.take(2)
    latent.write_keys(1, np.arange(64, dtype=np.int32) + 64 * host[1], keys(64, 7))
    active = index.activate(host, latent)
    assert (index.keys.read(1, page_rows(active[1:])) == 7).all()
    assert (index.keys.read(0, page_rows(active[1:])) == 0).all()
    assert (index.keys.read(0, page_rows(active[:1])) == 5).all(), "a page without keys was loaded"
    index.keys.write(1, page_rows(active[1:]), keys(64, 9))
    again = index.activate(host, latent)
    assert again.tolist() == active.tolist()
    assert (index.keys.read(1, page_rows(active[1:])) == 9).all(), "a shared page was reloaded"
    assert index.pages.hold_count(int(active[0])) == 2
    index.check()


def test_new_pages_are_counted_before_they_are_taken(pools):
    latent, index = pools
    host = latent.take(3)
    assert index.new_count(host) == 3
    index.activate(host[:2], latent)
    assert index.new_count(host) == 1
    assert index.active_of(host).tolist()[2] == -1


def test_a_leaving_page_keeps_its_id_until_it_is_freed(pools):
    latent, index = pools
    host = latent.take(1)
    active = index.activate(host, latent)
    assert index.leave(active).tolist() == active.tolist()
    assert index.new_count(host) == 1, "its host page may be active anew"
    fresh = index.activate(host, latent)
    assert fresh.tolist() != active.tolist(), "the old id is still leaving"
    index.check()
    index.free(active)
    assert index.pages.free_count == 3
    assert index.host_rows(page_rows(fresh)).tolist() == page_rows(host).tolist()
    index.check()


def test_a_shared_page_leaves_with_its_last_holder(pools):
    latent, index = pools
    host = latent.take(1)
    active = index.activate(host, latent)
    index.activate(host, latent)
    assert index.leave(active).tolist() == []
    assert index.active_of(host).tolist() == active.tolist()
    assert index.leave(active).tolist() == active.tolist()
    assert index.active_of(host).tolist() == [-1]


def test_host_rows_follow_the_page_map(pools):
    latent, index = pools
    latent.take(3)
    host = latent.take(2)[::-1].copy()
    active = index.activate(host, latent)
    rows = np.array([active[0] * 64 + 5, active[1] * 64 + 63], np.int32)
    assert index.host_rows(rows).tolist() == [host[0] * 64 + 5, host[1] * 64 + 63]
    index.free(index.leave(active))
    with pytest.raises(AssertionError):
        index.host_rows(rows)


def test_keys_are_block_split(pools):
    _, index = pools
    record = np.arange(12, dtype=np.uint8)[None]
    index.keys.write(1, np.array([64 + 3], np.int32), record)
    page = index.keys.pages[1, 1]
    assert page[3 * 8 : 4 * 8].tolist() == list(range(8))
    assert page[64 * 8 + 3 * 4 : 64 * 8 + 4 * 4].tolist() == [8, 9, 10, 11]
    assert page.sum() == sum(range(12)), "nothing else was written"
    assert (index.keys.pages[0] == 0).all()
    assert index.keys.read(1, np.array([67], np.int32)).tolist() == record.tolist()
    assert index.keys.key_bytes == 12


def test_page_tables_give_lines_and_rows():
    tables = PageTables(sequence_max=2, page_max=3)
    line = tables.take()
    tables.lines[line, :2] = [5, 2]
    assert tables.rows(line, 62, 4).tolist() == [5 * 64 + 62, 5 * 64 + 63, 2 * 64, 2 * 64 + 1]
    with pytest.raises(AssertionError):
        tables.rows(line, 127, 2)
    assert tables.free_count == 1
    assert tables.take() != line
    tables.give_back(line)
    assert (tables.lines[line] == -1).all()
    with pytest.raises(AssertionError):
        tables.give_back(line)
    assert (tables.page_max, tables.free_count) == (3, 1)


@pytest.mark.parametrize("is_native", [False, True])
def test_keys_go_from_tier_to_tier_row_by_row(pools, monkeypatch, is_native):
    if is_native and not native.available():
        pytest.skip(native.why_missing())
    monkeypatch.setattr(native, "available", lambda: is_native)
    latent, index = pools
    rng = np.random.default_rng(0)
    index.keys.pages[:] = rng.integers(0, 255, index.keys.pages.shape)
    here, there = np.array([70, 3, 255], np.int32), np.array([0, 383, 64], np.int32)
    latent.keys.copy_keys(index.keys, here, there, layers=[1])
    assert np.array_equal(latent.keys.read(1, there), index.keys.read(1, here))
    assert (latent.keys.pages[0] == 0).all()
    assert np.count_nonzero(latent.keys.pages[1]) <= 3 * index.keys.key_bytes
    latent.keys.copy_keys(index.keys, here[:2], there[:2], layers=[0, 1])
    assert np.array_equal(latent.keys.read(0, there[:2]), index.keys.read(0, here[:2]))
    with pytest.raises((AssertionError, IndexError)):
        latent.keys.copy_keys(index.keys, here, np.array([0, 0, 384], np.int32), layers=[0])
