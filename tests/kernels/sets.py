"""The op sets that tests run through; the cuda one takes tensors of the host and gives them back.

On a device every tensor is moved with its whole storage, so strides, gaps and overlaps arrive as
they were made, and what an op wrote is copied back to where the caller looks for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ess.errors import BadInput, Unavailable
from ess.kernels import backend
from ess.kernels.calls import Keys
from ess.kernels.merge import Partial
from ess.kernels.ops import Ops
from ess.layout import RowCodec

SETS = ["reference", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ISAS = ("portable", "avx2", "avx512")
reference, cpu = backend.ops("reference"), backend.ops("cpu")


def op_set(name: str) -> Ops:
    try:
        ops = backend.ops(name)
    except Unavailable as reason:
        pytest.skip(str(reason))
    return OnDevice(ops) if name == "cuda" and torch.cuda.is_available() else ops


def says_so(ops: Any, says: str) -> bool:
    """Whether these ops refuse it: on a device nothing looks at ids."""
    return not isinstance(ops, OnDevice) or not re.search(r"holds|outside", says)


def is_refused(ops: Any, codec: RowCodec) -> bool:
    """Whether no kernel of a device reads rows of this form yet: then its ops say so, in a
    sentence, and a test asks for no more."""
    is_device = isinstance(ops, OnDevice) or getattr(ops, "name", "") == "cuda"
    if not is_device or codec.form != "fp8_64":
        return False
    rows = torch.zeros(1, codec.row_bytes, dtype=torch.uint8)
    with pytest.raises(BadInput, match="no kernel of a device reads or writes rows of the form"):
        ops.decode_rows(rows, codec, torch.zeros(1, codec.latent_dim + codec.rope_dim))
    return True


def plain_attention(
    ops: Any,
    queries: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    *,
    latent_dim: int,
    scale: float,
) -> Partial:
    """Attention over float32 rows [slot, dim], which are encoded as they lie."""
    codec = RowCodec(form="f32", latent_dim=latent_dim, rope_dim=rows.shape[1] - latent_dim)
    return ops.attend(queries, rows.view(torch.uint8), slots, codec, scale=scale)


class OnDevice:
    """An op set for tensors of the host. `placed` is pinned and stays there."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(self._ops, name)

        def call(*given: Any, placed: torch.Tensor | None = None, **options: Any) -> Any:
            journey = Journey()
            there = [journey.there(each) for each in given]
            named = {key: journey.there(each) for key, each in options.items()}
            if placed is not None:
                named["placed"] = view(whole(placed).pin_memory(), placed)
            result = op(*there, **named)
            torch.cuda.synchronize()
            return journey.back(result)

        return call


class Journey:
    """Storages that went to the device for one call, each once, and the tensors that lie in them.

    Tensors that share a storage here share one there.
    """

    def __init__(self) -> None:
        self.storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []

    def there(self, thing: Any) -> Any:
        if isinstance(thing, tuple) and hasattr(thing, "_fields"):
            return type(thing)(*map(self.there, thing))
        if not isinstance(thing, torch.Tensor):
            return thing
        here = whole(thing)
        _, device = self.storages.setdefault(here.data_ptr(), (here, here.cuda()))
        self.tensors.append((thing, view(device, thing)))
        return self.tensors[-1][1]

    def back(self, result: Any) -> Any:
        """What the op wrote is copied to where the caller has it, and returned as his own."""
        for here, device in self.storages.values():
            here.copy_(device)
        return self._own(result)

    def _own(self, result: Any) -> Any:
        if isinstance(result, (Partial, Keys)):
            return type(result)(*map(self._own, result))
        if not isinstance(result, torch.Tensor):
            return result
        return next((here for here, device in self.tensors if device is result), result.cpu())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def view(bytes_there: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=bytes_there.device)
    place = like.storage_offset(), like.size(), like.stride()
    return empty.set_(bytes_there.untyped_storage(), *place)
