"""Load over real processes and sockets: nothing is lost, leaving frees everything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest

from ess.bench.engine import serve as bench
from tests.server.harness import TOKENIZER, until
from tests.support.process import Process

STREAM_COUNT = 64
LOAD_S = float(os.environ.get("LOAD_SECONDS", "20"))
ROUNDS = 2


def load(process: Process) -> dict:
    with urllib.request.urlopen(process.url + "/v1/loads", timeout=60) as answer:
        return json.loads(answer.read())["loads"][0]


async def streamed(url: str, body: dict, *, leave_after: int | None = None) -> tuple[str, dict]:
    """The text and the usage of one stream; one that leaves gives what it had."""
    address, sent = urlsplit(url), json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(sent)}\r\n"
    writer.write(head.encode() + b"connection: close\r\n\r\n" + sent)
    text, usage, count = "", {}, 0
    try:
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            usage = event.get("usage") or usage
            text += "".join(choice["text"] for choice in event["choices"])
            count += 1
            if count == leave_after:
                break
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return text, usage


def slots_used(text: str) -> list[float]:
    lines = [line for line in text.splitlines() if line.startswith("ess_slots_used{")]
    return [float(line.split()[-1]) for line in lines]


def asked(number: int, *, max_tokens: int) -> dict:
    prompt = TOKENIZER.encode("The server reads its configuration. ")[: 3 + number % 5]
    return {
        "prompt": [*prompt, 300 + number],
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.slow
@pytest.mark.parametrize("load_s", [0.0, pytest.param(LOAD_S, marks=pytest.mark.long)])
def test_sixty_four_streams_lose_nothing(load_s: float):
    """Every stream has as many tokens as it asked for, and the text that it has alone."""

    async def run(process: Process) -> int:
        deadline_s, done = time.monotonic() + load_s, 0

        async def repeat(number: int) -> None:
            nonlocal done
            texts, count = set(), 0
            while count < ROUNDS or time.monotonic() < deadline_s:
                text, usage = await streamed(process.url, asked(number, max_tokens=24))
                assert usage["completion_tokens"] == 24
                texts.add(text)
                assert len(texts) == 1, "another text for the same seed"
                count += 1
            done += count

        await asyncio.gather(*(repeat(number) for number in range(STREAM_COUNT)))
        return done

    with Process("--max-running", "64", "--max-waiting", "64").wait_ready() as process:
        count = asyncio.run(run(process))
        assert count >= ROUNDS * STREAM_COUNT
        until(lambda: load(process)["num_total_reqs"] == 0, "an empty server")
        until(lambda: load(process)["made_count"] == 24 * count, "the engine's own count")


@pytest.mark.slow
@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.long)])
def test_all_who_leave_free_everything(count: int):
    dice = random.Random(7)

    async def run(process: Process) -> None:
        for _ in range(count // 50):
            leaving = [
                streamed(
                    process.url,
                    asked(dice.randrange(1000), max_tokens=1000),
                    leave_after=dice.choice([1, 1, 2, 3]),
                )
                for _ in range(50)
            ]
            await asyncio.gather(*leaving)

    with Process("--max-running", "32", "--max-waiting", "64").wait_ready() as process:
        asyncio.run(run(process))
        until(lambda: load(process)["num_total_reqs"] == 0, "an empty server")
        until(lambda: load(process)["num_running_reqs"] == 0, "an empty engine")
        with urllib.request.urlopen(process.url + "/metrics") as answer:
            text = answer.read().decode()
        left = [line for line in text.splitlines() if line.startswith("ess_disconnects_total ")]
        assert left == [f"ess_disconnects_total {count}.0"]
        assert max(slots_used(text)) == 0.0
        request = urllib.request.Request(process.url + "/flush_cache", b"")
        urllib.request.urlopen(request).close()
        until(lambda: load(process)["memory"]["host_pages"]["used"] == 0, "empty pools")


@pytest.mark.slow
def test_a_grammar_and_chances_with_the_real_engine():
    with Process().wait_ready() as process:
        client = process.client()
        schema = {"enum": ["a server", "a client", 8000]}
        named = {"name": "what", "schema": schema}
        asked = {"model": "ess-embedded", "max_tokens": 60, "seed": 1}
        made = client.chat.completions.create(
            messages=[{"role": "user", "content": "The server"}],
            response_format={"type": "json_schema", "json_schema": named},
            **asked,
        )
        assert json.loads(made.choices[0].message.content) in schema["enum"]
        expression = "(yes|no), port [1-9][0-9]{3}"
        constrained = {"structured_outputs": {"regex": expression}}
        for _ in range(2):
            made = client.completions.create(prompt="Is it up?", extra_body=constrained, **asked)
            assert re.fullmatch(expression, made.choices[0].text)
            assert made.choices[0].finish_reason == "stop"
        bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
        with pytest.raises(openai.BadRequestError, match="grammar"):
            client.chat.completions.create(
                model="ess-embedded",
                messages=[{"role": "user", "content": "x"}],
                response_format=bad,
            )
        made = client.completions.create(
            model="ess-embedded", prompt="The server", max_tokens=8, logprobs=3, temperature=0
        )
        chances = made.choices[0].logprobs
        for logprob, top in zip(chances.token_logprobs, chances.top_logprobs, strict=True):
            assert logprob == max(top.values()) <= 0.0
        made = client.completions.create(
            model="ess-embedded",
            prompt="The server waits for the engine to say that it is ready. " * 8,
            max_tokens=4,
            echo=True,
            logprobs=1,
            n=2,
            seed=3,
        )
        count = made.usage.prompt_tokens
        first, second = (choice.logprobs for choice in made.choices)
        assert count > 70
        assert first.token_logprobs[:count] == second.token_logprobs[:count]
        nothing, *scored = first.token_logprobs
        assert nothing is None
        assert len(scored) == count - 1 + 4
        for logprob, top in zip(scored, first.top_logprobs[1:], strict=True):
            assert logprob <= max(top.values()) <= 0.0


@pytest.mark.slow
def test_it_speaks_https(tmp_path: Path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-keyout", key, "-out", cert, "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    flags = ["--engine", "paced", "--ssl-certfile", str(cert), "--ssl-keyfile", str(key)]
    with Process(*flags) as process:
        assert process.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(cert))
        with urllib.request.urlopen(process.url + "/health", context=trusted) as answer:
            assert answer.status == 200


@pytest.mark.slow
@pytest.mark.usefixtures("forked_servers")
def test_the_cost_of_a_token_is_measured():
    rows = bench.serve_benchmark(smoke=True)
    units = [row.unit for row in rows]
    assert units == ["events/s per core", "ms p99 to socket", "ms p99 to socket"]
    assert all(row.value > 0 for row in rows)
    assert rows[0].config["events"] > 1000
