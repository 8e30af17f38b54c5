"""Pipelines of prompts whose stages compute on the pretended device: run by `test_forward_steps`.

What they make is compared bit by bit with what one engine of the host makes by the same products: a
device has no compiled stages, and another op for its experts. The stages share the device, so their
states travel over links of the host (`ess.comm.processes.staged`).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import weakref
from unittest import mock

import pytest
import torch

from ess.comm.local import LocalLink, local_group
from ess.comm.processes.staged import LEAVING_MAX, SOON_S, StagedGroup, StagedLink
from ess.engine.layer_bytes import F32
from ess.engine.prompt.plain_rows import PlainRows
from ess.engine.prompt.run import Queued
from ess.engine.step_bytes import prompt_bytes
from ess.errors import BadInput
from ess.kernels.backend import ops
from ess.models import moe
from ess.models.model import Model
from ess.pool.device_bytes import pool_bytes, stage_shape
from ess.prefill.stage import Stage
from ess.prefill.stages import StageLost
from tests.device.memory import Peak, driver_bytes, tensor_bytes
from tests.device.races import either, within
from tests.prefill.pipes import (
    CHUNK,
    LAYER_COUNT,
    Given,
    Pipe,
    Ragged,
    Shelf,
    engine_given,
    model_of,
    room_of,
    text,
)
from tests.prefill.test_exact import assert_alike
from tests.prefill.test_lead import assert_quiet
from tests.prefill.test_tier import Tier, alone
from tests.support.few import few
from tests.support.pretended import PRETENCE, RACES, without_waits
from tests.support.pretended_streams import Event, Stream

pytestmark = pytest.mark.usefixtures("alone")

THERE = "cuda:0"
HOME = torch.device(THERE)
LENGTHS = (300, 1, 65)
MORE_LENGTHS = (2, 64, 66, 81, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK, 2 * CHUNK + 1, 511)


@contextlib.contextmanager
def by_the_same_products():
    def products(tokens, ends, weights, *, scales):
        return ops("cpu").expert_products(tokens, ends, weights, scales=scales)

    with (
        mock.patch.object(Model, "has_stages", False),
        mock.patch.object(moe, "_products", products),
    ):
        yield


def expected(prompts, **given) -> list[Given]:
    """One after the other, so that the same tokens run together."""
    with by_the_same_products():
        return [engine_given([prompt], **given)[0] for prompt in prompts]


def closed(pipe: Pipe) -> None:
    """Nothing is kept, on the host or on the device."""
    pipe.settle()
    pipe.release_all()
    assert_quiet(pipe)
    pipe.close()


@pytest.mark.parametrize(
    ("stage_count", "lengths"),
    [
        *((n, LENGTHS) for n in (2, 3)),
        *(pytest.param(n, LENGTHS, marks=pytest.mark.long) for n in (1, 4)),
        *(pytest.param(n, MORE_LENGTHS, marks=pytest.mark.long) for n in (2, 3)),
    ],
)
def test_rows_keys_and_windows_are_those_of_the_host(stage_count, lengths):
    prompts = [text(length) for length in lengths]
    pipe = Pipe(stage_count, device=THERE, page_count=128)
    for prompt in prompts:
        pipe.add(prompt)
        pipe.run()
    uids = range(1, len(prompts) + 1)
    assert_alike(pipe, uids, expected(prompts, page_count=128))
    closed(pipe)


def test_a_cached_prefix_is_read_from_the_host():
    pipe, shared = Pipe(2, device=THERE), text(260)
    second = shared[:250] + text(90, seed=4)
    pipe.add(shared)
    pipe.run()
    pipe.release_all()
    request = pipe.add(second)
    pipe.run()
    assert request.cached_count == 128
    with by_the_same_products():
        whole = Pipe(1)
        for prompt in (shared, second):
            whole.add(prompt)
            whole.run()
    assert_alike(pipe, [2], [whole.given(2)])
    closed(pipe)


@pytest.mark.long
@pytest.mark.parametrize("decode", ["cpu", THERE])
def test_answers_are_those_of_one_engine(decode):
    """Chunks of any size, several prompts in a micro-batch, one that has a cached beginning. That a
    host takes what stages make is shown by real processes in `test_served.py`, that a device takes
    what a device makes in `handoffs.py`."""
    prompts = [text(length, seed=9) for length in (1, 66, 300)]
    prompts.append(prompts[2][:200] + text(50))
    tier = Tier(3, mtp=2, decode=decode, device=THERE, sizes=Ragged())
    asked = [tier.add(prompt, uid) for uid, prompt in enumerate(prompts[:3])]
    tier.run()
    asked.append(tier.add(prompts[3], 3))
    tier.run()
    assert [take.output for _, take in asked] == alone(prompts, 2)
    assert asked[3][0].cached_count == 128
    assert tier.decode_port.counts.landed_count == len(prompts)
    tier.decode.offload.close()


@pytest.mark.parametrize("moment", few([2, 5], all_of=range(14)))
def test_a_request_is_cancelled_at_any_moment(moment):
    pipe, other_text = Pipe(3, device=THERE), text(200)
    other = pipe.add(other_text)
    request = pipe.add(text(300, seed=3))
    for at in range(moment):
        pipe.turns[at % len(pipe.turns)]()
    pipe.lead.cancel(request)
    pipe.run()
    assert other.reason == "sent"
    with by_the_same_products():
        whole = Pipe(1)
        whole.add(other_text)
        whole.add(text(300, seed=3))
        whole.run()
    assert pipe.given(1).rows == whole.given(1).rows
    closed(pipe)


@pytest.mark.parametrize("lost", few([1], all_of=[0, 1, 2]))
def test_a_stage_that_is_lost_midway_is_named_and_nothing_is_under_way(lost):
    pipe = Pipe(3, device=THERE)
    pipe.add(text(700))
    for _ in range(2):
        for turn in pipe.turns:
            turn()
    pipe.groups[lost].fail("out of memory")
    with pytest.raises(StageLost, match=rf"stage {lost} \(layers .*\): out of memory"):
        pipe.run()
    pipe.close()


def test_what_stages_have_on_disk_is_not_computed(tmp_path):
    prompt, cached = text(320), []
    for _ in range(2):
        pipe = Pipe(2, device=THERE, disk=tmp_path)
        request = pipe.add(prompt)
        pipe.run()
        assert_alike(pipe, [1], expected([prompt]))
        cached.append(request.cached_count)
        closed(pipe)
    assert cached == [0, 192]


def test_a_stage_takes_what_is_planned_for_it():
    before = tensor_bytes() + driver_bytes()
    offload = room_of((1, 3), device=THERE, page_count=40)
    shape = stage_shape(offload.layout, index_pages=40, sequence_max=8, length_max=1024)
    assert tensor_bytes() + driver_bytes() - before == sum(pool_bytes(shape).values())
    offload.close()


def test_a_state_of_another_device_is_refused():
    first, second = local_group(2)
    link = StagedLink(first.next, HOME)
    with pytest.raises(BadInput, match="tensor is on cpu, the link's on cuda:0"):
        link.send(b"head", torch.zeros(2, 2))
    assert second.previous.receive() is None


# ---- a chunk that has not landed when the next one is queued


@contextlib.contextmanager
def landing_late():
    """Every fifth time that chunks are asked, one has landed by itself. What was done is noted: the
    host lets layers begin, and tells of layers whose rows it has."""
    noted, asked = [], itertools.count(1)
    enter, made = PlainRows.enter, Shelf.made
    late = property(lambda queued: next(asked) % 5 == 0)

    def enters(rows, layer):
        noted.append(("begins", layer))
        enter(rows, layer)

    def tells(shelf, uid, layer, stop):
        noted.append(("is here", layer))
        made(shelf, uid, layer, stop)

    with (
        mock.patch.object(Queued, "has_landed", late),
        mock.patch.object(PlainRows, "enter", enters),
        mock.patch.object(Shelf, "made", tells),
    ):
        yield noted


def test_the_device_has_the_next_chunk_when_the_host_takes_the_last_rows_of_one():
    with landing_late() as noted:
        pipe = Pipe(1, device=THERE)
        pipe.add(text(2 * CHUNK + 9))
        pipe.run()
    one = [("begins", 1), ("is here", 0), ("begins", 2), ("is here", 1), ("begins", 3)]
    one += [("is here", 2), ("begins", 4), ("is here", 3)]
    last = ("is here", 4)
    assert noted == [("begins", 0), *one, *2 * [("begins", 0), last, *one], last]
    assert pipe.shelves[0].told[1] == [
        (layer, stop)
        for stop in (CHUNK, 2 * CHUNK, 2 * CHUNK + 8)  # decode runs the last token
        for layer in range(LAYER_COUNT + 1)
    ]
    closed(pipe)


@pytest.mark.parametrize(
    ("stage_count", "lengths"),
    [
        (1, (300, 65)),
        (2, (300, 65)),
        *(pytest.param(n, MORE_LENGTHS, marks=pytest.mark.long) for n in (1, 2, 3, 4)),
    ],
)
def test_chunks_that_land_late_are_those_of_the_host(stage_count, lengths):
    """Several prompts in turn, so that a chunk also lands beside another prompt's."""
    prompts = [text(length) for length in lengths]
    with landing_late():
        pipe = Pipe(stage_count, device=THERE, page_count=128)
        for prompt in prompts:
            pipe.add(prompt)
        pipe.run()
        uids = range(1, len(prompts) + 1)
        with by_the_same_products():
            whole = Pipe(1, page_count=128)
            for prompt in prompts:
                whole.add(prompt)
            whole.run()
        assert_alike(pipe, uids, [whole.given(uid) for uid in uids])
        closed(pipe)


def test_two_chunks_take_no_more_than_their_estimate():
    with landing_late(), Peak() as peak:
        pipe = Pipe(1, device=THERE)
        peak.begin()
        before = peak.most
        pipe.add(text(700))
        pipe.run()
        layout = pipe.stages[0].offload.layout
    sizes = {"chunk_tokens": CHUNK, "length_max": 1024, "prompt_max": 1, "value_bytes": F32}
    planned = prompt_bytes(model_of().config, layout, **sizes, pack_count=2)
    assert 4 * 640 * layout.row_bytes < peak.most - before <= planned
    closed(pipe)


def test_a_stage_of_few_layers_would_read_rows_that_are_not_here():
    prompt = text(300)
    with landing_late(), mock.patch.object(Stage, "_may_be_behind", return_value=True):
        pipe = Pipe(4, device=THERE)
        pipe.add(prompt)
        pipe.run()
    assert pipe.given(1).rows != expected([prompt])[0].rows
    closed(pipe)


def test_a_prompt_is_cancelled_while_a_chunk_of_it_has_not_landed():
    pipe, prompt = Pipe(2, device=THERE), text(700)
    with mock.patch.object(Queued, "has_landed", False):
        request = pipe.add(prompt)
        pipe.run(until=lambda: all(stage._underway for stage in pipe.stages[1:]))
        pipe.lead.cancel(request)
        pipe.run(until=pipe.is_quiet)
    closed(pipe)


# ---- sends


def states(count: int) -> list[torch.Tensor]:
    return [torch.full((3, 5), float(number), device=HOME) for number in range(count)]


def test_frames_go_in_order_when_their_states_have_come(monkeypatch: pytest.MonkeyPatch):
    first, second = local_group(2)
    link, there = StagedLink(first.next, HOME), StagedLink(second.previous, HOME)
    has_landed = [False]
    monkeypatch.setattr(Event, "query", lambda self: has_landed[0])
    [state] = states(1)
    link.send(b"a state", state)
    link.send(b"none")
    assert there.receive() is None
    has_landed[0] = True
    link.forward()
    came = [there.receive() for _ in range(3)]
    assert [frame and frame.head for frame in came] == [b"a state", b"none", None]
    assert came[0].tensor.device == HOME
    assert torch.equal(came[0].tensor, state)


def test_nothing_is_awaited_for_long_while_a_state_leaves(monkeypatch: pytest.MonkeyPatch):
    group = StagedGroup(local_group(3)[1], HOME)
    waited, receive = [], LocalLink.receive
    monkeypatch.setattr(Event, "query", lambda self: False)
    monkeypatch.setattr(
        LocalLink, "receive", lambda link, s=0.0: (waited.append(s), receive(link, 0.0))[1]
    )
    for sends in (False, True):
        if sends:
            group.next.send(b"head", *states(1))
        assert group.previous.receive(5.0) is None
    assert waited == [5.0, SOON_S]


def test_a_send_waits_only_for_the_send_before_the_last(monkeypatch: pytest.MonkeyPatch):
    first, second = local_group(2)
    link = StagedLink(first.next, HOME)
    monkeypatch.setattr(Event, "query", lambda self: False)
    given = states(LEAVING_MAX + 1)
    with without_waits():
        for number in range(LEAVING_MAX):
            link.send(b"%d" % number, given[number])
    assert second.previous.receive() is None
    link.send(b"last", given[-1])
    assert second.previous.receive().head == b"0"
    link.flush()
    assert [second.previous.receive().head for _ in range(LEAVING_MAX)] == [b"1", b"last"]


def test_a_state_leaves_before_the_host_waits_for_its_chunk(monkeypatch: pytest.MonkeyPatch):
    """So the next stage begins while the last rows of this one still come to the host."""
    pipe, told = Pipe(2, device=THERE), []
    send, refuse = StagedLink.send, PRETENCE.refuse

    def sends(link, head, tensor=None):
        if tensor is not None:
            told.append("leaves")
        send(link, head, tensor)

    def waits(name):
        if name == "cpu":
            told.append("windows")
        refuse(name)

    monkeypatch.setattr(StagedLink, "send", sends)
    monkeypatch.setattr(PRETENCE, "refuse", waits)
    pipe.add(text(100))
    pipe.run()
    assert told == ["leaves", "windows", "windows"]
    closed(pipe)


# ---- races


def found_in(pipe_of) -> list[str]:
    """A stage of one layer waits for nothing before its state leaves."""
    with RACES.watched() as races:
        pipe = pipe_of()
        pipe.add(text(300))
        pipe.run()
        pipe.settle()
        return races()


def test_nothing_races():
    assert found_in(lambda: Pipe(3, device=THERE)) == []


def test_nothing_races_where_chunks_land_late():
    with landing_late():
        assert found_in(lambda: Pipe(1, device=THERE)) == []


COPY = r"staged\.py:\d+ copy_ on [\w.: ]+"
MISTAKES = {
    "a send does not wait for the state": (
        within(StagedLink, "_copied", Stream, "wait_stream"),
        either(COPY, r"\S+ add on [\w.: ]+"),
    ),
    "a frame goes before its state has come": (
        mock.patch.multiple(Event, query=lambda self: True, synchronize=lambda self: None),
        rf"local\.py:\d+ clone on [\w.: ]+ reads what {COPY} writes,",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wait_that_is_left_out_is_found(name):
    mistake, says = MISTAKES[name]
    with mistake:
        races = found_in(lambda: Pipe(3, device=THERE))
    assert any(re.search(says, sentence) for sentence in races), races


def test_a_state_is_kept_until_it_has_come(monkeypatch: pytest.MonkeyPatch):
    """Torch would lend its memory to the next chunk."""
    first, _ = local_group(2)
    link, given = StagedLink(first.next, HOME), states(1)
    kept = weakref.ref(given[0])
    with monkeypatch.context() as patch:
        patch.setattr(Event, "query", lambda self: False)
        link.send(b"head", given.pop())
        assert kept() is not None
    link.forward()
    gc.collect()
    assert kept() is None
