"""Arguments of the library door are checked here, once; the code behind it trusts them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ess.errors import BadInput, BadState
from ess.kernels.checks import fits
from ess.layout import ModelLayout
from ess.pool.warmup import WINDOW_MAX, WindowSet
from ess.units import shown

TYPES: Final = {"uint8": torch.uint8, "int32": torch.int32, "float32": torch.float32}
DTYPES: Final = {name: np.dtype(name) for name in TYPES}
TOKEN_MAX: Final = (1 << 63) - 1


def as_array(value: Any, name: str, dtype: str, shape: tuple[int | None, ...]) -> npt.NDArray[Any]:
    """A C-contiguous CPU tensor or array as a NumPy view, never a copy. None matches any size."""
    array = _view(value, name, dtype)
    if array.dtype is not DTYPES[dtype] and array.dtype != DTYPES[dtype]:
        raise BadInput(f"{name} is {array.dtype}, must be {dtype}")
    if not fits(array.shape, shape):
        want_text = ", ".join("any" if size is None else str(size) for size in shape)
        raise BadInput(f"{name} has shape {list(array.shape)}, must be [{want_text}]")
    if not array.flags.c_contiguous:
        raise BadInput(f"{name} is not contiguous (strides {list(array.strides)})")
    return array


def _view(value: Any, name: str, dtype: str) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, torch.Tensor):
        raise BadInput(f"{name} is a {type(value).__name__}, must be a tensor or a NumPy array")
    if value.dtype is not TYPES[dtype]:
        raise BadInput(f"{name} is {str(value.dtype).removeprefix('torch.')}, must be {dtype}")
    if not value.is_cpu:
        raise BadInput(f"{name} is on {value.device}, this pool is on the CPU")
    array: npt.NDArray[Any] = value.numpy()
    return array


def check_sets(
    sets: Sequence[WindowSet], *, group_count: int, length: int, window_count: int
) -> None:
    """Checks a set of windows for each group, over `length` positions."""
    if len(sets) != group_count:
        raise BadInput(f"sets has {len(sets)} entries, must have {group_count}, for each group")
    in_range("window_count", window_count, 0, WINDOW_MAX)
    for positions, last in sets:
        places = as_array(positions, "positions", "int32", (None,))
        numbers = as_array(last, "last windows", "int32", places.shape)
        if not len(places):
            continue
        if places[0] < 0 or places[-1] >= length or (np.diff(places) <= 0).any():
            raise BadInput(f"positions must be ascending and within 0..{length - 1}")
        if not 0 <= numbers.min() <= numbers.max() < window_count:
            raise BadInput(
                f"last windows are {numbers.min()}..{numbers.max()}, must be 0..{window_count - 1}"
            )


def whole(name: str, value: Any) -> int:
    """The value as an int. True and False are refused, which Python takes for 1 and 0."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise BadInput(f"{name} is {shown(value)}, must be a whole number")


def in_range(name: str, value: Any, low: int, high: int) -> int:
    """The value as an int, with low <= value <= high."""
    number = value if type(value) is int else whole(name, value)
    if not low <= number <= high:
        raise BadInput(f"{name} is {shown(number)}, must be {low}..{high}")
    return number


def counts(name: str, values: Any, size: int) -> list[int]:
    """A whole number for each sequence."""
    listed = _whole_numbers(values)
    if listed is None:
        raise BadInput(f"{name} is {shown(values)}, must have whole numbers, for each sequence")
    if len(listed) != size:
        raise BadInput(f"{name} has {len(listed)} entries for {size} sequences")
    return listed


def part_of(queries: range | None, count: int) -> range:
    """Checks `queries`, a range of step 1 within 0..count; None means all of them."""
    if queries is None:
        return range(count)
    if not isinstance(queries, range) or queries.step != 1:
        raise BadInput(f"queries is {queries!r}, must be a range with step 1")
    if not 0 <= queries.start < queries.stop <= count:
        raise BadInput(f"queries is {queries!r}, must lie within 0..{count - 1}")
    return queries


def kept_counts(accepted: Any, row_counts: Sequence[int]) -> list[int]:
    """How many new rows of each sequence are kept."""
    listed = counts("accepted", accepted, len(row_counts))
    for kept, brought in zip(listed, row_counts, strict=True):
        if not 0 <= kept <= brought:
            in_range("accepted", kept, 0, brought)
    return listed


def token_ids(name: str, tokens: Any) -> list[int]:
    """Token ids of a list, or of an array or a tensor with one dimension."""
    if hasattr(tokens, "tolist"):
        if tokens.ndim != 1:
            raise BadInput(f"{name} has shape {list(tokens.shape)}, must have one dimension")
        tokens = tokens.tolist()
    ids = _whole_numbers(tokens)
    if ids is None:
        raise BadInput(f"{name} must be a list of whole numbers: {shown(tokens)}")
    if ids and not 0 <= min(ids) <= max(ids) <= TOKEN_MAX:
        raise BadInput(f"{name} has ids {shown(min(ids))}..{shown(max(ids))}, must be 0..2**63 - 1")
    return ids


def _whole_numbers(values: Any) -> list[int] | None:
    """The values as ints. None for bytes, sets and mappings, and where a value is not a whole
    number, as True and False are not."""
    if isinstance(values, bytes | bytearray | Set | Mapping):
        return None
    try:
        given = list(values)
        kinds = set(map(type, given))
        listed = given if kinds <= {int} else list(map(operator.index, given))
    except TypeError:
        return None
    return None if bool in kinds else listed


def named(queries: range) -> str:
    return f"queries {queries.start}..{queries.stop - 1}"


def require_appended(
    step: int, layout: ModelLayout, row_counts: Mapping[int, int], row_count: int
) -> None:
    """Every main layer has all new rows of a step."""
    missing = [n for n in range(layout.layer_count) if row_counts.get(n, 0) < row_count]
    if missing:
        raise BadState(
            f"step {step} accepts rows, but {len(missing)} layers have not been appended: layer "
            f"{missing[0]} has rows of {row_counts.get(missing[0], 0)} of {row_count} queries"
        )
