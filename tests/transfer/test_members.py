"""A group is met as its lead presents it, or not at all."""

from __future__ import annotations

import random
from dataclasses import replace
from struct import pack_into

import pytest

from ess.errors import BadInput
from ess.transfer.members import METADATA_BYTES_MAX, joined, members_of
from ess.transfer.messages import MEMBERS_MAX, Heartbeat, Members, Seal
from tests.transfer.rigs import SEAL, identity

OTHERS = Seal(b"the secret of another deployment")
RANGES = [range(3), range(3, 7), range(7, 9)]


def group(ranges=RANGES) -> list[tuple[bytes, range]]:
    return [(identity().hello(address=b"at" * 9), layers) for layers in ranges]


def epochs_of(stages: list[tuple[bytes, range]]) -> list[int]:
    return [SEAL.opened(hello).sender for hello, _ in stages]


def framed(frames: list[bytes], *, version: int = 1, count: int | None = None) -> bytes:
    """Without any of the checks that `joined` makes."""
    count = len(frames) - 1 if count is None else count
    head = b"ESSM" + bytes([version, 0]) + count.to_bytes(2, "little")
    sizes = b"".join(len(frame).to_bytes(4, "little") for frame in frames)
    return head + sizes + b"".join(frames)


def test_all_members_are_presented_with_their_layers() -> None:
    stages = group()
    members = members_of(SEAL, joined(SEAL, stages))
    assert [member.epoch for member in members] == epochs_of(stages)
    assert [(member.metadata, member.layers) for member in members] == stages


def test_a_worker_that_has_all_layers_is_met_by_its_hello() -> None:
    who = identity()
    (member,) = members_of(SEAL, who.hello())
    assert (member.epoch, member.metadata, member.layers) == (who.epoch, who.hello(), None)


def test_groups_of_any_size_up_to_the_bound() -> None:
    for count in (1, MEMBERS_MAX):
        stages = group([range(n, n + 1) for n in range(count)])
        assert len(members_of(SEAL, joined(SEAL, stages))) == count
    for wrong in (0, MEMBERS_MAX + 1):
        stages = group([range(n, n + 1) for n in range(wrong)])
        with pytest.raises(BadInput, match=f"{wrong} workers hand over together"):
            joined(SEAL, stages)


def test_no_bit_can_be_another() -> None:
    metadata, draw = joined(SEAL, group()), random.Random(1)
    for place in [*range(64), *draw.sample(range(len(metadata)), 200)]:
        flipped = bytearray(metadata)
        flipped[place] ^= 1 << draw.randrange(8)
        with pytest.raises(BadInput):
            members_of(SEAL, bytes(flipped))


def test_nothing_shorter_or_longer_is_metadata() -> None:
    metadata = joined(SEAL, group())
    for size in range(len(metadata)):
        with pytest.raises(BadInput):
            members_of(SEAL, metadata[:size])
    for more in (b"x", metadata, bytes(METADATA_BYTES_MAX)):
        with pytest.raises(BadInput):
            members_of(SEAL, metadata + more)


def test_what_the_sizes_say_is_not_believed() -> None:
    metadata = joined(SEAL, group())
    for value in (0, 1, 1 << 20, (1 << 32) - 1):
        said = bytearray(metadata)
        pack_into("<I", said, 8, value)
        with pytest.raises(BadInput, match="frame"):
            members_of(SEAL, bytes(said))


def test_other_versions_and_counts_are_refused_by_name() -> None:
    frames = [SEAL.sealed(Heartbeat(1), sender=1, receiver=0)] * 2
    with pytest.raises(BadInput, match="metadata of version 2, not of 1"):
        members_of(SEAL, framed(frames, version=2))
    for count in (0, MEMBERS_MAX + 1):
        with pytest.raises(BadInput, match=f"metadata of {count} workers, must be 1 to 64"):
            members_of(SEAL, framed(frames, count=count))
    with pytest.raises(BadInput, match="Members were due, a Heartbeat came"):
        members_of(SEAL, framed(frames))


def test_a_stranger_claims_no_layers() -> None:
    """Neither with a secret of its own, nor with Hellos that it has seen."""
    stages = group()
    with pytest.raises(BadInput, match="not made with our secret"):
        joined(OTHERS, stages)
    epochs = epochs_of(stages)
    rows = tuple((epoch, of.start, of.stop) for epoch, (_, of) in zip(epochs, stages, strict=True))
    foreign = OTHERS.sealed(Members(rows), sender=epochs[0], receiver=0)
    with pytest.raises(BadInput, match="not made with our secret"):
        members_of(SEAL, framed([foreign, *(hello for hello, _ in stages)]))
    strange = replace(identity(), seal=OTHERS).hello()
    sealed = SEAL.sealed(Members(rows), sender=epochs[0], receiver=0)
    with pytest.raises(BadInput, match="not made with our secret"):
        members_of(SEAL, framed([sealed, stages[0][0], stages[1][0], strange]))


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 1), (0, 1, 1), (0, 1, 2, 2)])
def test_hellos_are_those_of_the_group_in_its_order(order: tuple[int, ...]) -> None:
    stages = group()
    rows = tuple(zip(epochs_of(stages), (0, 3, 7), (3, 7, 9), strict=True))
    sealed = SEAL.sealed(Members(rows), sender=rows[0][0], receiver=0)
    with pytest.raises(BadInput, match="are not the group that"):
        members_of(SEAL, framed([sealed, *(stages[number][0] for number in order)]))


def test_hellos_of_two_boots_are_no_group() -> None:
    """A stage has been started anew, and an attacker puts its new Hello in the place of the old."""
    stages, again = group(), identity().hello()
    rows = tuple(zip(epochs_of(stages), (0, 3, 7), (3, 7, 9), strict=True))
    sealed = SEAL.sealed(Members(rows), sender=rows[0][0], receiver=0)
    with pytest.raises(BadInput, match="are not the group that"):
        members_of(SEAL, framed([sealed, stages[0][0], again, stages[2][0]]))


def test_only_its_lead_speaks_for_a_group() -> None:
    stages = group()
    rows = tuple(zip(epochs_of(stages), (0, 3, 7), (3, 7, 9), strict=True))
    sealed = SEAL.sealed(Members(rows), sender=rows[1][0], receiver=0)
    with pytest.raises(BadInput, match=f"the group that {rows[1][0]:016x} leads"):
        members_of(SEAL, framed([sealed, *(hello for hello, _ in stages)]))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (((1, 0, 2), (1, 2, 4)), "two have the same epoch"),
        (((1, 2, 2),), "layers 2..2, which are not a range"),
        (((1, 3, 2),), "layers 3..2, which are not a range"),
        (((0, 0, 2),), "peer 0000000000000000"),
    ],
)
def test_members_that_cannot_be_are_not_sealed(rows: tuple, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        SEAL.sealed(Members(rows), sender=1, receiver=0)
