"""Traces that carry scores beside selections; those without are as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ess.errors import BadInput
from ess.trace import RequestStep, TraceHeader, TraceReader, TraceWriter, form


def make_header(**changes: object) -> TraceHeader:
    settled = {"layout": "ess-embedded", "group_count": 2, "top_k": 8, "mtp": 2, "context": 1000}
    return TraceHeader(**(settled | changes))


def write_scored(path: Path) -> np.ndarray:
    header = make_header(scored=True, group_count=1)
    scores = np.random.default_rng(3).integers(0, 256, (2, 40)).astype(np.uint8)
    with TraceWriter(path, header=header) as writer:
        writer.write_group(0, np.array([[3, 9], [4, 30]], np.int32), scores=scores)
        writer.commit_step(0, [RequestStep(request=0, length=38, query_count=2, accepted=1)])
    return scores


@pytest.mark.parametrize("recover", [False, True])
def test_scores_are_read_back_beside_their_selection(tmp_path: Path, recover: bool) -> None:
    scores = write_scored(tmp_path / "t")
    with TraceReader(tmp_path / "t", recover=recover) as reader:
        assert reader.header.scored
        step = reader.step(0)
        assert step.selection(0)[:, :2].tolist() == [[3, 9], [4, 30]]
        np.testing.assert_array_equal(step.scores(0), scores)


def test_a_trace_without_scores_is_of_the_first_version_and_says_that_it_has_none(
    tmp_path: Path,
) -> None:
    with TraceWriter(tmp_path / "t", header=make_header(group_count=1)) as writer:
        writer.write_group(0, np.array([[3]], np.int32))
        writer.commit_step(0, [RequestStep(request=0, length=38, query_count=1, accepted=1)])
    assert (tmp_path / "t").read_bytes()[8:12] == (1).to_bytes(4, "little")
    with (
        TraceReader(tmp_path / "t") as reader,
        pytest.raises(BadInput, match="recorded without scores"),
    ):
        reader.step(0).scores(0)


def test_no_flipped_bit_of_scores_is_read(tmp_path: Path) -> None:
    write_scored(tmp_path / "t")
    raw = bytearray((tmp_path / "t").read_bytes())
    raw[raw.index(form.SCORES) + 30] ^= 4
    (tmp_path / "bad").write_bytes(raw)
    with (
        TraceReader(tmp_path / "bad") as reader,
        pytest.raises(BadInput, match="SCRS frame at byte"),
    ):
        reader.step(0).scores(0)


def test_scores_are_written_where_the_header_says_so_and_only_there(tmp_path: Path) -> None:
    chosen, scores = np.array([[3]], np.int32), np.zeros((1, 9), np.uint8)
    with (
        TraceWriter(tmp_path / "plain", header=make_header()) as writer,
        pytest.raises(BadInput, match="scored is False"),
    ):
        writer.write_group(0, chosen, scores=scores)
    with TraceWriter(tmp_path / "scored", header=make_header(scored=True)) as writer:
        with pytest.raises(BadInput, match="scored is True"):
            writer.write_group(0, chosen)
        with pytest.raises(BadInput, match="scores of 2"):
            writer.write_group(0, chosen, scores=np.zeros((2, 9), np.uint8))
        with pytest.raises(BadInput, match="of uint8, not int64"):
            writer.write_group(0, chosen, scores=np.zeros((1, 9), np.int64))
