"""A sequence that waits for its rows: host pages at once, the device when it resumes."""

from __future__ import annotations

import numpy as np
import pytest

from ess.door import Offload
from ess.errors import BadState, PoolFull
from ess.kernels.streams import RowCopy
from tests.support.manual_lane import ManualLane
from tests.unit.door.test_door import LAYOUT, make

TOKENS = list(range(150))


def filled(offload: Offload, tokens: list[int], *, on_device: bool, **more):
    """Opened, with rows and keys of all tokens but the last, from what is cached on."""
    sequence = offload.open(tokens, on_device=on_device, **more)
    count, layout = len(tokens) - 1 - sequence.cached_count, offload._pools.layout
    draw = np.random.default_rng(len(tokens))
    for layer in range(layout.layer_total):
        rows = draw.integers(0, 255, (count, layout.row_bytes), np.uint8)
        sequence.import_rows(layer, sequence.cached_count, rows)
    for group in layout.groups:
        keys = draw.integers(0, 255, (count, layout.index.key_bytes), np.uint8)
        sequence.import_keys(group[0], sequence.cached_count, keys)
    return sequence


def free(offload: Offload) -> dict[str, int]:
    ledger = offload._pools.ledger
    return {name: ledger.free(name) for name in ("slots", "index pages", "host pages")}


def test_it_takes_host_pages_only_and_promises_their_growth() -> None:
    with make() as offload:
        before = free(offload)
        sequence = offload.open(TOKENS, length_max=256, on_device=False)
        assert (sequence.state, sequence.line, sequence.page_count) == ("preempted", -1, 3)
        assert free(offload) == {**before, "host pages": before["host pages"] - 4}
        offload.check()
        sequence.holding.check()
        sequence.resume()
        assert free(offload)["host pages"] == before["host pages"] - 4
        assert free(offload)["index pages"] == before["index pages"] - 4
        sequence.preempt()
        sequence.resume()
        sequence.close()
        assert free(offload) == before
        offload.check()


def test_closed_before_it_resumed_it_leaves_nothing_promised() -> None:
    with make() as offload:
        before = free(offload)
        offload.open(TOKENS, length_max=256, on_device=False).close()
        assert free(offload) == before
        offload.check()


def test_resumed_it_holds_what_one_opened_on_the_device_holds() -> None:
    tables = []
    for on_device in (True, False):
        with make() as offload:
            sequence = filled(offload, TOKENS, on_device=on_device)
            if not on_device:
                sequence.resume()
            sequence.fill()
            pools = offload._pools
            keys = pools.index.keys.read(0, sequence.holding.row_ids(0, 149)).tobytes()
            rows = pools.latent.rows[:, sequence.holding.host_rows(0, 149)].tobytes()
            tables.append((sequence.length, keys, rows, sequence.page_table.tolist()))
            offload.check()
            assert offload.verify(0) == []
    assert tables[0] == tables[1]


def test_it_begins_behind_what_is_cached() -> None:
    with make() as offload:
        filled(offload, TOKENS, on_device=True).close()
        sequence = offload.open([*TOKENS, 7, 8], on_device=False)
        assert sequence.cached_count == 64, "two pages are cached, with MTP one of them counts"
        offload.check()
        sequence.close()
        offload.check()


@pytest.mark.parametrize(
    ("sizes", "limiter"),
    [
        ({"host_bytes": 3 * LAYOUT.host_page_bytes, "index_bytes": "1MB"}, "host pages"),
        ({"index_bytes": 3 * LAYOUT.index_page_bytes}, "index pages"),
    ],
)
def test_what_never_fits_is_refused_at_once(sizes, limiter) -> None:
    for on_device in (True, False):
        with make(**sizes) as offload:
            before = free(offload)
            with pytest.raises(PoolFull) as full:
                offload.open(TOKENS, length_max=256, on_device=on_device)
            assert (full.value.limiter, full.value.permanent) == (limiter, True)
            assert free(offload) == before
            offload.check()


def test_a_full_device_refuses_resume_and_changes_nothing() -> None:
    with make(index_bytes=4 * LAYOUT.index_page_bytes) as offload:
        active = offload.open(TOKENS, length_max=192)
        waiting = offload.open(TOKENS, length_max=256, on_device=False)
        before = free(offload)
        with pytest.raises(PoolFull, match="index pages"):
            waiting.resume()
        assert (waiting.state, free(offload)) == ("preempted", before)
        offload.check()
        active.close()
        waiting.resume()
        offload.check()


def test_host_pages_of_its_growth_are_nobody_elses() -> None:
    with make(host_bytes=5 * LAYOUT.host_page_bytes) as offload:
        waiting = offload.open(TOKENS, length_max=256, on_device=False)
        with pytest.raises(PoolFull, match="host pages"):
            offload.open(list(range(65)))
        offload.open(list(range(60)), length_max=64)
        waiting.resume()
        offload.check()


def test_it_is_in_no_step_before_it_resumed() -> None:
    with make() as offload:
        sequence = filled(offload, TOKENS, on_device=False)
        with pytest.raises(BadState, match="preempted, not active"):
            offload.begin([sequence], query_counts=[1])
        sequence.resume()
        offload.begin([sequence], query_counts=[1]).abandon()
        offload.check()


@pytest.mark.parametrize("text", [[2] * 250, list(range(250))], ids=["other", "shared"])
@pytest.mark.parametrize("on_device", [True, False])
def test_refused_while_another_leaves_it_forgets_nothing_of_the_other(
    on_device: bool, text: list[int]
) -> None:
    """Pages of the one that leaves become idle within the open that is refused."""
    lane = ManualLane(seed=1, delay_max=1000)
    with make(lane=lane, host_bytes=5 * LAYOUT.host_page_bytes) as offload:
        leaving = filled(offload, TOKENS, on_device=True)
        offload.open([1] * 100, on_device=False)
        row = np.zeros((1, 4), np.uint8)
        offload._pools.inflight.submit([RowCopy(source=row, target=row.copy())], lambda: None)
        leaving.close()
        assert offload._pools.inflight.pending_count > 1
        with pytest.raises(PoolFull, match="host pages"):
            offload.open(text, on_device=on_device)
        offload.check()
        assert offload.open(TOKENS, on_device=False).cached_count == 64


@pytest.mark.parametrize("on_device", [True, False])
def test_a_wait_for_room_that_is_broken_off_changes_nothing(on_device: bool) -> None:
    """As by Ctrl-C, while another sequence leaves."""
    lane, row = ManualLane(), np.zeros((1, 4), np.uint8)
    with make(lane=lane, host_bytes=5 * LAYOUT.host_page_bytes) as offload:
        filled(offload, TOKENS, on_device=True).close()
        leaving = offload.open([1] * 100, on_device=False)
        lane.hold()
        offload._pools.inflight.submit([RowCopy(source=row, target=row.copy())], lambda: None)
        leaving.close()
        with pytest.raises(BadState, match="waiting for ever"):
            offload.open([*TOKENS, *[1] * 50], on_device=on_device)
        lane.release()
        offload.check()
        assert offload.open([*TOKENS, *[1] * 50], on_device=on_device).cached_count == 64
        offload.check()
