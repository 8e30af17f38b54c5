"""`ess serve --device cuda` as people start it, on the device that is there."""

from __future__ import annotations

import json
import urllib.request

import pytest

for name in ("torch", "triton", "msgspec", "cyclopts", "fastapi", "uvicorn", "zmq", "llguidance"):
    pytest.importorskip(name, reason=f"a server needs {name}")

from tests.support.process import Process  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
EXACT = ("--form", "f32", "--row", "f32", "--slot-bytes", "24MiB")
PROMPTS = ("The server is", "A list of the files that")
MODEL = "ess-embedded"


def asked(process: Process, path: str, **body: object) -> str:
    content = None if not body else json.dumps({"model": MODEL, **body}).encode()
    request = urllib.request.Request(process.url + path, content)
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=100) as answer:
        return answer.read().decode()


def text(process: Process, prompt: str) -> str:
    said = asked(process, "/v1/completions", prompt=prompt, max_tokens=24, temperature=0)
    return json.loads(said)["choices"][0]["text"]


def graphs(process: Process) -> dict[str, object]:
    return json.loads(asked(process, "/server_info"))["engine"]["graphs"]


def ends_well(process: Process) -> bool:
    process.process.terminate()
    return process.ended(60) == 0


def test_its_text_is_that_of_a_server_of_the_host():
    there = ("--device", "cuda", "--graph-sizes", "1", "--modes", "none", *EXACT)
    with Process(*there, is_real=True) as device, Process(*EXACT, is_real=True) as host:
        device.wait_ready()
        host.wait_ready()
        for prompt in PROMPTS:
            assert text(device, prompt) == text(host, prompt)
        assert graphs(device)["replayed"] > 0
        assert ends_well(device)


def test_it_serves_with_no_setting_but_its_device():
    with Process("--device", "cuda", is_real=True) as process:
        process.wait_ready()
        message = {"role": "user", "content": "What is a list?"}
        said = asked(
            process, "/v1/chat/completions", messages=[message], max_tokens=16, stream=True
        )
        assert said.rstrip().endswith("data: [DONE]"), said[-400:]
        assert said.count("data: ") > 2
        assert graphs(process)["replayed"] > 0
        assert ends_well(process)
