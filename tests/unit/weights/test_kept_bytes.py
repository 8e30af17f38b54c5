"""What a plan says that a model keeps is what its tensors take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ess.kernels.cpu import native
from ess.models.load import load_model
from ess.models.weights.expected.kept_bytes import kept_bytes
from ess.models.weights.rank import Form
from ess.server.commands.start.files.checkpoint import held_bytes, read_checkpoint, read_entries
from tests.support.built import needs_native
from tests.support.checkpoints import TINY_AXK2, TINY_DOTS3, TINY_HY4, TINY_MISTRAL4
from tests.support.held import engine_bytes, held
from tests.unit.weights.conftest import SMALL

CASES = {
    "axk2": TINY_AXK2,
    "hy_v4": TINY_HY4,
    "tied": {**TINY_HY4, "tie_word_embeddings": True},
    "mistral_large4": TINY_MISTRAL4,
    "dots3": TINY_DOTS3,
}


@pytest.mark.parametrize("form", ["bf16", "f32"])
@pytest.mark.parametrize("raw", CASES.values(), ids=CASES)
def test_a_plan_says_what_a_model_takes(
    raw: dict[str, Any], form: Form, write: Any, tmp_path: Path
) -> None:
    write(tmp_path, raw, shard_count=1)
    made = load_model(tmp_path, form=form)
    sizes = {(each.data_ptr(), each.numel()): each.nbytes for each in held(made, set())}
    assert sum(sizes.values()) == kept_bytes(made.config, read_entries(tmp_path), form)


@pytest.mark.parametrize("raw", CASES.values(), ids=CASES)
def test_so_does_one_of_each_part(raw: dict[str, Any], write: Any, tmp_path: Path) -> None:
    write(tmp_path, raw, shard_count=1)
    entries = read_entries(tmp_path)
    config = load_model(tmp_path, form="f32").config
    middle = config.groups[len(config.groups) // 2][0]
    for part in (range(middle), range(middle, config.layer_count)):
        made = load_model(tmp_path, form="f32", layers=part)
        sizes = {(each.data_ptr(), each.numel()): each.nbytes for each in held(made, set())}
        assert sum(sizes.values()) == kept_bytes(config, entries, "f32", layers=part)


@needs_native
@pytest.mark.parametrize(
    ("kernels", "is_tied"), [("avx512", False), ("avx512_bf16", True), ("avx512_bf16", False)]
)
def test_a_plan_says_what_an_engine_on_a_cpu_holds(
    kernels: str, is_tied: bool, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed copies too, which machines without products of bfloat16 have in float32."""
    if kernels > native.kernels():
        pytest.skip(f"this machine has no products of bfloat16: {native.kernels()}")
    monkeypatch.setattr(native, "kernels", lambda: kernels)
    write(tmp_path, {**SMALL, "tie_word_embeddings": is_tied}, shard_count=1)
    checkpoint, forms = read_checkpoint(str(tmp_path)), ("bf16", "f32")
    for form in forms if is_tied else forms[:1]:
        held_now = engine_bytes(tmp_path, form)
        assert 0.97 * held_now < held_bytes(checkpoint, form) < 1.03 * held_now
