"""A team of ranks leaves what one rank leaves: rows, keys, windows and states."""

from __future__ import annotations

import pytest
import torch

from ess.prefill.team import Kind
from tests.support.few import pairs
from tests.team.rig import Made, alone, together

TEAMS = [("tp", 2), ("cp", 2), ("cp", 3)]
LENGTHS = (200, 2, 66, 129)
FEWER = (129, 2, 66)


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other), (mine != other).sum()


def check_bitwise(ours: list[Made], theirs: list[Made]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        same(mine.rows, other.rows)
        same(mine.keys, other.keys)
        same(mine.windows, other.windows)


def check_close(ours: list[Made], theirs: list[Made]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for rows, alone_rows in zip(mine.rows, other.rows, strict=True):
            values = rows.view(torch.float32), alone_rows.view(torch.float32)
            torch.testing.assert_close(*values, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(*pairs(family=("v32", "glm"), form=("f32", "fp8"), team=TEAMS))
def test_rows_keys_and_windows_are_those_of_one_rank(
    family: str, form: str, team: tuple[Kind, int]
):
    """Several prompts in a pack, in chunks of 64."""
    ours = together(*team, family, form, LENGTHS, 64)
    check_bitwise(ours, alone(family, form, LENGTHS, 64))


@pytest.mark.parametrize(("kind", "size"), TEAMS)
@pytest.mark.parametrize("length", [2, 3, 64, 65, 66, 130])
def test_prompts_around_the_size_of_a_team_and_of_a_page(kind: Kind, size: int, length: int):
    """One token for a team, fewer tokens than ranks, a chunk that ends at a page."""
    ours = together(kind, size, "glm", "f32", (length,), 64)
    check_bitwise(ours, alone("glm", "f32", (length,), 64))


@pytest.mark.parametrize(("kind", "size"), TEAMS)
def test_chunks_that_end_inside_a_page(kind: Kind, size: int):
    ours = together(kind, size, "v32", "f32", (150, 40), 47)
    check_bitwise(ours, alone("v32", "f32", (150, 40), 47))


@pytest.mark.parametrize("heads", [32, 4])
def test_heads_of_true_models_and_of_the_small_one_are_split_to_the_last_bit(heads: int):
    ours = together("tp", 2, "v32", "fp8", (129,), 64, heads=heads)
    check_bitwise(ours, alone("v32", "fp8", (129,), 64, heads=heads))


@pytest.mark.parametrize("family", ["v32", "glm"])
@pytest.mark.parametrize(("kind", "size"), TEAMS)
def test_rows_are_close_where_products_round_by_their_size(kind: Kind, size: int, family: str):
    """Where nothing is compiled products round by how many tokens they have."""
    ours = together(kind, size, family, "f32", FEWER, 64, backend="reference")
    check_close(ours, alone(family, "f32", FEWER, 64, backend="reference"))


@pytest.mark.parametrize("heads", [8, 12])
def test_rows_are_close_where_few_heads_are_split(heads: int):
    """Compiled attention adds up in another order for 4 to 8 heads than for more, or fewer."""
    ours = together("tp", 2, "v32", "f32", (129,), 64, heads=heads)
    check_close(ours, alone("v32", "f32", (129,), 64, heads=heads))
