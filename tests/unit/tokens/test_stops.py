from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ess.models
from ess.engine.process.messages import Piece
from ess.engine.requests.request import FinishReason, Request
from ess.engine.tokens.sampling import Sampling
from ess.engine.tokens.stops import Reader, Released, StopText
from ess.errors import BadInput
from ess.models.text.tokenizer import Tokenizer
from ess.server.dialects.generation import Ending, Generation

CHECKPOINT = Path(ess.models.__file__).parent / "tiny" / "checkpoint"
TEXTS = st.text(alphabet="abé", max_size=12)


def in_the_whole(text: str, stops: list[str], keep: bool) -> tuple[str, str | None]:
    """The stop that ends first; the longest of those that end together."""
    matches = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not matches:
        return text, None
    end, _, stop = min(matches)
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
    released += text.end(may_stop=True).text
    assert (released, stopped) == (expected, stop)


def test_after_a_stop_nothing_comes():
    text = StopText(["END"], keep=True)
    assert text.feed("one EN") == Released("one ")
    assert text.feed("D two") == Released("END", "END")
    assert text.feed(" END") == Released("", "END")
    assert text.end(may_stop=True) == Released("", "END")


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
    assert reader.finish(may_stop=True) is None
    assert reader.text == "so naïve EN"
    reader = Reader(tokenizer, ["END"])
    ids = tokenizer.encode("END of END, END")
    hits = [reader.read(token, may_stop=at > 2) for at, token in enumerate(ids)]
    first = next(at for at, hit in enumerate(hits) if hit)
    assert hits[first] == "END"
    assert reader.text == "END of "
    assert reader.finish(may_stop=True) == "END"
    assert reader.text == "END of "


def ended(
    request: Request, *, keep_stop: bool, reason: FinishReason | None = None
) -> tuple[str, str, str | int | None]:
    """What the server makes of the request's tokens: its text, how it ended, and by what."""
    sampling = request.sampling
    ending = Ending(stops=sampling.stop, tokens_min=sampling.tokens_min, keep_stop=keep_stop)
    made = Generation(Tokenizer(CHECKPOINT), ending)
    *before, last = request.output
    for token in before:
        assert made.feed(Piece(1, (token,))).finish is None
    made.feed(Piece(1, (last,), reason or ("stop" if last in request.ends else "length")))
    return made.text, str(made.finish), made.stopped_by


@pytest.mark.parametrize("end", [False, True], ids=["at its length", "at its end token"])
@pytest.mark.parametrize(
    ("stops", "is_early", "text", "stopped"),
    [
        (("a\ufffd",), False, "", "a\ufffd"),
        (("\ufffd", "x"), False, "a", "\ufffd"),
        (("a\ufffdb",), False, "a\ufffd", None),
        (("\ufffd",), True, "a\ufffd", None),
    ],
)
def test_an_unfinished_character_at_the_end_completes_a_stop(
    stops: tuple[str, ...], is_early: bool, text: str, stopped: str | None, end: bool
):
    """In the engine and in the server, whose answer has then ended by the stop and not by its
    length; but not among the first tokens, which are no stop, and not where it was broken off."""
    tokenizer = Tokenizer(CHECKPOINT)
    begun = next(at for at in range(len(tokenizer)) if tokenizer.bytes_of(at) == b"\xc3")
    tokens = [*tokenizer.encode("a"), begun, *([1] if end else [])]
    sampling = Sampling(
        tokens_max=9 if end else len(tokens), tokens_min=len(tokens) * is_early, stop=stops
    )
    request = Request(number=1, prompt=[5], sampling=sampling)
    request.ends, request.reader = frozenset({1}), Reader(tokenizer, stops)
    assert request.take(tokens) == tokens
    assert request.reader.text == text
    by = stopped or (1 if end else None)
    assert (request.reason, request.ended_by) == ("stop" if by else "length", by)
    kept = text + (stopped or "")
    for keep_stop, shown in ((False, text), (True, kept)):
        assert ended(request, keep_stop=keep_stop) == (shown, request.reason, stopped)
        broken = ended(request, keep_stop=keep_stop, reason="cancelled")
        assert broken == ("a\ufffd", "abort", None)
