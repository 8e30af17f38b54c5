"""DeepSeek-V4's chosen entries through `ess.Offload`: a row is an entry of four tokens.

A tiny model of random weights runs twice over the same tokens: with all entries in plain tensors
(`ess.models.compressed.plain`), and with those that an indexer chooses from in slots and on the
host; the state is beside the rows of its sequence. Attention of such a layer is of parts that are
merged: the last tokens, entries that are resident, those that are read in place or fetched, and the
sink. Random weights choose entries at
random: what is missed here says nothing of a trained model.

    python docs/examples/entries.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ess
from ess.kernels.backend import ops
from ess.models.compressed.form import state_form
from ess.models.compressed.model import CompressedModel, Layer
from ess.models.compressed.plain import Plain, PlainLayer, VisibleRows
from ess.models.config import ModelConfig
from ess.models.registry import read_config
from ess.models.weights.expected.shapes import expected_tensors

TINY: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 96,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 24,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 128, 4],
    "num_hash_layers": 1,
}


def drawn(config: ModelConfig) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(1)
    weights = {}
    for spec in expected_tensors(config):
        if spec.role == "numbers":
            weights[spec.name] = torch.randint(config.expert_count, spec.shape, generator=noise)
        else:
            centre = 1.0 if spec.name.endswith("norm.weight") else 0.0
            weights[spec.name] = centre + 0.2 * torch.randn(spec.shape, generator=noise)
    return weights


def layout_of(config: ModelConfig, *, drafts: int = 0) -> ess.ModelLayout:
    """Layers are those with an indexer; the value of a row is all of it."""
    assert config.compressed is not None
    count = config.compressed.kinds.count("sparse")
    return ess.ModelLayout(
        name="entries",
        layer_count=count,
        groups=tuple((layer,) for layer in range(count)),
        row=ess.RowCodec(form="f32", latent_dim=config.value_dim, rope_dim=0),
        index=None,
        top_k=config.top_k,
        slot_floor=config.top_k,
        row_tokens=config.compressed.sparse_rate,
        state_bytes=state_form(config, drafts=drafts).byte_count,
    )


def as_rows(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


class OffloadedLayer(PlainLayer):
    """Entries come from an offload; beside it they are not kept."""

    def __init__(
        self, model: CompressedModel, layer: Layer, plain: OffloadedPlain, number: int
    ) -> None:
        super().__init__(model, layer, plain.state)
        self._plain, self._number = plain, number

    def attend_chosen(
        self, queries: Tensor, last: VisibleRows, entries: Tensor, selection: Tensor
    ) -> Tensor:
        plain, count, attention = self._plain, len(queries), self._layer.attention
        assert self.entries is not None
        closed = entries[self.entries.stored.length :]
        plain.step.append(self._number, as_rows(closed))
        chosen = torch.full((count, plain.offload.layout.top_k), -1, dtype=torch.int32)
        chosen[:, : selection.shape[1]] = selection
        where = plain.step.resolve(self._number, chosen)
        memory = plain.offload.memory(self._number)

        def part(held: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
            codec = plain.offload.layout.row
            return ops("cpu").attend(queries, held, places, codec, scale=attention.scale)

        places = torch.arange(len(last.rows), dtype=torch.int32).where(last.by, -1)
        window = part(as_rows(last.rows), places.int())
        resident, placed = part(memory.slots, where.hit), part(memory.host, where.place)
        fetched = part(memory.slots, where.wait().miss)
        sink = torch.zeros_like(resident[0]), attention.sinks.expand(count, -1).contiguous()
        return ess.merge(window, resident, placed, fetched, sink).out

    def keep(self, length: int) -> None:
        super().keep(length)
        assert self.entries is not None
        self.entries.stored.filled.fill_(torch.nan)


class OffloadedPlain(Plain):
    """A step of the offload is one of the model: it brings a row for each window that its tokens
    close. Rows of windows whose tokens are taken back are refused, as rows of drafts are."""

    def __init__(self, model: CompressedModel, offload: ess.Offload, *, drafts: int = 0) -> None:
        self.offload = offload
        # Entries have no ids by which another sequence could find them.
        self._sequence = offload.open([0], publishes=False)
        self._steps: list[ess.Step] = []
        self._count = 0
        super().__init__(model, drafts=drafts, memory=self._sequence.beside)

    def layer(self, layer: Layer) -> PlainLayer:
        if layer.kind != "sparse":
            return super().layer(layer)
        self._count += 1
        return OffloadedLayer(self._model, layer, self, self._count - 1)

    @property
    def step(self) -> ess.Step:
        return self._steps[0]

    def begin(self, count: int) -> None:
        """Rows of tokens that come follow from the rate: a token brings the entry that it is the
        last token of, and may select those that end with it or before it."""
        self._steps.append(self.offload.begin([self._sequence], query_counts=[count]))

    def keep(self, length: int) -> None:
        super().keep(length)
        for step in self._steps:
            step.commit(accepted=[length - self._sequence.text_length])
        self._steps.clear()

    def close(self) -> None:
        self.keep(self.length)
        self._sequence.close()


def main() -> None:
    torch.set_num_threads(1)  # the tensors are tiny
    model = CompressedModel(config := read_config(TINY), drawn(config).__getitem__)
    prompt = torch.randint(96, (1200,), generator=torch.Generator().manual_seed(2)).tolist()
    with ess.Offload.create(layout_of(config), slot_bytes="64KiB", host_bytes="4MiB") as offload:
        plain, offloaded = Plain(model), OffloadedPlain(model, offload)
        for start in range(0, len(prompt), 48):
            logits = [each.run(prompt[start : start + 48])[-1] for each in (plain, offloaded)]
        before, said = offload.stats(), []
        for _ in range(24):
            tokens = [int(each.argmax()) for each in logits]
            assert tokens[0] == tokens[1], "offload changed a token"
            said.append(tokens[0])
            logits = [each.run(tokens[:1])[-1] for each in (plain, offloaded)]
        offloaded.close()
        after = offload.stats()
        missed = int((after.miss_count - before.miss_count).sum())
        fetched = int((after.fetched_bytes - before.fetched_bytes).sum())
        print(f"1,200 tokens, 300 entries a layer, {after.slot_count.sum() // 2} slots a layer")
        print(f"24 tokens the same both ways; {missed} entries missed, {fetched:,} bytes fetched")


if __name__ == "__main__":
    main()
