"""The stock routers as processes, and workers that record a router's requests.

Each router is started as its own documentation says, with its own command line. Their packages both
install a script called `smg`, so they are started as modules.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from ess.ports import kept_port
from tests.server.harness import until
from tests.server.test_life import Process

LINE = re.compile(r"^\S+ ess: request (\S+) (\S+) (\S+) (\S+)(?: \(\w+\))? after", re.MULTILINE)
# What docs/serving.md advises, and a pace at which a test can wait.
BREAKER = ("--cb-failure-threshold", "3", "--cb-timeout-duration-secs", "1")
ADVISED = ("--health-check-endpoint", "/ready", *BREAKER)
SOON = ("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1")
START_S = 180.0


@dataclass(frozen=True, slots=True)
class Kind:
    """`probes` are the routes that a router asks of itself, when it starts and later.

    `is_open`: bodies, headers and routes that it does not know go through unchanged.
    """

    package: str
    words: tuple[str, ...]
    probes: frozenset[str]
    is_open: bool = False


SGLANG = Kind(
    "sglang_router",
    ("sglang_router", "launch"),
    frozenset({"/health", "/server_info", "/model_info"}),
)
SMG = Kind(
    "smg",
    ("smg", "launch"),
    frozenset({"/health", "/v1/models", "/version", "/server_info", "/loads"}),
)
VLLM = Kind("vllm_router", ("vllm_router.launch_router",), frozenset({"/health"}), is_open=True)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Message
    text: str

    @property
    def document(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """Of a stream that ended as it should."""
        *texts, last = [line[6:] for line in self.text.splitlines() if line.startswith("data: ")]
        assert last == "[DONE]", self.text
        return [json.loads(event) for event in texts]


def ask(url: str, body: object = None, **headers: str) -> Answer:
    """A POST if there is a body; header names have underscores. 0 is no answer."""
    content = None if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, content, {"content-type": "application/json", **named})
    try:
        with urllib.request.urlopen(request, timeout=240) as answer:
            return Answer(answer.status, answer.headers, answer.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers, error.read().decode())
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        return Answer(0, Message(), repr(error))


@dataclass(frozen=True, slots=True)
class Asked:
    name: str
    method: str
    route: str
    status: str


class Worker(Process):
    """An `ess serve` without a model, ready, whose log is kept."""

    def __init__(self, log: Path, *flags: str) -> None:
        self._log = log
        pace = () if "--pace-ms" in flags else ("--pace-ms", "5")
        with log.open("w") as lines:
            flags = ("--engine", "paced", *pace, "--request-log", *flags)
            super().__init__(*flags, stderr=lines.fileno())
        self.wait_ready()

    def _last_words(self) -> str:
        return f"it ended by {self.process.wait()}: {self._log.read_text()}"

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    @property
    def asked(self) -> list[Asked]:
        """What was answered so far, apart from our own waiting for it to be ready."""
        return [Asked(*words) for words in LINE.findall(self._log.read_text())]

    def count(self, route: str, status: str = "200") -> int:
        return sum(asked.route == route and asked.status == status for asked in self.asked)

    @property
    def open_count(self) -> int:
        return int(ask(f"{self.url}/load").document["server_load"])


class Router:
    """A router on a free port, which has found every worker healthy."""

    def __init__(
        self,
        kind: Kind,
        workers: Sequence[str],
        log: Path,
        *flags: str,
        key: str = "",
        where: Sequence[str] = (),
    ) -> None:
        """`where` names the workers in the router's own flags, if they differ."""
        if importlib.util.find_spec(kind.package) is None:
            pytest.skip(f"{kind.package} is not installed: extra `router`, Linux on x86-64 only")
        self._kept = contextlib.ExitStack()
        port, metrics_port = (str(self._kept.enter_context(kept_port("127.0.0.1"))) for _ in "12")
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._given = {"Authorization": f"Bearer {key}"} if key else {}
        keyed = ("--api-key", key) if key else ()
        words = ["--host", "127.0.0.1", "--port", port]
        words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", metrics_port]
        words += where or ["--policy", "round_robin", *SOON, "--worker-urls", *workers]
        with log.open("w") as lines:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *kind.words, *words, *keyed, *flags],
                env={**os.environ, "NO_COLOR": "1"},
                stdout=lines,
                stderr=subprocess.STDOUT,
            )
        self._expected = len(workers)

    def __enter__(self) -> Router:
        try:
            until(self._is_up, "every worker's being found healthy", within_s=START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._kept.close()

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        return len(self.healthy()) == self._expected

    def healthy(self) -> set[str]:
        """The workers that it would send requests to."""
        with contextlib.suppress(json.JSONDecodeError):
            workers = ask(f"{self.url}/workers", **self._given).document["workers"]
            return {worker["url"] for worker in workers if worker["is_healthy"]}
        return set()

    def ask(self, path: str, body: object = None, **headers: str) -> Answer:
        return ask(self.url + path, body, **headers)
