"""Selections of units, against the obvious loop; what a layout with units must be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from ess.door import Offload
from ess.engine.layers.beside import Beside, Carried
from ess.engine.layers.units import put_keys, select
from ess.engine.step.warmth import hit_counter
from ess.errors import BadInput
from ess.kernels.backend import ops
from ess.kernels.calls import Angles, KeyFinish
from ess.kernels.cpu import native
from ess.kernels.reference.keys import page_values
from ess.layout import IndexCodec, ModelLayout, RowCodec
from ess.models.config_json.linear import StateField, StateForm
from ess.models.families.layers.pooled import MixedLayer
from ess.models.indexer import Probe, pooled, select_units
from ess.pool.keys import KeyPages
from ess.units import PAGE_ROWS

UNIT, CHOSEN, DIM, HEADS = 4, 3, 8, 5
WIDTH = UNIT * CHOSEN + UNIT - 1


def index_codec(form: str, unit: int = UNIT) -> IndexCodec:
    given = {"form": form, "key_dim": DIM, "head_count": HEADS, "hadamard": False, "unit": unit}
    return IndexCodec(**given)  # type: ignore[arg-type]


def layout(**more: object) -> ModelLayout:
    given = {
        "name": "units",
        "layer_count": 1,
        "groups": ((0,),),
        "row": RowCodec(form="f32", latent_dim=8, rope_dim=0),
        "index": index_codec("f32"),
        "top_k": WIDTH,
    }
    return ModelLayout(**{**given, **more})  # type: ignore[arg-type]


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
    selected = select_units(probe, keys, lengths, WIDTH, UNIT)
    for query, length in enumerate(lengths.tolist()):
        assert selected[query].tolist() == obvious(probe, keys, length, query), length


def of_rows(keys: torch.Tensor) -> torch.Tensor:
    """A key for each row: the last row of a unit has the unit's key, the other keys must never be
    read."""
    made = torch.full((len(keys), DIM), torch.nan)
    made[UNIT - 1 :: UNIT] = pooled(keys, UNIT)
    return made


@pytest.mark.parametrize("form", ["f32", "fp8"])
def test_keys_in_pages_are_chosen_as_keys_in_a_row(form: str) -> None:
    """Pages anywhere, one of them not whole; what lies behind a sequence does not matter."""
    probe, keys = drawn(3, 150)
    codec = index_codec(form)
    pages = torch.full((9, codec.page_bytes), 0xFF, dtype=torch.uint8)
    table = torch.tensor([7, 2, 5, 0], dtype=torch.int32)
    positions = torch.arange(150)
    row_ids = table[positions // PAGE_ROWS] * PAGE_ROWS + positions % PAGE_ROWS
    put_keys(of_rows(keys), codec, pages, row_ids)
    wanted, held = pooled(keys, UNIT), page_values(pages[table.long()], codec)[: 150 // UNIT]
    assert torch.equal(held, wanted) == (form == "f32")
    assert (held - wanted).abs().max() < 0.2
    lengths, lines = torch.tensor([150, 149, 3]), table.expand(3, -1)
    own = layout(index=codec)
    chosen, scores = select(own, *probe[:2], pages, lines, lengths)
    if form == "f32":
        assert torch.equal(chosen, select_units(probe, keys, lengths, WIDTH, UNIT))
    assert scores.shape == (3, len(table) * PAGE_ROWS)
    for query, length in enumerate(lengths.tolist()):
        tail = scores[query, length // UNIT * UNIT : length]
        assert (tail == scores[query, : max(1, length)].max()).all()


def test_records_hold_what_pages_hold() -> None:
    _, keys = drawn(1, 64)
    codec, count = index_codec("fp8"), 64 // UNIT
    records = torch.zeros(64, codec.key_bytes, dtype=torch.uint8)
    put_keys(of_rows(keys), codec, records, None)
    page = torch.zeros(1, codec.page_bytes, dtype=torch.uint8)
    put_keys(of_rows(keys), codec, page, torch.arange(64))
    last = records[UNIT - 1 :: UNIT]
    assert torch.equal(last[:, :DIM].flatten(), page[0, : count * DIM])
    assert torch.equal(last[:, DIM:].flatten(), page[0, count * DIM :])


@pytest.mark.parametrize("is_native", [False, True])
def test_pages_keep_a_key_of_each_unit(monkeypatch: pytest.MonkeyPatch, is_native: bool) -> None:
    """In both tiers, given and copied row by row: what other rows are given is dropped."""
    if is_native and not native.available():
        pytest.skip(native.why_missing())
    monkeypatch.setattr(native, "available", lambda: is_native)
    own, draw = layout(), np.random.default_rng(0)
    here, there = (
        KeyPages(own, np.zeros(count * own.key_page_bytes, np.uint8), count) for count in (3, 5)
    )
    assert here.pages.shape == (1, 3, 64 // UNIT * 4 * DIM)
    records = draw.integers(0, 255, (70, here.key_bytes), np.uint8)
    rows = np.arange(64, 134, dtype=np.int32)
    here.write(0, rows, records)
    last = np.arange(UNIT - 1, 70, UNIT)
    for row in last.tolist():
        unit = rows[row - UNIT + 1 : row + 1]
        assert (here.read(0, unit) == records[row]).all(), row
    assert not here.read(0, rows[68:]).any()
    home = (rows + 2 * 64)[::-1].copy()
    there.copy_keys(here, rows[::-1].copy(), home, layers=[0])
    assert np.array_equal(there.read(0, home[::-1][last]), records[last])
    assert not there.pages[0, [0, 1, 2]].any()
    with pytest.raises(AssertionError, match="rows of other places"):
        there.copy_keys(here, rows[:2].copy(), rows[1:3].copy(), layers=[0])


def test_ops_that_know_keys_of_rows_alone_refuse_those_of_units() -> None:
    probe, _ = drawn(1, 1)
    codec, computes = index_codec("f32"), ops("cpu")
    pages = torch.zeros(2, codec.page_bytes, dtype=torch.uint8)
    one, none = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 0)
    finish = KeyFinish(torch.ones(DIM), torch.zeros(DIM), 1e-6, Angles(none, none))
    with pytest.raises(BadInput, match="a key for each 4 rows, and this op one for each row"):
        computes.index_top_k(*probe[:2], pages, one[None], one, codec, k=4, threads=1)
    with pytest.raises(BadInput, match="a key for each 4 rows"):
        computes.finish_keys(torch.zeros(1, DIM), finish, codec, pages, one)


CUTS = ((1,) * 30, (7, 7, 1, 7, 8), (3, 4, 5, 18), (30,), (4, 4, 22), (29, 1))


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_the_last_token_of_a_unit_brings_its_key(cuts: tuple[int, ...]) -> None:
    """However tokens are cut, and beside other sequences that stand elsewhere in their units."""
    form = StateForm((StateField(name="unit", layer=2, shape=(UNIT - 1, 2 * DIM)),))
    layer = object.__new__(MixedLayer)
    layer.place = 2
    beside = Beside(form, torch.zeros(4, form.byte_count, dtype=torch.uint8))
    _, keys = drawn(1, 61)
    texts = keys[:30], keys[31:]
    other = Carried(beside, torch.tensor([3]), torch.tensor([0]))
    other.unit_keys(layer, keys[30:31])
    made = []
    for stop, count in zip(itertools.accumulate(cuts), cuts, strict=True):
        start = stop - count
        if count == 1 and start < 29:
            both = Carried(beside, torch.tensor([1, 3]), torch.tensor([start, start + 1]))
            given = torch.cat((texts[0][start:stop], texts[1][start:stop]))
            made.append(both.unit_keys(layer, given)[:1])
        else:
            alone = Carried(beside, torch.tensor([1]), torch.tensor([start]))
            made.append(alone.unit_keys(layer, texts[0][start:stop]))
    units = torch.cat(made)
    assert torch.equal(units[UNIT - 1 :: UNIT], pooled(texts[0], UNIT))
    rest = torch.arange(30) % UNIT != UNIT - 1
    assert not units[rest].any()


def test_what_a_query_asks_for_is_what_is_selected() -> None:
    probe, keys = drawn(70, 70)
    lengths = np.arange(1, 71, dtype=np.int32)
    selected = select_units(probe, keys, torch.from_numpy(lengths), WIDTH, UNIT)
    seen = hit_counter(lengths, layout())
    seen.located(range(70))
    assert seen.seen().read()[1].tolist() == (selected >= 0).sum(1).tolist()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"top_k": 16}, "top_k 16 is not some units of 4 rows and the 3 behind them"),
        ({"top_k": 3}, "top_k 3 is not some units"),
    ],
)
def test_units_that_do_not_fit_are_refused(more: dict[str, int], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        layout(**more)
    for unit in (0, 5, 128):
        with pytest.raises(BadInput, match=f"unit is {unit}, must divide the 64 rows of a page"):
            index_codec("f32", unit)
    with pytest.raises(BadInput, match="'units' selects units of several rows: not on 'cuda' yet"):
        Offload.create(
            layout(), slot_bytes=1 << 20, host_bytes=1 << 20, length_max=64, device="cuda"
        )
    assert layout().part(0, 1).select_unit == UNIT
    assert layout().units_max == CHOSEN
