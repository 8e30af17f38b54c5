"""Which backend runs: `reference` is the truth, `cpu` agrees with it and is fast, `cuda` is for the
device, with kernels of other libraries where they are there and right."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ess.kernels.own import own_ops
from ess.kernels.served import BackendName

if TYPE_CHECKING:
    from ess.kernels.calls import Backend
    from ess.kernels.ops import Ops


def ops(name: BackendName) -> Ops:
    return _ops(name)


@functools.cache
def _ops(name: BackendName) -> Ops:
    if name != "cuda":
        return own_ops(name)
    from ess.kernels.ops import Ops

    return Ops(name, _cuda())


def _cuda() -> Backend:
    own = own_ops("cuda")
    from ess.kernels.cuda.adapters import choice, joined
    from ess.kernels.cuda.triton.launch import home

    return joined.joined(own, choice.choose(home()))


def chosen(name: BackendName) -> str:
    """A line for people: what runs under this name on this machine."""
    return f"kernels: {name} ({ops(name).implementation()})"
