"""The document says what the server does: every route is in it, and what it says holds."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from ess.server.dialects import schemas
from ess.server.dialects.routes import past_responses
from ess.server.http.app import DOORS, create_app
from ess.server.http.auth_limits import OPEN_PATHS
from ess.server.http.openapi.document import SCHEMAS
from ess.server.process.service import Limits
from ess.server.process.tally import Tally
from tests.server.harness import PacedEngine, Served, saying
from tests.server.test_fuzz import KINDS

LIMITS = Limits(running_max=64, waiting_max=4096, length_max=4096)
NOTHING: Any = SimpleNamespace(limits=LIMITS, tally=Tally())
LISTED = [door for door in DOORS if door.listed]
PATHS = {path.replace(":path", "") for door in LISTED for path in door.paths}
DOCUMENT = json.loads(msgspec.json.encode(create_app(NOTHING).openapi()))


def operations() -> dict[tuple[str, str], Any]:
    return {
        (method.upper(), path): operation
        for path, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
    }


def test_every_route_is_in_the_document_and_the_other_way_round():
    served = {(m, p) for door in LISTED for p in door.paths for m in door.methods.split()}
    assert set(operations()) == {(method, path.replace(":path", "")) for method, path in served}


def test_every_body_that_a_route_reads_is_described():
    for path, kind in KINDS.items():
        body = operations()["POST", path]["requestBody"]["content"]["application/json"]
        assert body["schema"] == {"$ref": SCHEMAS + kind.__name__}
        described = DOCUMENT["components"]["schemas"][kind.__name__]["properties"]
        assert set(described) == {field.encode_name for field in msgspec.structs.fields(kind)}


def test_operations_have_names_of_their_own_and_open_doors_need_no_key():
    names = [each["operationId"] for each in operations().values()]
    assert len(set(names)) == len(names)
    open_paths = {path for (_, path), each in operations().items() if each.get("security") == []}
    assert open_paths == OPEN_PATHS & PATHS


def shape(name: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(
        {"$ref": SCHEMAS + name, "components": DOCUMENT["components"]}
    )


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [[1], [2]], 5, {"a": 1}, [None], [["a"]]])
def test_what_is_read_later_is_described_as_it_is_read(prompt: object):
    is_right = shape("CompletionAsk").is_valid({"prompt": prompt})
    try:
        schemas.read_texts(msgspec.Raw(json.dumps(prompt).encode()))
    except schemas.BadInput:
        assert not is_right
    else:
        assert is_right


def test_every_example_is_served():
    examples = {path: door.example for door in LISTED if door.asks for path in door.paths}
    with Served(PacedEngine(saying("one"))) as served:
        for path, example in examples.items():
            body = json.dumps(example).encode()
            with urllib.request.urlopen(served.url + path, body) as answer:
                assert answer.status == 200


def test_errors_have_the_shape_that_is_described():
    with Served(PacedEngine(saying("one"))) as served:
        for path in ("/nothing", "/v1/completions", "/dashboard/none.json"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(served.url + path)
            assert shape("ErrorAnswer").is_valid(json.loads(caught.value.read()))
            assert caught.value.headers["x-request-id"]
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(served.url + "/v1/messages")
        assert shape("MessagesErrorAnswer").is_valid(json.loads(caught.value.read()))
        with urllib.request.urlopen(served.url + "/openapi.json") as answer:
            assert json.loads(answer.read()) == DOCUMENT


LEFT_OUT = {"/v1/events", "/pause", "/pause_generation"}
"""An endless stream, and routes behind which no request ends."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("examples", "least"), [(6, 500), pytest.param(25, 1500, marks=pytest.mark.long)]
)
def test_a_stranger_s_tool_finds_nothing_to_complain_of(tmp_path: Path, examples: int, least: int):
    """schemathesis makes right and wrong requests from the document and judges the answers."""
    (tmp_path / "schemathesis.toml").write_text("")
    with Served(PacedEngine(saying("one two")), limits=LIMITS) as served:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", served.url + "/openapi.json"),
                *("--phases", "examples,coverage,fuzzing", "--max-examples", f"{examples}"),
                *("--seed", "20261121", "--generation-deterministic", "--no-color"),
                *("--checks", CHECKS, "--request-timeout", "20"),
                *(word for path in LEFT_OUT for word in ("--exclude-path", path)),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        answers = served.service.tally.answers
        assert {path for path, code in answers if code == 200} >= PATHS - UNMET - LEFT_OUT
        assert sum(answers.values()) > least
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert served.service.link.open_count == 0
        assert served.service.link.engine.state == "ready"


# Endless, of names that no stranger guesses, or a prefill worker's alone.
UNMET = {
    *("/v1/events", "/dashboard/{recording}", "/v1/models/{model}", "/peers", "/route", "/query"),
    *(door_path for door in past_responses.DOORS for door_path in door.paths),
}
CHECKS = ",".join(
    (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
        "unsupported_method",
    )
)
