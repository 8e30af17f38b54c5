"""How attention is cut for the tensor cores: a few named shapes, chosen from by form and heads.

Nothing is tried out while serving. The first shape that fits is used; the others compile
for sm_90 as well without spilling within the loop over keys, and `ess.bench.gpu.suite --only
shapes` says which of them is the best on the device that is there.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ess.layout import RowForm


class Shape(NamedTuple):
    """Heads and keys of a product, what Triton makes of a program, and why."""

    name: str
    heads: int
    keys: int
    warps: int
    stages: int
    reason: str


# fmt: off
EXACT: Final = Shape("exact", 16, 16, 8, 1, "float32 without tensor cores; larger blocks spill")
WIDE: Final = Shape("wide", 64, 64, 8, 3, "rows under way a block ahead in 226 kB of shared memory")
WIDE_LATE: Final = Shape("wide, late", 64, 64, 8, 2, "rows are waited for; one staged block less")
HALF: Final = Shape("half", 64, 32, 8, 3, "half the keys: products by narrower instructions")
HALF_FAR: Final = Shape("half, far", 64, 32, 8, 4, "half the keys, rows under way two blocks ahead")
SMALL: Final = Shape("small", 32, 32, 8, 3, "no heads of zeros up to 32 of them")
NARROW: Final = Shape("narrow", 16, 64, 8, 3, "no heads of zeros; products of single warps")
NARROW_FAR: Final = Shape("narrow, far", 16, 32, 8, 6, "less to wait for at the start of a list")

CANDIDATES: Final[dict[tuple[RowForm, int], tuple[Shape, ...]]] = {
    ("fp8", 16): (NARROW, NARROW_FAR, WIDE),
    ("fp8", 64): (WIDE, HALF, HALF_FAR, WIDE_LATE),
    ("bf16", 16): (NARROW, NARROW_FAR, HALF),
    ("bf16", 32): (SMALL, HALF),
    ("bf16", 64): (HALF, HALF_FAR, WIDE_LATE),
}
# For sm_100 Triton keeps sums in tensor memory and takes them to registers for every block: with
# 64 heads of decoded keys, 9 to 23 of them are spilled there. 32 heads spill none.
SINCE_BLACKWELL: Final[dict[tuple[RowForm, int], tuple[Shape, ...]]] = {
    ("fp8", 64): (SMALL, HALF, WIDE),
}
# fmt: on
BLACKWELL: Final = 10


def candidates(
    *, form: RowForm, heads: int, is_half: bool, generation: int, has_little: bool = False
) -> tuple[Shape, ...]:
    """The shape in use first, on a device of this generation: the first number of its compute
    capability. Heads beyond the most that a shape takes go to further programs. A device that has
    little shared memory, see `Place`, has room for one of these shapes."""
    if not is_half:
        return (EXACT,)
    if has_little:
        return (NARROW if heads <= NARROW.heads else SMALL,)
    limits = sorted(limit for of_form, limit in CANDIDATES if of_form == form)
    fitting = next((limit for limit in limits if heads <= limit), limits[-1])
    of_all = CANDIDATES[form, fitting]
    return SINCE_BLACKWELL.get((form, fitting), of_all) if generation >= BLACKWELL else of_all
