"""What a prompt takes while it runs: scores of some queries at a time, windows of the last ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ess.engine.prompt import reading
from ess.engine.prompt.pack import Span, window_of
from ess.engine.step_bytes import SCORED, room_bytes
from ess.kernels.backend import ops
from ess.kernels.cuda.adapters.deep_gemm import REQUESTS_MAX
from ess.kernels.cuda.adapters.deep_gemm_experts import no_room
from ess.kernels.served import ROOM_BYTES_MAX
from ess.layout import IndexCodec
from ess.models.registry import read_config
from ess.units import PAGE_ROWS, div_ceil
from tests.support.checkpoints import TINY_V32

CODEC = IndexCodec(form="f32", key_dim=16, head_count=4)
START, COUNT, TOP_K = 70, 131, 24


def span_of(count: int, *, start: int = 0, behind: int = 0) -> Span:
    sequence: Any = None
    tokens = range(count)
    return Span(
        sequence=sequence, start=start, tokens=tokens, following=tokens, behind_count=behind
    )


def test_windows_keep_no_other_selections():
    chosen = torch.arange(100 * 8, dtype=torch.int32).view(100, 8)
    for behind, first in ((0, 68), (12, 80), (200, 100)):
        window = window_of(span_of(100, behind=behind), chosen)
        assert torch.equal(window, chosen[first:])
        assert window.untyped_storage().nbytes() == window.nbytes


class Watched:
    """Ops that are told how many queries they are given."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._ops = ops("reference")

    def index_top_k(self, queries: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        self.counts.append(len(queries))
        return self._ops.index_top_k(queries, *given, **named)


def chosen_of(watched: Watched) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    pages = torch.zeros(5, CODEC.page_bytes, dtype=torch.uint8)
    pages.view(torch.float32).normal_(generator=generator)
    pack: Any = SimpleNamespace(
        layout=SimpleNamespace(index=CODEC, select_unit=1, top_k=TOP_K),
        device=torch.device("cpu"),
        ops=watched,
        tables=(torch.tensor([3, 0, 4, 1], dtype=torch.int32),),
        runner=SimpleNamespace(
            offload=SimpleNamespace(memory=lambda layer: SimpleNamespace(key_pages=pages))
        ),
    )
    shape = COUNT, CODEC.head_count
    queries = torch.randn(*shape, CODEC.key_dim, generator=generator)
    weights = torch.randn(*shape, generator=generator)
    return reading.top_k(pack, 0, span_of(COUNT, start=START), 7, queries, weights)


@pytest.mark.parametrize(("most", "counts"), [(131, [131]), (66, [66, 65]), (40, [33, 33, 33, 32])])
def test_pieces_choose_what_all_queries_together_do(
    most: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
):
    together, pieces = Watched(), Watched()
    expected = chosen_of(together)
    monkeypatch.setattr(reading, "SCORED", most)
    assert torch.equal(chosen_of(pieces), expected)
    assert (together.counts, pieces.counts) == ([COUNT], counts)
    assert (expected[-1] >= 0).all(), "a query that sees more keys than it chooses"
    assert START + COUNT <= 4 * PAGE_ROWS


def test_no_piece_of_a_long_prompt_is_a_batch_that_a_library_scores():
    for count in range(SCORED + 1, 20 * SCORED):
        step = div_ceil(count, div_ceil(count, SCORED))
        assert REQUESTS_MAX < step <= SCORED
        assert count - (div_ceil(count, step) - 1) * step > REQUESTS_MAX


def test_the_room_of_a_library_is_what_it_takes_at_most():
    """It refuses what needs more: then the largest batch that it takes decides."""
    config = read_config(TINY_V32)
    shape = (config.expert_count, 2 * config.expert_dim, config.hidden_dim)
    weights = torch.empty(shape, device="meta")
    takes = [room_bytes(config, count, 1) for count in (1, 1000, 10_000, 1 << 22)]
    assert 0 < takes[0] < takes[1] < takes[2] < takes[3] < 3 * ROOM_BYTES_MAX
    assert no_room(config.experts_per_token, weights) is None
    assert no_room((1 << 22) * config.experts_per_token, weights) is not None
