"""Workers that serve different weights learn of it before any row travels."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ess.errors import BadInput
from ess.models.load import EMBEDDED
from ess.models.weights.files.fingerprint import fingerprint


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED, tmp_path / "copy"))


def test_a_copy_has_the_same(copied: Path):
    (copied / "README.md").write_text("said about it, not it")
    assert fingerprint(copied) == fingerprint(EMBEDDED)


def test_other_weights_of_the_same_form_have_another(copied: Path):
    """As another training of the model has: every value differs, no size does."""
    [name] = copied.glob("*.safetensors")
    raw = bytearray(name.read_bytes())
    half = len(raw) // 2
    raw[half:] = bytes(byte ^ 1 for byte in raw[half:])
    name.write_bytes(raw)
    assert fingerprint(copied) != fingerprint(EMBEDDED)


def test_another_configuration_name_or_size_has_another(copied: Path):
    seen = {fingerprint(copied)}
    (copied / "config.json").write_text((copied / "config.json").read_text() + "\n")
    seen.add(fingerprint(copied))
    [name] = copied.glob("*.safetensors")
    moved = name.rename(copied / "weights.safetensors")
    seen.add(fingerprint(copied))
    moved.write_bytes(moved.read_bytes() + b"\0")
    seen.add(fingerprint(copied))
    assert len(seen) == 4


def test_no_checkpoint_has_none(tmp_path: Path):
    with pytest.raises(BadInput, match=r"config\.json"):
        fingerprint(tmp_path)
