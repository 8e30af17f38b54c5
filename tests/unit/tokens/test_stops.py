from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ess.models
from ess.engine.tokens.stops import Reader, Released, StopText
from ess.errors import BadInput
from ess.models.text.tokenizer import Tokenizer

CHECKPOINT = Path(ess.models.__file__).parent / "tiny" / "checkpoint"
TEXTS = st.text(alphabet="abé", max_size=12)


def in_the_whole(text: str, stops: list[str], keep: bool) -> tuple[str, str | None]:
    """The stop that ends first; the longest of those that end together."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if keep else end - len(stop)], stop


@given(
    pieces=st.lists(TEXTS, max_size=8),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
    keep=st.booleans(),
)
def test_pieces_stop_where_the_whole_text_stops(pieces, stops, keep):
    text, released, stopped = StopText(stops, keep=keep), "", None
    expected, stop = in_the_whole("".join(pieces), stops, keep)
    for count, piece in enumerate(pieces, start=1):
        one = text.feed(piece)
        released += one.text
        stopped = one.stopped
        so_far = in_the_whole("".join(pieces[:count]), stops, keep)
        assert stopped == so_far[1], "a stop is said with the piece that completes it"
        if stopped is None:
            held = "".join(pieces[:count])[len(released) :]
            assert not held or any(stop.startswith(held) for stop in stops), "held for nothing"
    released += text.flush()
    assert (released, stopped) == (expected, stop)


def test_after_a_stop_nothing_comes():
    text = StopText(["END"], keep=True)
    assert text.feed("one EN") == Released("one ")
    assert text.feed("D two") == Released("END", "END")
    assert text.feed(" END") == Released("", "END")
    assert text.flush() == ""


@pytest.mark.parametrize("stops", [["ok", ""], ["x" * 257], ["a"] * 17])
def test_bad_stops_are_refused(stops):
    with pytest.raises(BadInput, match="stop has"):
        StopText(stops)


def test_a_reader_joins_tokens_and_gives_back_what_was_held():
    tokenizer = Tokenizer(CHECKPOINT)
    reader = Reader(tokenizer, ["naïve END"])
    for token in tokenizer.encode("so naïve EN"):
        assert reader.read(token, may_stop=True) is None
    assert reader.text == "so "
    reader.finish()
    assert reader.text == "so naïve EN"
    reader = Reader(tokenizer, ["END"])
    ids = tokenizer.encode("END of END, END")
    hits = [reader.read(token, may_stop=at > 2) for at, token in enumerate(ids)]
    first = next(at for at, hit in enumerate(hits) if hit)
    assert hits[first] == "END"
    assert reader.text == "END of "
    reader.finish()
    assert reader.text == "END of "
