"""What a sequence keeps beside its rows: reserved with its pages, forked, preempted, not mixed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ess
from ess.adapters.vllm.settings import read_layout
from ess.errors import BadInput, BadState, PoolFull
from ess.pool.disk.tier import DiskTier
from tests.compressed import world
from tests.compressed.test_rows_apart import LAYOUT

WITH_STATE = replace(LAYOUT, row_tokens=4, state_bytes=48, state_page_bytes=32)


def opened(sequence_max: int = 2) -> ess.Offload:
    return ess.Offload.create(
        WITH_STATE,
        slot_bytes=4 * 64 * LAYOUT.row_bytes,
        host_bytes="1MiB",
        length_max=1024,
        sequence_max=sequence_max,
        poison=True,
    )


def numbered(sequence: ess.Sequence, first: int) -> torch.Tensor:
    values = torch.arange(first, first + len(sequence.beside)).to(torch.uint8)
    sequence.beside[:] = values
    return values


def test_its_size_follows_from_the_layout() -> None:
    with opened() as offload:
        whole, short = offload.open([0]), offload.open([0], length_max=260)
        assert len(whole.beside) == 48 + 4 * 32
        assert len(short.beside) == 48 + 2 * 32
        for sequence in (whole, short):
            assert not sequence.beside[:48].any()
            assert (sequence.beside[48:] == 0xFF).all()
            sequence.close()


def test_it_goes_to_the_host_and_comes_back_on_another_line() -> None:
    with opened() as offload:
        first, second = offload.open([0], length_max=400), offload.open([0])
        kept, other = numbered(first, 1), numbered(second, 100)
        first.preempt()
        with pytest.raises(BadState, match="is preempted, not active"):
            _ = first.beside
        line = second.line
        third = offload.open([0])
        assert not third.beside[:48].any()
        second.close()
        first.resume()
        assert first.line == line
        assert torch.equal(first.beside, kept)
        assert not torch.equal(first.beside[:48], other[:48])
        for sequence in (first, third):
            sequence.close()
        offload.check()


def test_a_fork_has_a_copy() -> None:
    with opened() as offload:
        first = offload.open([0])
        kept = numbered(first, 7)
        fork = first.fork()
        assert torch.equal(fork.beside, kept)
        fork.beside.zero_()
        assert torch.equal(first.beside, kept)
        for sequence in (first, fork):
            sequence.close()


def test_all_or_nothing_with_the_pages() -> None:
    """Without a line there are no pages either, and a resume that finds no room loses nothing."""
    with opened(sequence_max=1) as offload:
        first = offload.open([0])
        kept, free = numbered(first, 3), offload.stats().free_host_page_count
        for attempt in (lambda: offload.open([0]), first.fork):
            with pytest.raises(PoolFull):
                attempt()
        assert offload.stats().free_host_page_count == free
        first.preempt()
        second = offload.open([0])
        numbered(second, 9)
        for _ in range(2):
            with pytest.raises(PoolFull):
                first.resume()
        second.close()
        first.resume()
        assert torch.equal(first.beside, kept)
        first.close()
        offload.check()


def test_nothing_is_published_that_is_not_to_be() -> None:
    with opened() as offload:
        tokens = list(range(257))
        sequence = offload.open(tokens, publishes=False)
        for layer in range(WITH_STATE.layer_count):
            sequence.import_rows(layer, 0, torch.ones(64, LAYOUT.row_bytes, dtype=torch.uint8))
        sequence.close()
        again = offload.open(tokens)
        assert again.cached_count == 0
        again.close()


def test_what_is_not_published_keeps_no_state() -> None:
    """Nor do its forks: the text that they count from is not theirs."""
    with opened(sequence_max=3) as offload:
        sequence = offload.open(list(range(520)), publishes=False)
        rows = torch.ones(128, LAYOUT.row_bytes, dtype=torch.uint8)
        for layer in range(WITH_STATE.layer_count):
            sequence.import_rows(layer, 0, rows)
        sequence.reached(512)
        fork = sequence.fork()
        fork.progress.keep_state(prompt_end=512)
        states = offload.owner.pools.states
        assert states is not None
        assert len(states.kept) == 0
        for each in (fork, sequence):
            each.close()
        again = offload.open(list(range(520)))
        again.import_rows(0, 0, rows)
        again.import_rows(1, 0, rows)
        again.reached(512)
        assert len(states.kept) == 1
        again.close()
        assert offload.open(list(range(520))).cached_count == 512


def test_a_fork_without_a_row_goes_on_when_it_comes_back() -> None:
    with opened() as offload:
        sequence = offload.open([0])
        fork = sequence.fork()
        fork.preempt()
        fork.resume()
        for each in (fork, sequence):
            each.close()
        offload.check()


def test_cached_rows_without_a_state_do_not_go_on() -> None:
    """Beside the device a sequence has all that is cached: what is beside it is to come."""
    with opened() as offload:
        tokens = list(range(600))
        first = offload.open(tokens)
        for layer in range(WITH_STATE.layer_count):
            rows = torch.ones(149, LAYOUT.row_bytes, dtype=torch.uint8)
            first.import_rows(layer, 0, rows)
        first.close()
        assert offload.open(tokens).cached_count == 0
        beside = offload.open(tokens, on_device=False)
        assert (beside.cached_count, beside.text_length) == (512, 512)
        with pytest.raises(
            BadState, match="rows of 512 tokens, and nothing that is kept beside them"
        ):
            beside.resume()
        beside.close()
        fresh = offload.open(list(range(700, 710)), on_device=False)
        fresh.resume()
        assert not fresh.beside[:48].any()


def test_what_has_no_state_says_so() -> None:
    with ess.Offload.create(LAYOUT, slot_bytes="64KiB", host_bytes="1MiB") as offload:
        sequence = offload.open([0])
        with pytest.raises(BadInput, match="keeps nothing beside its rows"):
            _ = sequence.beside
        sequence.close()
    with pytest.raises(BadInput, match="rows of several tokens: not on 'cuda' yet"):
        ess.Offload.create(WITH_STATE, slot_bytes="64KiB", host_bytes="1MiB", device="cuda")


def test_states_are_not_kept_on_a_disk_nor_taken_from_another_engine(tmp_path: Path) -> None:
    size = WITH_STATE.host_page_bytes
    tier = DiskTier(tmp_path, identity=b"", page_bytes=size, capacity_bytes=1 << 22)
    with pytest.raises(BadInput, match="keeps states beside its rows: not on a disk yet"):
        ess.Offload.create(WITH_STATE, slot_bytes="64KiB", host_bytes="1MiB", disk=tier)
    tier.close()
    raw = {**world.LISTED, "num_nextn_predict_layers": 0}
    with pytest.raises(BadInput, match="states beside its rows: they are not handed over"):
        read_layout(raw, with_mtp=False)
