"""FlashMLA's sparse decode over rows of 656 bytes, for whole lists.

It takes every multiprocessor and has no lengths, so it serves a list that is attended in one piece;
parts that run beside a copy are for our own kernel. Its lists are padded to a multiple of 64, its
heads to 64 or 128. What its lse means differs between builds: natural or base 2, +inf or -inf where
nothing was attended. One call at construction finds out; a build that answers neither is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

from ess.errors import BadInput, Unavailable
from ess.kernels.calls import Attend
from ess.kernels.checks import BYTES, COUNTS, require
from ess.kernels.cuda.adapters.modules import Library, first_that
from ess.kernels.merge import Partial, adapt
from ess.layout import RowCodec
from ess.units import PAGE_ROWS

MODULES: Final = ("flash_mla", "sgl_kernel.flash_mla")
FUNCTIONS: Final = ("flash_mla_with_kvcache", "get_mla_metadata")
CODEC: Final = RowCodec()
DIM: Final = CODEC.latent_dim + CODEC.rope_dim
LIST_UNIT: Final = 64
HEAD_COUNTS: Final = (64, 128)
ONE: Final = 0x38
OF_FORK: Final = {"use_legacy": True}
"""sgl-flash-mla 1.0.0 serves Hopper and rows of 656 bytes only where it is asked like this."""
PROBED: Final = 255 / 128
"""A scale that uses all 8 bits of bfloat16."""
SERVES: Final = (
    f"for whole lists of up to {HEAD_COUNTS[-1]} heads in bfloat16 over rows of "
    f"{CODEC.row_bytes} bytes; else triton"
)


def load(device: torch.device, *, names: Sequence[str] = MODULES) -> FlashMla:
    """The first of these modules that is there and answers the probe."""
    return first_that(names, FUNCTIONS, lambda library: FlashMla(library, device))


class FlashMla:
    """Owns its schedules: one for each shape, shared by all layers and graphs.

    A schedule is written by a kernel: in the call that asks for it or, since 082094b, in the first
    attention that is given it. In a capture that kernel runs whenever that graph is replayed, and
    not before: another graph, replayed earlier, would read what is no schedule. So what a capture
    asks for is not kept for others.
    """

    def __init__(self, library: Library, device: torch.device) -> None:
        self._module: Any = library.module
        self._options = OF_FORK if hasattr(library.module, "has_legacy") else {}
        self._schedules: dict[tuple[int, int, int], tuple[Any, Any]] = {}
        self.base, self.empty = self._probe(device)
        self.line = f"{library.line}, lse of base {self.base}, {self.empty} where empty, {SERVES}"

    def takes(self, call: Attend) -> bool:
        """Its bits follow from the batch, and nothing can run beside it."""
        if not (call.whole and call.balanced) or call.adds or call.codec != CODEC:
            return False
        if not len(call.queries):
            return False
        is_paged = len(call.rows) % PAGE_ROWS == 0 and call.rows.is_contiguous()
        heads = call.queries.shape[1]
        return is_paged and call.queries.dtype == torch.bfloat16 and heads <= HEAD_COUNTS[-1]

    def attend(self, queries: Tensor, rows: Tensor, slots: Tensor, *, scale: float) -> Partial:
        """Queries [q, heads, 576] in bfloat16 over rows [slot, 656] that `slots` [q, k] name.

        -1 pads; other negative slots are the caller's mistake and read memory outside of `rows`.
        """
        require("queries", queries, (None, None, DIM), (torch.bfloat16,))
        require("rows", rows, (None, CODEC.row_bytes), BYTES)
        require("slots", slots, (len(queries), None), COUNTS)
        if len(rows) % PAGE_ROWS or not rows.is_contiguous():
            raise BadInput(f"rows of shape {tuple(rows.shape)} must be dense pages of {PAGE_ROWS}")
        if not slots.shape[1]:
            slots = slots.new_full((len(queries), LIST_UNIT), -1)
        out, lse = self._run(queries, rows, slots, scale)
        return adapt(out, lse, base=self.base, empty=self.empty)

    def _run(
        self, queries: Tensor, rows: Tensor, slots: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        heads, spare = queries.shape[1], -slots.shape[1] % LIST_UNIT
        padded = self._pad_heads(queries)
        names = torch.nn.functional.pad(slots.to(torch.int32), (0, spare), value=-1)
        schedule, splits = self._schedule(len(queries), padded.shape[1], names.shape[1], rows)
        out, lse = self._module.flash_mla_with_kvcache(
            padded[:, None],
            rows.view(torch.float8_e4m3fn).view(-1, PAGE_ROWS, 1, CODEC.row_bytes),
            rows.new_zeros((len(queries), 1), dtype=torch.int32),
            rows.new_full((len(queries),), names.shape[1], dtype=torch.int32),
            CODEC.latent_dim,
            schedule,
            splits,
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=names[:, None].contiguous(),
            **self._options,
        )
        return out[:, 0, :heads], lse[:, :heads, 0]

    def _pad_heads(self, queries: Tensor) -> Tensor:
        heads = queries.shape[1]
        wanted = next((count for count in HEAD_COUNTS if heads <= count), None)
        if wanted is None:
            raise BadInput(f"queries have {heads} heads, FlashMLA takes up to {HEAD_COUNTS[-1]}")
        return torch.nn.functional.pad(queries, (0, 0, 0, wanted - heads)).contiguous()

    def _schedule(self, count: int, heads: int, width: int, rows: Tensor) -> tuple[Any, Any]:
        shape = count, heads, width
        schedule = self._schedules.get(shape)
        if schedule is None:
            lengths = rows.new_full((count,), width, dtype=torch.int32)
            schedule = self._module.get_mla_metadata(
                lengths, heads, 1, num_heads_q=heads, is_fp8_kvcache=True, topk=width
            )
            if not is_captured(rows):
                self._schedules[shape] = schedule
        made: tuple[Any, Any] = schedule
        return made

    def _probe(self, device: torch.device) -> tuple[Literal["e", "2"], Literal["-inf", "+inf"]]:
        """A list of one key, whose logit and value are its row's scale, and a list without keys. On
        Blackwell builds keep only a power of two of a scale: they would misread rows of other
        engines by up to half."""
        rows = torch.zeros(PAGE_ROWS, CODEC.row_bytes, dtype=torch.uint8, device=device)
        rows[0, 0] = ONE
        rows[:, CODEC.latent_dim : CODEC.latent_dim + 16].view(torch.float32).fill_(PROBED)
        queries = torch.zeros(2, HEAD_COUNTS[0], DIM, dtype=torch.bfloat16, device=device)
        queries[:, :, 0] = 1.0
        slots = torch.full((2, LIST_UNIT), -1, dtype=torch.int32, device=device)
        slots[0, 0] = 0
        out, lse = self._run(queries, rows, slots, 1.0)
        value, lse_full, lse_empty = float(out[0, 0, 0]), float(lse[0, 0]), float(lse[1, 0])
        bases: tuple[Literal["e", "2"], ...] = ("e", "2")
        for base in bases:
            expected = PROBED if base == "e" else PROBED * math.log2(math.e)
            if abs(lse_full - expected) < 1e-3 and value == PROBED and math.isinf(lse_empty):
                return base, "+inf" if lse_empty > 0 else "-inf"
        raise Unavailable(
            f"the probe got value {value} and lse {lse_full} where both should be {PROBED} (or an "
            f"lse of {PROBED * math.log2(math.e):.3f}, base 2), and lse {lse_empty} for an empty "
            "list, which should be +inf or -inf"
        )


def is_captured(rows: Tensor) -> bool:
    """Whether work on these rows, queued now, becomes part of a graph."""
    if not rows.is_cuda:
        return False
    with torch.cuda.device(rows.device):  # which need not be the current one
        return torch.cuda.is_current_stream_capturing()
