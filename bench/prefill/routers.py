"""A stock router in front of a staged prefill worker and decode workers, as documented.

The router's package is not part of ESS; `ess[router]` installs it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from ess.bench.engine.serve import started
from ess.errors import Unavailable
from ess.ports import kept_port

# Module, arguments, and whether it tells decode workers the prefill worker's port.
ROUTERS: Final = (
    ("smg", ("smg", "launch", "--pd-disaggregation"), True),
    ("vllm_router", ("vllm_router.launch_router", "--vllm-pd-disaggregation"), False),
    ("sglang_router", ("sglang_router", "launch", "--pd-disaggregation"), True),
)
FLAGS: Final = (
    *("--policy", "round_robin", "--health-check-endpoint", "/ready"),
    *("--worker-startup-check-interval", "1", "--log-level", "error"),
)
ENDED: Final = re.compile(r'^ess_handoffs_total\{how="(landed|missed)"\} (\S+)$', re.MULTILINE)
TOLD_S: Final = 10.0
HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Tier:
    """The workers behind a router at `url`."""

    url: str
    router: str
    decodes: tuple[str, ...]

    def handoffs(self, count: int) -> Counter[str]:
        """The outcomes, since the start, of handoffs to decode workers, once there are `count`. A
        worker answers a request a moment before it reports the handoff."""
        deadline_s = time.monotonic() + TOLD_S
        while (ended := self._ended()).total() < count and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return ended

    def _ended(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for url in self.decodes:
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
                for how, count in ENDED.findall(answer.read().decode()):
                    counts[how] += int(float(count))
        return counts


@contextlib.contextmanager
def tier(stages: int, decodes: int, *flags: str, router: str = "") -> Iterator[Tier]:
    """Starts a tier and waits until every worker is ready."""
    package, words, meets_at_port = chosen(router)
    secret = {"ESS_PEER_SECRET": secrets.token_hex(16)}
    with contextlib.ExitStack() as stack:
        staged = ("--pp-size", str(stages), *flags)
        _, prefill = stack.enter_context(started("prefill", *staged, environment=secret))
        named = (*flags, "--peers", urlsplit(prefill).netloc)
        urls = [
            stack.enter_context(started("decode", *named, environment=secret))[1]
            for _ in range(decodes)
        ]
        port = [str(urlsplit(prefill).port)] if meets_at_port else []
        places = ["--prefill", prefill, *port]
        for url in urls:
            places += ["--decode", url]
        routed = stack.enter_context(_routing(words, places))
        yield Tier(routed, package, tuple(urls))


def chosen(name: str) -> tuple[str, tuple[str, ...], bool]:
    """The router of this name, or the first that is installed; Unavailable if there is none."""
    known = [each for each in ROUTERS if name in ("", each[0])]
    for each in known:
        if importlib.util.find_spec(each[0]) is not None:
            return each
    names = ", ".join(each[0] for each in known) or f"{name}, which is unknown here"
    raise Unavailable(f"no router is installed ({names}): pip install 'ess[router]'")


@contextlib.contextmanager
def _routing(words: Sequence[str], places: Sequence[str]) -> Iterator[str]:
    with kept_port(HOST) as port, kept_port(HOST) as metrics_port:
        listening = ("--host", HOST, "--port", str(port))
        metrics = ("--prometheus-host", HOST, "--prometheus-port", str(metrics_port))
        process = subprocess.Popen(
            [sys.executable, "-m", *words, *listening, *metrics, *places, *FLAGS],
            env={**os.environ, "NO_COLOR": "1"},
            stdout=subprocess.DEVNULL,
        )
        try:
            yield f"http://{HOST}:{port}"
        finally:
            process.kill()
            process.wait()
