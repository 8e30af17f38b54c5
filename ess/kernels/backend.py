"""Which set of ops runs. A set is a module; naming one imports it and nothing else does.

`reference` is the truth, `cpu` agrees with it and is fast, `cuda` is for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, get_args

from ess.errors import BadInput, Unavailable
from ess.kernels.served import BackendName
from ess.layout import IndexCodec, RowCodec

if TYPE_CHECKING:
    from torch import Tensor

    from ess.kernels.merge import Partial
    from ess.kernels.reference.ops import Keys


class Ops(Protocol):
    """What every set has, by the contracts written in `ess.kernels.reference.ops`."""

    def implementation(self) -> str: ...
    def has_stages(self) -> bool: ...
    def encode_rows(self, values: Tensor, codec: RowCodec, out: Tensor) -> Tensor: ...
    def decode_rows(self, rows: Tensor, codec: RowCodec, out: Tensor) -> Tensor: ...
    def encode_keys(self, values: Tensor, codec: IndexCodec) -> Keys: ...
    def write_keys(self, pages: Tensor, row_ids: Tensor, keys: Keys, codec: IndexCodec) -> None: ...
    def read_keys(self, pages: Tensor, row_ids: Tensor, codec: IndexCodec) -> Keys: ...
    def hadamard(self, values: Tensor) -> Tensor: ...
    def sparse_attention(
        self, queries: Tensor, rows: Tensor, slots: Tensor, *, latent_dim: int, scale: float
    ) -> Partial: ...
    def attend(
        self,
        queries: Tensor,
        rows: Tensor,
        slots: Tensor,
        codec: RowCodec,
        *,
        scale: float,
        placed: Tensor | None = None,
        into: Partial | None = None,
        threads: int = 1,
    ) -> Partial: ...
    def index_logits(
        self,
        queries: Tensor,
        weights: Tensor,
        pages: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        codec: IndexCodec,
        *,
        out: Tensor | None = None,
        threads: int = 1,
    ) -> Tensor: ...
    def index_top_k(
        self,
        queries: Tensor,
        weights: Tensor,
        pages: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        codec: IndexCodec,
        *,
        k: int,
        out: Tensor | None = None,
        threads: int = 1,
    ) -> Tensor: ...
    def top_k(
        self,
        logits: Tensor,
        lengths: Tensor,
        *,
        k: int,
        out: Tensor | None = None,
        threads: int = 1,
    ) -> Tensor: ...
    def expert_products(
        self,
        tokens: Tensor,
        ends: Tensor,
        weights: Tensor,
        *,
        scales: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...
    def merge(self, first: Partial, second: Partial, *, into: Partial | None = None) -> Partial: ...


def ops(name: BackendName) -> Ops:
    if name == "reference":
        from ess.kernels.reference import ops as reference

        return reference
    if name == "cpu":
        from ess.kernels.cpu import ops as cpu

        return cpu
    if name == "cuda":
        return _cuda()
    raise BadInput(f"there are no {name!r} ops; there are {', '.join(get_args(BackendName))}")


def _cuda() -> Ops:
    try:
        from ess.kernels.cuda.triton import ops as triton_ops
    except ModuleNotFoundError as error:
        raise Unavailable(f"the cuda ops need {error.name}: install ess[cuda]") from None
    triton_ops.require_device()
    return triton_ops


def chosen(name: BackendName) -> str:
    """One line for people: what runs under this name on this machine."""
    return f"kernels: {name} ({ops(name).implementation()})"
