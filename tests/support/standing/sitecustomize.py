"""Python imports this module at its start when the folder is in PYTHONPATH; then the process of an
engine, a further process of a server, and one that reads texts, only represents a forked one.

It asks the nursery of its kind to fork a process with its pipes, arguments and environment, and
ends as that process ends. It has the parent, the command line and the signals of a real one;
memory, files, threads and children are the fork's.
"""

from __future__ import annotations

import sys

OF_AN_ENGINE = (
    "ess.engine.process.worker",
    "ess.engine.process.rank",
    "ess.engine.mesh.process",
    "ess.prefill.worker",
)
WITHOUT_TORCH = (
    "ess.engine.process.fake_engine",
    "ess.server.commands.start.front",
    "ess.server.process.text_child",
)

LIFELINE = "ess.engine.process.lifeline"

words = [word for word in sys.orig_argv[1:] if word != LIFELINE]
if words[:1] == ["-m"] and words[1] in (*OF_AN_ENGINE, *WITHOUT_TORCH):
    from tests.support import standing_for

    standing_for.stand("engine" if words[1] in OF_AN_ENGINE else "server", words)
