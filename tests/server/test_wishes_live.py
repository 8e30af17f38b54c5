"""Wishes through `ess serve` itself, with drafts: the answers obey, in every dialect."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ess.server.commands.start.files.checkpoint import embedded_path
from tests.server.harness import TOKENIZER
from tests.support.process import Process

pytestmark = pytest.mark.slow
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}{{ tools or '' }}"
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Ulm", "Köln"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def with_tools(folder: Path) -> Path:
    """The model in the box with a template that shows tools, and with GLM's marks."""
    shutil.copytree(embedded_path(), folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    [last] = [word for word, number in words.items() if number == 4095]
    words["<arg_key>"] = words.pop(last)
    merges = vocabulary["model"]["merges"]
    merges[:] = [pair for pair in merges if "".join(pair).replace(" ", "") != last]
    mark = {"id": 4095, "content": "<arg_key>", "special": False, "normalized": False}
    sides = {"single_word": False, "lstrip": False, "rstrip": False}
    vocabulary["added_tokens"].append({**mark, **sides})
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = with_tools(tmp_path_factory.mktemp("model") / "tiny")
    with Process(str(folder), "--mtp", "2") as made:
        yield made.wait_ready()


def post(running: Process, path: str, body: dict[str, Any]) -> Any:
    asked = urllib.request.Request(running.url + path, json.dumps(body).encode())
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.loads(answer.read())


def texts(running: Process, params: dict[str, Any], form: dict[str, Any]) -> list[str]:
    """The answers of all dialects: `form` is the constraint as vLLM has it."""
    prompt = "The server is"
    plain = {**params, "max_tokens": 30, "seed": 5}
    completed = post(running, "/v1/completions", {"prompt": prompt, **plain, **form})
    said = post(
        running,
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": prompt}], **plain, **form},
    )
    ids = {"token_ids": TOKENIZER.encode(prompt), "sampling_params": {**plain, **form}}
    made = post(running, "/inference/v1/generate", ids)
    return [
        completed["choices"][0]["text"],
        said["choices"][0]["message"]["content"],
        TOKENIZER.decode(made["choices"][0]["token_ids"]),
    ]


def test_a_choice_is_one_of_its_options(running: Process):
    options = [' a "b"', "naïve\n", " the end"]
    chosen = texts(running, {"temperature": 1.0}, {"structured_outputs": {"choice": options}})
    assert set(chosen) <= set(options)


def test_allowed_ids_and_bad_words_hold(running: Process):
    allowed = TOKENIZER.encode(" the a of in")
    for text in texts(running, {"temperature": 1.0, "allowed_token_ids": allowed}, {}):
        assert set(text.split()) <= {"the", "a", "of", "in"}
    sampled = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}
    asked = {"text": "The server is", "sampling_params": sampled}
    first = post(running, "/generate", asked)["output_ids"]
    bad = TOKENIZER.decode(first[2:3]).strip()
    again = post(
        running, "/generate", {**asked, "sampling_params": {**sampled, "bad_words": [bad]}}
    )
    assert first[:2] == again["output_ids"][:2]
    assert first[2] not in again["output_ids"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tide"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_come_with_right_arguments(running: Process, choice, stream):
    client = running.client()
    tool = {"type": "function", "function": {"name": "tide", "parameters": PARAMETERS}}
    made = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "When is high tide?"}],
        tools=[tool],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=200,
        seed=5,
        stream=stream,
    )
    if stream:
        deltas = [chunk.choices[0].delta for chunk in made]
        calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
        names = [function.name for function in calls if function.name]
        arguments = "".join(function.arguments for function in calls)
    else:
        [call] = made.choices[0].message.tool_calls
        names, arguments = [call.function.name], call.function.arguments
        assert made.choices[0].finish_reason == "tool_calls"
    assert names == ["tide"]
    document = json.loads(arguments)
    assert document.keys() == {"city", "days"}
    assert document["city"] in ("Ulm", "Köln")
    assert isinstance(document["days"], int)
    assert document["days"] <= 9


def test_responses_call_too(running: Process):
    client = running.client()
    tool = {"type": "function", "name": "tide", "parameters": PARAMETERS, "strict": True}
    made = client.responses.create(
        model="tiny", input="When?", tools=[tool], tool_choice="required", max_output_tokens=200,
        parallel_tool_calls=False,
    )  # fmt: skip
    [call] = made.output
    assert call.name == "tide"
    assert json.loads(call.arguments).keys() == {"city", "days"}


def test_a_cached_prefix_is_one_tenant_s(running: Process):
    prompt = [7, 8, 9, 10] * 80

    def cached(**salt: str) -> int:
        made = post(running, "/v1/completions", {"prompt": prompt, "max_tokens": 1, **salt})
        count: int = made["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") > 0
    assert cached(cache_salt="two") == 0
    assert cached() == 0
