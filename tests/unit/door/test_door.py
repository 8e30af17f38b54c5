"""What comes in wrong through the door: a typed error that says what, and nothing has changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ess.door import Offload
from ess.errors import BadInput, BadState, PoolFull, Unavailable
from ess.layout import IndexCodec, ModelLayout, RowCodec
from ess.units import parse_size
from tests.support.manual_lane import ManualLane

LAYOUT = ModelLayout(
    name="t",
    layer_count=2,
    groups=((0, 1), (2,)),
    row=RowCodec(form="opaque", opaque_bytes=16),
    index=IndexCodec(key_dim=8, head_count=1),
    mtp_layer_count=1,
    top_k=8,
    slot_floor=8,
)


def make(**changes) -> Offload:
    settings = {
        "slot_bytes": 2 * LAYOUT.chunk_bytes,
        "host_bytes": 8 * LAYOUT.host_page_bytes,
        "sequence_max": 3,
        "length_max": 256,
        "query_max": 8,
        "lane": ManualLane(seed=1),
        "poison": True,
    }
    return Offload.create(**{"layout": LAYOUT, **settings, **changes})


@pytest.fixture
def offload():
    with make() as made:
        yield made


def rows(count: int, fill: int = 1) -> torch.Tensor:
    return torch.full((count, 16), fill, dtype=torch.uint8)


def opened(offload: Offload, count: int = 10):
    sequence = offload.open(list(range(count + 1)))
    for layer in range(3):
        sequence.import_rows(layer=layer, start=0, rows=rows(count))
    return sequence


def selection(*positions: int, queries: int = 1) -> torch.Tensor:
    line = [*positions, *[-1] * (8 - len(positions))]
    return torch.tensor([line] * queries, dtype=torch.int32)


def snapshot(offload: Offload) -> tuple:
    pools = offload._pools
    arrays = (
        pools.sparse.slot_of,
        pools.sparse._row_of,
        pools.sparse._dirty,
        pools.latent.stored,
        pools.latent.keyed,
        pools.latent.rows,
        pools.latent.keys.pages,
        pools.index.keys.pages,
        pools.index.host_page_of,
        pools.tables.lines,
    )
    frees = (pools.latent.free_count, pools.index.pages.free_count, pools.ledger.free("slots"))
    return (*(array.tobytes() for array in arrays), frees)


def refused(offload: Offload, kind: type[Exception], match: str, call) -> None:
    before = snapshot(offload)
    with pytest.raises(kind, match=match):
        call()
    assert snapshot(offload) == before
    offload.check()


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (torch.zeros(2, 16), "float32, must be uint8"),
        (torch.zeros(2, 15, dtype=torch.uint8), r"shape \[2, 15\], must be \[any, 16\]"),
        (torch.zeros(16, dtype=torch.uint8), "shape"),
        (torch.zeros(2, 32, dtype=torch.uint8)[:, ::2], "not contiguous"),
        ([[1] * 16], "list, must be a tensor"),
        (torch.zeros(12, 16, dtype=torch.uint8), r"0..11 .* must lie within 0..10"),
    ],
)
def test_bad_rows_are_refused(offload, bad, match):
    sequence = offload.open(list(range(11)))
    call = lambda: sequence.import_rows(layer=0, start=0, rows=bad)  # noqa: E731
    refused(offload, BadInput, match, call)


def test_imports_outside_the_sequence_or_twice_are_refused(offload):
    sequence = opened(offload)
    refused(
        offload,
        BadInput,
        "row 3 was imported already",
        lambda: sequence.import_rows(layer=1, start=3, rows=rows(2)),
    )
    for layer in (-1, 3):
        refused(
            offload,
            BadInput,
            r"outside 0\.\.2",
            lambda layer=layer: sequence.import_rows(layer=layer, start=0, rows=rows(1)),
        )
    refused(
        offload,
        BadInput,
        "must lie within",
        lambda: sequence.import_rows(layer=0, start=-1, rows=rows(1)),
    )
    keys = torch.zeros(1, 12, dtype=torch.uint8)
    refused(
        offload,
        BadInput,
        "layer 1 of 't' has no index keys of its own",
        lambda: sequence.import_keys(layer=1, start=0, keys=keys),
    )


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (selection(10), "position 10"),
        (selection(-2), "position -2"),
        (selection(2**31 - 1), "position 2147483647"),
        (selection(1).long(), "int64, must be int32"),
        (selection(1)[:, :4], r"shape \[1, 4\]"),
        (selection(1, queries=2), r"shape \[2, 8\], must be \[1, 8\]"),
        (torch.zeros(8, 2, dtype=torch.int32).T[:1], "not contiguous"),
        (None, "layer 0 is the first of its group and needs a selection"),
        (selection(3, 1), r"\[0, 1\] is position 1, which is not above the position before it"),
        (selection(-1, 4), r"\[0, 1\] is position 4, which comes behind a -1: -1 only at the end"),
        (selection(-1, 0), r"\[0, 1\] is position 0, which comes behind a -1: -1 only at the end"),
    ],
)
def test_bad_selections_are_refused(offload, bad, match):
    sequence = opened(offload)
    step = offload.begin([sequence], query_counts=[1])
    refused(offload, BadInput, match, lambda: step.resolve(0, bad))


def test_new_positions_exist_once_their_layer_is_appended(offload):
    sequence = opened(offload)
    step = offload.begin([sequence], query_counts=[2])
    two, later = selection(10, queries=2), selection(11, queries=2)
    refused(offload, BadInput, "position 10", lambda: step.resolve(0, two))
    step.append(0, rows(2))
    refused(offload, BadInput, "position 11", lambda: step.resolve(0, later))
    step.resolve(0, two)
    refused(offload, BadState, "layer 1: append", lambda: step.resolve(1, None))
    step.append(1, rows(2))
    step.resolve(1, None)


def test_rows_nobody_wrote_are_not_served(offload):
    sequence = offload.open(list(range(11)))
    for layer in range(2):
        sequence.import_rows(layer=layer, start=0, rows=rows(10))
    sequence.import_rows(layer=2, start=0, rows=rows(4))
    step = offload.begin([sequence], query_counts=[1])
    with pytest.raises(BadState, match="layer 2: 1 of 2 selected rows were never written"):
        step.resolve(2, selection(0, 5))
    offload.check()
    step.resolve(2, selection(0, 3)).wait()


def test_verbs_at_a_wrong_moment_are_refused(offload):
    sequence = opened(offload)
    step = offload.begin([sequence], query_counts=[1])
    refused(offload, BadState, "is open", lambda: offload.begin([sequence], query_counts=[1]))
    wanted = f"sequence 0 is in step {step.number}; commit or abandon it first"
    refused(offload, BadState, wanted, lambda: sequence.preempt())
    refused(offload, BadState, "in step", lambda: sequence.fork())
    refused(offload, BadState, "layer 0 before layer 1", lambda: step.resolve(1, None))
    step.append(0, rows(1))
    refused(offload, BadState, "appended in step", lambda: step.append(0, rows(1)))
    refused(
        offload,
        BadState,
        "1 layers have not been appended: layer 1 has rows of 0 of 1",
        lambda: step.commit(accepted=[1]),
    )
    step.append(1, rows(1))
    refused(offload, BadInput, "accepted is 2", lambda: step.commit(accepted=[2]))
    refused(offload, BadInput, "2 entries", lambda: step.commit(accepted=[1, 1]))
    other = [[99]]
    said = "opened with token 10 at position 10, and tokens has 99"
    said += " there: a step's first token is the one known before it"
    refused(offload, BadInput, said, lambda: step.commit(accepted=[1], tokens=other))
    step.commit(accepted=[1])
    for call in (
        lambda: step.commit(accepted=[1]),
        lambda: step.append(0, rows(1)),
        lambda: step.resolve(0, selection(0)),
    ):
        refused(offload, BadState, "is learned", call)
    refused(offload, BadState, "active, not preempted", lambda: sequence.resume())
    sequence.close()
    offload.drain()
    sequence.close()  # a second call does nothing
    for call in (
        lambda: sequence.preempt(),
        lambda: offload.begin([sequence], query_counts=[1]),
        lambda: sequence.import_rows(layer=0, start=0, rows=rows(1)),
        lambda: sequence.page_table,
    ):
        refused(offload, BadState, "closed", call)


def test_impossible_batches_are_refused(offload):
    one, two = opened(offload), opened(offload)
    begin = offload.begin
    for match, call in {
        "twice": lambda: begin([one, one], query_counts=[1, 1]),
        "1 entries": lambda: begin([one, two], query_counts=[1]),
        "sum to 9, must be 1..8": lambda: begin([one, two], query_counts=[5, 4]),
        "0 new rows": lambda: begin([one, two], query_counts=[1, 0]),
        "sum to 0": lambda: begin([], query_counts=[]),
    }.items():
        refused(offload, BadInput, match.strip(), call)


def test_sequences_that_cannot_be_opened_are_refused(offload):
    refused(offload, BadInput, "0 ids, the offload takes 1 to 256", lambda: offload.open([]))
    refused(offload, BadInput, "257 ids, the offload", lambda: offload.open(range(257)))
    refused(offload, BadInput, "takes 1 to 5 ", lambda: offload.open(range(9), length_max=5))
    for _ in range(3):
        offload.open([1, 2])
    match = "all 3 sequences are active; raise sequence_max, or preempt or close a sequence"
    refused(offload, PoolFull, match, lambda: offload.open([1]))


def test_a_full_pool_names_its_limiter(offload):
    offload.open(range(200), length_max=256)
    offload.open(range(1000, 1200), length_max=256)
    match = "index_bytes .*, or close a sequence|raise host_bytes, or close a sequence"
    refused(offload, PoolFull, match, lambda: offload.open([1]))


def test_a_refusal_for_want_of_slots_says_what_to_change():
    """The floor of 40 slots fits once into 64; a floor of 100 never does."""
    with make(slot_floor=40) as offload:
        first = offload.open(range(9))
        match = (
            "needs 40 slots x 2 groups = .* free; raise slot_bytes or lower slot_floor, or close"
        )
        with pytest.raises(PoolFull, match=match) as refusal:
            offload.open(range(9))
        assert not refusal.value.permanent
        assert refusal.value.retry_after_s == 1.0
        first.close()
        offload.open(range(9))
    with make(slot_floor=100) as offload:
        match = "more than the pool's .*; raise slot_bytes or lower slot_floor$"
        with pytest.raises(PoolFull, match=match) as refusal:
            offload.open(range(9))
        assert refusal.value.permanent
        assert refusal.value.retry_after_s is None
        offload.open(range(9), length_max=64)


def test_growth_is_all_or_nothing():
    with make(host_bytes=3 * LAYOUT.host_page_bytes) as offload:
        one, two = opened(offload, 63), opened(offload, 63)
        step = offload.begin([one, two], query_counts=[1, 1])
        for layer in range(2):
            step.append(layer, rows(2))
        step.commit(accepted=[1, 1])
        offload.drain()
        both = lambda: offload.begin([one, two], query_counts=[1, 1])  # noqa: E731
        refused(offload, PoolFull, r"needs 2 (host|index) pages", both)
        assert (one.page_count, two.page_count) == (1, 1)
        offload.begin([two], query_counts=[1])
        assert (one.page_count, two.page_count) == (1, 2)


def fail_inside(offload: Offload, made: list) -> None:
    with opened(offload) as sequence:
        made.append(sequence)
        step = offload.begin([sequence], query_counts=[1])
        step.append(0, rows(1))
        raise ZeroDivisionError


def test_leaving_with_a_step_open_gives_the_step_up(offload):
    made: list = []
    with pytest.raises(ZeroDivisionError):
        fail_inside(offload, made)
    assert made[0].state == "closed"
    offload.drain()
    assert offload.stats().used_slot_count.sum() == 0
    offload.check()


def test_sizes_that_hold_nothing_say_the_least_that_works():
    with pytest.raises(BadInput, match=r"slot_bytes is 1\.00 KiB, the least that works is"):
        make(slot_bytes="1KiB")
    with pytest.raises(BadInput, match="host_bytes"):
        make(host_bytes=100)
    with pytest.raises(BadInput, match="not a size"):
        make(host_bytes="many")
    with pytest.raises(Unavailable, match="cuda"):
        make(device="cuda", lane=None)
    with pytest.raises(BadInput, match="query_max is 0"):
        make(query_max=0)


@pytest.mark.parametrize("name", ["slot_bytes", "host_bytes", "index_bytes"])
@pytest.mark.parametrize("size", [1 << 63, 1 << 70, "9" * 24, "9" * 400, 1.5, float("nan"), -1])
def test_sizes_that_no_memory_has_are_refused(name: str, size: object):
    with pytest.raises(BadInput):
        make(**{name: size})


def test_pages_beyond_what_rows_can_be_named_are_refused():
    pages = (1 << 25) * LAYOUT.host_page_bytes
    with pytest.raises(BadInput, match="host_bytes holds 33,554,432 pages, at most"):
        make(host_bytes=pages)


def test_arrays_that_no_memory_has_are_refused(monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise MemoryError("Unable to allocate 256. GiB")

    monkeypatch.setattr("ess.door.offload.HostSide", full)
    with pytest.raises(Unavailable, match=r"no memory for these pools: .* 256\. GiB"):
        make()


def test_sizes_are_whole_numbers_of_any_length():
    assert parse_size("9007199254740993") == 9007199254740993
    assert parse_size("0.5t") == 1 << 39


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(device: str):
    with pytest.raises(Unavailable, match=r"(?i)cuda"):
        Offload.create(LAYOUT, slot_bytes="1MiB", host_bytes="1MiB", device=device)


def test_a_device_has_its_own_lane():
    with pytest.raises(BadInput, match="lane is given, but 'cuda' has its own"):
        make(device="cuda")
    with pytest.raises(BadInput, match="device is 'tpu', must be 'cpu', 'cuda' or 'cuda:<number>'"):
        make(device="tpu", lane=None)


def test_a_closed_offload_refuses_work():
    offload = make()
    offload.close()
    offload.close()
    with pytest.raises(BadState, match="closed"):
        offload.open([1])


def test_numpy_arrays_are_as_good_as_tensors(offload):
    sequence = offload.open(list(range(5)))
    for layer in range(3):
        sequence.import_rows(layer=layer, start=0, rows=np.full((4, 16), 9, np.uint8))
    step = offload.begin([sequence], query_counts=[1])
    answer = step.resolve(2, np.array([[0, 1, 2, 3, -1, -1, -1, -1]], np.int32)).wait()
    assert (offload.memory(2).slots[answer.miss[0, :4].long()] == 9).all()


def test_parts_are_appended_in_batch_order(offload):
    one, two = opened(offload), opened(offload)
    step = offload.begin([one, two], query_counts=[2, 1])
    late = lambda: step.append(0, rows(1), queries=range(2, 3))  # noqa: E731
    refused(offload, BadState, "layer 0 has rows of 0 queries", late)
    step.append(0, rows(2), queries=range(2))
    step.resolve(0, selection(10, queries=2), queries=range(2))
    alone = selection(10)
    unwritten = lambda: step.resolve(0, alone, queries=range(2, 3))  # noqa: E731
    refused(offload, BadInput, "position 10", unwritten)
    step.append(0, rows(1), queries=range(2, 3))
    refused(offload, BadState, "layer 0 was appended in step", late)
    again = lambda: step.resolve(0, alone, queries=range(2, 3), workspace=0)  # noqa: E731
    refused(offload, BadState, "workspace 0 of group 0 has another part's answer", again)
    refused(
        offload,
        BadInput,
        "the workspace of group 0 is 9, must be 0..3",
        lambda: step.resolve(0, alone, queries=range(2, 3), workspace=9),
    )
    step.resolve(0, alone, queries=range(2, 3), workspace=1)
    match = "layer 0: queries 2..2 are resolved already"
    refused(offload, BadState, match, lambda: step.resolve(0, alone, queries=range(2, 3)))
    step.append(1, rows(2), queries=range(2))
    follower = lambda: step.resolve(1, None, queries=range(2, 3))  # noqa: E731
    refused(offload, BadState, "layer 1: append its new rows first", follower)
    refused(offload, BadInput, "has resolved queries 0..1", lambda: step.resolve(1, None))
    step.resolve(1, None, queries=range(2))
    step.append(1, rows(1), queries=range(2, 3))
    step.resolve(1, None, queries=range(2, 3))
    step.commit(accepted=[2, 1])


def test_ranges_are_resolved_in_batch_order(offload):
    step = offload.begin([opened(offload), opened(offload)], query_counts=[3, 3])
    step.append(0, rows(6))
    ahead, behind = range(3), range(3, 6)
    step.resolve(0, selection(1, queries=3), queries=behind)
    match = "layer 0: queries 3..5 are resolved, and queries 0..2 come before them"
    call = lambda: step.resolve(0, selection(1, queries=3), queries=ahead)  # noqa: E731
    refused(offload, BadState, match, call)
    step.abandon()


def test_one_part_more_than_there_are_workspaces(offload):
    step = offload.begin([opened(offload)], query_counts=[5])
    step.append(0, rows(5))
    for query in range(4):
        step.resolve(0, selection(query), queries=range(query, query + 1))
    match = "layer 0: queries 4..4 would be part 5 of group 0 in this step, at most 4"
    call = lambda: step.resolve(0, selection(4), queries=range(4, 5))  # noqa: E731
    refused(offload, BadInput, match, call)
    step.abandon()


def test_keys_of_a_later_part_alone_change_nothing(offload):
    one, two = opened(offload), opened(offload)
    step = offload.begin([one, two], query_counts=[1, 1])
    step.append(0, rows(1), queries=range(1))
    keys = torch.zeros(1, offload._pools.index.keys.key_bytes, dtype=torch.uint8)
    late = lambda: step.append(0, rows(1), keys=keys, queries=range(1, 2))  # noqa: E731
    refused(offload, BadState, "group 0 has rows of 0 queries", late)
    step.append(0, rows(1), queries=range(1, 2))


def test_half_a_layer_cannot_be_committed(offload):
    one, two = opened(offload), opened(offload)
    step = offload.begin([one, two], query_counts=[1, 1])
    step.append(0, rows(2))
    step.append(1, rows(1), queries=range(1))
    refused(
        offload,
        BadState,
        "layer 1 has rows of 1 of 2 queries",
        lambda: step.commit(accepted=[1, 1]),
    )
    step.abandon()


def test_prefixes_are_forgotten_when_nobody_holds_them():
    with make() as offload:
        tokens = list(range(140))
        first = opened_full(offload, tokens)
        offload.begin([first], query_counts=[1], starts=[128]).abandon()
        first.close()
        second = offload.open(tokens)
        assert second.cached_count == 64
        with pytest.raises(BadState, match="1 cached pages are held"):
            offload.forget_prefixes()
        second.close()
        assert offload.forget_prefixes() == 2
        offload.check()
        stats = offload.stats()
        assert stats.free_host_page_count == stats.host_page_count
        assert offload.open(tokens).cached_count == 0
        assert offload.forget_prefixes() == 0


def opened_full(offload: Offload, tokens: list[int]):
    sequence = offload.open(tokens)
    for layer in range(3):
        sequence.import_rows(layer=layer, start=0, rows=rows(128))
    for layer in (0, 2):
        keys = torch.ones((128, LAYOUT.index.key_bytes), dtype=torch.uint8)
        sequence.import_keys(layer=layer, start=0, keys=keys)
    return sequence
