"""Public arrival traces: both forms as they are published, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ess.errors import BadInput
from ess.sim.serving.arrivals import Arrival, read_arrivals

MOONCAKE = """\
{"timestamp": 3000, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 27482, "input_length": 1, "output_length": 0, "hash_ids": []}

{"timestamp": 9000.5, "input_length": 512, "output_length": 3, "hash_ids": [46], "extra": true}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2024-05-10 00:00:00.009930+00:00,2162,5
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "arrivals"
    path.write_text(text)
    return path


def test_a_mooncake_trace_is_read(tmp_path: Path) -> None:
    first, second, third = read_arrivals(write(tmp_path, MOONCAKE))
    assert first == Arrival(
        at_s=0.0, prompt_tokens=6955, output_tokens=52, prefix_blocks=(46, 47, 48)
    )
    assert second.at_s == pytest.approx(6.0005)
    assert third == Arrival(at_s=24.482, prompt_tokens=1, output_tokens=1)


def test_an_azure_trace_is_read(tmp_path: Path) -> None:
    first, second, third = read_arrivals(write(tmp_path, AZURE))
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579, abs=1e-6)
    assert third.prompt_tokens == 2162


def test_a_byte_order_mark_and_quotes_are_no_obstacle(tmp_path: Path) -> None:
    quoted = AZURE.replace("374", '"374"').replace("TIMESTAMP", "\ufeffTIMESTAMP", 1)
    assert read_arrivals(write(tmp_path, quoted))[0].prompt_tokens == 374


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no column TIMESTAMP"),
        ("garbage\n", "and lines of Mooncake traces begin with {"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("TIMESTAMP,Tokens\n1,2\n", "line 1: no column ContextTokens, GeneratedTokens"),
        (AZURE + "2023-11-16 18:15:51,twelve,3\n", "line 5"),
        (AZURE + "yesterday,12,3\n", "line 5"),
        (AZURE + "2023-11-16 18:15:51,12\n", "line 5"),
        (AZURE + "2023-11-16 18:15:51,0,3\n", "line 5: 0 prompt"),
        (AZURE + '2023-11-16 18:15:51,"1,3\n', "unexpected end"),
        (MOONCAKE + "{\n", "line 5"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 5}\n', "line 5.*output_length"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 5.5, "output_length": 1}\n', "line 5"),
        (MOONCAKE + '{"timestamp": 1, "input_length": -5, "output_length": 1}\n', "-5 prompt"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 5, "output_length": 9999999999}', "999"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(BadInput, match=says) as refusal:
        read_arrivals(path)
    assert str(path) in str(refusal.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "arrivals"
    path.write_bytes(b'{"timestamp": 1, \xff\xfe}\n')
    with pytest.raises(BadInput, match="arrivals"):
        read_arrivals(path)
