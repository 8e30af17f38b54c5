"""Grammars of strangers against a real server: two real processes, and those of the grammars."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import openai
import pytest

from tests.attacks.processes import peak_bytes
from tests.attacks.wire import ENDLESS, MIB
from tests.server.harness import until
from tests.support.crowd import Crowd
from tests.support.kin import children, kin, wait_for_end
from tests.support.process import Process

TOO_MUCH = "takes more than 2 s to compile|needs more than 128 MiB"
ASKED = {"model": "ess-embedded", "prompt": "The number is", "max_tokens": 8}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served() -> Iterator[Process]:
    with Process(has_real_children=True).wait_ready() as made:
        yield made


def answer(served: Process, **constraint: object) -> str:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        made = client.completions.create(extra_body={"structured_outputs": constraint}, **ASKED)
    return made.choices[0].text


def works(process: int) -> bool:
    """It has grown larger than one that waits."""
    return peak_bytes(process) > 60 * MIB


def test_a_schema_that_never_compiles_is_refused_by_name_and_harms_nobody(served: Process):
    assert answer(served, regex="yes") == "yes"
    before = peak_bytes(served.engine_pid)
    bad = {**ASKED, "structured_outputs": {"json": ENDLESS}}
    with Crowd(served.url, [bad, bad, bad]):
        assert answer(served, regex="[1-9]{3}").isdigit(), "asked beside them"
    with pytest.raises(openai.BadRequestError, match=TOO_MUCH):
        answer(served, json=ENDLESS)
    assert peak_bytes(served.engine_pid) - before < 64 * MIB
    assert answer(served, regex="no") == "no"


def test_a_client_that_leaves_takes_its_grammar_along(served: Process):
    """Another multiple: the first is refused at once by now."""
    answer(served, regex="yes")
    [first] = children(served.engine_pid)
    other = {"type": "integer", "multipleOf": 99999971}
    with Crowd(served.url, [{**ASKED, "structured_outputs": {"json": other}}]):
        until(lambda: any(map(works, children(first))), "a process for the grammar")
        begun = set(filter(works, children(first)))
    for process in begun:
        wait_for_end(process)
    assert answer(served, regex="yes") == "yes"


def test_a_killed_child_is_replaced(served: Process):
    answer(served, regex="yes")
    [first] = children(served.engine_pid)
    os.kill(first, signal.SIGKILL)
    assert answer(served, regex="[1-9]{4}").isdigit()
    assert children(served.engine_pid) != [first]


@pytest.mark.parametrize("whom", ["server", "engine"])
def test_nothing_outlives_a_killed_process_with_a_grammar_in_flight(whom: str):
    with Process("--engine-restarts", "0", has_real_children=True).wait_ready() as process:
        engine = process.engine_pid
        bad = {**ASKED, "structured_outputs": {"json": ENDLESS}}
        with Crowd(process.url, [bad]):
            until(lambda: any(map(works, kin(engine))), "a process for the grammar")
            ending = [engine, *kin(engine)]
            os.kill(process.process.pid if whom == "server" else engine, signal.SIGKILL)
            for other in ending:
                wait_for_end(other)
        process.process.wait(30)
