"""An engine of your own over `ess.Offload`: sparse attention whose rows live in host memory.

A toy decoder with random weights runs twice over the same prompts: once with every row in a plain
tensor, once through an offload whose slots hold a fraction of the rows. The tokens are the same.

    python docs/examples/own_engine.py
"""

from __future__ import annotations

import math

import torch

import ess

LAYERS, WIDTH, LATENT, VOCABULARY, TOP_K = 4, 64, 32, 97, 48
LAYOUT = ess.ModelLayout(
    name="toy",
    layer_count=LAYERS,
    groups=tuple((layer,) for layer in range(LAYERS)),
    row=ess.RowCodec(form="f32", latent_dim=LATENT, rope_dim=0),
    index=None,
    top_k=TOP_K,
    slot_floor=TOP_K,
)


class ToyModel:
    """Embedding, four layers of latent attention, a head. A row is the latent of its token."""

    def __init__(self, seed: int) -> None:
        noise = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=noise) / math.sqrt(shape[-1])

        self.embedding = weight(VOCABULARY, WIDTH) * 8
        self.to_row = [weight(LATENT, WIDTH) for _ in range(LAYERS)]
        self.to_query = [weight(LATENT, WIDTH) for _ in range(LAYERS)]
        self.from_latent = [weight(WIDTH, LATENT) for _ in range(LAYERS)]

    def select(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The indexer: the top-k positions in ascending order, -1 padded."""
        count = min(TOP_K, len(keys))
        chosen = torch.topk(keys @ query, count).indices.sort().values
        selection = torch.full((1, TOP_K), -1, dtype=torch.int32)
        selection[0, :count] = chosen
        return selection


def attend(query: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One partial: the weighted sum over `rows` and its natural log-sum-exp; empty is (0, -inf)."""
    scores = rows @ query
    lse = torch.logsumexp(scores, dim=0)
    out: torch.Tensor = (scores - lse).exp().nan_to_num(0.0) @ rows
    return out, lse


def as_rows(latents: torch.Tensor) -> torch.Tensor:
    return latents.contiguous().view(torch.uint8).reshape(len(latents), LAYOUT.row_bytes)


def as_latents(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.float32)


def chosen(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Latents of these rows; -1 is padding."""
    return as_latents(rows[numbers[numbers >= 0].long()])


class PlainStore:
    """Everything resident: the baseline that the offload must equal."""

    def __init__(self, prompt: list[int], model: ToyModel) -> None:
        hidden = model.embedding[torch.tensor(prompt[:-1])]
        self.rows = [hidden @ model.to_row[layer].T for layer in range(LAYERS)]

    def begin(self) -> None:
        pass

    def attention(
        self, layer: int, query: torch.Tensor, row: torch.Tensor, model: ToyModel
    ) -> torch.Tensor:
        self.rows[layer] = torch.cat([self.rows[layer], row[None]])
        selection = model.select(query, self.rows[layer])[0]
        return attend(query, self.rows[layer][selection[selection >= 0].long()])[0]

    def commit(self, token: int) -> None:
        pass


class OffloadStore:
    """The same attention over slots. Only the indexer's keys stay beside the engine."""

    def __init__(self, prompt: list[int], model: ToyModel, offload: ess.Offload) -> None:
        self.offload, self.sequence = offload, offload.open(tokens=prompt)
        hidden = model.embedding[torch.tensor(prompt[:-1])]
        self.keys = [hidden @ model.to_row[layer].T for layer in range(LAYERS)]
        start = self.sequence.cached_count
        for layer in range(LAYERS):
            rows = as_rows(self.keys[layer][start:])
            self.sequence.import_rows(layer, start, rows)

    def begin(self) -> None:
        self.step = self.offload.begin([self.sequence], query_counts=[1])

    def attention(
        self, layer: int, query: torch.Tensor, row: torch.Tensor, model: ToyModel
    ) -> torch.Tensor:
        self.step.append(layer, as_rows(row[None]))
        self.keys[layer] = torch.cat([self.keys[layer], row[None]])
        where = self.step.resolve(layer, model.select(query, self.keys[layer]))
        memory = self.offload.memory(layer)
        resident = attend(query, chosen(memory.slots, where.hit[0]))
        placed = attend(query, chosen(memory.host, where.place[0]))
        fetched = attend(query, chosen(memory.slots, where.wait().miss[0]))
        return ess.merge(resident, placed, fetched).out

    def commit(self, token: int) -> None:
        self.step.commit(accepted=[1], tokens=[[token]])


def decode(model: ToyModel, store: PlainStore | OffloadStore, token: int, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        store.begin()
        hidden = model.embedding[token]
        for layer in range(LAYERS):
            query, row = model.to_query[layer] @ hidden, model.to_row[layer] @ hidden
            latent = store.attention(layer, query, row, model)
            hidden = hidden + torch.tanh(model.from_latent[layer] @ latent)
        store.commit(token)
        token = int((model.embedding @ hidden).argmax())
        tokens.append(token)
    return tokens


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the tensors are tiny
    model = ToyModel(seed=1)
    prompts = [torch.randint(VOCABULARY, (400 + 60 * i,)).tolist() for i in range(3)]
    with ess.Offload.create(LAYOUT, slot_bytes="128KiB", host_bytes="4MiB") as offload:
        for prompt in prompts:
            plain = decode(model, PlainStore(prompt, model), prompt[-1], 24)
            store = OffloadStore(prompt, model, offload)
            offloaded = decode(model, store, prompt[-1], 24)
            store.sequence.close()
            assert offloaded == plain, "offload changed a token"
            print(f"{len(prompt)} prompt tokens, 24 decoded: the same tokens both ways")
        stats = offload.stats()
        share = stats.slot_count.sum() / (LAYERS * (len(prompts[-1]) + 24))
        print(f"slots for {share:.0%} of the longest sequence's rows, hits {stats.hit_ratio:.1%}")


if __name__ == "__main__":
    main()
