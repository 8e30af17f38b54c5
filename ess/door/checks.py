"""Everything that comes in through the door is checked here, once; what is inside trusts it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput
from ess.kernels.checks import fits

DTYPES: Final = {name: np.dtype(name) for name in ("uint8", "int32")}


def as_array(value: Any, name: str, dtype: str, shape: tuple[int | None, ...]) -> npt.NDArray[Any]:
    """A C-contiguous CPU tensor or array as a NumPy view, never a copy. None matches any size."""
    array = _view(value, name)
    wanted = DTYPES[dtype]
    if array.dtype is not wanted and array.dtype != wanted:
        raise BadInput(f"{name} is {array.dtype}, must be {dtype}")
    if not fits(array.shape, shape):
        want_text = ", ".join("any" if size is None else str(size) for size in shape)
        raise BadInput(f"{name} has shape {list(array.shape)}, must be [{want_text}]")
    if not array.flags.c_contiguous:
        raise BadInput(f"{name} is not contiguous (strides {list(array.strides)})")
    return array


def _view(value: Any, name: str) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "data_ptr") and hasattr(value, "numpy"):
        if value.device.type != "cpu":
            raise BadInput(f"{name} is on {value.device}, this pool is on the CPU")
        if value.requires_grad:
            raise BadInput(f"{name} requires a gradient; pass {name}.detach()")
        return np.asarray(value.numpy())
    raise BadInput(f"{name} is a {type(value).__name__}, must be a tensor or a NumPy array")


def in_range(name: str, value: int, low: int, high: int) -> None:
    """low <= value <= high."""
    if not low <= value <= high:
        raise BadInput(f"{name} is {value}, must be {low}..{high}")


def counts(name: str, values: Any, size: int) -> list[int]:
    """One whole number per sequence."""
    listed = [int(value) for value in values]
    if len(listed) != size:
        raise BadInput(f"{name} has {len(listed)} entries for {size} sequences")
    return listed
