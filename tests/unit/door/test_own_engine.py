"""The example engine over the door, where its prompts are awkward."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

import ess

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "own_engine.py"


def example():
    spec = importlib.util.spec_from_file_location("own_engine", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_prompt_of_cached_pages_and_one_token_imports_nothing():
    own = example()
    model = own.ToyModel(seed=1)
    prompt = torch.arange(5 * 64 + 1).remainder(own.VOCABULARY).tolist()
    expected = own.decode(model, own.PlainStore(prompt, model), prompt[-1], 4)
    with ess.Offload.create(own.LAYOUT, slot_bytes="128KiB", host_bytes="4MiB") as offload:
        for cached_count in (0, 5 * 64):
            store = own.OffloadStore(prompt, model, offload)
            assert store.sequence.cached_count == cached_count
            assert own.decode(model, store, prompt[-1], 4) == expected
            store.sequence.close()
