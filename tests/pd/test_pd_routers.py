"""The stock routers before one prefill and three decode workers, each with its own command line.

What clients get is what a single server gives them, whichever worker made the prompt. Failures are
shown by `python -m tests.pd.failures`, with times; here only what happens, and that everybody
recovers.
"""

from __future__ import annotations

import functools
import itertools
import signal
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.pd.mixed import MODEL, Asked, Result, answered, mixed, results
from tests.pd.stand import EXACT, PACED, Stand
from tests.server import harness
from tests.support.few import few
from tests.support.process import Process
from tests.support.routers import SGLANG, SMG, VLLM, Kind, Router, ask

pytestmark = pytest.mark.slow

until = partial(harness.until, within_s=180.0)
KINDS = [SGLANG, SMG, VLLM]
COUNT, MANY = 16, 200
SHORT = {"model": MODEL, "prompt": "The server is", "max_tokens": 5}
NATIVE = {
    "text": "The server is a process that answers",
    "sampling_params": {"max_new_tokens": 6, "temperature": 0},
}
ROOM = ("--max-running", "16", "--max-waiting", "64", "--host-bytes", "192MiB")
STANDS = [("1",), ("2", "--pp-size=2", "--chunk=64"), ("4", "--pp-size=2", "--tp-size=2")]
LOST = [*itertools.product(("decode-2", "prefill-1"), KINDS)]
STOPPED = few([("decode-2", SGLANG), ("prefill-1", SMG), ("decode-2", VLLM)], all_of=LOST)
KILLED = few([("prefill-1", SGLANG), ("decode-2", SMG), ("prefill-1", VLLM)], all_of=LOST)
"""Each router sees a worker stop and one be killed, and each role stops and is killed."""
ANSWERS = few(
    [(STANDS[1], kind, COUNT) for kind in KINDS],
    all_of=itertools.product(STANDS, KINDS, (COUNT, MANY)),
)


def named(value: object) -> str:
    match value:
        case Kind():
            return value.package
        case tuple():
            return "-".join(value)
    return str(value)


PROBES = {
    "/ready",
    "/health",
    "/v1/models",
    "/version",
    "/server_info",
    "/model_info",
    "/loads",
    "/metrics",
}


@pytest.fixture(scope="module")
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    folder, (mtp, *stages) = tmp_path_factory.mktemp("stand"), request.param
    with Stand(folder, *EXACT, *ROOM, "--mtp", mtp, "--request-log", prefill=stages) as made:
        yield made


Expected = Callable[[int], list[Result]]


@pytest.fixture(scope="module")
def expected() -> Iterator[Expected]:
    """What a single server answers, which verifies one token a step."""
    with Process(*EXACT, *ROOM, "--mtp", "1", stderr=2).wait_ready() as alone:
        yield functools.cache(lambda count: results(alone.url, mixed(count)))


@pytest.mark.parametrize(("stand", "kind", "count"), ANSWERS, ids=named, indirect=["stand"])
def test_answers_are_those_of_a_single_server(
    stand: Stand, expected: Expected, kind: Kind, count: int
):
    asked = mixed(count)
    before = landed(stand)
    with stand.behind(kind) as router:
        check_equal(asked, results(router.url, asked), expected(count))
        native = answered(router.url + "/generate", NATIVE)
    alone = ask(stand.decodes[0].url + "/generate", NATIVE)
    assert native.document["output_ids"] == alone.document["output_ids"]
    prompt_count = sum(each.prompt_count for each in asked) + 1
    until(lambda: landed(stand) - before == prompt_count, "all landing")
    assert not any(worker.handoffs["missed"] for worker in stand.decodes)
    until(lambda: stand.prefill.handoffs["sent"] == landed(stand), "the prefill worker's word")
    assert not stand.prefill.handoffs["lapsed"]


def landed(stand: Stand) -> int:
    return sum(worker.handoffs["landed"] for worker in stand.decodes)


def check_equal(asked: list[Asked], made: list[Result], expected: list[Result]) -> None:
    different = [each for each in zip(asked, made, expected, strict=True) if each[1] != each[2]]
    assert not different, f"{len(different)} of {len(asked)}, such as {different[:2]}"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.package)
def test_each_worker_gets_what_its_role_can_answer(paced: Stand, kind: Kind):
    before = {name: len(worker.asked) for name, worker in paced.workers.items()}
    with paced.behind(kind) as router:
        results(router.url, mixed(24))
    for name, worker in paced.workers.items():
        posts = [asked for asked in worker.asked[before[name] :] if asked.method == "POST"]
        assert {asked.status for asked in posts} == {"200"}
        routes = {asked.route for asked in worker.asked if asked.method == "GET"}
        assert routes <= PROBES
        assert {asked.status for asked in worker.asked if asked.route in PROBES} <= {"200", "503"}


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    folder, words = tmp_path_factory.mktemp("paced"), (*PACED, *ROOM, "--request-log")
    with Stand(folder, *words, has_real_children=True) as made:
        yield made


def served(router: Router, times: int = 6) -> bool:
    """Each decode worker twice, in turn."""
    return all(router.ask("/v1/completions", SHORT).status == 200 for _ in range(times))


@pytest.mark.parametrize(("name", "kind"), KILLED, ids=named)
def test_a_killed_worker_is_left_out_and_taken_back(paced: Stand, kind: Kind, name: str):
    """At its port; whom a prefill worker served, they meet its successor."""
    with paced.behind(kind) as router:
        everybody = {worker.url for worker in paced.workers.values()}
        dead = paced.workers[name]
        dead.process.kill()
        until(lambda: router.healthy() == everybody - {dead.url}, "its being left out")
        if name.startswith("decode"):
            until(lambda: served(router), "service by the others")
        else:
            status = router.ask("/v1/completions", SHORT).status
            assert status >= 500
        paced.put_back(name)
        until(lambda: router.healthy() == everybody, "its being taken back")
        until(lambda: all(worker.peers_up for worker in paced.decodes), "all having met")
        until(lambda: served(router), "service")


@pytest.mark.parametrize(("name", "kind"), STOPPED, ids=named)
def test_a_stopped_worker_is_left_out_and_taken_back(paced: Stand, kind: Kind, name: str):
    with paced.behind(kind, "--health-check-timeout-secs", "2") as router:
        everybody = {worker.url for worker in paced.workers.values()}
        stopped = paced.workers[name]
        stopped.signal_all(signal.SIGSTOP)
        try:
            until(lambda: router.healthy() == everybody - {stopped.url}, "its being left out")
            if name.startswith("decode"):
                until(lambda: served(router), "service by the others")
        finally:
            stopped.signal_all(signal.SIGCONT)
        until(lambda: router.healthy() == everybody, "its being taken back")
        until(lambda: all(worker.peers_up for worker in paced.decodes), "all having met")
        until(lambda: served(router), "service")


@pytest.mark.parametrize("count", few([COUNT], all_of=[COUNT, MANY]))
def test_answers_behind_serve_pd_are_those_of_a_single_server(expected: Expected, count: int):
    flags = (*EXACT, *ROOM[:-1], "576MiB", "--mtp", "2")
    with Process("--pd", "1p2d", *flags, stderr=2) as pd:
        asked = mixed(count)
        check_equal(asked, results(pd.url, asked), expected(count))
        pd.process.send_signal(signal.SIGTERM)
        assert pd.ended(180) == 0
