"""A small decode on a device beside the same on the host: the same tokens?

    python -m ess.engine.process.checks.device_check ORDINAL       prints one JSON line

Two layers of the model in the box, float32, behind a prompt of which the device's slots hold a
part; and which kernels a server would use there, each with its reason.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import msgspec
import torch

from ess.engine.process.checks.selfcheck import decode, small_model
from ess.kernels.backend import ops
from ess.kernels.cpu import native
from ess.kernels.cuda.adapters.choice import choose

PROMPT_COUNT: Final = 400
MADE_COUNT: Final = 5
CHUNKS: Final = 5


class DeviceTrial(msgspec.Struct, frozen=True, kw_only=True):
    same: bool
    miss_count: int
    device_s: float
    host_s: float
    kernels: tuple[str, ...]


def trial(ordinal: int) -> DeviceTrial:
    torch.set_num_threads(1)
    device = f"cuda:{ordinal}"
    torch.cuda.set_device(ordinal)
    given: dict[str, Any] = {
        "modes": "da",
        "chunk_count": CHUNKS,
        "prompt_count": PROMPT_COUNT,
        "made_count": MADE_COUNT,
    }
    device_s, made, miss_count = decode(small_model(device), device=device, **given)
    host_s, expected, _ = decode(small_model(), **given)
    return DeviceTrial(
        same=made == expected,
        miss_count=miss_count,
        device_s=device_s,
        host_s=host_s,
        kernels=tuple(kernels(torch.device(device))),
    )


def kernels(device: torch.device) -> list[str]:
    """A line of text on each."""
    copies = native.available()
    lane = "native lists" if copies else f"not here ({native.why_missing()})"
    return [*choose(device).lines, f"ours: {ops('cuda').implementation()}", f"copy engine: {lane}"]


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(trial(int(sys.argv[1]))).decode() + "\n")
