"""A model in parts: what a part reads, and that parts in a row are the whole model bit for bit."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch

from ess.door import Offload
from ess.door import Sequence as Opened
from ess.engine.config import EngineConfig
from ess.engine.prompt.pack import Span
from ess.engine.prompt.run import Hooks, Prefilled, run_part
from ess.engine.step.runner import made_runner
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.models.load import load_model
from ess.models.model import Model
from ess.models.registry import build, read_config
from ess.models.weights.checkpoint import Checkpoint
from tests.support.checkpoints import GLM, tensors, tokens
from tests.support.few import pairs

GROUPED = {
    **GLM,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 7,
    "index_topk": 24,
    "index_n_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_topk_freq": 3,
}
"""Layer groups (0), (1, 2, 3), (4, 5, 6) and the MTP layer."""

LENGTHS = (300, 131)
CUTS = (0, 64, 128, 130, 299)
"""Chunk boundaries; the second prompt ends within the third chunk."""


@functools.cache
def model_of(family: str, part: range | None) -> Model:
    if family == "deepseek":
        return load_model(form="f32", layers=part)
    config = read_config(GROUPED)
    return build(config, weights().__getitem__, layers=part)


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    return tensors(read_config(GROUPED))


def prompts(model: Model) -> list[list[int]]:
    return [tokens(length, model.config.vocab_size, seed=length) for length in LENGTHS]


@dataclass
class Stage:
    """One part of a model over an offload of its own, and what it makes of the prompts."""

    runner: object
    opened: list[Opened]
    told: list[int]
    windows: list[list[torch.Tensor]]

    def run(self, start: int, stop: int, given: torch.Tensor | None) -> torch.Tensor:
        spans = [
            Span(
                sequence=sequence,
                start=start,
                tokens=sequence.tokens[start : min(stop, len(sequence.tokens) - 1)],
                following=sequence.tokens[start + 1 : min(stop, len(sequence.tokens) - 1) + 1],
            )
            for sequence in self.opened
            if start < len(sequence.tokens) - 1
        ]
        before = None if given is None else given.clone()
        hooks = Hooks(on_layer=self.told.append)
        made, hidden = run_part(self.runner, spans, given=given, hooks=hooks)
        assert before is None or torch.equal(given, before), "what is given stays as it is"
        self.windows.append([each.windows for each in made])
        self._check(made, hidden)
        return hidden

    def _check(self, made: list[Prefilled], hidden: torch.Tensor) -> None:
        assert torch.equal(torch.cat([each.hidden for each in made]), hidden)
        assert hidden.dtype == torch.float32

    def rows(self) -> list[torch.Tensor]:
        """Of each layer, its bytes of all prompts, one behind the other."""
        memory, layout = self.runner.offload.memory, self.runner.offload.layout
        at = torch.cat([each.host_rows(0, len(each.tokens) - 1) for each in self.opened]).long()
        return [memory(layer).host[at] for layer in range(layout.layer_total)]

    def key_pages(self) -> list[torch.Tensor]:
        memory, layout = self.runner.offload.memory, self.runner.offload.layout
        at = torch.cat([each.page_table for each in self.opened]).long()
        at = at[at >= 0]
        return [memory(group[0]).key_pages[at] for group in layout.groups]


def stage(model: Model, layout: ModelLayout, *, deterministic: bool) -> Stage:
    offload = Offload.create(
        layout,
        slot_bytes=2 * layout.group_count * layout.chunk_bytes,
        host_bytes=12 * layout.host_page_bytes,
        length_max=512,
        slot_floor=64,
        poison=True,
    )
    runner = made_runner(model, offload, EngineConfig(deterministic=deterministic))
    opened = [offload.open(ids, length_max=320) for ids in prompts(model)]
    return Stage(runner, opened, [], [])


def ran(stages: list[Stage]) -> list[torch.Tensor]:
    """All chunks through all stages; what the last one makes of each."""
    hiddens = []
    with torch.inference_mode():
        for start, stop in itertools.pairwise(CUTS):
            hidden = None
            for each in stages:
                hidden = each.run(start, stop, hidden)
            hiddens.append(hidden)
    return hiddens


@functools.cache
def whole(family: str, form: str, deterministic: bool):
    model = model_of(family, None)
    only = stage(model, model.config.layout(row=form, index=form), deterministic=deterministic)
    return only, ran([only])


CUT = {
    "deepseek in 2": ("deepseek", (0, 3, 6)),
    "deepseek in 4": ("deepseek", (0, 1, 2, 4, 6)),
    "grouped in 2": ("grouped", (0, 4, 7)),
    "grouped in 3": ("grouped", (0, 1, 4, 7)),
}


@pytest.mark.parametrize(*pairs(cut=[*CUT], form=("f32", "fp8"), deterministic=(False, True)))
def test_parts_in_a_row_make_the_whole_model_s_rows_keys_windows_and_states(
    cut, form, deterministic
):
    family, cuts = CUT[cut]
    layout = model_of(family, None).config.layout(row=form, index=form)
    stages = [
        stage(model_of(family, range(a, b)), layout.part(a, b), deterministic=deterministic)
        for a, b in itertools.pairwise(cuts)
    ]
    hiddens = ran(stages)
    only, wanted = whole(family, form, deterministic)
    assert all(map(torch.equal, hiddens, wanted))
    for made, expected in (
        ([rows for each in stages for rows in each.rows()], only.rows()),
        ([keys for each in stages for keys in each.key_pages()], only.key_pages()),
    ):
        assert len(made) == len(expected)
        assert all(map(torch.equal, made, expected))
    for chunk, expected in enumerate(only.windows):
        for span, windows in enumerate(expected):
            joined = torch.cat([each.windows[chunk][span] for each in stages])
            assert torch.equal(joined, windows)


@pytest.mark.parametrize("family", ["deepseek", "grouped"])
def test_a_stage_tells_of_its_layers_by_their_numbers_within_it(family):
    cut = 4
    layout = model_of(family, None).config.layout(row="f32", index="f32")
    stages = [
        stage(model_of(family, range(a, b)), layout.part(a, b), deterministic=False)
        for a, b in ((0, cut), (cut, layout.layer_count))
    ]
    ran(stages)
    chunks = len(CUTS) - 1
    assert stages[0].told == list(range(cut)) * chunks
    assert stages[1].told == list(range(layout.layer_total - cut)) * chunks


def test_a_part_reads_its_own_tensors_and_each_of_them_once(monkeypatch):
    taken: list[str] = []
    stored = Checkpoint.stored

    def counted(self: Checkpoint, name: str) -> torch.Tensor:
        taken.append(name)
        return stored(self, name)

    monkeypatch.setattr(Checkpoint, "stored", counted)
    load_model()
    all_names, taken = taken, []
    ends = {"model.norm.weight", "lm_head.weight"}
    embedding = "model.embed_tokens.weight"
    for part, outside, mtp in (
        (range(2), {embedding}, False),
        (range(2, 4), set(), False),
        (range(4, 6), {embedding, *ends}, True),
    ):
        model = load_model(layers=part)
        layers = [*part, 6] if mtp else list(part)
        wanted = [
            name
            for name in all_names
            if name in outside or any(name.startswith(f"model.layers.{n}.") for n in layers)
        ]
        assert sorted(taken) == sorted(wanted), part
        assert (model.is_first, model.is_last) == (part.start == 0, part.stop == 6)
        assert [layer.number for layer in model.layers] == list(range(2))
        assert (model.mtp is not None) == mtp
        taken = []


def test_the_parts_of_a_layout_are_numbered_from_0_and_know_where_they_begin():
    layout = ModelLayout.glm_52()
    parts = [layout.part(0, 22), layout.part(22, 50), layout.part(50, 78)]
    assert [part.layer_count for part in parts] == [22, 28, 28]
    assert [part.mtp_layer_count for part in parts] == [0, 0, 1]
    assert [part.first_layer for part in parts] == [0, 22, 50]
    starts = [0, parts[0].group_count, parts[0].group_count + parts[1].group_count]
    assert [part.first_group for part in parts] == starts
    assert sum(part.group_count for part in parts) == layout.group_count
    for part in parts:
        for number, group in enumerate(part.groups):
            shifted = tuple(layer + part.first_layer for layer in group)
            assert shifted == layout.groups[number + part.first_group]
    assert parts[1].part(4, 28).first_layer == 26
    assert parts[1].part(4, 28).first_group == starts[1] + 1
    assert layout.part(0, 78) == layout
    assert sum(part.host_page_bytes for part in parts) == layout.host_page_bytes


@pytest.mark.parametrize(
    ("first", "stop", "says"),
    [
        (0, 5, "cannot begin at layer 5: layers 2..5 share one selection"),
        (4, 10, "cannot begin at layer 4: layers 2..5 .* a part begins at 2 or 6"),
        (2, 2, "layers 2..1 are no part of layers 0..77"),
        (-1, 2, "layers -1..1"),
        (74, 79, "layers 74..78 are no part of layers 0..77"),
    ],
)
def test_a_part_that_cannot_stand_alone_is_refused(first, stop, says):
    layout = ModelLayout.glm_52()

    assert layout.groups[2] == (2, 3, 4, 5)
    with pytest.raises(BadInput, match=says):
        layout.part(first, stop)


def test_a_model_s_part_is_refused_where_its_layout_s_is():
    config = read_config(GROUPED)
    with pytest.raises(BadInput, match=r"begin at layer 2: layers 1..3 share"):
        build(config, weights().__getitem__, layers=range(2, 7))
    with pytest.raises(BadInput, match=r"layers 0..7 are no part of layers 0..6"):
        build(config, weights().__getitem__, layers=range(8))
