"""The stock routers as `ess serve --pd` starts them: the choice and the command line."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ess.errors import BadInput, Unavailable

RouterName = Literal["smg", "vllm_router", "sglang_router"]

# A worker is asked every second whether it is ready; one that hangs is left out after three times
# two seconds. A circuit breaker counts our 503 as a failure: it opens after fewer failures than a
# request has attempts, and closes after a second.
FLAGS: Final = (
    *("--policy", "round_robin", "--health-check-endpoint", "/ready"),
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "2"),
    *("--worker-startup-check-interval", "1"),
    *("--cb-failure-threshold", "3", "--cb-timeout-duration-secs", "1", "--log-level", "error"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """`meets_at_port`: it tells a decode worker the prefill worker's bootstrap port. `knows_keys`:
    it serves clients with any of several keys, and passes a client's key on."""

    name: RouterName
    home: str
    words: tuple[str, ...]
    meets_at_port: bool = True
    knows_keys: bool = False


# In order of preference: smg passes tokens on as the decode worker makes them; sglang-router
# passes on none before the prefill worker's answer has ended.
ROUTERS: Final = (
    Router(
        name="smg",
        home="smg.cli:main",
        words=("launch", "--pd-disaggregation"),
        knows_keys=True,
    ),
    Router(
        name="vllm_router",
        home="vllm_router.launch_router:main",
        words=("--vllm-pd-disaggregation",),
        meets_at_port=False,
    ),
    Router(
        name="sglang_router",
        home="sglang_router.cli:main",
        words=("launch", "--pd-disaggregation"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a router listens, and where it shows its own metrics."""

    host: str
    port: int
    metrics_port: int

    @property
    def url(self) -> str:
        return (
            f"http://[{self.host}]:{self.port}"
            if ":" in self.host
            else f"http://{self.host}:{self.port}"
        )


def choose(name: RouterName | None, *, has_keys: bool) -> Router:
    """The named router, or the first that is installed."""
    wanted = [router for router in ROUTERS if name in (None, router.name)]
    present = [router for router in wanted if importlib.util.find_spec(router.name)]
    if not present:
        missing = f"{name} is not installed" if name else "no router is installed"
        raise Unavailable(f"{missing}: pip install 'ess[router]' (Linux on x86-64 only)")
    fit = [router for router in present if router.knows_keys or not has_keys]
    if not fit:
        raise BadInput(
            f"api_key and --router {present[0].name}: this router has at most one key, its own;"
            " give --router smg"
        )
    return fit[0]


def words_for(
    router: Router,
    place: Place,
    *,
    prefills: Sequence[str],
    decodes: Sequence[str],
    key: str = "",
    keys: Sequence[str] = (),
) -> tuple[str, ...]:
    """The command line. A prefill worker's only port is also its bootstrap port. With `key` the
    router asks workers what they serve; it opens all of its own routes. With `keys` clients are
    served."""
    words = [*router.words, "--host", place.host, "--port", str(place.port)]
    words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(place.metrics_port)]
    for url in prefills:
        words += ["--prefill", url, *([url.rpartition(":")[2]] if router.meets_at_port else [])]
    for url in decodes:
        words += ["--decode", url]
    words += [f"--api-key={key}"] if key else []  # one word: a key may begin with a dash
    for number, each in enumerate(keys):
        words += ["--tenant-api-key", f"client-{number}:{each}"]
    return (*words, *FLAGS)
