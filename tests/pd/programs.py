"""Small programs for the keeper of processes: each is run as a console script of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import time


def listens() -> None:
    """Greets like a worker, then waits for its end."""
    port = int(sys.argv[sys.argv.index("--port") + 1])
    listener = socket.create_server(("127.0.0.1", port))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    print("it has begun", file=sys.stderr, flush=True)
    print(json.dumps({"url": url}, indent=2), flush=True)
    while True:
        with contextlib.suppress(OSError):
            listener.accept()


def listens_once() -> None:
    """A port that was used before is too much for it."""
    if sys.argv[sys.argv.index("--port") + 1] != "0":
        print("not again", file=sys.stderr, flush=True)
        sys.exit(9)
    listens()


def is_deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    listens()


def fails() -> None:
    print("\n".join(f"line {number}" for number in range(9)), file=sys.stderr, flush=True)
    sys.exit(7)


def hangs() -> None:
    print(f"at {sys.argv[1]}", file=sys.stderr, flush=True)
    time.sleep(600)
