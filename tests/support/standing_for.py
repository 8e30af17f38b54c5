"""The process that a server has started where a nursery's fork does the work of an engine, or of a
process that reads texts.

A signal that ends it ends the fork too: the nursery kills whose stand-in is gone. One that it can
catch is handed on. One that stops it does not reach the fork, so tests that stop an engine or look
into its memory start a real one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from ess.engine.process.lifeline import die_with_parent

NURSERY = "FORKED_BY_{}"
"""The variable that has the address of a nursery, by its kind."""
HANDED_ON = (signal.SIGINT, signal.SIGTERM)


def stand(kind: str) -> None:
    """Returns only if the nursery has no such fork: then this process does the work itself."""
    die_with_parent()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nursery:
        nursery.connect(f"\0{os.environ[NURSERY.format(kind)]}")
        asked = {"words": sys.orig_argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(nursery, [json.dumps(asked).encode()], [0, 1, 2])
        fork = int(nursery.recv(64))
        if fork < 0:
            return
        for number in HANDED_ON:
            signal.signal(number, lambda number, _: os.kill(fork, number))
        code = int(nursery.recv(64) or -signal.SIGKILL)
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)
