"""What a step brings: slots for its rows, whatever it selects; its keys; what kernels wrote."""

from __future__ import annotations

import pytest
import torch

from ess.errors import BadState
from tests.unit.door.test_door import LAYOUT, make, opened, refused, rows


@pytest.fixture
def offload():
    with make() as made:
        yield made


def test_a_selection_that_fills_the_arena_leaves_slots_for_new_rows(offload):
    """Also before any layer was appended: its rows would otherwise all be of this step."""
    step = offload.begin([opened(offload, 64)], query_counts=[8])
    chosen = torch.arange(64, dtype=torch.int32).view(8, 8)
    resolved = step.resolve(0, chosen)
    assert offload._pools.sparse.slot_count(0) == 64
    assert (resolved.miss_count.sum(), resolved.place_count.sum()) == (56, 8)
    for layer in range(3):
        step.append(layer, rows(8, fill=7))
    assert (offload.memory(0).slots[step.places(0).long()] == 7).all()
    step.commit(accepted=[8])
    offload.check()


def test_keys_of_steps_are_on_the_host_when_all_queries_have_brought_them(offload):
    one, two = opened(offload), opened(offload)
    keys = torch.full((1, LAYOUT.index.key_bytes), 5, dtype=torch.uint8)
    for later in (keys, None):
        step = offload.begin([one, two], query_counts=[1, 1])
        step.append(0, rows(1), keys=keys, queries=range(1))
        step.append(0, rows(1), keys=later, queries=range(1, 2))
        assert step.keyed == ({0} if later is not None else set())
        step.append(1, rows(2))
        step.commit(accepted=[1, 1])
    offload.drain()
    latent, number = offload._pools.latent, one.holding.host_rows(10, 2)
    assert latent.is_keyed(0, number).tolist() == [True, False]
    assert (latent.keys.read(0, number[:1]) == 5).all()


def test_what_was_written_in_place_is_said_once_and_in_order(offload):
    step = offload.begin([opened(offload)], query_counts=[2])
    late = lambda: step.wrote(0, queries=range(1, 2))  # noqa: E731
    refused(offload, BadState, "layer 0 has rows of 0 queries", late)
    step.places(0)
    step.wrote(0, queries=range(1))
    late()
    refused(offload, BadState, "layer 0 was appended in step", late)
    step.abandon()


def test_pages_that_have_arrived_are_shared_before_their_sequence_steps(offload):
    """As soon as the sequence is used; with MTP the last page of a prefix is left out."""
    tokens = list(range(193))
    first = offload.open(tokens, length_max=193)
    keys = torch.zeros(192, LAYOUT.index.key_bytes, dtype=torch.uint8)
    for layer in range(LAYOUT.layer_total):
        first.import_rows(layer=layer, start=0, rows=rows(192))
    for leader, *_ in LAYOUT.groups:
        assert cached_count_of(offload, tokens) == 0
        first.import_keys(leader, 0, keys)
    assert cached_count_of(offload, tokens) == 0
    first.fill(row_max=0)
    assert cached_count_of(offload, tokens) == 128
    offload.check()


def cached_count_of(offload, tokens: list[int]) -> int:
    with offload.open(tokens, on_device=False, length_max=len(tokens)) as other:
        return other.cached_count


def test_pages_that_a_withheld_sequence_grows_are_no_prefix_either() -> None:
    """Behind no published page their hash would be that of a text that begins with them."""
    with make(query_max=64) as offload:
        more = torch.zeros((64, LAYOUT.index.key_bytes), dtype=torch.uint8)
        leaders = [group[0] for group in LAYOUT.groups]
        sequence = offload.open(list(range(60)), publishes=False)
        for layer in range(LAYOUT.layer_total):
            sequence.import_rows(layer, 0, rows(59))
        for layer in leaders:
            sequence.import_keys(layer, 0, more[:59])
        for first in (59, 123, 187):
            with offload.begin([sequence], query_counts=[64]) as step:
                for layer in range(LAYOUT.layer_total):
                    new = more if layer in leaders else None
                    step.append(layer, rows(64), keys=new)
                step.commit(accepted=[64], tokens=[list(range(first, first + 64))])
        offload.drain()
        assert (sequence.length, sequence.page_count) == (251, 4)
        sequence.close()
        offload.drain()
        assert offload.open(list(range(64, 200))).cached_count == 0
