"""DeepSeek-V4 against transformers 5.23: logits and greedy tokens, in one go and through caches."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ess.errors import BadInput
from ess.models.compressed.model import CompressedModel
from ess.models.compressed.plain import Plain
from ess.models.registry import read_config
from ess.models.weights.checkpoint import Checkpoint
from ess.models.weights.rank import RankWeights
from tests.compressed import world
from tests.compressed.world import far
from tests.support import checkpoints
from tests.support.few import few

pytest.importorskip("transformers", reason="extra `oracle` (transformers==5.23.0) is not installed")
from tests.support.oracle import Oracle

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4
LENGTHS = {"listed": 61, "ratios": 301}
PIECES = {
    "listed": [[7, 9, 13, 32], [16] + [1] * 45, [40] + [3] * 7],
    "ratios": [[100, 29, 1, 1, 124, 46], [255] + [1] * 46, [127, 1, 1, 172]],
}


class Case:
    def __init__(self, spelling: str, folder: Path) -> None:
        self.spelling, self.folder = spelling, folder
        self.model = world.tiny(spelling)
        self.tokens = checkpoints.tokens(LENGTHS[spelling], 96, seed=3)
        drawn = world.weights(self.model.config)
        self.raw = world.SPELLINGS[spelling]
        self.oracle = Oracle(folder, self.raw, world.published(drawn))
        self.whole = self.oracle.logits(self.tokens, [len(self.tokens)])


@pytest.fixture(scope="module", params=world.SPELLINGS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("oracle"))


def in_pieces(model: CompressedModel, tokens: list[int], pieces: list[int]) -> torch.Tensor:
    plain = Plain(model)
    stops = itertools.accumulate(pieces)
    return torch.cat([plain.run(tokens[b - n : b]) for b, n in zip(stops, pieces, strict=True)])


def test_logits_in_one_go_and_piece_by_piece(case: Case) -> None:
    assert float(case.whole.std()) > 0.5
    assert far(Plain(case.model).run(case.tokens), case.whole) < TOLERANCE
    for pieces in PIECES[case.spelling]:
        ours = in_pieces(case.model, case.tokens, pieces)
        assert far(ours, case.oracle.logits(case.tokens, pieces)) < TOLERANCE
        assert far(ours, case.whole) < TOLERANCE
        assert torch.equal(ours.argmax(-1), case.whole.argmax(-1))


def test_greedy_tokens(case: Case) -> None:
    count = 12
    for length in (1, 2, 3, 5, 11, 30):
        plain, prompt = Plain(case.model), case.tokens[:length]
        said = [int(plain.run(prompt)[-1].argmax())]
        while len(said) < count:
            said.append(int(plain.run(said[-1:])[-1].argmax()))
        assert said == case.oracle.greedy(prompt, count), length


def test_several_sequences_side_by_side(case: Case) -> None:
    lines = [checkpoints.tokens(37, 96, seed=seed) for seed in range(4)]
    theirs = case.oracle.side_by_side(lines)
    plains = [Plain(case.model) for _ in lines]
    ours: list[list[torch.Tensor]] = [[] for _ in lines]
    for begin, stop in ((0, 10), (10, 11), (11, 37)):
        for number, plain in enumerate(plains):
            ours[number].append(plain.run(lines[number][begin:stop]))
    assert far(torch.stack([torch.cat(made) for made in ours]), theirs) < TOLERANCE


def test_every_boundary_of_a_window(case: Case) -> None:
    """A cut at each offset of both compressions, and in the middle of the last tokens."""
    model, tokens = case.model, case.tokens
    cuts = range(1, 50) if case.spelling == "listed" else range(1, 300, 7)
    near = () if case.spelling == "listed" else (*range(124, 134), *range(252, 262))
    for cut in (*cuts, *near):
        logits = in_pieces(model, tokens, [cut, len(tokens) - cut])
        assert far(logits, case.whole) < TOLERANCE, cut


@pytest.mark.parametrize("turn", few([0], all_of=[0, 1]))
def test_drafts_are_taken_back_at_every_length(case: Case, turn: int) -> None:
    """Ten rows verified, one to eight of them kept, every second count in turn; then the text goes
    on."""
    model, tokens = case.model, case.tokens
    starts = range(16, 25) if case.spelling == "listed" else range(120, 130)
    wrong = checkpoints.tokens(10, 96, seed=77)
    begun = Plain(model, drafts=world.DRAFTS)
    for start, kept in itertools.product(starts, range(1, 9)):
        if (start // 4 + kept) % 2 != turn:
            continue
        if start > begun.length:
            begun.run(tokens[begun.length : start])
        plain = begun.fork()
        verified = plain.run(tokens[start : start + kept] + wrong[kept:])
        plain.keep(start + kept)
        after = plain.run(tokens[start + kept : start + kept + 20])
        theirs = case.whole[start : start + kept + 20]
        assert far(torch.cat((verified[:kept], after)), theirs) < TOLERANCE, (start, kept)


def test_a_checkpoint_is_read(case: Case, tmp_path: Path) -> None:
    """What transformers saves has no MTP module, whatever its configuration says."""
    case.oracle.save(tmp_path)
    if case.model.config.mtp_layer_count:
        with pytest.raises(BadInput, match=r"lacks .* tensors: 'mtp\.0\."):
            Checkpoint(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "num_nextn_predict_layers": 0}))
    for folder in (case.folder, tmp_path):
        with Checkpoint(folder) as checkpoint:
            model = CompressedModel(
                checkpoint.model_config, RankWeights(checkpoint, form="f32").tensor
            )
        assert checkpoint.model_config.compressed == case.model.config.compressed
        assert far(Plain(model).run(case.tokens), case.whole) < TOLERANCE


def test_the_true_configuration_is_as_large_as_theirs() -> None:
    """Parameters and tables, without one value of them."""
    import transformers

    from ess.models.weights.expected.dry_run import make_plan
    from ess.models.weights.expected.dry_run import read_config as published

    raw: dict[str, Any] = published("deepseek-v4-flash")
    for key in ("quantization_config", "expert_dtype"):
        raw.pop(key)
    config = transformers.CONFIG_MAPPING["deepseek_v4"](
        **{key: value for key, value in raw.items() if key not in ("model_type", "architectures")}
    )
    with torch.device("meta"):
        theirs = transformers.DeepseekV4ForCausalLM(config).state_dict().values()
    assert make_plan(raw, mtp=False).whole.values == sum(tensor.numel() for tensor in theirs)
    assert list(config.layer_types) == [
        {
            "window": "sliding_attention",
            "sparse": "compressed_sparse_attention",
            "heavy": "heavily_compressed_attention",
        }[kind]
        for kind in read_config(raw).compressed.kinds[:43]  # type: ignore[union-attr]
    ]
