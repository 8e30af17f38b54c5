"""Python processes of tests, started without the seconds that their imports take. A nursery is a
process that has made the imports of one kind of process; for each process that a test needs it
forks. `Forked` is a `subprocess.Popen` whose child comes from there: it has pipes, an environment,
signals and an exit code of its own, and executes `__main__` anew. What differs from a real start:
/proc shows the nursery's command line; children of a nursery have the same seed of hashes and share
the pages that they do not write; their parent is the nursery, which tells how they end. So tests of
a start, of memory or of a command line take `subprocess.Popen`.

A nursery ends with the process that asked for it, and then a child is killed that wants to die
with its parent. It has a single thread: a fork would copy the locks of others, for ever held.

The engines of a forked server are forks too, as are its further processes and what reads texts for
it. What the server starts is a small process that stands for its fork (`standing_for.py`), so that
the server has a child to wait for and to kill.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import itertools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.kin import kill_all, kin
from tests.support.standing_for import NURSERY

ROOT = Path(__file__).resolve().parents[2]
STANDING = f"{ROOT / 'tests' / 'support' / 'standing'}:{ROOT}"
"""Where Python finds modules so that what a server starts is a fork."""
IMPORTS = {
    "engine": (
        "ess.engine.process.rank",
        "ess.engine.mesh.process",
        "ess.prefill.worker",
        "ess.comm.processes.joined",
    ),
    "interpreted": (
        "triton.experimental.gluon",
        "ess.kernels.cuda.triton.ops",
        "ess.engine.process.build",
        "ess.comm.processes.joined",
        "ess.prefill.stage",
    ),
    "disk": ("tests.disk.bytes_of",),
    "server": (
        "ess.server.commands.start.begin",
        "ess.server.commands.serve",
        "ess.server.commands.start.front",
        "ess.engine.process.fake_engine",
        "uvloop",
    ),
    "tests": ("tests.support.collected",),
}
"""By kind; the first two have torch. The second is for Triton's interpreter, the last is for
workers of a run of tests."""
AT_IMPORTS = {"interpreted": {"TRITON_INTERPRET": "1"}}
"""What kernels are is decided when they are imported."""
STARTED = dict(os.environ)
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "LD_", "MALLOC_", "TORCH", "ESS_ISA")
MAY_DIFFER = ("TORCHINDUCTOR_CACHE_DIR", "MALLOC_ARENA_MAX")
"""torch writes the one into the environment of a process that imports its compiler; with the other
a process that reads texts takes less memory."""
ASKED_MAX = 1 << 17


def started(
    kind: str, words: Sequence[str], *, env: Mapping[str, str] | None = None, **given: Any
) -> subprocess.Popen[Any]:
    """`python words...` in this tree's folder; forked unless the environment differs in something
    that Python or a library reads when it starts."""
    told = dict(os.environ if env is None else env)
    command = [sys.executable, *words]
    if not _starts_alike(told):
        return subprocess.Popen(command, cwd=ROOT, env=told, **given)
    return Forked(command, kind=kind, cwd=ROOT, env=told, **given)


def finished(kind: str, *words: object, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, of one that is started here; what it printed and said is kept. When the
    time of a test is over, it is killed with all that it has started."""
    given, pipes = [*map(str, words)], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(kind, given, env=env, text=True, **pipes) as process:
        try:
            printed, said = process.communicate()
        except BaseException:
            kill_all([*kin(process.pid), process.pid])
            raise
    return subprocess.CompletedProcess(given, process.returncode, printed, said)


def run(kind: str, *words: object, env: Mapping[str, str]) -> str:
    """What it printed, which ended well."""
    done = finished(kind, *words, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    return done.stdout


def forking(kind: str) -> SimpleNamespace:
    """In place of `subprocess` in a module: what it starts is forked, as are a server's engines."""

    def forked(command: Sequence[str], *, env: Any = None, **given: Any) -> subprocess.Popen[Any]:
        told = dict(os.environ if env is None else env)
        told |= forked_engines() if kind == "server" else {}
        return started(kind, command[1:], env=told, **given)

    return SimpleNamespace(**{**vars(subprocess), "Popen": forked})


def _starts_alike(told: Mapping[str, str]) -> bool:
    return all(
        told.get(name) == STARTED.get(name)
        or (name == "PYTHONPATH" and told.get(name) in (str(ROOT), STANDING))
        for name in {*told, *STARTED}
        if name.startswith(READ_AT_START) and name not in MAY_DIFFER
    )


class Forked(subprocess.Popen):
    """Three methods differ: one begins a child, two learn of its end."""

    def __init__(self, args: Sequence[str], *, kind: str, **given: Any) -> None:
        self._kind = kind
        super().__init__(args, **given)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
        pipes = more[3:9]
        theirs = (pipes[0], pipes[3], pipes[5])
        files = [own if end == -1 else end for own, end in enumerate(theirs)]
        self._end, told = os.pipe()
        asked = {"words": args[1:], "folder": str(cwd), "environment": env, "files": [0, 1, 2]}
        self.pid = nursery(self._kind).fork(asked, [*files, told])
        os.close(told)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        try:
            return self._wait(0)
        except subprocess.TimeoutExpired:
            return None

    def _wait(self, timeout: float | None) -> int:
        with self._waitpid_lock:
            if self.returncode is None:
                if not select.select([self._end], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                said = os.read(self._end, 64)
                assert said, "its nursery has ended"
                os.close(self._end)
                self.returncode = int(said)
        return self.returncode


class Nursery:
    """As seen by the process that asks it. With a command that runs it on another machine `before`
    its own, only a `path` leads to it."""

    def __init__(self, kind: str, *, before: Sequence[str] = (), path: str = "") -> None:
        self._asks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self.address = path or f"@nursery-{os.getpid()}-{kind}"
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hears:
            hears.bind(self.address.replace("@", "\0", 1))
            hears.listen()
            files = theirs.fileno(), hears.fileno()
            words = ["-m", "tests.support.forked", *map(str, files), *IMPORTS[kind]]
            self.process = subprocess.Popen(
                [*before, sys.executable, *words],
                cwd=ROOT,
                env={
                    **STARTED,
                    "OPENBLAS_NUM_THREADS": "1",  # NumPy starts no threads
                    **AT_IMPORTS.get(kind, {}),
                },
                stdin=subprocess.DEVNULL,
                pass_fds=files,
            )
        atexit.register(self.close)

    def fork(self, asked: Mapping[str, Any], files: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self._asks, [json.dumps(asked).encode()], files)
            said = self._asks.recv(64)
        assert said, "the nursery has ended"
        return int(said)

    def close(self) -> None:
        self._asks.close()
        self.process.wait()


@functools.cache
def nursery(kind: str) -> Nursery:
    return Nursery(kind)


def forked_engines() -> dict[str, str]:
    """Variables for a server whose engines and other processes shall be forks."""
    addresses = {NURSERY.format(kind): nursery(kind).address for kind in ("engine", "server")}
    return {"PYTHONPATH": STANDING, **addresses}


class Forks:
    """The forks of a nursery: where each end is reported, and the process that represents a fork,
    if there is one."""

    def __init__(self) -> None:
        self._told: dict[int, int] = {}
        self.standing: dict[socket.socket, int] = {}

    def begin(self, who: socket.socket, asked: Mapping[str, Any], files: list[int]) -> bool:
        """True in the fork. A process that cannot have one does the work itself."""
        stands = who in self.standing
        pid = -1 if stands and not _starts_alike(asked["environment"]) else os.fork()
        if pid > 0:
            self._told[pid] = os.dup(who.fileno()) if stands else files.pop()
        if pid and stands:
            self.standing[who] = pid
        if pid:
            for file in files:
                os.close(file)
            with contextlib.suppress(ConnectionError):
                who.send(b"%d" % pid)
        return not pid

    def leave(self, standing: socket.socket) -> None:
        """Its fork goes with it, if that has not ended."""
        pid = self.standing.pop(standing)
        standing.close()
        if pid in self._told:
            os.kill(pid, signal.SIGKILL)

    def tell(self) -> None:
        """Those that wait for children which have ended."""
        for pid, told in list(self._told.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(ConnectionError):
                    os.write(told, b"%d" % os.waitstatus_to_exitcode(status))
                os.close(self._told.pop(pid))


def main(asks: socket.socket, hears: socket.socket, modules: Sequence[str]) -> None:
    """Forks until the other end is closed. Only a child leaves the loop, with what it shall be."""
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "a nursery with a second thread"
    ended, woken = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    forks = Forks()
    while True:
        [who, *_], _, _ = select.select([ended, hears, asks, *forks.standing], [], [])
        if who is ended:
            os.read(ended, 1 << 10)
            forks.tell()
        elif who is hears:
            forks.standing[hears.accept()[0]] = 0
        elif not (heard := _heard(who))[0]:
            if who is asks:
                return
            forks.leave(who)
        elif forks.begin(who, asked := json.loads(heard[0]), files := heard[1]):
            break
    _become(asked, files)


def _heard(who: socket.socket) -> tuple[bytes, list[int]]:
    """No bytes behind the end of `who`, also of one that has ended before it read our answer."""
    try:
        message, files, *_ = socket.recv_fds(who, ASKED_MAX, 8)
    except ConnectionResetError:
        return b"", []
    return message, files


def _become(asked: Mapping[str, Any], files: Sequence[int]) -> None:
    """The process that was asked for, with nothing of the nursery but its imports."""
    _take_over(asked, files)
    try:
        _run(*asked["words"])
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        _end(end.code or 0)
    _end(0)


def _end(code: int) -> None:
    """As Python does, but that modules are not taken apart: with torch that takes 0.2 s, fifteen
    times as long as a fork."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):  # closed, or none
            file.flush()
    os._exit(code)


def _take_over(asked: Mapping[str, Any], files: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    numbers = asked["files"]
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    for file, number in zip(apart, numbers, strict=False):  # a last file is where an end is told
        os.dup2(file, number)
    for below, above in itertools.pairwise((*sorted(numbers), 1 << 10)):
        os.closerange(below + 1, above)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])


def _run(form: str, program: str, *words: str) -> None:
    sys.argv = [form, *words]
    if form == "-c":
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.modules.pop(program, None)
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*(socket.socket(fileno=int(word)) for word in sys.argv[1:3]), sys.argv[3:])
