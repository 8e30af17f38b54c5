"""traceparent in, spans out: over a real socket, collected in memory or by a collector's door."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from ess.errors import Unavailable
from ess.server.http import telemetry
from tests.server.harness import PacedEngine, Served, counting, until

sdk = pytest.importorskip("opentelemetry.sdk.trace.export", reason="needs ess[otel]")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def post(url: str, body: dict, **headers: str) -> int:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_a_request_is_a_span_under_its_parent():
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = telemetry.provider_over(sdk.SimpleSpanProcessor(kept), model="m")
    asked = {"model": "test-model", "prompt": "x", "max_tokens": 5}
    with Served(PacedEngine(counting(5), pace_s=0.02), keys=("k",), spans=provider) as served:
        path = served.url + "/v1/completions"
        key = {"authorization": "Bearer k"}
        named = {**key, "traceparent": PARENT, "x-request-id": "mine"}
        assert post(path, {**asked, "stream": True}, **named) == 200
        assert post(path, {**asked, "prompt": 7.5}, **key, traceparent="nonsense") == 400
        assert post(path, asked, traceparent=PARENT) == 401
        assert post(served.url + "/tokenize", {"prompt": "x"}, **key) == 200
        until(lambda: len(kept.get_finished_spans()) == 2, "two spans")
    status = "http.response.status_code"
    streamed, wrong = sorted(kept.get_finished_spans(), key=lambda span: span.attributes[status])
    assert streamed.name == "POST /v1/completions"
    assert f"{streamed.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{streamed.parent.span_id:016x}" == PARENT.split("-")[2]
    assert streamed.attributes["gen_ai.request.id"] == "mine"
    assert streamed.attributes["http.response.status_code"] == 200
    took_s = (streamed.end_time - streamed.start_time) / 1e9
    assert 0 < streamed.attributes["ess.first_byte_s"] < took_s
    assert took_s > 0.06, "a span ends with its stream"
    assert [event.name for event in streamed.events] == ["first byte"]
    assert wrong.parent is None
    assert wrong.attributes["http.response.status_code"] == 400


def test_spans_leave_for_the_collector_at_the_end():
    came = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *said: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with telemetry.provided(endpoint, model="m") as provider:
            provider.get_tracer("x").start_span("POST /generate").end()
        collector.shutdown()
    [(path, body)] = came
    assert path == "/v1/traces"
    assert b"POST /generate" in body


def test_without_the_packages_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(Unavailable, match=r"pip install 'ess\[otel\]'"):
        telemetry.provider_to("http://127.0.0.1:1", model="m")


def test_nothing_is_loaded_without_an_endpoint():
    check = (
        "import sys, ess.server.commands.start.launch\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry.')"
        " and name.split('.')[1] in ('sdk', 'exporter')])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
