"""The engine gives the tokens of the plain model: whatever the mode, the arena, the neighbours."""

from __future__ import annotations

import functools
import gc
import weakref
from unittest.mock import Mock

import pytest

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.requests.request import Take
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput, BadState
from ess.kernels.cpu import stage
from ess.models.model import Model
from tests.support.checkpoints import small, tokens
from tests.support.few import pairs
from tests.support.greedy import greedy
from tests.support.manual_lane import ManualLane


@functools.cache
def expected(family: str, length: int, count: int) -> list[int]:
    return greedy(small(family, layer_count=3), prompt(length), count)


def prompt(length: int) -> list[int]:
    return tokens(length, 512, seed=length)


def engine(
    family: str,
    *,
    mtp: int = 1,
    chunks: int = 2,
    host_pages: int = 24,
    index_pages: int | None = None,
    chunk_tokens: int = 48,
    model: Model | None = None,
    **config,
) -> Engine:
    made = model or small(family, layer_count=3)
    layout = made.config.layout(row="f32", index="f32", has_mtp=mtp > 1)
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.chunk_bytes * chunks,
        host_bytes=host_pages * layout.host_page_bytes,
        index_bytes=None if index_pages is None else index_pages * layout.index_page_bytes,
        length_max=1024,
        slot_floor=24,
        lane=ManualLane(seed=chunks, delay_max=3),
        poison=True,
    )
    return Engine(made, offload, EngineConfig(mtp=mtp, chunk_tokens=chunk_tokens, **config))


def run(eng: Engine) -> None:
    for _ in eng.run():
        eng.check()
    eng.offload.drain()
    stats = eng.offload.stats()
    assert stats.used_slot_count.sum() == 0
    assert stats.free_host_page_count == stats.host_page_count
    assert stats.free_index_page_count == stats.index_page_count
    future = eng._flights._future
    left = future.lines(), future.step_numbers()
    assert left == (set(), []), "a token or an outcome was left on the device"


def test_a_rehearsed_engine_packs_no_weights_in_its_first_steps(monkeypatch):
    """The first request of a server would wait for that."""
    eng = engine("v32", mtp=2, model=small.__wrapped__("v32", layer_count=3))
    eng.rehearse(lambda said: None)
    called, function = [], stage._function

    def noted(name, *kinds, **more):
        called.append(name)
        return function(name, *kinds, **more)

    monkeypatch.setattr(stage, "_function", noted)
    made = eng.add(prompt(90), Sampling(tokens_max=10))
    run(eng)
    assert made.output == expected("v32", 90, 10)
    assert "ess_pack" not in called, called


def test_rows_of_a_prompt_that_slots_have_room_for_are_not_missed():
    """Slots are filled with rows that the prompt's last queries did not select, too."""
    for warm in (True, False):
        eng = engine("v32", chunks=6, modes="none", warm=warm)
        made = eng.add(prompt(150), Sampling(tokens_max=9))
        run(eng)
        assert made.output == expected("v32", 150, 9)
        assert (eng.offload.stats().miss_count.sum() == 0) == warm


@pytest.mark.parametrize(
    *pairs(family=("v32", "glm"), mode=("resident", "none", "da", "dba"), mtp=(1, 3))
)
def test_every_mode_gives_the_plain_model_s_tokens(family, mode, mtp):
    eng = engine(family, mtp=mtp, modes=mode, chunks=1)
    made = [eng.add(prompt(length), Sampling(tokens_max=10)) for length in (1, 2, 90, 130)]
    run(eng)
    for request in made:
        assert request.output == expected(family, len(request.prompt), 10), len(request.prompt)
        assert request.reason == "length"


def test_requests_join_leave_preempt_and_share_prefixes():
    eng = engine("v32", mtp=2, modes="da")
    first = eng.add(prompt(200), Sampling(tokens_max=16))
    for _ in range(7):
        eng.step()
    assert first.state == "decoding"
    second = eng.add(prompt(90), Sampling(tokens_max=12))
    eng.step()
    eng.preempt(first)
    third = eng.add(prompt(200), Sampling(tokens_max=8))
    gone = eng.add(prompt(70), Sampling(tokens_max=50))
    for _ in range(6):
        eng.step()
    assert third.prefilled_count > 0
    eng.cancel(gone)
    eng.resume(first)
    run(eng)
    assert first.output == expected("v32", 200, 16)
    assert second.output == expected("v32", 90, 12)
    assert third.output == expected("v32", 200, 8)
    assert gone.reason == "cancelled"
    again = eng.add(prompt(200), Sampling(tokens_max=4))
    eng.step()
    assert again.sequence is not None
    assert again.sequence.cached_count >= 64, "the prompt of a finished request is a prefix"
    run(eng)
    assert again.output == expected("v32", 200, 4)


@pytest.mark.parametrize(
    "place",
    [
        "step.underway.future.FutureMap.tell",
        "step.warmth.Warmth.stepped",
        "engine.Engine._prefill",
    ],
)
def test_a_step_that_fails_midway_is_the_last(place, monkeypatch):
    """It has taken tokens that no later step can give, or has left more steps under way than any
    audit allows: the engine can only be closed."""
    eng = engine("v32", mtp=2, depth=1)
    request = eng.add(prompt(20), Sampling(tokens_max=9))
    while len(request.output) < 3:
        eng.step()
    with monkeypatch.context() as patch:
        patch.setattr(f"ess.engine.{place}", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            eng.step()
    waiting = eng.add(prompt(20))
    for call in (eng.step, eng.learn, lambda: eng.preempt(request), eng.step):
        with pytest.raises(BadState, match="failed midway: close the engine"):
            call()
    assert waiting.state == "waiting"
    assert request.output == expected("v32", 20, 9)[: len(request.output)]
    eng.close()
    eng.offload.close()


def test_sampled_tokens_do_not_depend_on_drafts_or_neighbours():
    sampling = Sampling(tokens_max=10, temperature=1.0, top_p=0.9, seed=5)
    alone = engine("v32", mtp=1, modes="none")
    one = alone.add(prompt(60), sampling)
    run(alone)
    crowd = engine("v32", mtp=4, modes="dba", chunks=1)
    same = crowd.add(prompt(60), sampling)
    crowd.add(prompt(61), Sampling(tokens_max=7, temperature=1.0, seed=6))
    run(crowd)
    assert same.output == one.output
    assert len(set(one.output)) > 3


def test_stop_ids_end_a_request_within_a_verified_step():
    tokens_made = expected("v32", 90, 10)
    stop = tokens_made[4]
    eng = engine("v32", mtp=3, modes="none")
    request = eng.add(prompt(90), Sampling(tokens_max=10, stop_ids=frozenset({stop})))
    run(eng)
    assert request.output == tokens_made[: tokens_made.index(stop) + 1]
    assert request.reason == "stop"


def test_what_can_never_fit_is_refused_and_what_does_not_fit_waits():
    eng = engine("v32", modes="none", host_pages=6)
    never = eng.add(prompt(500), Sampling(tokens_max=10))
    pair = [eng.add(prompt(130 + i), Sampling(tokens_max=4)) for i in range(2)]
    later = eng.add(prompt(140), Sampling(tokens_max=4))
    eng.step()
    assert never.reason == "refused"
    assert later.state == "waiting"
    assert eng.refusal is not None
    assert eng.refusal.limiter in ("host pages", "index pages")
    run(eng)
    assert eng.refusal is None
    for request in (*pair, later):
        assert request.output == expected("v32", len(request.prompt), 4)


def test_the_end_of_one_lets_another_in_while_a_third_runs_on():
    """Its pages are free one step behind its end."""
    eng = engine("v32", modes="none", host_pages=6, depth=1)
    long = eng.add(prompt(131), Sampling(tokens_max=40))
    short, later = (eng.add(prompt(n), Sampling(tokens_max=4)) for n in (130, 140))
    while not short.reason:
        eng.step()
        assert later.state == "waiting"
    for _ in range(2):
        eng.step()
    assert (later.state, long.state) == ("prefilling", "decoding")
    eng.cancel(long)
    run(eng)
    for request in (short, later):
        assert request.output == expected("v32", len(request.prompt), 4)


def test_requests_that_make_no_sense_are_refused_by_name():
    eng = engine("v32", modes="none")
    with pytest.raises(BadInput, match="empty prompt"):
        eng.add([])
    with pytest.raises(BadInput, match=r"must be 0\.\.511"):
        eng.add([1, 512])
    with pytest.raises(BadInput, match="1030 positions, at most 1024"):
        eng.add(prompt(1000), Sampling(tokens_max=30))
    with pytest.raises(BadInput, match="mtp is 9"):
        engine("v32", mtp=9, modes="none")
    with pytest.raises(BadInput, match="modes is 'fast'"):
        engine("v32", modes="fast")
    with pytest.raises(BadInput, match="2 modes for 3 layers"):
        engine("v32", modes=["none", "da"])
    waiting = eng.add(prompt(5))
    with pytest.raises(BadState, match="waiting, not running"):
        eng.preempt(waiting)
    with pytest.raises(BadState, match="waiting, not preempted"):
        eng.resume(waiting)


def test_a_request_of_another_engine_is_refused():
    mine, other = (engine("v32", modes="none") for _ in range(2))
    requests = [eng.add(prompt(20), Sampling(tokens_max=4)) for eng in (mine, other)]
    for _ in range(2):
        mine.step()
        other.step()
    for call in (mine.cancel, mine.preempt, mine.resume):
        with pytest.raises(BadInput, match="added to another engine"):
            call(requests[1])
    with pytest.raises(BadInput, match="added to another engine"):
        mine.add(prompt(20), Sampling(tokens_max=4), leader=requests[1])
    run(mine)
    run(other)
    for request in requests:
        assert request.output == expected("v32", 20, 4)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_memory_of_a_closed_engine_goes_without_a_search_for_garbage(depth):
    """Its objects are few, so Python would search late. A request that the caller keeps, one that
    shares its prompt, one that was preempted and cancelled and one that was refused hold nothing
    of it; nor does what the first that waits is short of."""
    eng = engine("v32", mtp=2, depth=depth, host_pages=12)
    refused = eng.add(prompt(70), Sampling(tokens_max=900))
    kept = eng.add(prompt(70), Sampling(tokens_max=4))
    follower = eng.add(prompt(70), Sampling(tokens_max=4), leader=kept)
    left = eng.add(prompt(90), Sampling(tokens_max=40))
    while left.state != "decoding":
        eng.step()
    eng.preempt(left)
    eng.cancel(left)
    run(eng)
    for _ in range(2):
        eng.add(prompt(300), Sampling(tokens_max=200))
    eng.step()
    assert (refused.reason, eng.refusal.limiter) == ("refused", "host pages")
    eng.close()
    eng.offload.close()
    gone = [weakref.ref(each) for each in (eng, eng.offload, eng.offload.owner, eng.runner)]
    gc.disable()
    try:
        del eng
        assert [each() for each in gone] == [None] * len(gone)
    finally:
        gc.enable()
    assert kept.output == follower.output == expected("v32", 70, 4)


@pytest.mark.parametrize("is_preempted", [False, True])
def test_what_was_prefilled_of_a_cancelled_prompt_is_found_again(is_preempted):
    eng = engine("v32", modes="none")
    request = eng.add(prompt(300), Sampling(tokens_max=4))
    while request.prefilled_count < 192:
        eng.step()
    if is_preempted:
        eng.preempt(request)
    eng.cancel(request)
    again = eng.add(prompt(300), Sampling(tokens_max=4))
    eng.step()
    assert again.sequence.cached_count == 192
    run(eng)
    assert again.output == expected("v32", 300, 4)


def test_wrong_arguments_of_an_engine():
    with pytest.raises(BadInput, match="chunk_tokens is 0, must be 1"):
        EngineConfig(chunk_tokens=0)
    with pytest.raises(BadInput, match="prompt must be a list of whole numbers"):
        engine("v32").add([1.0, 2.0], Sampling(tokens_max=4))
    with pytest.raises(BadInput, match=r"mtp is '2', must be 1\.\.8"):
        EngineConfig(mtp="2")
    made = engine("v32")
    made.close()
    with pytest.raises(BadState, match="this engine is closed"):
        made.add([1, 2])
    said = r"layout deepseek_v32 has 3 layers .* in 3 groups, and the model deepseek_v32 has 2 in 2"
    with pytest.raises(BadInput, match=said):
        Engine(small("v32", layer_count=2), made.offload, EngineConfig())
    made.offload.close()
    with pytest.raises(BadState, match="this offload is closed"):
        Engine(small("v32", layer_count=3), made.offload, EngineConfig())


@pytest.mark.parametrize(
    "option",
    [
        *({"priority": wrong} for wrong in (None, "1", True, 0.5, 1 << 31)),
        *({"prior_output": wrong} for wrong in ([True], [1.5], "ab", b"ab", 3, None, [512], [-1])),
        *({"salt": wrong} for wrong in ("a", None, 3)),
        *({"leader": wrong} for wrong in (3, "a")),
        *({"give": wrong} for wrong in ("a", True, 1.5, 7)),
        *({"take": wrong} for wrong in (7, Take("a"), Take(7, 1.5), Take(True), Take(7))),
        {"colour": 3},
    ],
    ids=repr,
)
def test_options_of_a_wrong_kind_leave_the_engine_as_it_was(option):
    eng = engine("v32", modes="none")
    kept = eng.add(prompt(20), Sampling(tokens_max=4))
    with pytest.raises(BadInput):
        eng.add(prompt(20), Sampling(tokens_max=4), **option)
    eng.check()
    run(eng)
    assert kept.output == expected("v32", 20, 4)
