"""Selections of units, against the obvious loop; what a layout with units must be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ess.door import Offload
from ess.engine.layers.units import put_keys, select, select_scored
from ess.engine.step.warmth import watch
from ess.errors import BadInput
from ess.kernels.reference.keys import page_values
from ess.layout import IndexCodec, ModelLayout, RowCodec
from ess.models.indexer import Probe, select_units
from ess.units import PAGE_ROWS

UNIT, CHOSEN, DIM, HEADS = 4, 3, 8, 5
WIDTH = UNIT * CHOSEN + UNIT - 1


def layout(**more: object) -> ModelLayout:
    given = {
        "name": "units",
        "layer_count": 1,
        "groups": ((0,),),
        "row": RowCodec(form="f32", latent_dim=8, rope_dim=0),
        "index": IndexCodec(form="f32", key_dim=2 * DIM, head_count=HEADS, hadamard=False),
        "top_k": WIDTH,
        "select_unit": UNIT,
    }
    return ModelLayout(**{**given, **more})  # type: ignore[arg-type]


def index_codec(form: str) -> IndexCodec:
    given = {"form": form, "key_dim": 2 * DIM, "head_count": HEADS, "hadamard": False}
    return IndexCodec(**given)  # type: ignore[arg-type]


def obvious(probe: Probe, keys: torch.Tensor, length: int, query: int) -> list[int]:
    """Of one query that sees the first `length` keys."""
    scored = []
    for unit in range(length // UNIT):
        own = keys[unit * UNIT : (unit + 1) * UNIT].double()
        mixed = sum(own[:, DIM:].softmax(0)[place] * own[place, :DIM] for place in range(UNIT))
        dots = (probe.queries[query].double() @ mixed).relu()
        scored.append((-float(dots @ probe.weights[query].double()), unit))
    best = sorted(unit for _, unit in sorted(scored)[:CHOSEN])
    rows = [unit * UNIT + place for unit in best for place in range(UNIT)]
    rows += range(length // UNIT * UNIT, length)
    return rows + [-1] * (WIDTH - len(rows))


def drawn(count: int, key_count: int) -> tuple[Probe, torch.Tensor]:
    noise = torch.Generator().manual_seed(count * key_count)
    queries = torch.randn(count, HEADS, DIM, generator=noise)
    weights = torch.randn(count, HEADS, generator=noise)
    return Probe(queries, weights, torch.empty(0)), torch.randn(key_count, 2 * DIM, generator=noise)


def test_a_selection_is_that_of_the_obvious_loop_at_every_length() -> None:
    probe, keys = drawn(70, 70)
    lengths = torch.arange(70) + 1
    found = select_units(probe, keys, lengths, WIDTH, UNIT)
    for query, length in enumerate(lengths.tolist()):
        assert found[query].tolist() == obvious(probe, keys, length, query), length


@pytest.mark.parametrize("form", ["f32", "fp8"])
def test_keys_in_pages_are_chosen_as_keys_in_a_row(form: str) -> None:
    """Pages anywhere, one of them not whole; what lies behind a sequence does not matter."""
    probe, keys = drawn(3, 150)
    codec = index_codec(form)
    pages = torch.full((9, codec.page_bytes), 0xFF, dtype=torch.uint8)
    table = torch.tensor([7, 2, 5, 0], dtype=torch.int32)
    positions = torch.arange(150)
    put_keys(keys, codec, pages, table[positions // PAGE_ROWS] * PAGE_ROWS + positions % PAGE_ROWS)
    held = page_values(pages[table.long()], codec)[:150]
    assert torch.equal(held, keys) == (form == "f32")
    assert (held - keys).abs().max() < 0.2
    lengths, lines = torch.tensor([150, 149, 3]), table.expand(3, -1)
    own = layout(index=codec)
    chosen, scores = select_scored(own, *probe[:2], pages, lines, lengths)
    assert torch.equal(chosen, select(own, *probe[:2], pages, lines, lengths))
    assert torch.equal(chosen, select_units(probe, held, lengths, WIDTH, UNIT))
    assert scores.shape == (3, len(table) * PAGE_ROWS)
    for query, length in enumerate(lengths.tolist()):
        tail = scores[query, length // UNIT * UNIT : length]
        assert (tail == scores[query, : max(1, length)].max()).all()


def test_records_hold_what_pages_hold() -> None:
    _, keys = drawn(1, 64)
    codec = IndexCodec(form="fp8", key_dim=2 * DIM, head_count=HEADS, hadamard=False)
    records = torch.zeros(64, codec.key_bytes, dtype=torch.uint8)
    put_keys(keys, codec, records, None)
    page = torch.zeros(1, codec.page_bytes, dtype=torch.uint8)
    put_keys(keys, codec, page, torch.arange(64))
    assert torch.equal(records[:, : 2 * DIM].flatten(), page[0, : 64 * 2 * DIM])
    assert torch.equal(records[:, 2 * DIM :].flatten(), page[0, 64 * 2 * DIM :])


def test_what_a_query_asks_for_is_what_is_selected() -> None:
    probe, keys = drawn(70, 70)
    lengths = np.arange(1, 71, dtype=np.int32)
    found = select_units(probe, keys, torch.from_numpy(lengths), WIDTH, UNIT)
    seen = watch(lengths, layout())
    seen.located(range(70))
    assert seen.seen().read()[1].tolist() == (found >= 0).sum(1).tolist()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"select_unit": 0}, "select_unit is 0, must divide the 64 rows of a page"),
        ({"select_unit": 5}, "select_unit is 5"),
        ({"select_unit": 128}, "select_unit is 128"),
        ({"top_k": 16}, "top_k 16 is not some units of 4 rows and the 3 behind them"),
        ({"top_k": 3}, "top_k 3 is not some units"),
    ],
)
def test_units_that_do_not_fit_are_refused(more: dict[str, int], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        layout(**more)
    with pytest.raises(BadInput, match="'units' selects units of several rows: not on 'cuda' yet"):
        Offload.create(
            layout(), slot_bytes=1 << 20, host_bytes=1 << 20, length_max=64, device="cuda"
        )
    assert layout().part(0, 1).select_unit == UNIT
    assert layout().units_max == CHOSEN
