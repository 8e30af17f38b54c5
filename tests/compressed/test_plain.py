"""DeepSeek-V4 against itself: pieces, rejection, forks, poison, saved bytes."""

from __future__ import annotations

import itertools

import pytest
import torch

from ess.errors import BadInput
from ess.models.compressed.form import HEADER_BYTES
from ess.models.compressed.model import CompressedModel
from ess.models.compressed.plain import Plain, resumed
from ess.models.registry import read_config
from tests.compressed import world
from tests.compressed.world import DRAFTS, far
from tests.support import checkpoints

LENGTH, NEAR = 53, 1e-5
LINE = checkpoints.tokens(LENGTH, 96, seed=5)
WRONG = checkpoints.tokens(DRAFTS + 1, 96, seed=6)


@pytest.fixture(scope="module")
def whole() -> torch.Tensor:
    return Plain(world.tiny()).run(LINE)


def at(length: int) -> Plain:
    plain = Plain(world.tiny(), drafts=DRAFTS)
    if length:
        plain.run(LINE[:length])
    plain.keep(length)
    return plain


def stored(plain: Plain) -> list[torch.Tensor]:
    return plain.save()[1]


def test_pieces_of_every_length_say_the_same(whole: torch.Tensor) -> None:
    for first, second in itertools.product(range(1, 10), range(1, 10)):
        plain = Plain(world.tiny())
        stops = (0, first, first + second, LENGTH)
        made = [plain.run(LINE[begin:stop]) for begin, stop in itertools.pairwise(stops)]
        assert far(torch.cat(made), whole) < NEAR, (first, second)


def test_entries_are_stored_when_their_tokens_are_accepted() -> None:
    """Rates 8, 4 and 4; the keys of an indexer as its entries."""
    plain = Plain(world.tiny(), drafts=DRAFTS)
    plain.run(LINE[:14])
    assert [len(rows) for rows in stored(plain)] == [1, 3, 3, 3, 3, 1]
    plain.run(LINE[14:24])
    held = [layer.entries.stored.length for layer in plain.layers if layer.entries]
    assert held == [1, 3, 3, 1]
    plain.keep(15)
    assert [len(rows) for rows in stored(plain)] == [1, 3, 3, 3, 3, 1]
    plain.run(LINE[15:16])
    assert [len(rows) for rows in stored(plain)] == [2, 4, 4, 4, 4, 2]


@pytest.mark.parametrize("start", range(16, 24))
def test_rejected_drafts_leave_nothing(start: int, whole: torch.Tensor) -> None:
    """At each offset of both windows; whatever was kept, the entries are those of no drafts."""
    for kept in range(1, DRAFTS + 1):
        plain = at(start)
        plain.run(LINE[start : start + kept] + WRONG[kept:])
        plain.keep(start + kept)
        for rows, others in zip(stored(plain), stored(at(start + kept)), strict=True):
            assert far(rows, others) < NEAR
        stop = start + kept + 20
        assert far(plain.run(LINE[start + kept : stop]), whole[start + kept : stop]) < NEAR


def test_drafts_step_after_step(whole: torch.Tensor) -> None:
    """Ten rows a step, of which one to ten stay in turn."""
    plain, length, kept = at(3), 3, 1
    while length + DRAFTS < LENGTH:
        right = min(kept, LENGTH - length)
        logits = plain.run(LINE[length : length + right] + WRONG[right:])
        assert far(logits[:right], whole[length : length + right]) < NEAR, length
        length, kept = length + right, kept % (DRAFTS + 1) + 1
        plain.keep(length)


def poison(plain: Plain) -> int:
    """NaN in all lines that no later token may read; how many of them."""
    count, state = 0, plain.state
    for field in state.form.fields:
        lines = state.lines(field, state.form.offset(field.name, field.layer))
        readable = range(max(0, state.length - field.lines + DRAFTS), state.length)
        gone = set(range(field.lines)) - {position % field.lines for position in readable}
        for line in gone:
            lines[line] = torch.nan
        count += len(gone)
    return count


@pytest.mark.parametrize("length", [1, 7, 16, 23, 40])
def test_lines_that_mean_nothing_are_not_read(length: int) -> None:
    plain, other = at(length - 1), at(length - 1)
    for each in (plain, other):
        each.run(LINE[length - 1 : length] + WRONG[1:])
        each.keep(length)
    assert poison(plain) >= len(plain.state.form.fields) * DRAFTS
    rest = LINE[length : length + 12]
    for part in (rest[:1], rest[1:]):
        assert torch.equal(plain.run(part), other.run(part))


def test_what_is_read_is_not_poison() -> None:
    """The lines that the test above leaves alone are those that are read."""
    plain = at(23)
    for field in plain.state.form.fields:
        plain.state.lines(field, plain.state.form.offset(field.name, field.layer))[:] = torch.nan
    assert plain.run(LINE[23:24]).isnan().all()


def test_at_a_boundary_of_both_windows_little_is_needed(whole: torch.Tensor) -> None:
    """What a prefix may be kept with: the last rows, and series A of the last window of four."""
    for length in (8, 16, 40):
        plain = at(length)
        for field in plain.state.form.fields:
            lines = plain.state.lines(field, plain.state.form.offset(field.name, field.layer))
            if field.name == "window":
                needed = range(max(0, length - 5), length)
                gone = set(range(field.lines)) - {position % field.lines for position in needed}
                lines[sorted(gone)] = torch.nan
            elif field.lines == 8 + DRAFTS and field.width in (4 * 32, 4 * 16):
                last = [position % field.lines for position in range(length - 4, length)]
                kept = lines[last].view(4, 2, 2, -1)[:, :, 0].clone()
                lines[:] = torch.nan
                lines.view(field.lines, 2, 2, -1)[last, :, 0] = kept
            else:
                lines[:] = torch.nan
        assert far(plain.run(LINE[length:]), whole[length:]) < NEAR


def test_forks_go_their_own_way(whole: torch.Tensor) -> None:
    for length in (3, 17, 24):
        plain = at(length)
        fork = plain.fork()
        fork.run(WRONG * 3)
        assert far(plain.run(LINE[length:]), whole[length:]) < NEAR


def test_a_saved_sequence_goes_on(whole: torch.Tensor) -> None:
    """The state has one size at every length, whatever the entries have."""
    form = at(1).state.form
    for length in (1, 6, 17, 31, 48):
        state, rows = at(length).save()
        assert len(state) == HEADER_BYTES + 4 * form.values
        resting = resumed(world.tiny(), (state, rows), drafts=DRAFTS)
        assert torch.equal(resting.run(LINE[length:]), at(length).run(LINE[length:]))
        assert (
            far(
                resumed(world.tiny(), (state, rows), drafts=DRAFTS).run(LINE[length:]),
                whole[length:],
            )
            < NEAR
        )


def test_sequences_of_one_model_do_not_meet() -> None:
    lines = [checkpoints.tokens(30, 96, seed=seed) for seed in range(3)]
    alone = [Plain(world.tiny()) for _ in lines]
    beside = [Plain(world.tiny()) for _ in lines]
    steps = ((0, 9), (9, 10), (10, 30))
    expected = [[p.run(t[a:b]) for a, b in steps] for p, t in zip(alone, lines, strict=True)]
    for number, (a, b) in enumerate(steps):
        for sequence, plain in enumerate(beside):
            assert torch.equal(plain.run(lines[sequence][a:b]), expected[sequence][number])


def test_what_cannot_be_is_refused() -> None:
    plain = at(20)
    for wrong in (21, 20 - DRAFTS - 1, -1):
        with pytest.raises(BadInput, match=f"cannot be cut to {wrong}"):
            plain.keep(wrong)
    with pytest.raises(BadInput, match=r"tokens 5\.\.96 are outside"):
        plain.run([5, 96])
    with pytest.raises(BadInput, match="no tokens"):
        plain.run([])
    state, rows = plain.save()
    with pytest.raises(BadInput, match="a saved state has"):
        resumed(world.tiny(), (state[:-1], rows), drafts=DRAFTS)
    with pytest.raises(BadInput, match="a saved state has"):
        resumed(world.tiny(), (state, rows), drafts=DRAFTS - 1)
    with pytest.raises(BadInput, match="of 5 compressors were saved, not of 6"):
        resumed(world.tiny(), (state, rows[1:]), drafts=DRAFTS)
    with pytest.raises(BadInput, match="says that"):
        resumed(world.tiny(), (b"\xff" * 16 + state[16:], rows), drafts=DRAFTS)
    assert plain.length == 20


PARTS = [
    *("attn_sink", "q_norm.weight", "attn.kv_norm.weight", "wo_a.weight", "wo_b.weight"),
    *("attn.compressor.ape", "attn.compressor.norm.weight", "attn.compressor.wgate.weight"),
    *("indexer.compressor.ape", "indexer.compressor.norm.weight", "indexer.weights_proj.weight"),
    *("indexer.compressor.wgate.weight", "indexer.wq_b.weight", "gate.tid2eid", "attn_norm.weight"),
    *("gate.e_score_correction_bias", "hc_attn_fn", "hc_attn_base", "hc_attn_scale", "hc_ffn_fn"),
    *("hc_ffn_base", "hc_ffn_scale", "hc_head_fn", "hc_head_base", "ffn_norm.weight"),
    *("shared_experts.gate_proj.weight", "norm.weight"),
]


@pytest.mark.parametrize("part", PARTS)
def test_what_the_family_adds_changes_its_logits(part: str, whole: torch.Tensor) -> None:
    """A part that is left out would be seen."""
    config = read_config(world.LISTED)
    weights = world.weights(config)
    touched = [name for name in weights if name.endswith(part)]
    assert touched
    for name in touched:
        weights[name] = weights[name].flip(0)
    logits = Plain(CompressedModel(config, weights.__getitem__)).run(LINE)
    assert far(logits, whole) > 1e-3


def test_a_table_that_names_no_expert_is_refused() -> None:
    config = read_config(world.LISTED)
    weights = world.weights(config)
    weights["layers.1.ffn.gate.tid2eid"][3, 1] = 8
    with pytest.raises(BadInput, match=r"gate.tid2eid has experts 0..8, of 8"):
        CompressedModel(config, weights.__getitem__)
