"""Found first by a Python with this folder in PYTHONPATH: an engine's process stands for a fork.

It asks the nursery at FORKED_ENGINES for one that has its pipes, its words and its environment, and
ends as that ends. It has the parent, the command line and the signals of a real engine; memory,
files, threads and children are the fork's.
"""

from __future__ import annotations

import sys

OF_AN_ENGINE = ("ess.engine.process.worker", "ess.engine.process.rank", "ess.prefill.worker")

if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2] in OF_AN_ENGINE:
    from tests.support import standing_for

    standing_for.stand()
