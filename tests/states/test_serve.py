"""`ess serve` of a checkpoint whose requests keep states: what it says, plans and refuses."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ess.errors import BadInput
from ess.models.load import load_model
from ess.models.registry import read_config
from ess.server.commands.start.files.checkpoint import read_checkpoint
from ess.server.commands.start.resolving import derived, layout_of, planned
from ess.server.commands.start.settings import resolve
from tests.ranks.test_serve import COUNT, PROMPT, tokens
from tests.states.world import EACH, GLM5, V4, World
from tests.support.greedy import greedy
from tests.support.process import Process

SHORT = PROMPT[:60]
"""A page of GLM-5-next; with what is said behind it two."""
HEADERS = {"content-type": "application/json"}
FolderOf = Callable[[World], Path]


def resolved(folder: Path, **flags: Any) -> Any:
    settled = resolve({"model": str(folder), **flags}, environment={})
    return derived(settled, read_checkpoint(str(folder)))


def body(prompt: list[int], **wishes: Any) -> bytes:
    asked = {
        "model": "ess-embedded",
        "prompt": prompt,
        "max_tokens": COUNT,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **wishes,
    }
    return json.dumps(asked).encode()


def asked(url: str, prompt: list[int], **wishes: Any) -> dict[str, Any]:
    request = urllib.request.Request(url + "/v1/completions", body(prompt, **wishes), HEADERS)
    with urllib.request.urlopen(request, timeout=120) as answer:
        document: dict[str, Any] = json.load(answer)
    return document


def streamed(url: str, prompt: list[int]) -> tuple[HTTPConnection, HTTPResponse]:
    """A long answer that has begun."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=120)
    wishes = body(prompt, stream=True, max_tokens=1000)
    connection.request("POST", "/v1/completions", wishes, HEADERS)
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: {")
    return connection, answer


def gauge(url: str, name: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    [value] = [line.split()[-1] for line in lines if line.startswith(f"{name} ")]
    return float(value)


def served(folder: Path, *flags: str) -> Process:
    """For three requests at a time."""
    names = ("--model", str(folder), "--served-model-name", "ess-embedded", "--max-running", "3")
    forms = ("--dtype", "f32", "--row", "f32", "--recover", "resume")
    return Process(*forms, *names, *flags).wait_ready()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "flags"), [(GLM5, ()), (V4, ("--mtp", "4"))], ids=["glm5_next", "deepseek_v4"]
)
def test_a_server_says_what_the_plain_model_says(
    world: World, flags: tuple[str, ...], folder_of: FolderOf
) -> None:
    """Alone, with a prefix that it may have, in two ways at once, beside a stream that is left; and
    again when its engine is lost."""
    folder = folder_of(world)
    expected = greedy(load_model(folder, form="f32"), PROMPT, COUNT)
    with served(folder, *flags) as process:
        layout = read_config(world.served).layout(row="f32")
        held = 6 * layout.request_state_bytes(2048)
        assert process.greeting["memory"]["state_bytes"] == held > 0
        assert list(tokens(process.url)) == expected
        left, answer = streamed(process.url, PROMPT)
        twice = asked(process.url, PROMPT, n=2)
        assert [choice["token_ids"] for choice in twice["choices"]] == [expected] * 2
        cached = twice["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == len(PROMPT) // world.page * world.page
        answer.close()
        left.close()
        going = tokens(process.url)
        first = [next(going), next(going)]
        process.kill_engine()
        assert [*first, *going] == expected
        assert gauge(process.url, "ess_requests_preempted") == 0


@pytest.mark.slow
def test_requests_that_are_set_aside_go_on(folder_of: FolderOf) -> None:
    """Three of two pages each begin in three pages."""
    folder = folder_of(GLM5)
    model, layout = load_model(folder, form="f32"), read_config(GLM5.served).layout(row="f32")
    prompts = [SHORT[at:] + SHORT[:at] for at in (0, 20, 40)]
    expected = [greedy(model, prompt, COUNT) for prompt in prompts]
    pages = ("--index-bytes", str(3 * layout.index_page_bytes), "--promise", "some")
    with (
        served(folder, *pages, "--max-model-len", "192") as process,
        ThreadPoolExecutor(3) as pool,
    ):
        going = [pool.submit(asked, process.url, prompt) for prompt in prompts]
        aside = set()
        while not all(each.done() for each in going):
            aside.add(gauge(process.url, "ess_requests_preempted"))
        assert [each.result()["choices"][0]["token_ids"] for each in going] == expected
        assert max(aside) > 0


@EACH
def test_what_a_server_plans(world: World, folder_of: FolderOf) -> None:
    folder = folder_of(world)
    settled = resolved(folder, max_model_len="2k", max_running=4)
    checkpoint = read_checkpoint(str(folder))
    layout = layout_of(settled.settings, checkpoint)
    plan = planned(settled.settings, checkpoint, layout)
    assert plan.token_capacity == 4 * 2048
    assert plan.host_bytes == 4 * 2048 // world.page * layout.host_page_bytes
    assert plan.state_bytes == 2 * 4 * layout.request_state_bytes(2048)
    assert plan.total_bytes > plan.state_bytes + plan.host_bytes
    assert [(room.length, room.count) for room in plan.rooms] == [(2048, 4)]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tp_size": 2}, "tp_size is 2, and the model is {}: its heads are not divided"),
    ({"pp_size": 2}, "pp_size is 2, and the model is {}: its layers are not divided"),
    ({"dp_size": 2}, "dp_size is 2, and the model is {}: its experts are not divided"),
    ({"device": "cuda"}, "device is cuda, and the model is {}: its layers are computed"),
    ({"prefix_cache_dir": "x"}, "prefix_cache_dir is x, and the model is {}: states"),
    ({"deterministic": True}, "deterministic is True, and the model is {}: it has no"),
]


@EACH
@pytest.mark.parametrize(("flags", "said"), REFUSED, ids=lambda value: str(value)[:24])
def test_what_a_server_cannot_do_is_refused_by_name(
    world: World, folder_of: FolderOf, flags: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInput, match=said.format(world.family)):
        resolved(folder_of(world), **flags)


def test_drafts_of_a_model_without_a_module_are_refused(folder_of: FolderOf) -> None:
    with pytest.raises(BadInput, match="mtp is 2, and this glm5_next has no MTP module that is re"):
        resolved(folder_of(GLM5), mtp=2)


@pytest.mark.parametrize("flags", [{"tbo": "1"}, {"sbo": "combine-down"}, {"modes": "da"}])
def test_what_it_can_do_is_not(folder_of: FolderOf, flags: dict[str, Any]) -> None:
    resolved(folder_of(GLM5), **flags)
