"""A checkpoint of the tiny model, for servers and their engines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from ess.models.load import EMBEDDED
from ess.models.registry import read_config
from tests.compressed import world


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint by published names, with the tokenizer of the model in the box."""
    made = tmp_path_factory.mktemp("v4") / "the-model"
    made.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, made / name)
    (made / "config.json").write_text(json.dumps(world.LISTED))
    drawn = world.weights(read_config(world.LISTED))
    save_file(world.published(drawn), made / "model.safetensors")
    return made
