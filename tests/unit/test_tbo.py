"""Two halves in turn: who runs when, where a batch is cut, and why it is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ess.engine.config import EngineConfig
from ess.errors import BadInput
from ess.overlap import sbo, tbo
from ess.overlap.policy import Mode
from ess.overlap.stages import Run, finish
from ess.overlap.tbo import interleave, reasons_off


def counted(name: str, stage_count: int, log: list[str]) -> Run[str]:
    for stage in range(stage_count - 1):
        log.append(f"{name}{stage}")
        yield
    log.append(f"{name}{stage_count - 1}")
    return name.upper()


def test_the_first_half_is_two_stages_ahead():
    log: list[str] = []
    assert interleave(counted("a", 5, log), counted("b", 5, log)) == ("A", "B")
    assert log == ["a0", "a1", "a2", "b0", "a3", "b1", "a4", "b2", "b3", "b4"]


@given(st.integers(1, 12), st.integers(0, 15))
def test_every_stage_runs_once_and_in_order_whatever_the_lead(stage_count: int, delta: int):
    log: list[str] = []
    interleave(counted("a", stage_count, log), counted("b", stage_count, log), delta=delta)
    for name in "ab":
        assert [each for each in log if each[0] == name] == [
            f"{name}{i}" for i in range(stage_count)
        ]
    for at, each in enumerate(log):
        if each[0] == "b":
            done = sum(other[0] == "a" for other in log[:at])
            assert done == min(stage_count, int(each[1:]) + delta + 1)


def test_halves_of_unequal_make_are_refused():
    with pytest.raises(AssertionError, match="3 stages beside 4"):
        interleave(counted("a", 3, []), counted("b", 4, []))


def test_finish_is_the_same_without_anybody_else():
    log: list[str] = []
    assert finish(counted("a", 3, log)) == "A"
    assert log == ["a0", "a1", "a2"]


@pytest.mark.parametrize(("counts", "first"), [([1, 1], 1), ([3, 1, 2], 1), ([2] * 8, 4)])
def test_a_batch_is_cut_between_sequences(counts: list[int], first: int):
    assert tbo.first_half(counts) == first


def test_one_sequence_is_not_cut():
    with pytest.raises(AssertionError, match="1 sequences have no two halves"):
        tbo.first_half([4])


DA = (Mode.DA,) * 3
RESIDENT = (Mode.RESIDENT,) * 3


@pytest.mark.parametrize(
    ("setting", "counts", "vector", "has_experts", "reasons"),
    [
        ("on", [1, 1], DA, True, ()),
        ("on", [1, 1], RESIDENT, True, ()),
        ("auto", [1] * 64, DA, True, ()),
        (6, [3, 3], DA, True, ()),
        ("off", [1, 1], DA, True, ("tbo is off",)),
        ("on", [4], DA, True, ("one sequence has no second half",)),
        ("auto", [1] * 63, DA, True, ("63 tokens, the floor is 64",)),
        (7, [3, 3], DA, True, ("6 tokens, the floor is 7",)),
        ("on", [1, 1], DA, False, ("no layer with experts leads a layer group",)),
        ("auto", [64, 64], RESIDENT, True, ("all rows are resident: there is no fetch to hide",)),
    ],
)
def test_why_a_step_runs_whole(setting, counts, vector, has_experts, reasons):
    reasons_given = reasons_off(setting, counts=counts, vector=vector, has_experts=has_experts)
    assert reasons_given == reasons


@pytest.mark.parametrize("setting", ["maybe", 0, -3])
def test_settings_that_make_no_sense(setting):
    with pytest.raises(BadInput, match="tbo is"):
        EngineConfig(tbo=setting)


class Told:
    """Returns nothing, records every call."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def blocks(self, count: int) -> list[range]:
        return [range(at, at + 1) for at in range(count)]

    def __getattr__(self, name: str):
        return lambda *block: self.log.append(name + "".join(str(each.start) for each in block))


ORDERS = {
    "off": "route|dispatch|arrive up down0 combine0|collect shared",
    "dispatch-shared": "route|dispatch shared|arrive up down0 combine0|collect",
    "combine-shared": "route|dispatch|arrive up down0 combine0 shared|collect",
    "combine-down": "route|dispatch|arrive up down0 combine0 down1 combine1|collect shared",
}


@pytest.mark.parametrize("mode", ORDERS)
def test_what_communication_runs_beside(mode):
    told = Told()
    pieces = []
    for _ in sbo.schedule(told, mode):
        pieces.append(" ".join(told.log))
        told.log.clear()
    assert "|".join([*pieces, " ".join(told.log)]) == ORDERS[mode]


def test_an_unknown_order_is_refused():
    with pytest.raises(BadInput, match="sbo is 'fast', must be off, combine-down"):
        EngineConfig(sbo="fast")
