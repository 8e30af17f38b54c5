"""Python imports this module at its start when the folder is in PYTHONPATH; then an engine's
process gets a device.

It is the pretended one, with ops at the speed of the host; its driver is kept in PRETENDED_DRIVER.
A server refuses variables of ESS that it does not know, so ESS_EMULATED is the engine's alone.
"""

from __future__ import annotations

import os
import sys

OF_AN_ENGINE = ("ess.engine.process.", "ess.prefill.worker")

OF_ALL = "ess.engine.process.lifeline"

if any(word.startswith(OF_AN_ENGINE) and word != OF_ALL for word in sys.orig_argv):
    os.environ["ESS_EMULATED"] = os.environ["PRETENDED_DRIVER"]
    from ess.kernels import backend
    from tests.support import (
        pretended,  # noqa: F401  from here on there is a device
        pretended_nccl,  # noqa: F401  and ranks may exchange its tensors
    )

    from tests.device.kernels import Kernels  # isort: skip

    backend._cuda = Kernels
