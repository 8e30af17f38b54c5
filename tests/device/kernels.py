"""The device's ops at the speed of the host: the CPU's, in the place of Triton's interpreter.

A call is one kernel: it is queued, captured and replayed as such, and looks at nothing before.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map

from ess.kernels.cpu import ops as cpu
from tests.support.pretended import PRETENCE


class Kernels:
    def implementation(self):
        return "the host's, for the pretended device"

    def has_stages(self):
        return False

    def reaches(self, tensor, *, in_place):
        return tensor.is_cuda or (in_place and tensor.is_pinned())

    def checked_before(self, name, ids):
        return False

    def __getattr__(self, name):
        function = getattr(cpu, name)

        def kernel(*given):
            made = []

            def call():
                with torch._C.DisableTorchFunction():
                    made.append(function(*given))

            PRETENCE.launch(call, *given)
            return tree_map(marked, made[0]) if made else None

        return kernel


def marked(thing):
    if isinstance(thing, torch.Tensor):
        thing.is_there = True
    return thing
