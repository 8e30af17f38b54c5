"""Which settings a CUDA device serves, which it does not serve yet, and what is its default.

Decided from settings alone, before anything looks for a device. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ess.errors import BadInput
from ess.kernels.served import BackendName
from ess.units import counted

if TYPE_CHECKING:
    from ess.engine.config import ProcessConfig

CPU: Final = "cpu"
CUDA: Final = "cuda"
DEFAULTS: Final[Mapping[str, Any]] = {"backend": "cuda", "form": "stored"}
"""Defaults of settings that are not given, where a device serves."""
OF_PREFILL: Final[Mapping[str, Any]] = {"graphs": 0}
"""Whatever is given: graphs are steps that decode, and a prefill worker runs none."""

OF_DEVICES: Final = ("device_bytes", "graph_bytes", "graph_sizes", "nvtx", "pp_devices")

TEAM: Final = "a stage's processes map one another's index keys, which lie on its device"
DECODES: Final = "an engine that decodes in several processes has its rows and weights on the host"

# Settings, the values that a device serves, and why it does not serve others.
SERVED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "backend": (("cuda",), "its kernels are those of backend cuda"),
    "evict": (("lru", "score"), "rows give way by lru or score there"),
    "deterministic": ((False,), "its kernels have no stages that are alike in every batch"),
    "tp_size": ((1,), TEAM),
    "cp_size": ((1,), TEAM),
    "transport": (("tcp", "nixl"), "its pools cannot be mapped by other processes"),
}


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What there is on this machine, as far as it could be asked: `fault` is what the driver, or
    what compiles for it, has answered. `torch_cuda` is what torch was built for, `torch_count` how
    many devices it sees. `has_rooms`: a library is installed whose products of experts take room of
    their own."""

    torch: str
    torch_cuda: str = ""
    torch_count: int = 0
    count: int = 0
    fault: str = ""
    name: str = ""
    arch: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    has_rooms: bool = False

    def why_not(self, device: str) -> str:
        """Why this device can serve nothing, in one sentence with all faults; empty if it can
        serve."""
        ordinal = ordinal_of(device)
        if ordinal < min(self.count, self.torch_count) and not self.fault:
            return ""
        driver = self.fault.rstrip(".") or f"the driver has {counted(self.count, 'CUDA device')}"
        built = f"for CUDA {self.torch_cuda}" if self.torch_cuda else "without CUDA"
        sees = f" and sees {counted(self.torch_count, 'device')}" if self.torch_cuda else ""
        return (
            f"device is {device!r}, and CUDA device {ordinal} cannot be used here: {driver}; torch"
            f" {self.torch} is built {built}{sees}; `ess serve --device cpu` needs none"
        )


def is_device(device: str) -> bool:
    return device != CPU


def backend_of(device: str) -> BackendName:
    return "cuda" if is_device(device) else "cpu"


def ordinal_of(device: str) -> int:
    """
    >>> ordinal_of("cuda"), ordinal_of("cuda:3")
    (0, 3)
    """
    return int(device.partition(":")[2] or 0)


def brought_by(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Defaults that the device sets where the settings give none, and notes on settings that have
    no effect.

    >>> brought_by({"device": "cuda", "form": "bf16"})
    ({'backend': 'cuda'}, [])
    >>> brought_by({"device": "cuda", **DEFAULTS, "role": "prefill"})
    ({'graphs': 0}, [])
    >>> brought_by({"device_bytes": "60GiB"})
    ({}, ['device_bytes has no effect: device is cpu'])
    """
    if is_device(given.get("device", CPU)):
        brought = {name: value for name, value in DEFAULTS.items() if name not in given}
        return {**brought, **(OF_PREFILL if given.get("role") == "prefill" else {})}, []
    return {}, [f"{name} has no effect: device is cpu" for name in OF_DEVICES if name in given]


def check_device(config: ProcessConfig) -> None:
    """Refuses, by name, each setting that the device cannot serve."""
    device = config.device
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", device):
        raise BadInput(f"device is {device!r:.40}, must be cpu, cuda or cuda:N")
    if not is_device(device):
        _check_cpu(config)
        return
    for name, (served, why) in SERVED.items():
        value = getattr(config, name)
        if value not in served:
            shown = f"{name} is {value!r:.80}, and device is {device!r}: {why}"
            raise BadInput(shown + (_instead(config) if why == TEAM else ""))
    if config.pp_size > 1 and config.role != "prefill":
        shown = f"pp_size is {config.pp_size}, and device is {device!r}: {DECODES}"
        raise BadInput(shown + _instead(config))


def _instead(config: ProcessConfig) -> str:
    """What uses as many devices."""
    count = config.world_size * config.dp_size
    if config.role == "prefill":
        return f"; pp_size {count} gives each of {count} devices its layers"
    return (
        f"; dp_size {count} uses {count} devices: each has requests of its own, and its share of"
        " the experts"
    )


def check_stage_devices(config: ProcessConfig) -> None:
    """Whether each stage here has a device that the settings name."""
    if not is_device(config.device):
        return
    device, given, count = config.device, config.pp_devices, config.processes_here
    if given and not config.is_staged:
        raise BadInput(f"pp_devices is {given!r:.80}, and no pipeline runs: device says which one")
    if device != CUDA and (given or (config.is_staged and count > 1)):
        raise BadInput(
            f"device is {device!r}, and {counted(count, 'stage')} of a pipeline run here: say cuda,"
            " and each has a device of its own from cuda:0 on, or those that pp_devices lists"
        )
    if given and (not re.fullmatch(r"\d{1,3}(,\d{1,3})*", given) or given.count(",") + 1 != count):
        raise BadInput(
            f"pp_devices is {given!r:.80}, must be a device's number for each of the"
            f" {counted(count, 'stage')} here, as 0,1"
        )


def devices_here(config: ProcessConfig) -> tuple[str, ...]:
    """The device of each process of a pipeline on this machine, in the order of ranks."""
    count = config.processes_here
    if config.pp_devices and is_device(config.device):
        return tuple(f"{CUDA}:{number}" for number in config.pp_devices.split(","))
    if config.device != CUDA:
        return (config.device,) * count
    return tuple(f"{CUDA}:{number}" for number in range(count))


def _check_cpu(config: ProcessConfig) -> None:
    if config.backend == "cuda":
        raise BadInput("backend is 'cuda', and device is 'cpu': --device cuda brings both")
    if config.form == "stored":
        raise BadInput(
            "form is 'stored', and device is 'cpu', where weights are computed in bf16 or f32"
        )
