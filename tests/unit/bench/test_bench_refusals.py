"""What cannot be measured is refused in a sentence that names the option, before any work."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from ess import console
from ess.bench import cli
from ess.bench.engine import vs_transformers
from ess.bench.harness import prefix
from ess.bench.harness.lists import amount, sizes
from ess.errors import BadInput

HUGE = "99999999999999999999g"
MANY = "1000000000000000000000"


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark that begins its work reads its text or its model first."""

    def begun(*_: object, **__: object) -> None:
        raise AssertionError("the benchmark began")

    monkeypatch.setattr(prefix, "token_ids", begun)
    monkeypatch.setattr(prefix, "load_model", begun)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("step --ctx " + HUGE, "no value above 1,099,511,627,776"),
        ("step --ctx 1000g", "are free: take a smaller --ctx or --batch"),
        ("step --batch 1000000000", "are free: take a smaller --ctx or --batch"),
        ("step --ctx 1.5", "--ctx 1.5 is not a whole number"),
        ("step --steps 0", "--steps 0: between 1 and 1,000,000"),
        ("step --steps " + MANY, "between 1 and 1,000,000"),
        ("step --arrivals -1", "--arrivals -1: between"),
        ("step --evict fifo", "choose from"),
        ("slow-link --batch 0", "--batch 0: between"),
        ("slow-link --mtp -1", "--mtp -1: between"),
        ("slow-link --steps -1", "--steps -1: between"),
        ("slow-link --ctx 1000g", "are free"),
        ("slow-link --gbps inf", "--gbps inf"),
        ("slow-link --gbps nan", "--gbps nan"),
        ("overhead --mtp " + MANY, "--mtp"),
        ("overhead --batch 1000000000", "are free"),
        ("own-grid --steps 0", "--steps 0: between"),
        ("own-grid --batch 1000000000", "two of --timed-ctx must fit it"),
        ("own-grid --ctx 3", "--ctx 3: no --batch and one more fits it"),
        ("own-grid --timed-ctx 4k", "two of --timed-ctx must fit it"),
        ("own-grid --ratio 2", "--ratio 2"),
        ("entries --ctx 1000g", "are free"),
        ("entries --batch 1000000000", "are free"),
        ("vs-transformers --repeats 0", "--repeats 0: between"),
        ("precision --excerpts 0", "--excerpts 0: between"),
        ("precision --mode fast", "--mode fast"),
        ("locality --queries 0", "--queries 0: between"),
        ("locality --top-k -1 --model smollm2", "--top-k -1: between"),
        ("guest --ctx none", "--ctx"),
        ("step --batch 5-1", "--batch 5-1: a range that does not grow"),
        ("guest --excerpts 0", "--excerpts 0: between"),
        ("guest --text no/such.txt", "--text no/such.txt cannot be read: No such file"),
        ("prefill --chunk 0", "--chunk 0: between"),
        ("prefill --real none", "--real"),
        ("prefill --memory 3", "a prompt of 3 tokens"),
        ("prefill --memory -1", "--memory"),
        ("prefill --ctx 1000g", "are free"),
        ("prefill --serving --router haproxy --smoke", "haproxy"),
        ("handoff --ctx 0", "--ctx 0"),
        ("prefix --rounds 0", "--rounds 0: between"),
        ("prefix --ctx 1000g", "are free"),
        ("links --repeats 0", "--repeats 0: between"),
        ("policies --trace no/such.trace", "the trace no/such.trace cannot be read: No such file"),
        ("load --file no/such.json", "--file no/such.json cannot be read: No such file"),
        ("paper --ctx 4k", "unknown option --ctx"),
        ("trace 3", "no place"),
        ("rows --out .", "it is a folder; name a file"),
        ("all --json no/such/x.json", "does not exist"),
    ],
)
def test_a_command_line_that_cannot_be_is_refused(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == console.USAGE
    said = capsys.readouterr()
    assert says in " ".join(said.err.split())
    assert "Traceback" not in said.err
    assert said.out == ""


def test_a_package_that_is_missing_is_missed_before_any_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(_: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(vs_transformers, "Checkpoint", read)
    assert cli.main(["vs-transformers", "--smoke"]) == 1
    assert "transformers is not installed: pip install 'ess[oracle]'" in capsys.readouterr().err


@pytest.mark.parametrize("value", [0, -1, 1_000_001])
def test_an_amount_has_two_ends(value: int) -> None:
    assert (amount("--n", 1), amount("--n", 1_000_000)) == (1, 1_000_000)
    with pytest.raises(BadInput, match=f"--n {value}: between 1 and 1,000,000"):
        amount("--n", value)


@pytest.mark.parametrize("text", ["", ",", "4k,,8k", "4k-1k", "-1", "0", "1e9", "1.5", "9" * 25])
def test_a_list_of_sizes_that_is_none(text: str) -> None:
    with pytest.raises(BadInput, match="--n"):
        sizes("--n", text)


def test_a_fraction_of_a_unit_is_a_size() -> None:
    counts: Sequence[int] = sizes("--n", "1.5k,2")
    assert counts == [1536, 2]
