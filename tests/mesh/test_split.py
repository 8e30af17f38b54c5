"""`ess prefill` before `ess decode --tp-size 2`, and `--pp-size 2`, behind a stock router."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from ess.ports import kept_port
from tests.mesh.test_serve import check_pools, engines
from tests.pd.mixed import MODEL, Asked, mixed, results
from tests.pd.stand import EXACT, Worker
from tests.ranks.test_split import before, landed
from tests.server.harness import until
from tests.support.few import few
from tests.support.process import Process
from tests.support.routers import ask

pytestmark = pytest.mark.slow

ROOM = ("--max-running", "8", "--max-waiting", "64", "--host-bytes", "1GiB")
COUNT = 10
BY_GRAMMAR = Asked(
    "/v1/completions",
    {
        "model": MODEL,
        "prompt": "The module",
        "max_tokens": 20,
        "seed": 1,
        "regex": "[a-z]{3}( [a-z]{3})*",
    },
)
SIZES = [(2, 1, 2, "tcp"), (1, 2, 1, "shared")]


@pytest.fixture(scope="module")
def asked():
    return [*mixed(COUNT), BY_GRAMMAR]


@pytest.fixture(scope="module")
def expected(asked):
    with Process(*EXACT, *ROOM, "--mtp", "1", stderr=2).wait_ready() as alone:
        return results(alone.url, asked)


def is_up(decode: Worker) -> bool:
    answer = ask(f"{decode.url}/ready")
    return answer.status == 200 and not answer.document["missing"]


@pytest.mark.parametrize(("tp", "pp", "mtp", "transport"), few(SIZES[:1], all_of=SIZES))
def test_handed_over_prompts(tp, pp, mtp, transport, asked, expected, tmp_path):
    """And again, when a process of the decode worker was killed: it meets the prefill worker anew,
    with another pool."""
    exact = (*EXACT, *ROOM, "--mtp", str(mtp), "--transport", transport)
    size = ("--tp-size", str(tp), "--pp-size", str(pp))
    with contextlib.ExitStack() as kept:
        ports = [kept.enter_context(kept_port("127.0.0.1")) for _ in range(2)]
        prefill = kept.enter_context(
            Worker("prefill-1", tmp_path, *exact, port=ports[0], has_real_children=True)
        )
        words = ("--peers", prefill.wait_ready().address, *size, *exact)
        real = {"port": ports[1], "has_real_children": True}
        decode = kept.enter_context(Worker("decode-1", tmp_path, *words, **real))
        decode.wait_ready()
        until(lambda: decode.peers_up, "the prefill worker")
        router = kept.enter_context(before(prefill, [decode.url], tmp_path / "smg.txt"))
        assert results(router.url, asked) == expected
        until(lambda: landed(decode.url) >= COUNT - 1, "what has landed")
        pids = sorted(engines(decode))
        assert len(pids) == tp * pp
        pools = check_pools(pids, tp, pp, writer=prefill.engine_pid)
        os.kill(pids[-1], signal.SIGKILL)
        until(lambda: not {*pids} & {*engines(decode)} and is_up(decode), "another")
        until(lambda: results(router.url, asked[:1]) == expected[:1], "service")
        after = sorted(engines(decode))
        assert not pools & check_pools(after, tp, pp, writer=prefill.engine_pid)
        assert results(router.url, asked) == expected
        until(lambda: sum(decode.handoffs.values()) >= COUNT - 1, "a word of the handoffs")
        assert landed(decode.url) > COUNT // 2, decode.handoffs
