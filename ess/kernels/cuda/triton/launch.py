"""The device on which kernels run, and what a launch needs to know of it."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor

from ess.errors import BadInput, Unavailable
from ess.kernels.cuda.program import CAPABILITY_MIN

FORMS: Final = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8", torch.float32: "f32"}
FUSED: Final[dict[str, Any]] = {"enable_fp_fusion": True}
"""A sum takes the product whole. Triton's default until 3.9, which announces the opposite."""
UNFUSED: Final[dict[str, Any]] = {"enable_fp_fusion": False}
"""Each product is rounded, as torch does."""
INTERPRETED_SMS: Final = 3
INTERPRETED_AS: Final = 9
SHARED_BYTES: Final = 227 << 10
"""Shared memory of a block on Hopper and on data-centre Blackwell, which shapes are made for."""
STAGES_OF_LITTLE: Final = 2


class Place(NamedTuple):
    """A device as launches see it; the interpreter counts as a device of few multiprocessors.
    `generation` is the first number of its compute capability, `shared_bytes` what a block may have
    of shared memory."""

    sm_count: int
    interpreted: bool
    generation: int
    shared_bytes: int

    @property
    def has_little(self) -> bool:
        """Whether it has less than shapes are made for: sm_89 and sm_120 have 99 KiB."""
        return self.shared_bytes < SHARED_BYTES

    def stages(self, wanted: int) -> int:
        """Blocks of a loop that shared memory holds at once."""
        return min(wanted, STAGES_OF_LITTLE) if self.has_little else wanted

    def programs(self, task_count: int, *, spare_sms: int = 0) -> int:
        """A grid for tasks that programs share out, leaving `spare_sms` multiprocessors free.

        It holds for programs of which no two fit on one multiprocessor.
        """
        if not 0 <= spare_sms < self.sm_count:
            raise BadInput(f"spare_sms is {spare_sms}, outside 0..{self.sm_count - 1}")
        return max(1, min(task_count, self.sm_count - spare_sms))


def interpreted() -> bool:
    """True where Triton's interpreter stands in for a device; it is chosen before the import."""
    return bool(triton.knobs.runtime.interpret)


def home() -> torch.device:
    """The device on which a kernel that is launched now runs."""
    return torch.device("cpu") if interpreted() else torch.device("cuda")


def require_device() -> None:
    if interpreted():
        return
    if not torch.cuda.is_available():
        raise Unavailable(f"the cuda ops need a CUDA device, and torch {torch.__version__} sees 0")
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY_MIN:
        raise Unavailable(
            f"the cuda ops need compute capability {CAPABILITY_MIN} for e4m3, got {capability}"
        )


def place(tensor: Tensor) -> Place:
    if interpreted():
        return Place(INTERPRETED_SMS, True, INTERPRETED_AS, SHARED_BYTES)
    number = tensor.device.index or 0
    return Place(_sm_count(number), False, _generation(number), _shared_bytes(number))


@functools.cache
def _sm_count(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _generation(device: int) -> int:
    return int(torch.cuda.get_device_capability(device)[0])


@functools.cache
def _shared_bytes(device: int) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device the current device, to which launches go."""
    if tensor.device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def bits(tensor: Tensor) -> Tensor:
    """bfloat16 as its bits, e4m3 as its codes; all else as it is."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16)
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
