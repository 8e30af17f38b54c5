"""A pipeline makes what one engine makes, bit for bit: rows, keys and windows of every layer."""

from __future__ import annotations

import itertools

import pytest

from tests.prefill.pipes import CHUNK, TOP_K, Pipe, Ragged, engine_given, text
from tests.support.few import few

LENGTHS = (
    *(1, 2, 3, 63, 64, 65, 66),
    *(TOP_K - 1, TOP_K, TOP_K + 1, TOP_K + 2),
    *(CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2),
    *(2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 2 * CHUNK + 2, 300),
)


def assert_alike(pipe: Pipe, uids, expected) -> None:
    """A last chunk of fewer tokens than a window set has leaves fewer windows: the last ones."""
    for uid, wanted in zip(uids, expected, strict=True):
        made = pipe.given(uid)
        for name in ("rows", "keys", "windows"):
            pairs = zip(getattr(made, name), getattr(wanted, name), strict=True)
            differing = [
                at for at, pair in enumerate(pairs) if not is_end(*sorted(pair, key=len), name)
            ]
            assert not differing, f"handoff {uid}: {name} of layers {differing} differ"


def is_end(shorter: bytes, longer: bytes, name: str) -> bool:
    return longer.endswith(shorter) if name == "windows" and shorter else longer == shorter


@pytest.mark.parametrize(
    ("stage_count", "row"),
    few(
        [(1, "f32"), (2, "fp8"), (4, "f32")],
        all_of=itertools.product((1, 2, 4), ("f32", "fp8")),
    ),
)
def test_prompts_of_all_lengths_at_once_in_chunks_of_one_size(stage_count, row):
    prompts = [text(length) for length in LENGTHS]
    pipe = Pipe(stage_count, row=row, page_count=128)
    for at in range(0, len(prompts), 8):
        batch = prompts[at : at + 8]
        requests = [pipe.add(prompt) for prompt in batch]
        pipe.run()
        uids = [request.gives for request in requests]
        assert_alike(pipe, uids, engine_given(batch, row=row))
        assert [request.reason for request in requests] == ["sent"] * len(batch)
        pipe.release_all()


@pytest.mark.parametrize("length", few(LENGTHS[::4], all_of=LENGTHS))
def test_a_prompt_alone(length):
    pipe = Pipe(4)
    request = pipe.add(text(length))
    pipe.run()
    assert request.reason == "sent"
    assert_alike(pipe, [1], engine_given([text(length)]))


@pytest.mark.parametrize(
    ("stage_count", "row"),
    few([(2, "fp8"), (4, "f32")], all_of=itertools.product((2, 4), ("f32", "fp8"))),
)
def test_a_deterministic_pipeline_makes_the_same_in_chunks_of_any_size(stage_count, row):
    prompts = [text(length, seed=5) for length in (300, 2, 65, 190, 1, 130)]
    pipe = Pipe(stage_count, row=row, deterministic=True, sizes=Ragged())
    for prompt in prompts:
        pipe.add(prompt)
    pipe.run()
    assert_alike(pipe, range(1, 7), engine_given(prompts, row=row, deterministic=True, chunk=512))


def test_every_layer_is_told_of_as_its_rows_are_stored_chunk_by_chunk():
    pipe = Pipe(2)
    pipe.add(text(300))
    pipe.run()
    stops = [128, 256, 299]
    first, last = (shelf.told[1] for shelf in pipe.shelves)
    assert first == list(itertools.chain(*([(0, stop), (1, stop)] for stop in stops)))
    assert last == list(itertools.chain(*([(0, stop), (1, stop), (2, stop)] for stop in stops)))


def test_a_chunk_enters_the_first_stage_while_the_one_before_is_in_the_second():
    pipe = Pipe(4)
    request = pipe.add(text(800))
    for _ in range(3):
        pipe.lead.step()
    assert len(pipe.lead._batches) == 3
    assert request.prefilled_count == 0
    pipe.followers[0].turn()
    pipe.followers[1].turn()
    pipe.followers[2].turn()
    pipe.lead.step()
    assert request.prefilled_count == CHUNK


def test_at_most_two_more_micro_batches_than_stages_are_under_way():
    pipe = Pipe(2)
    pipe.add(text(1000))
    for _ in range(20):
        pipe.lead.step()
    assert len(pipe.lead._batches) == 4
    pipe.run()


def test_short_prompts_share_a_micro_batch():
    pipe = Pipe(2)
    for seed in range(6):
        pipe.add(text(20, seed=seed))
    pipe.run()
    assert pipe.lead._batches.chunk_count(1) == 1


def test_what_a_chunk_took_on_the_slowest_stage_is_observed():
    pipe = Pipe(4)
    pipe.add(text(300))
    pipe.run()
    assert [seen[:2] for seen in pipe.sizes.seen] == [(0, 128), (128, 128), (256, 43)]
