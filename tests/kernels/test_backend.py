"""The registry of op sets."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ess.errors import EssError, Unavailable
from ess.kernels import backend, rowcodec


def test_the_registry_names_what_runs() -> None:
    assert backend.chosen("reference") == "kernels: reference (torch)"
    assert rowcodec.implementation() in backend.chosen("cpu")
    with pytest.raises(Unavailable, match="cuda"):
        backend.ops("cuda")
    with pytest.raises(EssError, match="there are no 'tpu' ops; there are reference, cpu, cuda"):
        backend.ops("tpu")


def test_importing_the_registry_does_not_import_torch() -> None:
    program = "import sys, ess.kernels.backend, ess.kernels.rowcodec; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"
