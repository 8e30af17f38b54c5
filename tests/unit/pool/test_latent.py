from __future__ import annotations

import numpy as np
import pytest

from ess.kernels.cpu import native
from ess.layout import IndexCodec, ModelLayout, RowCodec
from ess.pool.latent import LatentPool
from ess.pool.prefix import page_hashes

LAYOUT = ModelLayout(
    name="t",
    layer_count=2,
    groups=((0,), (1,), (2,)),
    row=RowCodec(form="opaque", opaque_bytes=8),
    index=IndexCodec(key_dim=8, head_count=1),
    mtp_layer_count=1,
    top_k=4,
)


def pool(pages: int = 4) -> LatentPool:
    return LatentPool(LAYOUT, np.zeros(pages * LAYOUT.host_page_bytes, np.uint8), poison=True)


def rows_of(page: int, count: int = 64) -> np.ndarray:
    return np.arange(page * 64, page * 64 + count, dtype=np.int32)


def complete(latent: LatentPool, page: int) -> None:
    for layer in range(LAYOUT.layer_total):
        latent.mark_rows(layer, rows_of(page))
    for layer in range(LAYOUT.key_layer_count):
        latent.mark_keys(layer, rows_of(page))


def test_memory_is_cut_into_rows_and_keys_without_overlap():
    latent = pool()
    assert latent.rows.shape == (3, 4 * 64, 8)
    assert latent.keys.pages.shape == (3, 4, 64 * 12)
    latent.rows.fill(1)
    latent.keys.pages.fill(2)
    assert (latent.rows == 1).all()


@pytest.mark.parametrize("missing", ["row of a layer", "row of the MTP layer", "key"])
def test_a_page_is_complete_only_with_every_row_and_key(missing):
    latent = pool()
    page = int(latent.take(1)[0])
    layer = 2 if missing == "row of the MTP layer" else 0
    for each in range(3):
        short = each == layer and missing != "key"
        latent.mark_rows(each, rows_of(page, 63 if short else 64))
        latent.mark_keys(each, rows_of(page, 63 if missing == "key" and each == 1 else 64))
    complete(latent, whole := int(latent.take(1)[0]))
    counts = [latent.complete_count(np.array(p, np.int32)) for p in ([whole, page], [page, whole])]
    assert (latent.is_complete(page), counts) == (False, [1, 0])
    beyond = latent.pages.page_count  # not looked at: a gap would cost all pages behind it, always
    assert latent.complete_count(np.array([page, beyond], np.int32)) == 0
    with pytest.raises(AssertionError):
        latent.publish(page, b"text")
    complete(latent, page)
    assert latent.complete_count(np.array([whole, page], np.int32)) == 2
    assert latent.is_complete(page)
    assert latent.publish(page, b"text")


def test_leading_count_is_the_shortest_main_layer():
    latent = pool()
    pages = latent.take(2)
    for layer, count in ((0, 64), (1, 64)):
        latent.mark_rows(layer, rows_of(int(pages[0]), count))
    assert latent.leading_count(pages) == 64, "the MTP layer may lag"
    latent.mark_rows(0, rows_of(int(pages[1]), 40))
    latent.mark_rows(1, rows_of(int(pages[1]), 7))
    assert latent.leading_count(pages) == 71
    latent.mark_rows(1, rows_of(int(pages[1]), 64)[9:])
    assert latent.leading_count(pages) == 71, "a hole ends it"
    assert latent.leading_count(pages[:0]) == 0


def test_rows_of_a_freed_page_are_poisoned_and_forgotten():
    latent = pool()
    page = latent.take(1)
    latent.rows[:, rows_of(int(page[0]))] = 7
    latent.keys.pages[:, page] = 7
    complete(latent, int(page[0]))
    latent.drop(page)
    assert (latent.rows[:, rows_of(int(page[0]))] == 0xFF).all()
    assert (latent.keys.pages[:, page] == 0xFF).all()
    assert not latent.is_stored(0, rows_of(int(page[0]))).any()
    assert not latent.is_keyed(0, rows_of(int(page[0]))).any()
    assert latent.free_count == 4
    latent.check()


def test_published_pages_stay_until_the_room_is_needed_deepest_first():
    latent, hashes = pool(), page_hashes(range(192))
    pages = latent.take(3)
    for page, content in zip(pages.tolist(), hashes, strict=True):
        complete(latent, page)
        latent.publish(page, content)
    latent.drop(pages)
    assert latent.free_count == 4
    assert latent.pages.free_count == 1
    assert latent.prefix.find(hashes) == pages.tolist()
    latent.take(2)
    assert latent.prefix.find(hashes) == pages.tolist()[:2], "a child goes before its parents"
    latent.check()


def test_a_cached_page_that_is_held_again_is_not_forgotten():
    latent, content = pool(1), page_hashes(range(64))[0]
    page = latent.take(1)
    complete(latent, int(page[0]))
    latent.publish(int(page[0]), content)
    latent.drop(page)
    latent.hold(page)
    assert latent.free_count == 0
    latent.drop(page)
    assert latent.prefix.find([content]) == page.tolist()
    latent.check()


def test_pages_that_a_refused_sequence_asked_for_stay_where_they_were_in_order():
    latent, pages = pool(3), []
    for number in range(2):
        [page] = latent.take(1).tolist()
        complete(latent, page)
        latent.publish(page, page_hashes([number] * 64)[0])
        latent.drop(np.array([page], np.int32))
        pages.append(page)
    idle = list(latent.prefix._idle)
    assert idle == pages
    latent.ask(np.array(pages[:1], np.int32))
    assert latent.free_count == 2, "a page that was asked for counted as free"
    latent.refuse(np.array(pages[:1], np.int32))
    assert list(latent.prefix._idle) == idle
    latent.check()
    latent.take(2)
    assert list(latent.prefix._idle) == pages[1:], "the page used longest ago was kept"
    latent.ask(np.array(pages[1:], np.int32))
    latent.take(0)
    assert list(latent.prefix._idle) == [], "what a sequence has got can still be forgotten"
    latent.check()


def test_pages_forgotten_at_once_are_taken_in_the_order_of_those_forgotten_singly():
    """Processes that mirror a pool see the same numbers, however its pages are forgotten."""
    taken = []
    for counts in ((3,), (1, 1, 1)):
        latent = pool(4)
        pages = latent.take(4)
        for page, content in zip(pages.tolist(), page_hashes(range(256)), strict=True):
            complete(latent, page)
            latent.publish(page, content)
        latent.drop(pages)
        for count in counts:
            latent._clear(np.array(latent.prefix.forget_oldest(count), np.int32))
        taken.append(latent.take(3).tolist())
        latent.check()
    assert taken[0] == taken[1] == [1, 2, 3]


def test_a_copied_page_has_the_rows_the_keys_and_the_marks():
    latent = pool()
    source, target = (int(page) for page in latent.take(2))
    latent.rows[:, rows_of(source)] = 5
    latent.keys.pages[:, source] = 6
    latent.mark_rows(0, rows_of(source, 9))
    latent.mark_keys(1, rows_of(source, 3))
    latent.copy_page(source, target)
    assert (latent.rows[:, rows_of(target)] == 5).all()
    assert (latent.keys.pages[:, target] == 6).all()
    assert latent.is_stored(0, rows_of(target)).sum() == 9
    assert latent.is_keyed(1, rows_of(target)).sum() == 3


@pytest.mark.parametrize("is_native", [False, True])
def test_marks_are_of_the_given_rows_and_layers_only(monkeypatch, is_native):
    if is_native and not native.available():
        pytest.skip(native.why_missing())
    monkeypatch.setattr(native, "available", lambda: is_native)
    latent, marked = pool(), np.array([70, 3, 255, 64], np.int32)
    latent.mark_rows([0, 2], marked)
    latent.mark_rows(1, marked[:1])
    latent.mark_rows(1, marked[1:2])
    latent.mark_keys([2, 1], marked[2:])
    stored = [np.flatnonzero(latent.is_stored(layer, rows_of(0, 256))) for layer in range(3)]
    assert [rows.tolist() for rows in stored] == [[3, 64, 70, 255], [3, 70], [3, 64, 70, 255]]
    stored = [np.flatnonzero(latent.is_keyed(layer, rows_of(0, 256))) for layer in range(3)]
    assert [rows.tolist() for rows in stored] == [[], [64, 255], [64, 255]]
