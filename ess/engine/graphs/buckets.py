"""The sizes that decode steps are padded to, so that a few graphs serve all of them.

A bucket has some number of sequences that bring equally many queries each. A step goes into the
smallest one that holds it; its pads bring no rows, select none and are accepted for no request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from ess.errors import BadInput

SMALL: Final = (1, 2, 4)
STRIDE: Final = 8
GraphCount = Literal["auto"] | int
GRAPHS_MIN: Final = 64
KINDS: Final = 2
"""Of one bucket with all drafts, or with none: all rows in slots or not."""
EAGER_STEPS: Final = 1
STEPS: Final = 1 + EAGER_STEPS
"""Steps of a kind, the last of which is captured."""


def rehearsed_length(given: GraphCount, *, verified_max: int) -> int:
    """Positions of the request with which steps are rehearsed: a token, and those of its steps.

    >>> rehearsed_length("auto", verified_max=2), rehearsed_length(0, verified_max=2)
    (5, 0)
    """
    return 1 + STEPS * verified_max if given else 0


def default_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, then every eighth, up to the largest batch, which is always included.

    >>> default_sizes(20)
    (1, 2, 4, 8, 16, 20)
    """
    assert largest > 0, f"batches of {largest} sequences"
    return tuple(sorted({*_upto(SMALL, largest), *range(STRIDE, largest, STRIDE), largest}))


def parse_sizes(text: str, largest: int) -> tuple[int, ...]:
    """
    >>> parse_sizes("1, 2,8", 8)
    (1, 2, 8)
    """
    parts = [part.strip() for part in text.split(",")]
    sizes = [int(part) if part.isascii() and part.isdecimal() else 0 for part in parts]
    if min(sizes) < 1 or max(sizes) > largest or sizes != sorted({*sizes}):
        raise BadInput(
            f"graph_sizes is {text!r:.80}, must be ascending numbers of requests from 1 to"
            f" max_running, which is {largest}"
        )
    return tuple(sizes)


def bucket_sizes(given: str, *, largest: int, splits: bool) -> tuple[int, ...]:
    """The sizes in `given`, or the default sizes; `splits` is for steps in two halves.

    >>> bucket_sizes("", largest=10, splits=False), bucket_sizes("3,5", largest=10, splits=True)
    ((1, 2, 4, 8, 10), (3, 5))
    """
    if given:
        return parse_sizes(given, largest)
    sizes = default_sizes(largest)
    return doubled(sizes, largest) if splits else sizes


def graph_count(given: GraphCount, sizes: Sequence[int], *, verified_max: int) -> int:
    """`given`, or as many as there are usual kinds of steps: of each bucket those with all drafts,
    the same as timed steps, those without drafts, and the steps in which this rank stands by.

    >>> graph_count(5, (1, 2), verified_max=2), graph_count("auto", (1, 2), verified_max=2)
    (5, 64)
    >>> graph_count("auto", default_sizes(128), verified_max=2)
    133
    """
    if given != "auto":
        return given
    return max(GRAPHS_MIN, len(sizes) * (KINDS * (2 + (verified_max > 1)) + 1))


def _upto(sizes: Iterable[int], largest: int) -> list[int]:
    return [size for size in sizes if size <= largest]


def doubled(sizes: Sequence[int], largest: int) -> tuple[int, ...]:
    """Sizes for steps in two halves: each half then has one of the sizes given.

    >>> doubled((1, 2, 4, 8), 10)
    (2, 4, 8)
    """
    return tuple(_upto((2 * size for size in sizes), largest))


def bucket_of(
    counts: Sequence[int], sizes: Sequence[int], *, query_max: int, width: int = 1
) -> tuple[int, ...]:
    """Queries of each sequence of the bucket for a step with `counts`, `width` at least where that
    many fit; () if none holds it.

    >>> bucket_of((2, 1, 2), (1, 2, 4), query_max=8)
    (2, 2, 2, 2)
    >>> bucket_of((2, 1, 2), (1, 2, 4), query_max=7)
    (2, 2, 2)
    >>> bucket_of((2, 1, 2), (1, 2), query_max=8), bucket_of((4, 1, 1), (4,), query_max=8)
    ((), ())
    >>> bucket_of((1, 1), (2,), query_max=4, width=2), bucket_of((1, 1), (2,), query_max=3, width=2)
    ((2, 2), (1, 1))
    """
    assert counts, "a step without sequences"
    widest, least = max(counts), len(counts)
    width = max(width, widest) if least * width <= query_max else widest
    for size in sizes:
        if size >= least and least * width <= query_max:
            return (width,) * min(size, query_max // width)
    return ()
