"""`ess serve` as a real process, the model in the box behind it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.forked import ROOT, forked_engines, started
from tests.support.kin import commands, kin, worker_of

if TYPE_CHECKING:
    import openai

RUN = "from ess.server.commands.cli import main; raise SystemExit(main())"
READY_S = 180.0
SMALL = {
    "--max-model-len": "2k",
    "--max-running": "4",
    "--host-bytes": "96MiB",
    "--threads": "1",
    "--drain-grace-s": "0",
    "--port": "0",
}


class Process:
    """`ess serve`, or another command that serves, on a free port, of this tree or another. Words
    `before` the command may let it run on another host. It and what it starts are forked, unless
    `is_real` is asked for or it is elsewhere; with `has_real_children` what a forked server starts
    is real, for tests that stop that or look into its memory, files or children."""

    def __init__(
        self,
        *flags: str,
        stderr: int = subprocess.PIPE,
        stdin: int = subprocess.DEVNULL,
        tree: Path = ROOT,
        command: str = "serve",
        before: Sequence[str] = (),
        is_real: bool = False,
        has_real_children: bool = False,
        **environment: str,
    ) -> None:
        sizes = {name: value for name, value in SMALL.items() if name not in flags}
        small = [word for pair in sizes.items() for word in pair]
        words = ["-c", RUN, command, "--json", *small, *flags]
        is_real = bool(is_real or before or tree != ROOT)
        paths = os.pathsep.join((str(tree), os.environ.get("PYTHONPATH", "")))
        self._clients = contextlib.ExitStack()
        engines = {"PYTHONPATH": paths} if is_real or has_real_children else forked_engines()
        given = {"env": {**os.environ, **engines, **environment}, "stderr": stderr}
        given |= {"stdout": subprocess.PIPE, "text": True, "stdin": stdin}
        if is_real:
            command_line = [*before, sys.executable, *words]
            self.process = subprocess.Popen(command_line, cwd=tree, **given)
        else:
            self.process = started("server", words, **given)
        with self._ended_on_failure():
            self.greeting = self._greeting()
        self.url = self.greeting["url"]

    def _greeting(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("\n}\n"):
            line = self.process.stdout.readline()
            assert line, self._last_words()
            text += line
        return json.loads(text)

    @contextlib.contextmanager
    def _ended_on_failure(self) -> Iterator[None]:
        """Of what is asked for before a test's block begins, which ends it."""
        try:
            yield
        except BaseException:
            self.__exit__()
            raise

    def _last_words(self) -> str:
        return f"it ended by {self.process.wait()}: {self.process.communicate()[1]}"

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            below = kin(self.process.pid)
            self.process.kill()
            for pid in below:  # a stopped process would hold our pipes for ever
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        self.process.communicate()
        self._clients.close()

    def status(self, path: str) -> int:
        """0 if the connection was refused, or no server answers on it."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return 0

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait_ready(self) -> Process:
        deadline_s = time.monotonic() + READY_S
        with self._ended_on_failure():
            while self.status("/ready") != 200:
                assert self.process.poll() is None, self._last_words()
                assert time.monotonic() < deadline_s, f"{self.url} is not ready after {READY_S} s"
                time.sleep(0.05)
        return self

    @property
    def engine_pid(self) -> int:
        below = commands(self.process.pid)
        [engine] = [pid for pid, words in below.items() if "ess.engine.process" in words]
        return engine

    def kill_engine(self) -> int:
        """The pid that the server knew it by; what it held is free for the next engine."""
        pid = self.engine_pid
        os.kill(worker_of(pid), signal.SIGKILL)
        return pid

    def client(self) -> openai.OpenAI:
        """It is closed with the server."""
        import openai  # a machine with a GPU may be without it

        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        return self._clients.enter_context(made)

    def stream(self, **asked: object) -> openai.Stream[openai.types.Completion]:
        return self.client().completions.create(
            model="ess-embedded",
            prompt="The server is",
            stream=True,
            extra_body={"ignore_eos": True},
            **{"max_tokens": 2000, **asked},
        )

    def ended(self, within_s: float) -> int:
        return self.process.wait(timeout=within_s)
