"""Python imports this module at its start when the folder is in PYTHONPATH; then an engine's
process only represents a forked engine.

It asks the nursery at FORKED_ENGINES to fork an engine with its pipes, arguments and environment,
and ends as that engine ends. It has the parent, the command line and the signals of a real engine;
memory, files, threads and children are the fork's.
"""

from __future__ import annotations

import sys

OF_AN_ENGINE = ("ess.engine.process.worker", "ess.engine.process.rank", "ess.prefill.worker")

if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2] in OF_AN_ENGINE:
    from tests.support import standing_for

    standing_for.stand()
