"""Drawn configurations say what transformers says; a mistake in one number is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model import config_search
from tests.support import checkpoints

pytest.importorskip("transformers", reason="extra `oracle` (transformers==5.23.0) is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element"),  # torch: n_shared_experts 0
]
FAMILIES = [*config_search.FAMILIES]
SEEDS = range(len(FAMILIES))
MORE = range(SEEDS.stop, 200)


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_and_tokens_are_the_same(seed: int, tmp_path: Path) -> None:
    assert config_search.tried(seed, FAMILIES[seed % len(FAMILIES)], tmp_path)[1] == ""


@pytest.mark.long
@pytest.mark.parametrize("seed", MORE)
def test_so_they_are_in_many_configurations(seed: int, tmp_path: Path) -> None:
    assert config_search.tried(seed, FAMILIES[seed % len(FAMILIES)], tmp_path)[1] == ""


def test_a_mistake_in_one_number_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = checkpoints.model

    def mistaken(raw: dict[str, Any], **changes: Any) -> object:
        factor = 1.01 * raw["routed_scaling_factor"]
        return made({**raw, "routed_scaling_factor": factor}, **changes)

    monkeypatch.setattr(checkpoints, "model", mistaken)
    why = [config_search.tried(seed, "glm_moe_dsa", tmp_path / str(seed))[1] for seed in range(2)]
    assert any("from those of transformers" in each for each in why)
