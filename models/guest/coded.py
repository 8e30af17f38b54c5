"""The codes beside a guest's checkpoint, as weights: an engine on a CPU computes with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ess.errors import BadInput
from ess.kernels.cpu.codes import Bits, CodedWeight
from ess.models.guest.codes import FILE


class CodedFile:
    """Coded weights by the names of the checkpoint's tensors; empty if there is no file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._tensors: Mapping[str, Tensor] = {}
        if self._path.is_file():
            self._tensors = _loaded(self._path)

    def weight(self, name: str, shape: tuple[int, ...]) -> CodedWeight | None:
        """The weight as codes; BadInput if its shape is another."""
        codes, steps = (self._tensors.get(f"{name}.{part}") for part in ("codes", "steps"))
        if codes is None or steps is None:
            return None
        out_dim, in_dim = shape if len(shape) == 2 else (0, 0)
        if codes.shape not in ((out_dim, in_dim), (out_dim, in_dim // 2)):
            raise BadInput(
                f"{self._path.name}: {name} is {tuple(codes.shape)}, expected {out_dim} rows of"
                f" {in_dim} codes of 8 bits or 4"
            )
        bits: Bits = 8 if codes.shape[1] == in_dim else 4
        return CodedWeight(codes, steps, bits)


def _loaded(path: Path) -> Mapping[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise BadInput(f"{path.name} is not a safetensors file: {str(error)[:200]}") from None
