"""The process that a server has started where a nursery's fork does the work of an engine, of a
further process of the server, or of one that reads texts. Its name says which fork (`worker_of`).

A signal that ends it ends the fork too, but later: the nursery kills whose stand-in is gone. A test
in which the end of a process frees what the next one needs kills the fork. A signal that it can
catch is handed on. One that stops it does not reach the fork, so tests that stop such a process
or look into its memory or files start a real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket

from ess.engine.process.lifeline import LEAVE, die_with_parent

NURSERY = "FORKED_BY_{}"
"""The variable that has the address of a nursery, by its kind: a path, or a name behind an @."""
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, LEAVE)


def stand(kind: str, words: list[str]) -> None:
    """`words` are those behind `python`. Returns only if there is no nursery of this kind, or it
    has no such fork: then this process does the work itself."""
    if not (address := os.environ.get(NURSERY.format(kind), "").replace("@", "\0", 1)):
        return
    die_with_parent()
    files = inherited()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nursery:
        nursery.connect(address)
        asked = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(nursery, [json.dumps(asked | {"files": files}).encode()], files)
        fork = int(nursery.recv(64))
        if fork < 0:
            return
        with open("/proc/self/comm", "w") as name:
            name.write(f"for {fork}")
        for file in files[3:]:
            os.close(file)
        for number in HANDED_ON:
            signal.signal(number, lambda number, _: hand_on(fork, number))
        code = int(nursery.recv(64) or -signal.SIGKILL)
        if code < 0:
            if code != -signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def hand_on(fork: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, which the nursery is to say
        os.kill(fork, number)


def inherited() -> list[int]:
    """Descriptors of files that this process was started with: what Python opens is not handed on
    to children."""
    files = []
    for word in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing is closed
            if os.get_inheritable(int(word)):
                files.append(int(word))
    return sorted(files)
