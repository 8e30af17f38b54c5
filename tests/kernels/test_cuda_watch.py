"""The watch over the emulated device finds each mistake of device/wrong.cu, and no other."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest

from ess.kernels.cuda.program import Program
from tests.support import emulate
from tests.support.emulate import DEVICE, DeviceFault, emulated, lent, made_once, needs_compiler

pytestmark = needs_compiler

BLOCK = r"block \d thread \d+"
LOWER = r"block \d thread ([12]?\d|3[01])"
RACES = {
    "neighbour": rf"shared memory at byte \d+ of \d+: {BLOCK} \w+ what {BLOCK} \w+; nothing orders",
    "overwritten_too_early": "race on shared memory",
    "lane": "race on shared memory",
    "lane_after_vote": "race on shared memory",
    "lane_after_sum": "race on shared memory",
    "warp_after_warp": "race on shared memory",
    "many_readers": rf"thread 32 writes what {LOWER} reads|{LOWER} reads what .* thread 32 writes",
    "block_to_block": r"race on words at byte 0 of 512: block (\d) .* what block (?!\1)",
    "atomic_and_plain": r"race on words at byte 0.*atomically",
    "bytes_twice": r"race on bytes at byte (\d+) of 128",
    "constant_is_written": "race on words.*one of them as a constant",
    "left_before_the_barrier": r"race on shared memory.* reads what block \d thread 0 writes",
}
STRAYS = {
    "one_past_the_end": r"block 1 thread 63 writes 4 bytes outside of every array, 4 bytes past "
    r"the end of words \(512 bytes\)",
    "one_before_the_start": r"block 0 thread 0 reads 4 bytes outside .* before words",
    "past_shared": "thread 63 writes 4 bytes outside of every array, 4 bytes past .* shared memory",
    "nowhere": "thread 5 writes 4 bytes outside of every array",
    "odd_unit": r"writes a unit of 8 bytes at the odd address of words at byte (4|20) of 512",
    "shared_before_it_is_written": r"thread 0 reads shared memory .*, which no thread has written",
}
APART = {
    "half_at_another_barrier": r"meet that wait at different places: wrong.cu:\d+ and wrong.cu:\d+",
    "half_a_warp_at_the_barrier": r"wait for one another: thread \d+ at wrong.cu:\d+, thread",
    "value_of_one_who_left": "a value is asked of a lane that has left",
    "part_of_a_warp": "a part of the warp",
}
RIGHT = (
    "neighbour_after_barrier",
    "neighbour_after_count",
    "lane_after_warp",
    "block_to_block_atomically",
    "bytes_beside",
    "words_then_bytes",
    "write_words",
    "read_words",
    "the_rest_meets",
)
THROUGH = "through_the_cluster"
BETWEEN_CLUSTERS = r"race on words at byte 0 .*(block 0 thread 1 writes|block [23] .*block 0)"
WRONG = RACES | STRAYS | APART


class Trial(ctypes.Structure):
    _fields_ = (("words", ctypes.c_void_p), ("bytes", ctypes.c_void_p))


@pytest.fixture(scope="module")
def kernels(folder):
    return emulated(Program(file="wrong.cu"), dict.fromkeys([*WRONG, *RIGHT], "Trial"), folder)


class Arrays:
    """128 words, twice as many for what goes astray to hit nothing of Python's, and 128 bytes."""

    def __init__(self):
        self.room = np.zeros(512, np.int32)
        self.given = {"words": self.room[128:256], "bytes": np.zeros(128, np.uint8)}

    def record(self):
        return Trial(*(each.__array_interface__["data"][0] for each in self.given.values()))


def play(kernels, folder, *names, blocks=2, seed=1, unwritten=()):
    arrays = Arrays()
    with lent(folder, arrays.given, unwritten=unwritten):
        for name in names:
            shared = 256 if name == "past_shared" else 0
            grid = {"blocks": blocks, "threads": 64, "shared_bytes": shared}
            kernels[name](arrays.record(), **grid, seed=seed)
    return arrays.given


def test_a_cluster_orders_its_own_blocks_alone(folder):
    pair = Program(file="wrong.cu", defines=(("ESS_BLOCKS", 2),))
    kernels = emulated(pair, dict.fromkeys([THROUGH, "block_to_block"], "Trial"), folder)
    for seed in range(10):
        assert play(kernels, folder, THROUGH, seed=seed)["words"][:3].tolist() == [7, 7, 8]
        with pytest.raises(DeviceFault, match=RACES["block_to_block"]):
            play(kernels, folder, "block_to_block", seed=seed)
        with pytest.raises(DeviceFault, match=BETWEEN_CLUSTERS):
            play(kernels, folder, THROUGH, blocks=4, seed=seed)


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_found_on_every_schedule(name, kernels, folder):
    for seed in range(10):
        with pytest.raises(DeviceFault, match=WRONG[name]) as fault:
            play(kernels, folder, name, seed=seed)
        assert str(fault.value).startswith(f"{name}: ") or name in APART


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_way_passes_on_every_schedule(name, kernels, folder):
    for seed in range(10):
        play(kernels, folder, name, seed=seed)


def test_launches_are_ordered_and_a_fault_ends_one_alone(kernels, folder):
    played = play(kernels, folder, "write_words", "read_words", "write_words", "bytes_beside")
    assert (played["words"] == 3).all()
    with pytest.raises(DeviceFault):
        play(kernels, folder, "write_words", "block_to_block")
    assert (play(kernels, folder, "write_words")["words"] == 3).all()


def test_what_nobody_wrote_is_not_read(kernels, folder):
    with pytest.raises(DeviceFault, match=r"reads words at byte \d+ of 512, which no thread"):
        play(kernels, folder, "read_words", unwritten=["words"])
    play(kernels, folder, "write_words", "read_words", unwritten=["words", "bytes"])


def test_those_who_left_are_not_waited_for(kernels, folder):
    words = play(kernels, folder, "the_rest_meets")["words"].reshape(2, 64)
    assert (words[:, ::2] == 0).all()
    assert (words[:, 1::2] == 1000 + (np.arange(1, 64, 2) ^ 32)).all()


def test_what_was_lent_is_given_back(kernels, folder):
    arrays = Arrays()
    with lent(folder, arrays.given):
        kernels["write_words"](arrays.record(), blocks=2, threads=64)
    with pytest.raises(DeviceFault, match="outside of every array"):
        kernels["write_words"](arrays.record(), blocks=2, threads=64)


def test_every_trial_is_played():
    text = (DEVICE / "wrong.cu").read_text()
    assert set(re.findall(r"ESS_TRIAL\((\w+)\) {", text)) == {*WRONG, *RIGHT, THROUGH}


def test_a_library_is_made_anew_when_a_source_changes(tmp_path, monkeypatch):
    source, made = tmp_path / "sources", []
    source.mkdir()
    monkeypatch.setattr(emulate, "SOURCES", (source,))
    for text in ("one", "one", "other"):
        (source / "rows.cu").write_text(text)
        made_once(tmp_path / "of.so", lambda part, text=text: made.append(part.write_text(text)))
    assert (tmp_path / "of.so").read_text() == "other"
    assert len(made) == 2
