"""Small programs for the keeper of processes: each is run as a console script of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path


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


def leaves_a_child() -> None:
    """Its first child lives on until there is a file `end`, or for two minutes where the test was
    killed; what they do is in the file it gets."""
    lives = Path(sys.argv[1])
    is_first = not lives.exists()
    write(lives, "begins")
    if is_first and not os.fork():
        os.closerange(0, 3)
        signal.alarm(120)
        write(lives, "left")
        while not (lives.parent / "end").exists():
            time.sleep(0.01)
        write(lives, "ends")
        os._exit(0)
    listens()


def leaves_its_output() -> None:
    """To a child, which has it open until the file it gets is there, or for two minutes."""
    if not os.fork():
        signal.alarm(120)
        while not Path(sys.argv[1]).exists():
            time.sleep(0.01)
        os._exit(0)
    listens()


def write(file: Path, line: str) -> None:
    with file.open("a") as lines:
        lines.write(line + "\n")


def is_deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    listens()


def fails() -> None:
    print("\n".join(f"line {number}" for number in range(9)), file=sys.stderr, flush=True)
    sys.exit(7)


def hangs() -> None:
    print(f"at {sys.argv[1]}", file=sys.stderr, flush=True)
    time.sleep(600)
