"""Chosen entries of DeepSeek-V4 through `ess.Offload`: what the example does, against the plain."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import ess
from ess.models.compressed.plain import Plain
from tests.compressed import world
from tests.compressed.world import far
from tests.support import checkpoints

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "entries.py"
LENGTH, PROMPT, DRAFTS = 420, 330, 3
LINE = checkpoints.tokens(LENGTH, 96, seed=8)
WRONG = checkpoints.tokens(DRAFTS + 1, 96, seed=9)
NEAR = 1e-4
SLOTS = {"tight": 2 * 64, "ample": 2 * 192}
"""Of 105 entries in each of two layers."""


def example() -> Any:
    spec = importlib.util.spec_from_file_location("entries", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def offload_of(entries: Any, arena: str, *, drafts: int = 0) -> ess.Offload:
    layout = entries.layout_of(world.tiny().config, drafts=drafts)
    slot_bytes = SLOTS[arena] * layout.row_bytes
    return ess.Offload.create(
        layout, slot_bytes=slot_bytes, host_bytes="1MiB", length_max=1024, poison=True
    )


@pytest.mark.parametrize("arena", SLOTS)
def test_offloaded_entries_are_the_resident_ones(arena: str) -> None:
    """Prompt in odd pieces, then steps of one token, then drafts of which none to all stay."""
    entries, model = example(), world.tiny()
    whole = Plain(model).run(LINE)
    with offload_of(entries, arena, drafts=DRAFTS) as offload:
        plain = entries.OffloadedPlain(model, offload, drafts=DRAFTS)
        made = [plain.run(LINE[start : min(start + 37, PROMPT)]) for start in range(0, PROMPT, 37)]
        made += [plain.run([token]) for token in LINE[PROMPT : PROMPT + 21]]
        length, kept = PROMPT + 21, 1
        while length + DRAFTS < LENGTH:
            made += [plain.run(LINE[length : length + kept] + WRONG[kept:])[:kept]]
            plain.keep(length := length + kept)
            kept = kept % (DRAFTS + 1) + 1
        assert far(torch.cat(made), whole[:length]) < NEAR
        stats = offload.stats()
        plain.close()
        offload.check()
    if arena == "tight":
        assert int(stats.miss_count.sum()) > 100
        assert int(stats.evicted_count.sum()) > 100
    assert int(stats.stored_bytes.sum()) == 2 * (length // 4) * 4 * 32


def test_sequences_share_the_slots_and_nothing_else() -> None:
    entries, model = example(), world.tiny()
    lines = [checkpoints.tokens(200, 96, seed=seed) for seed in range(3)]
    with offload_of(entries, "tight") as offload:
        plains = [entries.OffloadedPlain(model, offload) for _ in lines]
        pieces: list[list[torch.Tensor]] = [[] for _ in lines]
        for start in range(0, 200, 25):
            for plain, line, made in zip(plains, lines, pieces, strict=True):
                made.append(plain.run(line[start : start + 25]))
                plain.keep(plain.length)
        for plain, line, made in zip(plains, lines, pieces, strict=True):
            assert far(torch.cat(made), Plain(model).run(line)) < NEAR
            plain.close()


def test_what_the_example_shows(capsys: pytest.CaptureFixture[str]) -> None:
    example().main()
    said = capsys.readouterr().out
    assert "1,200 tokens, 300 entries a layer, 128 slots a layer" in said
    assert "24 tokens the same both ways" in said
