"""The ops by our own kernels alone. Each backend is a module; naming it imports it and nothing else
does."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, get_args

from ess.errors import BadInput, not_installed
from ess.kernels.served import BackendName

if TYPE_CHECKING:
    from ess.kernels.calls import Backend
    from ess.kernels.ops import Ops


@functools.cache
def own_ops(name: BackendName) -> Ops:
    from ess.kernels.ops import Ops

    return Ops(name, _backend(name))


def _backend(name: BackendName) -> Backend:
    if name == "reference":
        from ess.kernels.reference import ops as reference

        return reference
    if name == "cpu":
        from ess.kernels.cpu import ops as cpu

        return cpu
    if name == "cuda":
        return _cuda()
    raise BadInput(f"there are no {name!r} ops; there are {', '.join(get_args(BackendName))}")


def _cuda() -> Backend:
    try:
        from ess.kernels.cuda.triton import ops as triton_ops
    except ModuleNotFoundError as error:
        raise not_installed(error.name or "triton", extra="cuda") from None
    triton_ops.require_device()
    return triton_ops
