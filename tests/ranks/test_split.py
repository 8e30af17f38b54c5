"""`ess prefill` before `ess decode --dp-size 2`, behind a stock router, as real processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ess.ports import kept_port
from tests.pd.mixed import MODEL, mixed, results
from tests.pd.stand import ENDED, EXACT, SECRET, Worker
from tests.server.harness import until
from tests.support.crowd import Crowd
from tests.support.process import Process
from tests.support.routers import SMG, Router, ask

pytestmark = pytest.mark.slow

ROOM = ("--max-running", "8", "--max-waiting", "64", "--host-bytes", "128MiB")
LONG = {"model": MODEL, "prompt": "The server is", "max_tokens": 1500, "ignore_eos": True}
COUNT = 24


@contextlib.contextmanager
def split(folder: Path) -> Iterator[tuple[Worker, list[str]]]:
    """The prefill worker, and the URLs of the decode ranks."""
    with kept_port("127.0.0.1") as port:
        exact = (*EXACT, *ROOM, "--mtp", "2")
        with Worker("prefill-1", folder, *exact, port=port) as prefill:
            prefill.wait_ready()
            flags = ("--dp-size", "2", "--peers", prefill.address, *exact)
            with Process(*flags, command="decode", stderr=2, ESS_PEER_SECRET=SECRET) as ranks:
                yield prefill, [line["url"] for line in ranks.greeting["processes"]]


@contextlib.contextmanager
def before(prefill: Worker, ranks: list[str], log: Path) -> Iterator[Router]:
    where = ["--pd-disaggregation", "--prefill", prefill.url, str(prefill.port)]
    for url in ranks:
        where += ["--decode", url]
    where += ["--policy", "round_robin", "--worker-startup-check-interval", "1"]
    with Router(SMG, [prefill.url, *ranks], log, where=where) as router:
        yield router


def landed(url: str) -> int:
    return int(dict(ENDED.findall(ask(f"{url}/metrics").text)).get("landed", "0").split(".")[0])


def test_handed_over_prompts_are_answered_as_by_one_process(tmp_path):
    """Rows arrive at both ranks while they decode, and streams are given up on both meanwhile."""
    asked = mixed(COUNT)
    with Process(*EXACT, *ROOM, "--mtp", "1", stderr=2).wait_ready() as alone:
        expected = results(alone.url, asked)
    with (
        split(tmp_path) as (prefill, ranks),
        before(prefill, ranks, tmp_path / "smg.txt") as router,
    ):
        with Crowd(router.url, [LONG] * 4) as going:
            until(lambda: all(b'"text"' in text for text in going.texts), "four streams")
            made = results(router.url, asked)
            assert not any(going.is_over(number) for number in range(4))
        different = [pair for pair in zip(made, expected, strict=True) if pair[0] != pair[1]]
        assert not different, f"{len(different)} of {COUNT}, such as {different[:2]}"
        for url in ranks:
            until(lambda url=url: not ask(f"{url}/load").document["server_load"], "their end")
            assert landed(url) > 2, "a rank had no request"
        assert results(router.url, asked[:4]) == expected[:4]
