"""Dynamic chunk sizes: the closed form, its limits, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ess.engine.chunking.sizes import Chunking, PrefillTime, chunks, next_chunk
from ess.errors import BadInput

TIME = PrefillTime(quadratic=2e-9, linear=5e-5)

times = st.builds(PrefillTime, quadratic=st.floats(1e-14, 1e-6), linear=st.floats(0, 1e-2))
set_up = st.builds(
    lambda unit, count, context, smoothing: Chunking(
        first=max(unit, 64) * count, page=unit, context=context, smoothing=smoothing
    ),
    st.sampled_from([1, 16, 64, 128, 256]),
    st.integers(1, 200),
    st.integers(1, 1_000_000),
    st.floats(0, 1),
)


def seconds(time: PrefillTime, tokens: int) -> float:
    return time.quadratic * tokens**2 + time.linear * tokens


def test_a_strict_chunk_takes_as_long_as_the_first() -> None:
    wide = Chunking(first=64_000, context=10_000_000, smoothing=1.0)
    for done in (0, 64_000, 1_000_000):
        chunk = next_chunk(TIME, wide, done=done)
        shorter, longer = (
            seconds(TIME, done + chunk + more) - seconds(TIME, done) for more in (0, 64)
        )
        target = seconds(TIME, 64_000)
        assert chunk > wide.floor or done == 1_000_000
        if chunk > wide.floor:
            assert shorter <= target * (1 + 1e-9)
            assert longer > target * (1 - 1e-9)


def test_smoothing_zero_is_static_and_more_of_it_means_shorter_chunks() -> None:
    sizes = [
        next_chunk(TIME, Chunking(first=8192, context=200_000, smoothing=s), done=100_000)
        for s in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    assert sizes[0] == 8192
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]


def test_a_quadratic_term_that_is_rounding_changes_no_size() -> None:
    chunking = Chunking(first=4096, context=1 << 20)
    for trace in (1e-23, 1e-20, 1e-18):
        time = PrefillTime(quadratic=trace, linear=1e-5)
        assert next_chunk(time, chunking, done=100_000) == 4096


def test_the_floor_is_a_quarter_of_the_first_chunk() -> None:
    steep = PrefillTime(quadratic=1.0, linear=0.0)
    assert next_chunk(steep, Chunking(first=4096, context=10**9, smoothing=1.0), done=10**8) == 1024
    odd = Chunking(first=64 * 5, context=10**9, smoothing=1.0)
    assert next_chunk(steep, odd, done=10**8) == 64, "a quarter of 5 units is 1, aligned down"


@settings(max_examples=60, deadline=None)
@given(times, set_up, st.floats(0, 1))
def test_every_chunk_is_aligned_bounded_and_fits(
    time: PrefillTime, chunking: Chunking, share: float
) -> None:
    done = int(share * (chunking.context - 1))
    chunk = next_chunk(time, chunking, done=done)
    left, unit = chunking.context - done, max(chunking.page, 64)
    assert 0 < chunk <= min(left, chunking.first)
    assert chunk % unit == 0 or chunk == left < unit
    assert chunk >= min(chunking.first // 4 // unit * unit, left // unit * unit)


@settings(max_examples=60, deadline=None)
@given(times, set_up, st.floats(0, 1))
def test_chunks_shrink_and_sum_to_the_prompt(
    time: PrefillTime, chunking: Chunking, share: float
) -> None:
    prompt = max(1, int(share * min(chunking.context, 300 * max(chunking.page, 64))))
    sizes = chunks(time, chunking, prompt=prompt)
    assert sum(sizes) == prompt
    assert list(sizes) == sorted(sizes, reverse=True), "time per token only grows"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"first": 100}, "no multiple of 64"),
        ({"first": 0}, "no multiple"),
        ({"first": 192, "page": 128}, "no multiple of 128"),
        ({"smoothing": 1.1}, "smoothing 1.1"),
        ({"smoothing": float("nan")}, "smoothing nan"),
        ({"context": 0}, "context 0"),
        ({"page": 0}, "page 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Chunking(**({"first": 4096, "context": 131_072} | wrong))  # type: ignore[arg-type]


def test_what_is_done_must_leave_room() -> None:
    chunking = Chunking(first=4096, context=8192)
    for done in (-1, 8192, 9000):
        with pytest.raises(BadInput, match="no chunk fits"):
            next_chunk(TIME, chunking, done=done)
    for prompt in (0, 8193):
        with pytest.raises(BadInput, match=f"a prompt of {prompt}"):
            chunks(TIME, chunking, prompt=prompt)
