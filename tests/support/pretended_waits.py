"""Where torch waits for a device: by names of calls, and by what they are given.

Of each of these torch's own code for a device reads a number back, a value or how large a result
is, or copies from memory of the host that is not page-locked.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {f"__{name}__" for name in ("bool", "int", "float", "index", "contains", "format", "repr")}
WAITS |= {"item", "tolist", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"}
WAITS |= {"equal", "allclose", "is_nonzero", "bincount", "multinomial", "new_tensor"}
WAITS |= {"histc", "one_hot", "combinations", "linspace", "logspace"}
# Those that ask whether a matrix could be factored.
WAITS |= {f"linalg_{name}" for name in ("inv", "solve", "cholesky", "eigh", "svd", "lstsq")}
WAITS |= {"inverse", "cholesky", "svd", "pinverse"}
UPLOADS = {"tensor", "as_tensor", "asarray"}
LISTS = list, range, np.ndarray
READ = torch.ops.aten._local_scalar_dense.default


def is_there(thing):
    return getattr(thing, "is_there", False)


def tree_top(index):
    return index if isinstance(index, tuple) else ()


def reads_back(name, args, kwargs):
    """Whether torch waits in a call with some tensor of the device."""
    if name == "copy_":
        queued = kwargs.get("non_blocking", args[2:3] == (True,))
        return is_there(args[0]) != is_there(args[1]) and not queued
    if name in ("__getitem__", "__setitem__"):
        return any(map(is_read_back, (args[1], *tree_top(args[1]))))
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave" and "output_size" not in kwargs:
        given = [*args[:2], *(kwargs[key] for key in ("input", "repeats") if key in kwargs)]
        return isinstance(given[-1], torch.Tensor)
    if is_there(kwargs.get("alpha")):  # a capture does not come to where torch reads it
        return True
    return name in WAITS or (name in UPLOADS and isinstance(args[0], list | tuple))


def may_be_number(tensor):
    """Torch takes one element of any shape as a length or a place, a factor without dimensions."""
    return tensor.numel() == 1 and not (tensor.dim() and tensor.is_floating_point())


def is_read_back(index):
    if isinstance(index, slice):
        return any(map(is_there, (index.start, index.stop, index.step)))
    if isinstance(index, torch.Tensor):
        return index.dtype == torch.bool or (is_there(index) and not index.dim())
    return isinstance(index, LISTS)


class Numbers(TorchDispatchMode):
    """Around one call of torch: `tell` is called where torch reads a tensor of the device, because
    it takes a number in its place. Of those of the host, `here`, it may."""

    def __init__(self, here, tell):
        super().__init__()
        self.here, self.tell = here, tell

    @classmethod
    def _should_skip_dynamo(cls):
        """Else torch imports its compiler, for 2 s, at the first call."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is READ and not any(args[0] is each for each in self.here):
            self.tell()
        return func(*args, **(kwargs or {}))
