"""Every body that a router was seen to send to a pair, sent to both roles.

`router_bodies.json` has what sglang-router 0.3.2, smg 1.13.0, vllm-router 0.1.17 and SGLang's own
small balancer sent: to which leg, and to which path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.pd.pairs import BODIES, Half
from tests.support.routers import Answer

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Half
    decode: Half


def ports() -> set[int]:
    """Where the captured bodies say that prefill workers are."""
    numbers = {28430, 28431}
    for sent in BODIES:
        port = sent["body"].get("bootstrap_port")
        numbers |= {*port} if isinstance(port, list) else {port} if port else set()
    return numbers


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Half("prefill", "--served-model-name", "fake") as prefill:
        at = f"127.0.0.1:{prefill.port}"
        peers = ",".join([at, *(f"127.0.0.1:{port}={at}" for port in sorted(ports()))])
        with Half("decode", "--served-model-name", "fake", "--peers", peers) as decode:
            yield Pair(prefill, decode.wait_met())


def texts(answer: Answer, path: str) -> list[str]:
    """Of every choice or, of a stream, of every event."""
    events = answer.events if "data: " in answer.text else [answer.document]
    if path == "/generate":
        flat = [
            each for event in events for each in (event if isinstance(event, list) else [event])
        ]
        return [each["text"] for each in flat]
    choices = [choice for event in events for choice in event["choices"]]
    said = [choice.get("message") or choice.get("delta", choice) for choice in choices]
    return [part.get("content") or part.get("text") or "" for part in said]


def finishes(answer: Answer, path: str) -> list[str]:
    if path == "/generate":
        flat = answer.document if isinstance(answer.document, list) else [answer.document]
        return [each["meta_info"]["finish_reason"]["type"] for each in flat]
    return [choice["finish_reason"] for choice in answer.document["choices"]]


def is_bootstrapped(body: dict[str, Any]) -> bool:
    return "bootstrap_host" in body


def asks(body: dict[str, Any], wish: str) -> bool:
    return bool((body.get("kv_transfer_params") or {}).get(wish))


def is_unread(sent: dict[str, Any]) -> bool:
    """A router for another engine puts max_tokens where it would be dropped."""
    body = sent["body"]
    is_generate = sent["path"] == "/generate" and "max_tokens" in body
    return is_generate and "kv_transfer_params" not in body


def named(sent: dict[str, Any]) -> str:
    return "-".join((sent["router"], sent["leg"], sent["test"], sent["path"].rpartition("/")[2]))


@pytest.mark.parametrize("sent", BODIES, ids=named)
def test_the_prefill_worker_makes_prompts_alone(pair: Pair, sent: dict[str, Any]):
    path, body = sent["path"], sent["body"]
    answer = pair.prefill.ask(path, body)
    if not (is_bootstrapped(body) or asks(body, "do_remote_decode")):
        assert answer.status == 400
        assert is_unread(sent) or "send this to the router" in answer.text
        return
    assert answer.status == 200, answer.text
    assert set(texts(answer, path)) == {""}
    if not body.get("stream"):
        assert set(finishes(answer, path)) == {"length"}


@pytest.mark.parametrize("sent", BODIES, ids=named)
def test_the_decode_worker_answers(pair: Pair, sent: dict[str, Any]):
    """What another engine's prefill worker has given is refused; the rest is answered whole."""
    path, body = sent["path"], sent["body"]
    answer = pair.decode.ask(path, body)
    if is_unread(sent):
        assert answer.status == 400
        return
    if asks(body, "do_remote_prefill") and "transfer_id" not in body["kv_transfer_params"]:
        assert answer.status == 400
        assert answer.document["error"]["param"] == "kv_transfer_params"
        return
    assert answer.status == 200, answer.text
    assert any(texts(answer, path))


SEQUENTIAL = [sent for sent in BODIES if asks(sent["body"], "do_remote_decode")]


@pytest.mark.parametrize("sent", SEQUENTIAL, ids=named)
def test_what_the_first_leg_gives_is_taken_by_the_second(pair: Pair, sent: dict[str, Any]):
    """As vllm-router does it: the answer's kv_transfer_params are copied."""
    path = sent["path"]
    answer = pair.prefill.ask(path, sent["body"])
    document = answer.document[0] if isinstance(answer.document, list) else answer.document
    params = document["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", pair.prefill.port)
    left = {name: v for name, v in sent["body"].items() if name not in ("max_tokens", "min_tokens")}
    taken = pair.decode.ask(path, {**left, "kv_transfer_params": params})
    assert taken.status == 200, taken.text
    assert any(texts(taken, path))
    doubles = {**params, "remote_port": float(params["remote_port"])}
    assert pair.decode.ask(path, {**left, "kv_transfer_params": doubles}).status == 200
    stale = {**params, "remote_engine_id": "00000000000000ff"}
    late = pair.decode.ask(path, {**left, "kv_transfer_params": stale})
    assert (late.status, late.headers["x-ess-reason"]) == (503, "peer_restarted")
