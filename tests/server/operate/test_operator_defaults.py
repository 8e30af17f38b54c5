"""What an operator decides for requests that leave it open: sampling, and usage in streams."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from ess.errors import BadInput
from ess.server.commands.start.files.checkpoint import default_sampling
from ess.server.process.service import Limits, SamplingDefaults
from tests.server.harness import PacedEngine, Served, counting
from tests.support.process import Process

RECOMMENDED = SamplingDefaults(temperature=0.7, top_k=20)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 3}},
}


def test_a_given_value_comes_before_a_recommended_one():
    assert default_sampling("", RECOMMENDED) == RECOMMENDED
    defaults = default_sampling('{"temperature": 0, "min_p": 0.1, "top_k": -1}', RECOMMENDED)
    assert defaults == SamplingDefaults(temperature=0.0, min_p=0.1, top_k=-1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ('{"temperature": "hot"}', "not a JSON object of numbers"),
        ('{"temperature": -1}', "default_sampling: temperature is -1.0"),
        ('{"top_p": 0}', "default_sampling: top_p is 0"),
        ('{"max_new_tokens": 5}', "default_sampling: has 'max_new_tokens'; known are temperature"),
    ],
)
def test_a_wrong_default_is_refused(text: str, says: str):
    with pytest.raises(BadInput) as caught:
        default_sampling(text, RECOMMENDED)
    assert says in str(caught.value)


def chunks(url: str, path: str, **more: Any) -> list[Any]:
    body = json.dumps({**BODIES[path], "stream": True, **more}).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, body), timeout=120) as answer:
        events = answer.read().decode().split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


@pytest.mark.parametrize("path", BODIES)
def test_streams_may_always_end_with_their_usage(path: str):
    limits = Limits(running_max=2, waiting_max=1, length_max=4096, tells_usage=True)
    with Served(PacedEngine(counting(3)), limits=limits) as served:
        for options in ({}, {"include_usage": False}):
            last = chunks(served.url, path, stream_options=options)[-1]
            assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    with Served(PacedEngine(counting(3))) as served:
        assert chunks(served.url, path)[-1]["choices"]


@pytest.mark.slow
def test_the_flags_reach_a_server_and_its_requests():
    """Greedy by default: two requests without a seed and a temperature say the same."""
    flags = ("--override-generation-config", '{"temperature": 0}', "--enable-force-include-usage")
    with Process(*flags).wait_ready() as process:
        asked = {"prompt": "The server is", "max_tokens": 24}
        streams = [chunks(process.url, "/v1/completions", **asked) for _ in range(2)]
        texts = ["".join(c["choices"][0]["text"] for c in each if c["choices"]) for each in streams]
        assert texts[0] == texts[1] != ""
        assert all(each[-1]["usage"]["completion_tokens"] == 24 for each in streams)
        warm = [chunks(process.url, "/v1/completions", **asked, temperature=1.5) for _ in range(2)]
        drawn = ["".join(c["choices"][0]["text"] for c in each if c["choices"]) for each in warm]
        assert drawn[0] != drawn[1]
