"""Sparse attention and merge: the launches, which trust what they are given.

Nothing here looks at a value on the device, so all of it may be captured in a graph, and a caller
that keeps the scratch may replay it with other lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from ess.errors import Unavailable
from ess.kernels.cuda.triton.device import attend as device
from ess.kernels.cuda.triton.device import partials, shares
from ess.kernels.cuda.triton.launch import FUSED, UNFUSED, Place, bits, on, place
from ess.kernels.cuda.triton.shapes import Shape, candidates
from ess.kernels.merge import Partial
from ess.layout import RowCodec
from ess.units import div_ceil

DOT_MIN: Final = 16
LIST_BLOCK: Final = 1024
PIECE_KEYS_MIN: Final = 128
JOIN_LINES: Final = 4
ALIGNED_MAX: Final = 16
"""Bytes that a thread loads at once."""


class Lists(NamedTuple):
    """Names without gaps [q, width] and how many there are of each [q], both int32."""

    named: Tensor
    counts: Tensor


def close_up(slots: Tensor) -> Lists:
    """Slots [q, width], int32, with -1 anywhere."""
    count, width = slots.shape
    named = torch.empty_like(slots, memory_format=torch.contiguous_format)
    counts = torch.empty(count, dtype=torch.int32, device=slots.device)
    if count:
        with on(slots):
            device.close_up[(count,)](
                *(slots, named, counts, width, slots.stride(0)), BLOCK=LIST_BLOCK, **FUSED
            )
    return Lists(named, counts)


def in_half(query_dtype: torch.dtype, codec: RowCodec) -> bool:
    """Products in bfloat16 where queries and rows are no wider by nature."""
    return query_dtype == torch.bfloat16 and codec.form != "f32"


def attend_lists(
    queries: Tensor,
    rows: Tensor,
    lists: Lists,
    codec: RowCodec,
    *,
    scale: float,
    into: Partial,
    placed: Tensor | None = None,
    spare_sms: int = 0,
    balanced: bool = False,
    adds: bool = False,
    shape: Shape | None = None,
) -> Partial:
    """Attention over lists that are closed up, on a grid that leaves `spare_sms` alone.

    With `adds`, `into` holds a partial over other rows and gets the joint one, in one pass over it
    where attention apart and a merge take two; a query that names nothing is not touched.

    `balanced` cuts lists where the programs' equal shares of all keys end, and joins the pieces
    after: a batch of any size then fills the device. The cut is part of the arithmetic, so bits
    follow from the batch; without it a list is one program's, and bits from the list alone. `shape`
    is for measurements: the bits of another shape differ.
    """
    count, heads = queries.shape[:2]
    if adds and not lists.named.shape[1]:
        return into
    if not count or not lists.named.shape[1]:
        into.out.zero_()
        into.lse.fill_(float("-inf"))
        return into
    shapes: Sequence[Shape] = (shape,) if shape is not None else ()
    is_half, where = in_half(queries.dtype, codec), place(queries)
    for chosen in shapes or candidates(
        form=codec.form,
        heads=heads,
        is_half=is_half,
        generation=where.generation,
        has_little=where.has_little,
    ):
        work = _Work(queries, rows, lists, codec, scale, placed, into, chosen, adds)
        if work.runs(spare_sms, balanced=balanced):
            return into
    raise Unavailable(f"no shape of attention over {codec.form} rows fits this device")


class _Work(NamedTuple):
    """One launch, or with lists in pieces two."""

    queries: Tensor
    rows: Tensor
    lists: Lists
    codec: RowCodec
    scale: float
    placed: Tensor | None
    into: Partial
    shape: Shape
    adds: bool

    def runs(self, spare_sms: int, *, balanced: bool) -> bool:
        """False where a program of this shape takes more memory than a multiprocessor has."""
        where = place(self.queries)
        programs = where.programs(self._block_count(), spare_sms=spare_sms)
        is_cut = balanced and programs > 1
        parts = self._parts(programs) if is_cut else self.into
        cuts, pieces = self._ints(programs, 4), self._ints(self._pieces_max(programs), programs, 4)
        with on(self.queries):
            self._lay_out(programs, cuts, pieces, is_cut=is_cut)
            try:
                self._attend(programs, parts, (cuts, pieces), where)
            except OutOfResources:
                return False
            if is_cut:
                self._join(programs, parts, cuts)
        return True

    def _block_count(self) -> int:
        """The most blocks of keys that there can be."""
        count, heads = self.queries.shape[:2]
        blocks = div_ceil(self.lists.named.shape[1], self.shape.keys)
        return count * div_ceil(heads, self.shape.heads) * blocks

    def _pieces_max(self, programs: int) -> int:
        lists = len(self.queries) * div_ceil(self.queries.shape[1], self.shape.heads)
        return pieces_max(lists, self._block_count(), programs, self._blocks_min())

    def _blocks_min(self) -> int:
        return max(1, PIECE_KEYS_MIN // self.shape.keys)

    def _ints(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.queries.device)

    def _parts(self, programs: int) -> Partial:
        """Two parts of each program: dense, so that the second lies behind the first."""
        shape, device = (2 * programs, self.shape.heads), self.queries.device
        out = torch.empty(*shape, self.codec.latent_dim, device=device)
        return Partial(out, torch.empty(shape, device=device))

    def _lay_out(self, programs: int, cuts: Tensor, pieces: Tensor, *, is_cut: bool) -> None:
        count, heads = self.queries.shape[:2]
        shares.lay_out[(programs,)](
            *(self.lists.counts, cuts, pieces, count, div_ceil(heads, self.shape.heads)),
            KEYS=self.shape.keys,
            BLOCKS_MIN=self._blocks_min(),
            IS_CUT=is_cut,
            **FUSED,
        )

    def _attend(
        self,
        programs: int,
        parts: Partial,
        room: tuple[Tensor, Tensor],
        where: Place,
    ) -> None:
        queries, rows, codec, shape = self.queries, self.rows, self.codec, self.shape
        elsewhere = rows if self.placed is None else self.placed
        distance = elsewhere.data_ptr() - rows.data_ptr()
        device.attend[(programs,)](
            *(bits(queries), rows, self.lists.named, *room, *self.into, self.scale, distance),
            *(_apart(part, mine) for part, mine in zip(parts, self.into, strict=True)),
            *(rows.stride(0), elsewhere.stride(0), *queries.stride()[:2]),
            *(queries.shape[1], self.lists.named.shape[1]),
            **constants(codec, query_dtype=queries.dtype, interpreted=where.interpreted),
            ALIGNED=aligned(rows, elsewhere),
            HEADS=shape.heads,
            KEYS=shape.keys,
            ADDS=self.adds,
            num_warps=shape.warps,
            num_stages=where.stages(shape.stages),
            **FUSED,
        )

    def _join(self, programs: int, parts: Partial, cuts: Tensor) -> None:
        dim, shape = self.codec.latent_dim, self.shape
        partials.join[(programs - 1, div_ceil(shape.heads, JOIN_LINES))](
            *(*parts, cuts, *self.into, self.queries.shape[1], programs),
            WIDTH=dim,
            PADDED=_padded(dim),
            HEADS=shape.heads,
            LINES=JOIN_LINES,
            ADDS=self.adds,
            **FUSED,
        )


def aligned(rows: Tensor, elsewhere: Tensor) -> int:
    """To how many bytes all rows of both lie as the first of `rows` does."""
    distance = elsewhere.data_ptr() - rows.data_ptr()
    return math.gcd(ALIGNED_MAX, distance, rows.stride(0), elsewhere.stride(0))


def pieces_max(lists: int, blocks: int, programs: int, least: int) -> int:
    """How many pieces a program may get from at most `blocks` blocks: a list has at least a block,
    and a share may cut a list at each end. `shares` says when fewer programs have any: a share is
    then less than twice the least, or the lists are fewer than the programs."""
    share = max(div_ceil(blocks, programs), 2 * least)
    return min(lists, share + div_ceil(lists, programs) + 1)


def _apart(part: Tensor, mine: Tensor) -> int:
    """Numbers from one tensor to another."""
    return (part.data_ptr() - mine.data_ptr()) // mine.itemsize


def constants(
    codec: RowCodec, *, query_dtype: torch.dtype, interpreted: bool
) -> dict[str, int | bool | str]:
    """What the kernel is compiled for, apart from its block sizes."""
    size = 4 if codec.form == "f32" else 2
    before = codec.latent_dim + 4 * codec.scale_count
    return {
        "DIM": codec.latent_dim,
        "DIM_PADDED": _padded(codec.latent_dim),
        "ROPE": codec.rope_dim,
        "ROPE_PADDED": _padded(codec.rope_dim),
        "ROPE_FROM": before if codec.form == "fp8" else size * codec.latent_dim,
        "FORM": codec.form,
        "QUERY_IS_BF16": query_dtype == torch.bfloat16,
        "IN_BF16": in_half(query_dtype, codec) and not interpreted,
        "INTERPRETED": interpreted,
        "PRECISION": "ieee",
    }


def _padded(size: int) -> int:
    return max(DOT_MIN, int(triton.next_power_of_2(size)))


def merge_into(first: Partial, second: Partial, into: Partial) -> None:
    """All dense; `into` may be one of the sides."""
    width = into.out.shape[-1]
    if into.lse.numel():
        with on(into.lse):
            partials.merge[(into.lse.numel(),)](
                *first,
                *second,
                *into,
                width,
                triton.next_power_of_2(width),
                **UNFUSED,
            )
