"""The rule that picks a fetch's way: by the predicted times, and by what is possible at all."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ess.flashtrans.pick import Link, pick_way, staged_time_us

SIZES = [656 * 4**power for power in range(11)]


def test_few_rows_are_read_in_place_and_many_are_sent():
    ways = [pick_way(size, host_lists=True, threads=4) for size in SIZES]
    assert ways[0] == "flat"
    assert ways[-1] == "staged"
    assert sorted(ways) == ways, "one switch, and never back"


def test_one_host_thread_gathers_slower_than_a_kernel_reads():
    assert {pick_way(size, host_lists=True, threads=1) for size in SIZES} == {"flat"}


def test_a_device_that_compute_fills_leaves_the_copy_engine():
    assert pick_way(656, host_lists=True, compute_fills_device=True) == "staged"
    assert pick_way(656, host_lists=False, compute_fills_device=True) == "flat"


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_more_bytes_and_fewer_threads_take_longer(threads):
    times = [staged_time_us(size, threads=threads) for size in SIZES]
    assert all(one < other for one, other in pairwise(times))
    assert times[-1] >= staged_time_us(SIZES[-1], threads=threads + 1)


def test_no_number_of_threads_beats_the_link():
    link = Link(dma_rate=50_000.0)
    size = 1 << 30
    assert size / staged_time_us(size, threads=64, link=link) < link.dma_rate
