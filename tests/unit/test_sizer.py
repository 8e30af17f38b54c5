"""Chunk sizes of a running pipeline: the profile, the fit that follows what runs, its patience."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ess.engine.chunking.fit import fitted, fitted_robustly
from ess.engine.chunking.sizer import ChunkSizer
from ess.engine.chunking.sizes import Chunking, PrefillTime, chunks
from ess.errors import BadInput

FIRST, CONTEXT = 4096, 1 << 17
TIME = PrefillTime(quadratic=2e-9, linear=5e-5)
Took = Callable[[int, int], float]


def sizer(*, dynamic: bool = True, **settings) -> ChunkSizer:
    return ChunkSizer(
        settings.pop("first", FIRST),
        context=settings.pop("context", CONTEXT),
        dynamic=dynamic,
        **settings,
    )


def took(time: PrefillTime, *, constant: float = 0.0) -> Took:
    return lambda done, count: time.of(count, after=done) + constant


def profile(made: ChunkSizer, seconds: Took) -> None:
    """The first prompt takes ten times as long: it warms up."""
    sizes = made.profile_sizes()
    warm = [10.0] + [1.0] * (len(sizes) - 1)
    made.profiled((size, more * seconds(0, size)) for size, more in zip(sizes, warm, strict=True))


def cut(made: ChunkSizer, prompt: int) -> list[int]:
    sizes, done = list[int](), 0
    while done < prompt:
        sizes.append(made.next(done, prompt - done))
        done += sizes[-1]
    return sizes


def run_prompts(made: ChunkSizer, seconds: Took, count: int) -> int:
    """Runs prompts of many lengths; how many fits were taken on the way."""
    rand, taken_count = random.Random(7), 0
    for _ in range(count):
        done, prompt = 0, rand.randrange(1, CONTEXT)
        while done < prompt:
            size, before = made.next(done, prompt - done), made.time
            made.observe(done, size, seconds(done, size))
            taken_count += made.time is not before
            done += size
    return taken_count


def noisy(seconds: Took, *, spread: float, stalls: float = 0.0, longer: float = 100.0) -> Took:
    rand = random.Random(3)

    def drawn(done: int, count: int) -> float:
        stall = longer if rand.random() < stalls else 1.0
        return seconds(done, count) * rand.uniform(1 - spread, 1 + spread) * stall

    return drawn


@pytest.mark.parametrize("first", [64, 192, 4096])
@pytest.mark.parametrize("prompt", [1, 63, 64, 65, 4095, 4096, 4097, 50_000])
def test_smoothing_zero_off_and_no_profile_all_give_static_chunks(first, prompt):
    made = [
        sizer(first=first, smoothing=0.0),
        sizer(first=first, dynamic=False),
        sizer(first=first),
    ]
    profile(made[0], took(TIME))
    run_prompts(made[0], took(TIME), 3)
    assert made[0].time is not None
    whole, rest = divmod(prompt, first)
    wanted = [first] * whole + [rest] * (rest > 0)
    assert [cut(each, prompt) for each in made] == [wanted] * 3


def test_the_profile_s_sizes_are_few_fall_to_little_and_stay_within_the_context():
    sizes = sizer().profile_sizes()
    assert sizes[0] == FIRST * 5 // 4
    assert 8 < len(sizes) <= 128
    assert sizes[-1] <= sizes[0] // 16
    assert list(sizes) == sorted(set(sizes), reverse=True)
    assert sizer(context=1000, first=960).profile_sizes()[0] == 1000
    assert list(sizer(context=5).profile_sizes()) == [5, 4, 3, 2, 1]
    assert sizer(dynamic=False).profile_sizes() == ()


@pytest.mark.parametrize("constant", [0.0, 0.05])
def test_a_profile_without_noise_gives_the_sizes_of_the_true_time(constant):
    """A constant per chunk cancels; the first sample, ten times as slow, is dropped."""
    made = sizer()
    profile(made, took(TIME, constant=constant))
    assert made.time is not None
    assert made.time.quadratic == pytest.approx(TIME.quadratic, rel=1e-4)
    assert made.time.linear == pytest.approx(TIME.linear, rel=1e-4)
    assert "from 31 prompts of up to 4960 tokens" in made.why
    wanted = chunks(TIME, Chunking(first=FIRST, context=CONTEXT), prompt=CONTEXT)
    assert cut(made, CONTEXT) == list(wanted)
    assert wanted[-2] < FIRST


def test_a_profile_that_does_not_bend_leaves_chunks_static_and_says_so():
    for bend in (-1e-10, 0.0):
        made = sizer()
        profile(made, lambda done, count, bend=bend: 1.0 + 1e-5 * count + bend * count**2)
        assert made.time is None or made.time.quadratic < 1e-17, "rounding may leave a trace"
    assert made.next(100_000, 5000) == FIRST
    made = sizer()
    profile(made, lambda done, count: 1.0 + 1e-4 * count - 1e-9 * count**2)
    assert made.time is None
    assert made.why == "the time of a prompt does not grow faster than its length"


def test_too_few_samples_leave_chunks_static_and_say_so():
    made = sizer()
    made.profiled([(size, TIME.of(size)) for size in range(64, 64 * 9, 64)])
    assert (made.time, made.why) == (None, "7 prompts were timed, a fit needs 8")
    made.profiled([(size, TIME.of(size)) for size in range(64, 64 * 10, 64)])
    assert made.time is not None
    made.profiled([(size, math.nan) for size in range(64, 64 * 10, 64)])
    assert (made.time, made.why) == (None, "0 prompts were timed, a fit needs 8")


def test_a_negative_linear_term_counts_as_none():
    made = sizer()
    profile(made, lambda done, count: 1.0 - 1e-6 * count + 1e-8 * count**2)
    assert made.time is not None
    assert made.time.linear == 0.0


# ---- while it runs


def test_without_a_profile_what_runs_is_enough():
    made = sizer()
    assert run_prompts(made, took(TIME, constant=0.01), 40) >= 1
    assert made.time is not None
    assert "kinds of chunks that ran" in made.why
    wanted = chunks(TIME, Chunking(first=FIRST, context=CONTEXT), prompt=CONTEXT)
    got = cut(made, CONTEXT)
    assert len(got) == pytest.approx(len(wanted), abs=2)
    assert got[-2] == pytest.approx(wanted[-2], rel=0.15)


def test_an_exact_profile_is_never_replaced_by_what_runs_as_it_said():
    """With noise and stalls as well: among thousands of chunks sizes do not move once."""
    for seconds in (took(TIME), noisy(took(TIME), spread=0.1, stalls=0.03)):
        made = sizer()
        profile(made, took(TIME))
        before = made.time
        assert run_prompts(made, seconds, 150) == 0
        assert made.time is before


def test_stalls_of_a_third_of_all_chunks_are_outvoted():
    """Three times as slow is not far enough to be left out; of each kind the middle one counts."""
    made = sizer()
    profile(made, took(TIME))
    before = cut(made, CONTEXT)
    run_prompts(made, noisy(took(TIME), spread=0.02, stalls=0.3, longer=3.0), 150)
    assert cut(made, CONTEXT) == before


@pytest.mark.parametrize("wrong", [(2e-10, 5e-5), (2e-8, 5e-5), (2e-9, 1e-6)])
def test_a_wrong_profile_is_replaced_and_then_sizes_stay(wrong):
    made = sizer()
    profile(made, took(PrefillTime(quadratic=wrong[0], linear=wrong[1])))
    seconds = noisy(took(TIME, constant=0.01), spread=0.05, stalls=0.02)
    taken = run_prompts(made, seconds, 150)
    assert 1 <= taken <= 4
    got = cut(made, CONTEXT)
    wanted = chunks(TIME, Chunking(first=FIRST, context=CONTEXT), prompt=CONTEXT)
    assert len(got) == pytest.approx(len(wanted), rel=0.1)
    assert run_prompts(made, seconds, 150) <= 1, "sizes swing"


def test_a_machine_that_turns_slower_altogether_changes_no_size():
    made = sizer()
    profile(made, took(TIME))
    slower = took(PrefillTime(quadratic=TIME.quadratic * 3, linear=TIME.linear * 3))
    before = cut(made, CONTEXT)
    run_prompts(made, took(TIME), 30)
    run_prompts(made, slower, 60)
    assert cut(made, CONTEXT) == pytest.approx(before, abs=FIRST // 8)


def test_chunks_that_are_all_alike_say_nothing():
    made = sizer()
    for _ in range(2000):
        made.observe(0, FIRST, 1.0)
    assert made.time is None


def test_what_it_keeps_is_bounded():
    made, rand = sizer(context=1 << 30), random.Random(1)
    for _ in range(20_000):
        made.observe(rand.randrange(1 << rand.randrange(1, 30)), rand.randrange(1, FIRST + 1), 1.0)
    assert len(made._kinds) <= 64
    assert sum(map(len, made._kinds.values())) <= 64 * 7


seconds_any = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -1.0, 1e-9, 1e-300, 1e8, 1e300]),
)
seen_any = st.tuples(st.integers(0, 1 << 20), st.integers(1, 1 << 20), seconds_any)


@settings(max_examples=80, deadline=None)
@given(
    first=st.integers(1, 80),
    page=st.sampled_from([1, 16, 64, 128]),
    smoothing=st.floats(0, 1),
    context=st.integers(1, 1 << 20),
    profiled=st.lists(st.tuples(st.integers(1, 10_000), seconds_any), max_size=40),
    seen=st.lists(seen_any, max_size=120),
    at=st.floats(0, 1),
)
def test_whatever_it_is_told_a_chunk_is_aligned_and_within_bounds(
    first, page, smoothing, context, profiled, seen, at
):
    unit = max(page, 64)
    first *= unit
    made = ChunkSizer(first, context=context, dynamic=True, smoothing=smoothing, page=page)
    made.profiled(profiled)
    for each in seen:
        made.observe(*each)
    done = int(at * (context - 1))
    left = context - done
    size = made.next(done, left)
    assert 1 <= size <= min(first, left)
    assert size == left or size % unit == 0
    assert size == left or size >= first // 4 // unit * unit


@settings(max_examples=40, deadline=None)
@given(
    quadratic=st.floats(1e-11, 1e-7),
    linear=st.floats(1e-7, 1e-3),
    constant=st.floats(0, 0.1),
    stalled=st.sets(st.integers(0, 29), max_size=9),
    factor=st.sampled_from([1e-3, 30.0, 1e5]),
)
def test_a_third_of_wild_samples_does_not_turn_the_fit(
    quadratic, linear, constant, stalled, factor
):
    time = PrefillTime(quadratic=quadratic, linear=linear)
    true = [(4096 * (n // 3), 1024 + 1536 * (n % 3)) for n in range(30)]
    seconds = took(time, constant=constant)
    samples = [
        (done, count, seconds(done, count) * (factor if place in stalled else 1.0))
        for place, (done, count) in enumerate(true)
    ]
    clean = fitted([(done, count, seconds(done, count)) for done, count in true])
    fit = fitted_robustly(samples, [time.of(count, after=done) for done, count in true])
    assert fit is not None
    assert clean is not None
    assert fit.quadratic == pytest.approx(clean.quadratic, rel=0.05)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"first": 100}, "first chunk of 100 is no multiple of 64"),
        ({"first": 192, "page": 128}, "192 is no multiple of 128"),
        ({"smoothing": 1.5}, "smoothing 1.5"),
        ({"context": 0}, "context 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, says):
    with pytest.raises(BadInput, match=says):
        sizer(**wrong)


@pytest.mark.parametrize(("done", "left"), [(-1, 5), (0, 0), (CONTEXT, 1), (CONTEXT - 4, 5)])
def test_a_prompt_beyond_the_context_has_no_next_chunk(done, left):
    with pytest.raises(BadInput, match=f"{done} tokens are done and {left} left"):
        sizer().next(done, left)
