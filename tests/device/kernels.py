"""The device's ops at the speed of the host: the CPU's, in the place of Triton's interpreter.

A call is one kernel: it is captured and replayed as such, and looks at nothing before. While a
graph is captured it runs too, over ids that are none, for its result says how large that is.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map

from ess.kernels.cpu import ops as cpu
from tests.support.pretended import PRETENCE
from tests.support.pretended_touches import of_kernel


class Kernels:
    def implementation(self):
        return "the host's, for the pretended device"

    def has_stages(self):
        return False

    def reaches(self, tensor, *, in_place):
        return tensor.is_cuda or (in_place and tensor.is_pinned())

    def checked_before(self, name, ids):
        return False

    def counts_to_build(self, weights, count_max):
        return []

    def __getattr__(self, name):
        function = getattr(cpu, name)

        def kernel(*own):
            def call():
                with torch._C.DisableTorchFunction():
                    return function(*given)

            PRETENCE.require_reach(own)
            given = PRETENCE.by_address(own)
            first = None if PRETENCE.captured is None else lambda: sized(function, own)
            told = lambda made: of_kernel(name, function, given, made)  # noqa: E731
            return PRETENCE.run(call, there=True, first=first, told=told, name=name)

        return kernel


def sized(function, given):
    """What a call gives back is so large, whatever ids it will find when it is replayed. What only
    writes to what it is given does not run."""
    if function.__annotations__["return"] == "None":
        return None
    with torch._C.DisableTorchFunction():
        return function(*tree_map(without_ids, given))


def without_ids(thing):
    has_ids = isinstance(thing, torch.Tensor) and thing.dtype == torch.int32
    return thing.clamp(-1, 0) if has_ids else thing
