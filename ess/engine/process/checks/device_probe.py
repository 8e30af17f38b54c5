"""A CUDA device's name, memory and libraries, as one JSON line.

    python -m ess.engine.process.checks.device_probe ORDINAL

This is a process of its own: a process that opens a device holds some hundred megabytes of it until
it ends, and a server's process has no torch. Free memory is counted with that process's own share
taken, since the engine will take the same.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import msgspec
import torch

from ess.engine.devices import DeviceReport
from ess.errors import EssError
from ess.kernels.cuda import driver
from ess.kernels.cuda.adapters.deep_gemm import MODULES


def probe(ordinal: int) -> DeviceReport:
    report = DeviceReport(torch=str(torch.__version__), torch_cuda=torch.version.cuda or "")
    try:
        driver.call("cuInit", 0)
        report = msgspec.structs.replace(report, count=int(driver.call("cuDeviceGetCount")))
        if ordinal >= report.count:
            return report
        lacks = driver.why_missing(ordinal)
        device = driver.Device(ordinal)
        free_bytes, total_bytes = device.memory()
    except EssError as error:
        return msgspec.structs.replace(report, fault=str(error))
    return msgspec.structs.replace(
        report,
        fault=lacks or "",
        name=device.name,
        arch=device.arch,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        has_rooms=any(map(find_spec, MODULES)),
        torch_count=torch.cuda.device_count() if torch.cuda.is_available() else 0,
    )


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(probe(int(sys.argv[1]))).decode() + "\n")
