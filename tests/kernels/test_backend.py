"""The registry of op sets."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ess.errors import EssError, Unavailable
from ess.kernels import backend
from ess.kernels.cpu import codec


def test_the_registry_names_what_runs() -> None:
    assert backend.chosen("reference") == "kernels: reference (torch)"
    assert codec.implementation() in backend.chosen("cpu")
    with pytest.raises(EssError, match="there are no 'tpu' ops; there are reference, cpu, cuda"):
        backend.ops("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_cuda_ops_say_what_is_missing() -> None:
    with pytest.raises(Unavailable, match=r"the cuda ops need (a CUDA device|triton: install ess)"):
        backend.ops("cuda")


def test_importing_the_registry_does_not_import_torch() -> None:
    program = (
        "import sys, ess.kernels.backend, ess.kernels.cpu.codec; print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"
