"""What is easy to get wrong at the door: a typed error says what, and nothing has changed."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch

from ess.door import Offload, Sequence, Step
from ess.errors import BadInput, BadState
from ess.flashtrans import InlineLane
from ess.pool.disk.elsewhere import Elsewhere
from ess.pool.disk.tier import DiskTier
from tests.unit.door.test_door import LAYOUT, make, opened, refused, rows, selection


@pytest.fixture
def offload():
    with make() as made:
        yield made


def begun(offload, count: int = 10):
    return offload.begin([opened(offload, count)], query_counts=[1])


# ---- whose it is


def test_a_sequence_of_another_offload_is_refused(offload):
    mine = opened(offload)
    with make() as other:
        stranger = opened(other)
        for call in (
            lambda: offload.begin([stranger], query_counts=[1]),
            lambda: offload.begin([mine, stranger], query_counts=[1, 1]),
            lambda: offload.all_resident([stranger]),
            lambda: offload.refill([stranger]),
        ):
            refused(offload, BadInput, "not opened by this offload", call)
        other.check()
    refused(offload, BadInput, "not opened", lambda: offload.begin([7], query_counts=[1]))
    refused(offload, BadInput, "list of sequences", lambda: offload.begin(mine, query_counts=[1]))


def in_a_thread(call) -> BaseException | None:
    raised: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: raised.append(raised_by(call)), name="arrivals")
    thread.start()
    thread.join()
    return raised[0]


def test_two_threads_are_told_of_each_other(offload):
    sequence = opened(offload)
    step = offload.begin([sequence], query_counts=[1])
    for call in (
        lambda: offload.open([1, 2]),
        lambda: sequence.import_rows(0, 10, rows(1)),
        lambda: step.append(0, rows(1)),
        offload.drain,
        sequence.close,
    ):
        error = in_a_thread(call)
        assert isinstance(error, BadState), error
        assert "thread 'MainThread'" in str(error)
        assert "thread 'arrivals'" in str(error)
    assert in_a_thread(offload.stats) is None, "numbers may be read from anywhere"
    offload.check()
    step.abandon()


def test_an_offload_belongs_to_the_thread_that_uses_it_first_while_that_lives():
    offload, made = make(), []
    assert in_a_thread(lambda: made.append(opened(offload))) is None
    offload.begin(made, query_counts=[1]).abandon()
    assert isinstance(in_a_thread(lambda: offload.open([1])), BadState)
    offload.close()


def test_a_forked_child_is_refused_and_leaves_the_parent_s_disk_alone(tmp_path):
    """Its `forget_prefixes` would empty the parent's files, and its `close` wait for a thread."""
    pages = {"page_bytes": LAYOUT.host_page_bytes, "capacity_bytes": 1 << 24}
    with make(disk=DiskTier(tmp_path, identity=b"t", **pages)) as offload:
        whole_pages(offload, list(range(250)), count=200).close()
        sequence = opened(offload)
        calls = (
            lambda: offload.open([1, 2]),
            lambda: sequence.import_rows(0, 10, rows(1)),
            lambda: offload.begin([sequence], query_counts=[1]),
            offload.forget_prefixes,
            offload.drain,
            sequence.close,
        )
        child = os.fork()
        if child == 0:
            try:
                said = [raised_by(call) for call in calls]
                offload.close()
                match = f"this offload belongs to process {os.getppid()}"
                os._exit(sum(isinstance(each, BadState) and match in str(each) for each in said))
            finally:
                os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
        sequence.close()
        offload.check()
        assert offload.stats().disk.page_count == 3


def raised_by(call) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


# ---- what is brought


def test_token_ids_are_whole_numbers_in_one_dimension(offload):
    for tokens in (torch.ones(1, 5, dtype=torch.int64), np.ones((2, 3), np.int32)):
        refused(offload, BadInput, "one dimension", lambda tokens=tokens: offload.open(tokens))
    wrong = ([1.5, 2.0], torch.ones(4), "text", 7, [[1, 2]], None, b"text", {1, 2}, {1: 2})
    truths = ([True, False], [7, True], torch.ones(3, dtype=torch.bool), np.ones(3, np.bool_))
    for tokens in (*wrong, *truths):
        refused(offload, BadInput, "whole numbers", lambda tokens=tokens: offload.open(tokens))
    refused(offload, BadInput, "ids -1..2", lambda: offload.open([2, -1]))
    refused(offload, BadInput, "a number too long to print", lambda: offload.open([2, 10**5000]))
    assert offload.open(torch.arange(4)).tokens == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"length_max": 0}, "length_max is 0, must be 1..256"),
        ({"length_max": 2.5}, "length_max is 2.5, must be a whole number"),
        ({"length_max": True}, "length_max is True, must be a whole number"),
        ({"length_max": 10**5000}, "length_max is a number too long to print, must be 1..256"),
        ({"promise": "most"}, "promise is 'most', must be 'all' or 'some'"),
        ({"salt": "tenant"}, "salt is a str, must be bytes"),
        ({"reuse_max": -1}, "reuse_max is -1"),
    ],
)
def test_wrong_terms_of_a_sequence_are_refused(offload, changes, match):
    refused(offload, BadInput, match, lambda: offload.open([1, 2, 3], **changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"slot_floor": -1}, "slot_floor is -1"),
        ({"slot_floor": 0}, "slot_floor is 0"),
        ({"length_max": 0}, "length_max is 0"),
        ({"slot_bytes": "lots"}, "slot_bytes: 'lots' is not a size"),
        ({"lane": "fast"}, "lane is 'fast', must be a lane"),
        ({"disk": "/tmp"}, "disk is '/tmp', must be a DiskTier"),
        ({"disk": Elsewhere(1)}, "disk is Elsewhere: a process that writes the host's rows has a"),
        ({"query_max": 1.5}, "query_max is 1.5, must be a whole number"),
        ({"layout": "deepseek-v3.2"}, "layout is 'deepseek-v3.2', must be a ModelLayout"),
        (
            {"device": torch.device("meta"), "lane": None},
            "device is 'meta', must be 'cpu', 'cuda' or",
        ),
    ],
)
def test_wrong_sizes_of_an_offload_are_refused(changes, match):
    with pytest.raises(BadInput, match=match):
        make(**changes)


def test_rows_of_another_type_are_named(offload):
    sequence = offload.open(list(range(5)))
    brain = torch.zeros(4, 16, dtype=torch.bfloat16)
    refused(offload, BadInput, "rows is bfloat16", lambda: sequence.import_rows(0, 0, brain))
    for start in (1.0, "a"):
        refused(
            offload,
            BadInput,
            "start is",
            lambda start=start: sequence.import_rows(0, start, rows(1)),
        )


@pytest.mark.parametrize("layer", [True, 1.0, "1", None, [1], np.array([1])])
def test_a_layer_is_a_whole_number(offload, layer):
    sequence, step = offload.open(list(range(5))), begun(offload)
    for call in (
        lambda: offload.memory(layer),
        lambda: sequence.import_rows(layer, 0, rows(4)),
        lambda: step.append(layer, rows(1)),
        lambda: step.resolve(layer, selection(0)),
    ):
        refused(offload, BadInput, "layer is .*, must be a whole number", call)
    step.append(np.int64(0), rows(1))


def test_room_for_pads_is_refused_before_pages_are_taken(offload):
    """On the host no step has pads; the step's number is the next one's."""
    sequence = opened(offload, 64)
    step_count, page_count = offload._pools.sparse.step, sequence.page_count
    for room in (2, 9):
        refused(
            offload,
            BadInput,
            f"room is {room}",
            lambda room=room: offload.begin([sequence], query_counts=[1], room=room),
        )
    assert (offload._pools.sparse.step, sequence.page_count) == (step_count, page_count)
    offload.begin([sequence], query_counts=[1], room=1).abandon()


def test_no_rows_do_nothing(offload):
    sequence = opened(offload)
    refused_count = sequence.arrival_count
    sequence.import_rows(0, 10, rows(0))
    assert sequence.arrival_count == refused_count
    assert offload.begin([sequence], query_counts=[1]).query_start.tolist() == [10]


def test_rows_that_came_in_part_are_no_start(offload):
    sequence = offload.open(list(range(11)))
    for layer, count in ((0, 10), (1, 4)):
        sequence.import_rows(layer, 0, rows(count))
    match = "of 10 rows before its last token layer 1 has 4, layer 0 has 10"
    refused(offload, BadState, match, lambda: offload.begin([sequence], query_counts=[1]))
    refused(
        offload,
        BadInput,
        "continues at position 4, not at 10",
        lambda: offload.begin([sequence], query_counts=[1], starts=[10]),
    )
    step = offload.begin([sequence], query_counts=[1], starts=[4])
    assert step.query_start.tolist() == [4]
    step.abandon()
    sequence.import_rows(1, 4, rows(6))
    assert offload.begin([sequence], query_counts=[1]).query_start.tolist() == [10]


def test_rows_of_all_layers_that_end_early_are_counted_once(offload):
    sequence = offload.open(list(range(11)))
    for layer in range(3):
        sequence.import_rows(layer, 0, rows(4))
    match = "of 10 rows before its last token every layer has 4; import the others, or say"
    refused(offload, BadState, match, lambda: offload.begin([sequence], query_counts=[1]))


def test_with_nothing_imported_steps_bring_every_row(offload):
    sequence = offload.open(list(range(6)))
    for start in (0, 3):
        step = offload.begin([sequence], query_counts=[3])
        assert step.query_start.tolist() == [start] * 3
        for layer in range(3):
            step.append(layer, rows(3))
        step.commit(accepted=[3], tokens=[[start, start + 1, start + 2]])
    assert (sequence.length, sequence.tokens) == (6, list(range(6)))


def test_a_fork_leaves_the_pending_token_behind(offload):
    sequence = opened(offload, 70)
    fork = sequence.fork()
    assert (len(sequence.tokens), len(fork.tokens)) == (71, 70)
    assert (fork.length, fork.cached_count) == (70, 64)


def test_a_filled_row_of_a_group_counts_once(offload):
    """Four rows, two groups; the first group has two layers."""
    assert opened(offload, 4).fill() == 2 * 4


def test_help_shows_what_a_caller_calls():
    """Verbs by which the door tells a sequence what happened are no verbs of a sequence."""
    inner = {"joined", "learned", "refresh", "require_state", "check_start", "publish"}
    assert not inner & set(dir(Sequence))
    for name in ("tokens", "length", "cached_count", "step_numbers", "ahead_count", "page_count"):
        assert getattr(Sequence, name).__doc__, name
    for name in ("row_ids", "query_line", "query_start", "query_offset", "query_stop", "firsts"):
        assert name in Step.__doc__


# ---- what is asked


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (selection(5, 3), r"selection\[0, 1\] is position 3, which is not above"),
        (selection(3, 3), r"selection\[0, 1\] is position 3, which is not above"),
        (torch.tensor([[1, -1, 2, -1, -1, -1, -1, -1]], dtype=torch.int32), r"\[0, 2\] is pos"),
    ],
)
def test_a_selection_ascends(offload, bad, match):
    step = begun(offload)
    for verb in (step.resolve, step.locate, step.locate_all, step.host_codes):
        refused(offload, BadInput, match, lambda verb=verb: verb(0, bad))
    step.append(0, rows(1))
    refused(offload, BadInput, match, lambda: step.resolve(0, bad))


def test_queries_are_a_range_of_the_step(offload):
    step = begun(offload)
    for queries, match in (([0], "range with step 1"), (range(2), r"within 0\.\.0")):
        refused(
            offload,
            BadInput,
            match,
            lambda queries=queries: step.append(0, rows(1), queries=queries),
        )
    refused(
        offload,
        BadInput,
        "a query is 1",
        lambda: step.locate(0, selection(0), queries=[1]),
    )
    step.append(0, rows(1))
    step.resolve(0, selection(0))
    refused(offload, BadInput, "pass None", lambda: step.resolve(1, selection(0)))


def test_what_was_accepted_are_whole_numbers(offload):
    step = begun(offload)
    step.append(0, rows(1))
    step.append(1, rows(1))
    for accepted, match in (
        ([1.7], "accepted is .1.7., must have whole"),
        ([True], "accepted is .True., must have whole"),
        (1, "accepted is 1, must have"),
    ):
        for verb in (step.commit, step.seal):
            refused(
                offload,
                BadInput,
                match,
                lambda verb=verb, accepted=accepted: verb(accepted=accepted),
            )
    for tokens in ([99], 99, [["a"]]):
        refused(
            offload,
            BadInput,
            "tokens",
            lambda tokens=tokens: step.commit(accepted=[1], tokens=tokens),
        )
    step.seal(accepted=[1])
    other = "accepted is .0., step .* was sealed with .1."
    refused(offload, BadInput, other, lambda: step.learn(accepted=[0]))
    step.learn(accepted=[1])
    refused(offload, BadState, "learned, not sealed", lambda: step.learn(accepted=[1]))


def test_wrong_counts_of_a_fill_or_a_batch_are_refused(offload):
    sequence = opened(offload)
    refused(offload, BadInput, "row_max is -1", lambda: sequence.fill(row_max=-1))
    for counts, match in ((1, "counts is 1, must have whole"), ([1.5], "must have whole numbers")):
        refused(
            offload,
            BadInput,
            match,
            lambda counts=counts: offload.begin([sequence], query_counts=counts),
        )


# ---- when


def test_a_closed_offload_refuses_every_verb():
    offload = make(lane=InlineLane())
    active, preempted = opened(offload), opened(offload)
    preempted.preempt()
    offload.close()
    for call in (
        lambda: active.import_rows(0, 10, rows(1)),
        lambda: active.warm(np.full((2, 1, 3), -1, np.int32)),
        active.fill,
        active.preempt,
        active.fork,
        preempted.resume,
        lambda: offload.begin([active], query_counts=[1]),
        lambda: offload.all_resident([active]),
        offload.forget_prefixes,
    ):
        with pytest.raises(BadState, match="this offload is closed"):
            call()
    active.close()


def test_a_sequence_in_a_step_is_not_closed_under_it(offload):
    first, second = opened(offload), opened(offload)
    step = offload.begin([first, second], query_counts=[1, 1])
    refused(offload, BadState, "is in step .*; commit or abandon it first", first.close)
    for layer in (0, 1):
        step.append(layer, rows(2))
    step.seal(accepted=[1, 1])
    refused(offload, BadState, "is in step .*; learn it first", first.close)
    step.learn(accepted=[1, 1])
    assert (first.length, second.length) == (11, 11)
    first.close()


def test_repr_is_short(offload):
    sequence = opened(offload, 200)
    step = offload.begin([sequence], query_counts=[1])
    assert repr(sequence) == "<Sequence 0: active, 200 rows, 201 tokens>"
    assert repr(step) == f"<Step {step.number}: open, 1 sequences, 1 queries>"
    step.abandon()
    assert "learned" in repr(step)


# ---- what stays


def whole_pages(offload, tokens, *, count: int):
    sequence = offload.open(tokens)
    start = sequence.cached_count
    for layer in range(3):
        sequence.import_rows(layer, start, rows(count - start))
    for layer in (0, 2):
        keys = torch.ones((count - start, LAYOUT.index.key_bytes), dtype=torch.uint8)
        sequence.import_keys(layer, start, keys)
    return sequence


@pytest.mark.parametrize("is_preempted", [False, True])
def test_what_has_arrived_is_cached_when_its_sequence_closes(is_preempted):
    """The MTP module's last page is left out of a prefix: its row saw another continuation."""
    with make() as offload:
        tokens = list(range(250))
        sequence = whole_pages(offload, tokens, count=200)
        if is_preempted:
            sequence.preempt()
        sequence.close()
        offload.check()
        assert offload.open(tokens).cached_count == 128


def test_what_arrives_while_preempted_is_cached_too():
    with make() as offload:
        tokens = list(range(250))
        sequence = offload.open(tokens)
        sequence.preempt()
        for layer in range(3):
            sequence.import_rows(layer, 0, rows(200))
        for layer in (0, 2):
            keys = torch.ones((200, LAYOUT.index.key_bytes), dtype=torch.uint8)
            sequence.import_keys(layer, 0, keys)
        sequence.close()
        assert offload.open(tokens).cached_count == 128


# ---- a step that is over, and a follower without rows


def test_a_step_that_is_over_answers_nothing(offload):
    step = begun(offload)
    for layer in range(3):
        step.append(layer, rows(1))
    step.seal(accepted=[1])
    refused(offload, BadState, "is sealed", lambda: step.commit(accepted=[1]))
    refused(offload, BadState, "is sealed", lambda: step.host_codes(0, selection(1)))
    step.learn(accepted=[1])
    refused(offload, BadState, "is learned", lambda: step.commit(accepted=[1]))


def test_a_follower_of_one_query_needs_its_row_before_the_selection_is_read(offload):
    step = begun(offload)
    step.append(0, rows(1))
    step.resolve(0, selection(10))
    refused(offload, BadState, "layer 1: append its new rows", lambda: step.resolve(1, None))
    step.append(1, rows(1))
    step.resolve(1, None).wait()
    step.abandon()


@pytest.mark.parametrize(
    ("evict", "device", "sentence"),
    [
        ("mru", "cpu", "evict is 'mru', must be one of lru, sieve, score"),
        ("sieve", "cuda", "evict is 'sieve': on cuda rows give way by lru or score"),
    ],
)
def test_a_policy_that_is_not_there_is_refused_by_name(evict, device, sentence):
    with pytest.raises(BadInput, match=sentence):
        Offload.create(
            LAYOUT, slot_bytes="1MiB", host_bytes="1MiB", device=device, evict=evict, lane=None
        )
