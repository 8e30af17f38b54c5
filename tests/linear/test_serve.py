"""`ess serve` of a GLM-5-next checkpoint with linear layers: what it says, plans and refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from safetensors.torch import save_file

from ess.errors import BadInput
from ess.models.load import EMBEDDED, load_model
from ess.models.registry import read_config
from ess.server.commands.start.checkpoint import read_checkpoint
from ess.server.commands.start.launch import derived, layout_of, planned
from ess.server.commands.start.settings import resolve
from tests.ranks.test_serve import COUNT, PROMPT, tokens
from tests.support import checkpoints
from tests.support.greedy import greedy
from tests.support.process import Process

MODEL = "the-model"
# Index keys of a server are rounded: with so many rows to a query none is left out.
RAW = checkpoints.tiny_glm5_next("LILIL", index_topk=256)
SHORT = PROMPT[:60]
"""A page; with what is said behind it two."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint by published names, with the tokenizer of the model in the box."""
    made = tmp_path_factory.mktemp("glm5") / MODEL
    made.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, made / name)
    (made / "config.json").write_text(json.dumps(RAW))
    config = read_config(RAW)
    drawn = checkpoints.published(checkpoints.tensors(config), config)
    save_file(drawn, made / "model.safetensors")
    return made


def resolved(folder: Path, **flags: Any) -> Any:
    found = resolve({"model": str(folder), **flags}, environment={})
    return derived(found, read_checkpoint(str(folder)))


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


HEADERS = {"content-type": "application/json"}


def asked(url: str, prompt: list[int], **wishes: Any) -> dict[str, Any]:
    request = urllib.request.Request(url + "/v1/completions", body(prompt, **wishes), HEADERS)
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def streamed(url: str, prompt: list[int]) -> tuple[HTTPConnection, HTTPResponse]:
    """A long answer that has begun."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=120)
    wishes = body(prompt, stream=True, max_tokens=1000)
    connection.request("POST", "/v1/completions", wishes, HEADERS)
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: {")
    return connection, answer


def served(folder: Path, *flags: str) -> Process:
    names = ("--model", str(folder), "--served-model-name", "ess-embedded")
    forms = ("--dtype", "f32", "--row", "f32", "--recover", "resume")
    return Process(*forms, *names, *flags).wait_ready()


@pytest.mark.slow
def test_a_server_says_what_the_plain_model_says(folder: Path) -> None:
    """Alone, with a prefix that it has, in two ways at once, beside a stream that is left; and
    again when its engine is lost."""
    expected = greedy(load_model(folder, form="f32"), PROMPT, COUNT)
    with served(folder, "--max-running", "3") as process:
        layout = read_config(RAW).layout(row="f32")
        assert process.greeting["memory"]["state_bytes"] == 6 * layout.state_bytes > 0
        assert list(tokens(process.url)) == expected
        left, answer = streamed(process.url, PROMPT)
        twice = asked(process.url, PROMPT, n=2)
        assert [choice["token_ids"] for choice in twice["choices"]] == [expected] * 2
        assert twice["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        answer.close()
        left.close()
        going = tokens(process.url)
        first = [next(going), next(going)]
        os.kill(process.engine_pid, signal.SIGKILL)
        assert [*first, *going] == expected


@pytest.mark.slow
def test_requests_that_are_set_aside_go_on(folder: Path) -> None:
    """Three of two pages each begin in three pages."""
    model, layout = load_model(folder, form="f32"), read_config(RAW).layout(row="f32")
    prompts = [SHORT[at:] + SHORT[:at] for at in (0, 20, 40)]
    expected = [greedy(model, prompt, COUNT) for prompt in prompts]
    room = (
        "--index-bytes",
        str(3 * layout.index_page_bytes),
        "--promise",
        "some",
        "--max-model-len",
        "192",
    )
    with served(folder, "--max-running", "3", *room) as process, ThreadPoolExecutor(3) as pool:
        going = [pool.submit(asked, process.url, prompt) for prompt in prompts]
        aside = set()
        while not all(each.done() for each in going):
            aside.add(gauge(process.url, "ess_requests_preempted"))
        assert [each.result()["choices"][0]["token_ids"] for each in going] == expected
        assert max(aside) > 0


def gauge(url: str, name: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    [value] = [line.split()[-1] for line in lines if line.startswith(f"{name} ")]
    return float(value)


def test_what_a_server_plans(folder: Path) -> None:
    found = resolved(folder, max_model_len="2k", max_running=4)
    checkpoint = read_checkpoint(str(folder))
    layout = layout_of(found.settings, checkpoint)
    plan = planned(found.settings, checkpoint, layout)
    assert plan.state_bytes == 2 * 4 * layout.state_bytes
    assert plan.total_bytes > plan.state_bytes + plan.host_bytes
    assert [(room.length, room.count) for room in plan.rooms] == [(2048, 4)]


REFUSED = [
    ({"mtp": 2}, "mtp is 2, and this glm5_next has no MTP module that is read"),
    ({"tp_size": 2}, "tp_size is 2, and the model is glm5_next: its heads are not divided"),
    ({"pp_size": 2}, "pp_size is 2, and the model is glm5_next: its layers are not divided"),
    ({"dp_size": 2}, "dp_size is 2, and the model is glm5_next: its experts are not divided"),
    ({"device": "cuda"}, "device is cuda, and the model is glm5_next: its layers are computed"),
    ({"prefix_cache_dir": "x"}, "prefix_cache_dir is x, and the model is glm5_next: states"),
    ({"deterministic": True}, "deterministic is True, and the model is glm5_next: it has no"),
]


@pytest.mark.parametrize(("flags", "said"), REFUSED, ids=lambda value: str(value)[:24])
def test_what_a_server_cannot_do_is_refused_by_name(
    folder: Path, flags: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        resolved(folder, **flags)


@pytest.mark.parametrize("flags", [{"tbo": "1"}, {"sbo": "combine-down"}, {"modes": "da"}])
def test_what_it_can_do_is_not(folder: Path, flags: dict[str, Any]) -> None:
    resolved(folder, **flags)
