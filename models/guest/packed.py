"""A GGUF file as untrusted input: every number is checked before it is believed.

The `gguf` library reads the file; what it raises for a broken file becomes BadInput here. Tensors
are asked for by name and shape, and come as float32, so a file cannot say how much memory is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput, not_installed
from ess.models.guest.codes import Codes, codes_of
from ess.models.guest.head import check_head

FORMS: Final = frozenset(
    {
        *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    }
)
Floats = npt.NDArray[np.float32]


class Packed:
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._gguf = _library()
        try:
            check_head(path)
            reader = self._gguf.GGUFReader(str(path))
            self._fields = reader.fields
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        except BadInput:
            raise
        except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise BadInput(f"{path.name} is not a whole GGUF file: {str(error)[:200]}") from None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def text(self, key: str) -> str:
        return str(self._said(key, str))

    def flag(self, key: str) -> bool:
        return bool(self._said(key, bool))

    def count(self, key: str, most: int) -> int:
        value = int(self._said(key, int))
        if not 1 <= value <= most:
            raise BadInput(f"{self._path.name}: {key} is {value}, expected 1 to {most:,}")
        return value

    def number(self, key: str) -> float:
        return float(self._said(key, (float, int)))

    def listed(self, key: str, kind: type) -> Sequence[Any]:
        values = self._said(key, list)
        if not all(isinstance(item, kind) for item in values):
            raise BadInput(f"{self._path.name}: {key} holds values that are no {kind.__name__}")
        return list(values)

    def floats(self, name: str, shape: tuple[int, ...]) -> Floats:
        """A tensor of this very shape, outermost axis first, dequantised."""
        if name not in self._tensors:
            raise BadInput(f"{self._path.name} lacks tensor {name!r}")
        tensor = self._tensors[name]
        stored = tuple(int(side) for side in reversed(tensor.shape))
        form = tensor.tensor_type.name
        if stored != shape or form not in FORMS:
            raise BadInput(
                f"{self._path.name}: tensor {name!r} is {form} {list(stored)}, expected"
                f" {list(shape)} in one of {', '.join(sorted(FORMS))}"
            )
        values = self._gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return np.ascontiguousarray(values, np.float32).reshape(shape)

    def codes(self, name: str) -> Codes | None:
        """A matrix that `floats` has given, as the file keeps it; None where no codes do."""
        tensor = self._tensors[name]
        return codes_of(np.asarray(tensor.data), tensor.tensor_type.name)

    def _said(self, key: str, kind: type | tuple[type, ...]) -> Any:
        try:
            value = self._fields[key].contents()
        except (KeyError, ValueError, UnicodeError, IndexError) as error:
            raise BadInput(f"{self._path.name} has no readable {key}: {error!r:.120}") from None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise BadInput(f"{self._path.name}: {key} is {value!r:.60}, a {type(value).__name__}")
        return value


def _library() -> Any:
    try:
        import gguf
        import gguf.quants
    except ModuleNotFoundError as error:
        raise not_installed(str(error.name), extra="guest") from None
    return gguf
