"""DeepGEMM's index logits over paged keys in fp8.

One call takes 1 or 2 queries of a request together (some builds 4); a probe finds out which, in
which form lengths are taken, and whether the numbers are right. More queries go as requests of
their own. It writes garbage behind a length; a top-k that knows the lengths never reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.errors import Unavailable
from ess.kernels.calls import IndexQueries
from ess.kernels.checks import BYTES, CODED, COUNTS, SINGLE, check_shared, require
from ess.kernels.cuda.adapters.modules import Library, first_that, name_of
from ess.layout import IndexCodec
from ess.units import PAGE_ROWS, div_ceil

MODULES: Final = ("deep_gemm",)
LOGITS: Final = ("fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits")
FUNCTIONS: Final = ("get_paged_mqa_logits_metadata", "get_num_sms")
CODEC: Final = IndexCodec()
TOGETHER: Final = (4, 2, 1)
HEAD_COUNTS: Final = (32,)
"""Beside those of `CODEC`."""
ONE: Final = 0x38
PROBED: Final = (300, 65, 4, 0)
"""Keys of the requests that a build is probed with."""
REQUESTS_MAX: Final = 256
"""For each 32 requests more it compiles another program of its schedule, in the call: a batch has
few such numbers, and prompts, of which every query is a request, have any."""


def whole_lines(logits: Tensor) -> Tensor:
    """Logits that the library has cut from longer lines, dense: with what lies behind each line."""
    stride = logits.stride(0)
    room = logits.untyped_storage().nbytes() // logits.itemsize - logits.storage_offset()
    if len(logits) * stride > room:
        return logits.contiguous()
    return logits.as_strided((len(logits), stride), (stride, 1))


def load(device: torch.device, *, names: Sequence[str] = MODULES) -> DeepGemm:
    """The first of these modules that is there and answers the probe."""
    return first_that(names, FUNCTIONS, lambda library: DeepGemm(library, device))


def function_of_logits(module: Any) -> Callable[..., Tensor]:
    """Builds after 2.6.1 have one for queries in fp8, without scales, and fp4, with scales."""
    name = name_of(module, LOGITS)
    function: Callable[..., Tensor] = getattr(module, name)
    if name == LOGITS[0]:
        return partial(function, clean_logits=False)
    return lambda queries, *others: function((queries, None), *others)


class DeepGemm:
    def __init__(self, library: Library, device: torch.device) -> None:
        self._module: Any = library.module
        self._logits = function_of_logits(library.module)
        self._flat_lengths = False
        self.together = self._probe(device)
        self.head_counts = self._heads(device)
        counts, heads = (", ".join(map(str, of)) for of in (self.together, self.head_counts))
        self.line = (
            f"{library.line}, {counts} queries of a request at once, queries rounded to e4m3, for "
            f"{heads} heads over keys of {CODEC.key_bytes} bytes, of up to {REQUESTS_MAX} requests;"
            " else triton"
        )

    def takes(self, call: IndexQueries) -> bool:
        is_ours = call.codec.form == CODEC.form and call.codec.key_dim == CODEC.key_dim
        requests = len(call.queries) // self._together(call.queries_per_request)
        is_ours = is_ours and 0 < requests <= REQUESTS_MAX and call.pages.is_contiguous()
        return is_ours and call.queries.shape[1] in self.head_counts

    def _together(self, queries_per_request: int) -> int:
        return next(n for n in self.together if queries_per_request % n == 0)

    def index_logits(
        self,
        queries: Tensor,
        weights: Tensor,
        pages: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        *,
        queries_per_request: int = 1,
    ) -> Tensor:
        """`Ops.index_logits` for queries in e4m3 and pages in fp8, but anything behind a length.

        The queries of one request lie side by side and share its pages.
        """
        count, heads = queries.shape[:2]
        require("queries", queries, (None, None, CODEC.key_dim), (CODED,))
        require("weights", weights, (count, heads), SINGLE)
        require("pages", pages, (None, CODEC.page_bytes), BYTES)
        require("page_table", page_table, (count, None), COUNTS)
        require("lengths", lengths, (count,), COUNTS)
        check_shared(count, queries_per_request)
        together = self._together(queries_per_request)
        return self._run(queries, weights, pages, page_table, lengths, together)

    def _run(
        self,
        queries: Tensor,
        weights: Tensor,
        pages: Tensor,
        table: Tensor,
        lengths: Tensor,
        together: int,
    ) -> Tensor:
        """For a request without keys, which is a pad, it is asked for one, in whatever page the
        request's line of the table begins with: where no request has a key, its kernel of schedules
        reads beyond its memory (2.6.1, multiples of 32 requests), and the context is lost.

        Behind the lengths there is another line of them. Multiprocessors for which a schedule has
        no work ask how long the request behind the last one is (builds from 7f2a703 on): they use
        no such length, but memory must be there."""
        width = table.shape[1] * PAGE_ROWS
        told = lengths.to(torch.int32).clamp(min=1).view(-1, together)
        told = told[:, -1:] if self._flat_lengths else told
        counts = F.pad(told, (0, 0, 0, 1), value=1)[:-1]
        counts = counts[:, 0] if self._flat_lengths else counts
        sm_count = self._module.get_num_sms()
        schedule = self._module.get_paged_mqa_logits_metadata(counts, PAGE_ROWS, sm_count)
        logits = self._logits(
            queries.contiguous().view(-1, together, *queries.shape[1:]),
            pages.view(-1, PAGE_ROWS, 1, CODEC.key_bytes),
            weights.contiguous(),
            counts,
            table[::together].to(torch.int32).clamp(min=0).contiguous(),
            schedule,
            width,
        )
        return logits[:, :width]

    def _probe(self, device: torch.device) -> tuple[int, ...]:
        """How many queries of a request the build takes at once; 1 must be among them."""
        faults = []
        for flat in (False, True):
            self._flat_lengths, works = flat, []
            for together in TOGETHER:
                try:
                    self._require_right(together, device)
                    works.append(together)
                except Exception as error:
                    fault = (str(error).strip() or type(error).__name__).splitlines()[0]
            if 1 in works:
                return tuple(works)
            faults.append(fault)
        raise Unavailable(f"the probe failed for one query: {'; else '.join(faults)}")

    def _heads(self, device: torch.device) -> tuple[int, ...]:
        """How many heads the build takes, of those that models have."""
        works = [CODEC.head_count]
        for heads in HEAD_COUNTS:
            with contextlib.suppress(Exception):
                self._require_right(1, device, heads)
                works.append(heads)
        return tuple(works)

    def _require_right(
        self, together: int, device: torch.device, heads: int = CODEC.head_count
    ) -> None:
        """Keys j and queries i with one number each: logit = heads * (i + 1) * scale of key j.

        Several requests are tried, as in a step: with keys of more than one of its splits, of a
        page and one key more, and of a few keys; then a pad. No two share a page, and no request
        has its pages in order.
        """
        page_counts = [div_ceil(count, PAGE_ROWS) for count in PROBED]
        pages = torch.zeros(1 + sum(page_counts), CODEC.page_bytes, dtype=torch.uint8)
        pages[:, : PAGE_ROWS * CODEC.key_dim : CODEC.key_dim] = ONE
        scales = torch.arange(float(len(pages) * PAGE_ROWS)).view(len(pages), PAGE_ROWS)
        pages[:, PAGE_ROWS * CODEC.key_dim :].view(torch.float32).copy_(scales)
        table = torch.zeros(len(PROBED), max(page_counts), dtype=torch.int32)
        for line, count, stop in zip(table, page_counts, accumulate(page_counts), strict=True):
            line[:count] = torch.arange(stop, stop - count, -1)
        table, count = table.repeat_interleave(together, 0), together * len(PROBED)
        behind = 0 if self._flat_lengths else torch.arange(together - 1, -1, -1)
        last = torch.tensor(PROBED, dtype=torch.int32)[:, None].expand(-1, together)
        lengths = (last - behind).clamp(min=0).flatten().int()
        queries = torch.zeros(count, heads, CODEC.key_dim)
        queries[:, :, 0] = 1.0
        weights = torch.arange(1.0, count + 1)[:, None].repeat(1, heads)
        want = weights[:, :1] * heads * scales[table.long()].flatten(1)
        seen = torch.arange(want.shape[1]) < lengths[:, None]
        codes, weights, pages, table, lengths = (
            part.to(device)
            for part in (queries.to(torch.float8_e4m3fn), weights, pages, table, lengths)
        )
        ours = self._run(codes, weights, pages, table, lengths, together).cpu()
        error = float((ours - want).masked_fill(~seen, 0.0).abs().max())
        if not error <= 1e-3:
            raise Unavailable(f"{together} queries at once are wrong by {error}")
