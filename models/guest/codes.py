"""A guest's weights as its GGUF file has them: integers, each 32 with a scale and an offset.

They lie in `coded.safetensors` beside the checkpoint, which has the same weights in float32. An
engine on a CPU computes with them: a quarter or half of the bytes of bfloat16, and nothing rounded.
Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

FILE: Final = "coded.safetensors"
Bytes = npt.NDArray[np.uint8]
Steps = npt.NDArray[np.float16]


class Codes(NamedTuple):
    """As `ess.kernels.cpu.codes.CodedWeight` keeps them."""

    codes: Bytes
    steps: Steps

    def rows(self, order: npt.NDArray[np.int64]) -> Codes:
        return Codes(np.ascontiguousarray(self.codes[order]), self.steps[order])


def codes_of(stored: Bytes, form: str) -> Codes | None:
    """From a tensor's bytes [out, bytes]; None where codes say less than the file does."""
    if form not in _READERS or stored.ndim != 2:
        return None
    size = _BLOCK_BYTES[form]
    blocks = np.ascontiguousarray(stored).reshape(len(stored), -1, size)
    codes, scale, offset = _READERS[form](blocks)
    steps = np.stack((scale, offset), -1)
    if not np.isfinite(steps).all():
        return None
    return Codes(codes.reshape(len(stored), -1), steps)


def _halves(blocks: Bytes, at: int) -> Steps:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _nibbles(blocks: Bytes) -> Bytes:
    """The file has inputs 0 to 15 of a group in the low halves of its bytes, 16 to 31 above."""
    single = np.concatenate((blocks & 15, blocks >> 4), -1)
    return np.ascontiguousarray(single[..., 0::2] | single[..., 1::2] << 4)


def _q4_0(blocks: Bytes) -> tuple[Bytes, Steps, Steps]:
    scale = _halves(blocks, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        return _nibbles(blocks[..., 2:]), scale, scale * np.float16(-8)


def _q4_1(blocks: Bytes) -> tuple[Bytes, Steps, Steps]:
    return _nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> tuple[Bytes, Steps, Steps]:
    scale = _halves(blocks, 0)
    return np.ascontiguousarray(blocks[..., 2:]), scale, np.zeros_like(scale)


_READERS: Final[Mapping[str, Any]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
_BLOCK_BYTES: Final = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def write(path: Path, coded: Mapping[str, Codes]) -> None:
    from safetensors.numpy import save_file

    parts = {f"{name}.{part}": made for name, both in coded.items() for part, made in _parts(both)}
    save_file(parts, path / FILE, {"format": "pt"})


def _parts(codes: Codes) -> list[tuple[str, npt.NDArray[Any]]]:
    return [("codes", codes.codes), ("steps", np.ascontiguousarray(codes.steps))]
