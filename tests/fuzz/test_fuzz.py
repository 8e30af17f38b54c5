"""The stored corpus and some fresh inputs break nothing, and the fuzzer finds what is planted.

A file in known/ repeats a fault that is not mended yet: its test is an expected failure as long as
the fault is there, and from then on a test like any other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import planted
from tests.fuzz.__main__ import main
from tests.fuzz.bodies import Bodies
from tests.fuzz.fuzzer import CORPUS, KNOWN, Finding, Fuzzer, Stored, shrunk
from tests.fuzz.http_bytes import HttpBytes
from tests.fuzz.responses import responses
from tests.fuzz.targets import TARGETS
from tests.fuzz.templates import Templates
from tests.server import harness

KNOWN_FILES = sorted(KNOWN.glob("*.json"))
CORPUS_BYTES_MAX = 300 << 10
FLOORS = {
    "http": 70,
    "bodies": 55,
    "grammars": 70,
    "templates": 80,
    "safetensors": 85,
    "configs": 65,
    "tokenizers": 45,
    "ggufs": 80,
    "traces": 65,
    "frames": 70,
    "disks": 65,
}
FRESH = {
    "http": 60,
    "bodies": 250,
    "grammars": 150,
    "templates": 300,
    "safetensors": 100,
    "configs": 200,
    "tokenizers": 50,
    "ggufs": 100,
    "traces": 100,
    "frames": 500,
    "disks": 15,
}
SLOW_FACTOR = 25


def known() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in KNOWN_FILES]


def is_of(key: tuple[str, str], document: dict[str, Any]) -> bool:
    kind, place = document["key"]
    return key[0] == kind and place in ("*", key[1])


def fuzzed(name: str, fresh_count: int, *, seed: int, folder: Path) -> float:
    """Percent of lines that the corpus reaches; nothing but known faults may turn up."""
    mine = [document for document in known() if document["target"] == name]
    avoid = [document["avoid"] for document in mine if document.get("avoid")]

    def is_known(key: tuple[str, str]) -> bool:
        return any(is_of(key, document) for document in mine)

    with TARGETS[name]() as target:
        fuzzer = Fuzzer(target, seed=seed, findings=folder, avoid=avoid, is_known=is_known)
        fuzzer.begin()
        percent = target.lines.percent
        for _ in range(fresh_count):
            fuzzer.step()
    fresh = {key for key in fuzzer.found if not is_known(key)}
    shown = [path.read_text() for path in fuzzer.files]
    assert not fresh, f"{fresh}: python -m tests.fuzz --replay FILE repeats it\n{shown}"
    return percent


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_and_some_fresh_inputs(name: str, tmp_path: Path) -> None:
    percent = fuzzed(name, FRESH[name], seed=1, folder=tmp_path)
    assert percent >= FLOORS[name], f"the corpus of {name} reaches {percent:.1f} % of the lines"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_many_fresh_inputs(name: str, tmp_path: Path) -> None:
    fuzzed(name, FRESH[name] * SLOW_FACTOR, seed=2, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("path", KNOWN_FILES, ids=[path.stem for path in KNOWN_FILES])
def test_a_fault_that_was_found(path: Path) -> None:
    document = json.loads(path.read_text())
    with TARGETS[document["target"]]() as target:
        fuzzer = Fuzzer(target, seed=1)
        fuzzer.replay([document["input"]])
    others = {key for key in fuzzer.found if not is_of(key, document)}
    assert not others
    if fuzzer.found:
        pytest.xfail(document["what"])


def test_the_corpus_is_small() -> None:
    sizes = [path.stat().st_size for path in CORPUS.rglob("*.json")]
    assert sum(sizes) < CORPUS_BYTES_MAX


# ---- the fuzzer itself


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault needs a list in a list in an object of one field, which no single mutation
    makes."""
    create_app = harness.create_app
    monkeypatch.setattr(harness, "create_app", lambda *a, **k: planted.Raising(create_app(*a, **k)))
    faults, run_count = set(), 0
    for seed in (15, 12, 8):  # of 16 seeds those that find it soonest
        with Bodies(extra=[Path(planted.__file__)]) as target:
            target.paths = ["/generate"]
            fuzzer = Fuzzer(target, seed=seed)
            while not fuzzer.found and fuzzer.run_count < 2_500:
                fuzzer.step()
        faults, run_count = {kind for kind, _ in fuzzer.found}, run_count + fuzzer.run_count
        if faults:
            break
    assert faults == {"Planted"}, f"in {run_count} inputs"


STREAM = [["bytes", "GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n"], ["turns", 20]]


def test_a_stream_may_be_cut_by_what_is_sent_behind_its_request() -> None:
    with HttpBytes() as target:
        target.run({"ops": [*STREAM, ["bytes", "\x00 is no request\r\n\r\n"]]})


def test_a_stream_that_the_server_cuts_by_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    create_app = harness.create_app
    monkeypatch.setattr(harness, "create_app", lambda *a, **k: planted.Cutting(create_app(*a, **k)))
    with HttpBytes() as target, pytest.raises(Finding) as caught:
        target.run({"ops": STREAM})
    assert caught.value.key == ("not HTTP", "cut short")


@pytest.mark.slow
def test_a_planted_leak_is_found_and_its_input_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    create_app = harness.create_app
    monkeypatch.setattr(harness, "create_app", lambda *a, **k: planted.Keeping(create_app(*a, **k)))
    with Bodies(census_every=30) as target:
        target.paths = ["/detokenize", "/generate", "/tokenize"]
        fuzzer = Fuzzer(target, seed=6, findings=tmp_path)
        while not fuzzer.found and fuzzer.run_count < 2000:
            fuzzer.step()
        [(kind, _)] = fuzzer.found
        [stored] = [json.loads(path.read_text()) for path in fuzzer.files]
    assert kind == "leak"
    assert stored["input"]["path"] == "/detokenize"


def test_one_seed_draws_the_same_inputs() -> None:
    kept = []
    for _ in range(2):
        with Templates() as target:
            fuzzer = Fuzzer(target, seed=5)
            for _ in range(150):
                fuzzer.step()
            kept.append(fuzzer.values)
    assert kept[0] == kept[1]
    assert len(kept[0]) > 5


def test_an_input_is_cut_to_what_matters() -> None:
    value = {"a": [1, 2, "xxxxneedleyyyy"], "b": "zz"}
    small = shrunk(value, lambda smaller: "needle" in json.dumps(smaller))
    assert len(json.dumps(small)) < len(json.dumps(value)) - 8


def test_what_is_no_response_is_told() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
    assert [answer.body for answer in responses(head + b"ab" + head + b"cd", has_heads=False)] == [
        b"ab",
        b"cd",
    ]
    assert not responses(head + b"a", has_heads=False)[0].is_whole
    closed = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nab"
    assert [answer.body for answer in responses(closed, has_heads=False)] == [b"ab"]
    for raw in (
        head + b"abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\nb\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ):
        with pytest.raises(Finding):
            responses(raw, has_heads=False)


def test_a_finding_is_stored_and_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_app = harness.create_app
    monkeypatch.setattr(harness, "create_app", lambda *a, **k: planted.Raising(create_app(*a, **k)))
    wrong = {"path": "/generate", "raw": '{"text": "a", "sampling_params": {"stop": [["a"]]}}'}
    with Bodies() as target:
        fuzzer = Fuzzer(target, seed=6, findings=tmp_path)
        fuzzer.replay([wrong, wrong])
    [((kind, _), count)] = fuzzer.found.items()
    assert (kind, count) == ("Planted", 2)
    [path] = fuzzer.files
    assert main(["--replay", str(path)]) == 1  # the same fault is planted there too
    assert "Planted" in capsys.readouterr().out


def test_the_corpus_in_the_tree_is_read() -> None:
    for name in TARGETS:
        assert Stored(CORPUS / name).load().values, name
