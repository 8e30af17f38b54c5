"""DeepSeek-V4's MTP module: no other implementation is at hand, so a slow one without rings stands
in, which computes all positions of a text at once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ess.errors import BadInput
from ess.models.compressed.attention import attend
from ess.models.compressed.model import CompressedModel
from ess.models.compressed.plain import Plain
from ess.models.load import load_model
from ess.models.registry import read_config
from tests.compressed import world
from tests.compressed.world import far
from tests.support import checkpoints

LENGTH, NEAR, VERIFIED = 40, 1e-5, 4
LINE = checkpoints.tokens(LENGTH + 1, 96, seed=5)
WRONG = checkpoints.tokens(VERIFIED, 96, seed=6)


def module_of(model: CompressedModel) -> Any:
    assert model.module is not None
    return model.module


def streams_of(model: CompressedModel, tokens: list[int]) -> Tensor:
    """What the last layer makes of each position."""
    plain = Plain(model)
    plain.run(tokens)
    return plain._ran


def at_once(model: CompressedModel, following: list[int], streams: Tensor) -> Tensor:
    """The module's layer over positions 0, 1, ... of one text, by a mask."""
    module, ids = module_of(model), torch.tensor(following)
    layer, attention = module.layer, module.layer.attention
    window = model.config.compressed.window  # type: ignore[union-attr]
    positions = torch.arange(len(ids))
    rotation = model.turning("window").at(positions)
    joined = module.join(model.embed(ids)[:, 0], streams)
    read = layer.around_attention.read(joined)
    hidden = layer.attention_norm(read.sum)
    queries = attention.queries(attention.query(hidden), rotation)
    ages = positions[:, None] - positions
    seen = (ages >= 0) & (ages < window)
    rows = attention.rows(hidden, rotation)
    attended = attend(queries, rows, seen, scale=attention.scale, sinks=attention.sinks)
    made = attention.output(attended, rotation)
    return layer.mlp(layer.around_attention.write(joined, read, made), ids)


def slow_guesses(model: CompressedModel, tokens: list[int], known: int, count: int) -> Tensor:
    """Behind `tokens` and the known one: all rows are made again for each guess."""
    following, streams, logits = [*tokens[1:], known], streams_of(model, tokens), list[Tensor]()
    while len(logits) < count:
        made = at_once(model, following, streams)
        logits.append(model.logits(module_of(model).finish(made[-1:])))
        following = [*following, int(logits[-1].argmax())]
        streams = torch.cat((streams, made[-1:]))
    return torch.cat(logits)


@pytest.fixture(scope="module")
def whole() -> Tensor:
    return slow_guesses(world.tiny(), LINE[:-1], LINE[-1], VERIFIED)


@pytest.mark.parametrize("spelling", world.SPELLINGS)
@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 21, 40])
def test_guesses_are_those_of_all_positions_at_once(spelling: str, length: int) -> None:
    """Windows of 6 and of 20 tokens."""
    model = world.tiny(spelling)
    plain = Plain(model, drafts=VERIFIED)
    plain.run(LINE[:length])
    made = plain.guesses(LINE[1 : length + 1], VERIFIED)
    assert far(made, slow_guesses(model, LINE[:length], LINE[length], VERIFIED)) < NEAR


def test_pieces_of_every_length_make_the_same_rows(whole: Tensor) -> None:
    for first, second in ((1, 1), (3, 8), (6, 5), (9, 1)):
        plain = Plain(world.tiny(), drafts=VERIFIED)
        stops = (0, first, first + second, *range(first + second + 1, LENGTH, 3), LENGTH)
        for begin, stop in itertools.pairwise(stops):
            plain.run(LINE[begin:stop])
            made = plain.guesses(LINE[begin + 1 : stop + 1], VERIFIED)
        assert far(made, whole) < NEAR, (first, second)


@pytest.mark.parametrize("start", range(24, 32))
def test_guesses_behind_rejected_drafts(start: int, whole: Tensor) -> None:
    """Rows of rejected tokens and of guesses are made again."""
    for kept in range(1, VERIFIED + 1):
        plain = Plain(world.tiny(), drafts=VERIFIED)
        plain.run(LINE[:start])
        plain.guesses(LINE[1 : start + 1], VERIFIED - 1)
        plain.run(LINE[start : start + kept] + WRONG[kept:])
        plain.keep(start + kept)
        plain.guesses(LINE[start + 1 : start + kept + 1], VERIFIED - 1)
        plain.run(LINE[start + kept : LENGTH])
        made = plain.guesses(LINE[start + kept + 1 :], VERIFIED)
        assert far(made, whole) < NEAR, kept


def test_the_main_model_does_not_see_it() -> None:
    one, other = (Plain(world.tiny(), drafts=VERIFIED) for _ in range(2))
    for begin in range(0, LENGTH, 4):
        part = LINE[begin : begin + 4]
        assert torch.equal(one.run(part), other.run(part))
        one.guesses(LINE[begin + 1 : begin + 5], VERIFIED)


PARTS = [
    *("enorm.weight", "hnorm.weight", "e_proj.weight", "h_proj.weight", "norm.weight"),
    *("hc_head_fn", "hc_head_base", "hc_head_scale", "hc_attn_fn", "hc_ffn_base"),
    *("attn.attn_sink", "attn.wkv.weight", "attn.wo_b.weight", "attn_norm.weight"),
    *("ffn.gate.weight", "ffn.gate.e_score_correction_bias"),
    *("ffn.shared_experts.up_proj.weight", "down_proj.weight"),
]


@pytest.mark.parametrize("part", PARTS)
def test_each_part_changes_guesses_and_no_logits(part: str, whole: Tensor) -> None:
    config = read_config(world.LISTED)
    weights = world.weights(config)
    touched = [name for name in weights if name.startswith("mtp.0.") and name.endswith(f".{part}")]
    assert touched
    for name in touched:
        weights[name] = weights[name].flip(0) if weights[name].numel() > 1 else 2 * weights[name]
    plain = Plain(CompressedModel(config, weights.__getitem__), drafts=VERIFIED)
    assert torch.equal(plain.run(LINE[:-1]), Plain(world.tiny()).run(LINE[:-1]))
    assert far(plain.guesses(LINE[1:], VERIFIED), whole) > 1e-4


# ---- checkpoints


def saved(folder: Path, raw: dict[str, Any], drawn: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(world.published(drawn), folder / "model.safetensors")
    return folder


def drawn() -> dict[str, Tensor]:
    """With copies of the model's embedding and head, which some files have."""
    made = world.weights(read_config(world.LISTED))
    copies = {"mtp.0.emb.tok_emb.weight": "embed.weight", "mtp.0.head.weight": "head.weight"}
    return {**made, **{copy: made[name].flip(0) for copy, name in copies.items()}}


def test_a_checkpoint_is_read(tmp_path: Path, whole: Tensor) -> None:
    model = load_model(saved(tmp_path, world.LISTED, drawn()), form="f32")
    assert isinstance(model, CompressedModel)
    plain = Plain(model, drafts=VERIFIED)
    plain.run(LINE[:-1])
    assert far(plain.guesses(LINE[1:], VERIFIED), whole) < NEAR


def test_a_module_that_nobody_asks_for_is_not_read(tmp_path: Path) -> None:
    raw = {**world.LISTED, "num_nextn_predict_layers": 0}
    model = load_model(saved(tmp_path, raw, drawn()), form="f32")
    assert isinstance(model, CompressedModel)
    plain = Plain(model)
    assert torch.equal(plain.run(LINE), Plain(world.tiny()).run(LINE))
    with pytest.raises(BadInput, match="this deepseek_v4 checkpoint has no MTP module"):
        plain.guesses(LINE[1:], 1)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    left = drawn()
    del left["mtp.0.h_proj.weight"]
    with pytest.raises(BadInput, match=r"lacks tensor 'mtp.0.h_proj.weight'"):
        load_model(saved(tmp_path, world.LISTED, left), form="f32")


def test_the_module_routes_by_its_gate() -> None:
    """However many layers have a table."""
    raw = {**world.LISTED, "mlp_layer_types": ["hash_moe"] * 5}
    names = {name for name in world.weights(read_config(raw)) if "tid2eid" in name}
    assert names == {f"layers.{layer}.ffn.gate.tid2eid" for layer in range(5)}
