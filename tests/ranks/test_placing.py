"""Experts with copies, placed by measured loads: the same tokens; the file of loads."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from ess.comm.experts.balance import balance, balanced
from ess.comm.experts.expert_ranks import ExpertRanks
from ess.comm.experts.loads import WINDOW_STEPS
from ess.comm.experts.placement import Placement, Places, even
from ess.comm.local import local_group
from ess.engine.config import ProcessConfig
from ess.engine.process.rank import loads_file, recorder
from ess.engine.ranks.agreement import Many, StepNeeds, expert_line
from ess.engine.ranks.placing import agreed_places, decided, read_loads, write_loads
from ess.errors import BadInput
from tests.comm.test_local import each
from tests.ranks.rig import EXPERTS, Task, run_ranks, weights
from tests.ranks.test_engines import BUSY, LATE, check

CONFIG = weights("v32")[0]
LAYERS = [layer for layer in range(CONFIG.layer_total) if CONFIG.has_experts(layer)]


def placed(ranks: int, redundant: int) -> Places:
    """Each layer in another way, with the busiest expert on all ranks."""
    drawn, own = random.Random(3), {}
    for layer in LAYERS:
        loads = [1000, *(drawn.randrange(100) for _ in range(EXPERTS - 1))]
        drawn.shuffle(loads)
        own[layer] = Placement(balanced(loads, ranks, redundant))
    return Places(Placement(balanced([1] * EXPERTS, ranks, redundant)), own)


@pytest.mark.parametrize(
    ("size", "redundant", "mtp", "tbo", "sbo", "is_fixed"),
    [
        (2, 4, 2, "on", "combine-down", False),
        (3, 4, 1, "off", "dispatch-shared", False),
        (3, 4, 2, "on", "combine-shared", True),
    ],
)
def test_copies_of_experts_change_no_token(size, redundant, mtp, tbo, sbo, is_fixed):
    """Three ranks could not share eight experts without copies."""
    places = placed(size, redundant)
    tasks = [BUSY, LATE, ()][:size]
    order = {"mtp": mtp, "tbo": tbo, "sbo": sbo}
    ranks = run_ranks("v32", tasks, places=places, modes="da", is_fixed=is_fixed, **order)
    check("v32", ranks)
    for rank in ranks:
        for layer in rank.engine.runner.model.layers[1:]:
            assert layer.experts.own_count == (EXPERTS + redundant) // size
    recent = [rank.expert_ranks.loads.recent() for rank in ranks]
    assert recent[0] == recent[-1], "ranks have counted differently"
    assert {*recent[0]} <= {*LAYERS}
    tokens = sum(rank.expert_ranks.traffic.token_count for rank in ranks)
    assert sum(map(sum, recent[0].values())) == tokens * CONFIG.experts_per_token > 0
    assert ranks[0].engine.expert_line() == expert_line(ranks[-1].expert_ranks)


def test_what_engines_have_chosen_is_recorded_and_places_the_next_ones(tmp_path: Path):
    """A window's loads, in a file that rank 0 alone has: both ranks then place alike, near
    the mean."""
    path = tmp_path / "loads.json"
    ranks = run_ranks("v32", [BUSY, (Task(0, 90, 12),)], modes="none")
    write_loads(path, ranks[0].expert_ranks)
    loads = read_loads(path, CONFIG)
    assert loads == ranks[1].expert_ranks.loads.recent()

    def act(group) -> Places:
        own = str(path) if group.rank == 0 else "/never/read"
        return agreed_places(group.team, CONFIG, redundant=2, path=own)

    first, second = each(local_group(2, team=2), act)
    assert first == second
    for layer, chosen in loads.items():
        assert balance(first.of(layer).places, chosen) > 0.9
        assert first.of(layer).place_count == EXPERTS // 2 + 1


def test_a_census_is_held_in_the_same_step_by_all_and_at_the_end(monkeypatch):
    monkeypatch.setattr("ess.engine.ranks.agreement.WINDOW_STEPS", 3)

    def act(group) -> list[int]:
        expert_ranks, held = ExpertRanks(group.team, even(EXPERTS, 2)), []
        many = Many(expert_ranks, on_meet=lambda: None, on_census=lambda: held.append(step))
        for step in range(9):
            is_quiet = step in (1, 2)
            many.meet(StepNeeds(token_count=int(group.rank == 0 and not is_quiet)))
        step = 9
        many.meet(StepNeeds(leaves=True))
        assert many.line().step_count == 7
        return held

    assert each(local_group(2, team=2), act) == [[5, 8, 9]] * 2


def test_a_file_is_recorded_and_read_by_the_same_ranks(tmp_path: Path, capsys):
    """It need not be there the first time; a few steps replace no file; a rank goes on without."""
    path = tmp_path / "loads.json"
    both = ProcessConfig(dp_size=2, expert_load=str(path), record_expert_load=str(path))
    assert loads_file(both) == ""
    assert loads_file(replace(both, record_expert_load="")) == str(path)
    expert_ranks = ExpertRanks(local_group(1)[0].team, even(EXPERTS, 1))
    record = recorder(both, expert_ranks)
    expert_ranks.loads.count(LAYERS[0], torch.arange(EXPERTS)[None])
    expert_ranks.loads.share(expert_ranks.team, 5)
    record()
    assert read_loads(Path(loads_file(both)), CONFIG) == {LAYERS[0]: [1] * EXPERTS}
    expert_ranks.loads.count(LAYERS[0], torch.arange(EXPERTS)[None])
    expert_ranks.loads.share(expert_ranks.team, WINDOW_STEPS - 6)
    record()
    assert read_loads(path, CONFIG) == {LAYERS[0]: [1] * EXPERTS}
    expert_ranks.loads.share(expert_ranks.team, 1)
    record()
    assert read_loads(path, CONFIG) == {LAYERS[0]: [2] * EXPERTS}
    recorder(replace(both, record_expert_load="/never/there"), expert_ranks)()
    assert "/never/there cannot be written: No such file" in capsys.readouterr().err


def test_without_loads_and_copies_experts_are_where_checkpoints_have_them():
    assert decided(CONFIG, 2, redundant=0, path="").usual == even(EXPERTS, 2).places
    assert not decided(CONFIG, 2, redundant=2, path="").own


GOOD = {
    "form": "ess expert loads 1",
    "steps": 9,
    "ranks": 2,
    "experts": EXPERTS,
    "layers": {str(LAYERS[0]): [1] * EXPERTS},
}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"form": "ess expert loads 2"}, "has the form 'ess expert loads 2'"),
        ({"layers": {"0": [1] * EXPERTS}}, "has layer 0, which has no experts here"),
        ({"layers": {"77": [1] * EXPERTS}}, "has layer 77"),
        ({"layers": {str(LAYERS[0]): [1]}}, f"has 1 loads for layer {LAYERS[0]}"),
        ({"layers": {str(LAYERS[0]): [*[1] * (EXPERTS - 1), -4]}}, "the least -4"),
        ({"layers": [3]}, "has no expert loads"),
        ({"steps": "x"}, "has no expert loads"),
    ],
)
def test_a_file_that_is_no_file_of_loads_is_refused(tmp_path: Path, changed: dict, says: str):
    path = tmp_path / "loads.json"
    path.write_bytes(msgspec.json.encode(GOOD))
    assert read_loads(path, CONFIG)
    path.write_bytes(msgspec.json.encode({**GOOD, **changed}))
    with pytest.raises(BadInput, match=r"loads\.json") as caught:
        read_loads(path, CONFIG)
    assert says in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path):
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        read_loads(tmp_path / "none.json", CONFIG)
    (tmp_path / "raw").write_bytes(b"\xff\x00" * 9)
    with pytest.raises(BadInput, match="has no expert loads"):
        read_loads(tmp_path / "raw", CONFIG)
