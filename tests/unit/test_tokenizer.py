from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ess.errors import BadInput
from ess.models.text.detokenizer import Detokenizer
from ess.models.text.tokenizer import Tokenizer, byte_alphabet

TEXT = "the quick brown fox naïve façade 日本語のテキスト 🙂👩‍👩‍👧 ελληνικά العربية " * 8


def train(folder: Path) -> Path:
    """A byte-level vocabulary of 400 with special and plain added tokens, some not ASCII."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
    )
    library.train_from_iterator([TEXT], trainer)
    library.add_tokens(["<think>", "two words", "｜DSML｜"])
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def test_the_alphabet_is_the_librarys() -> None:
    assert set(byte_alphabet()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), keep_special=True) == text


@settings(max_examples=100, deadline=None)
@given(draws=st.data())
def test_a_stream_equals_the_whole(
    tokenizer: Tokenizer, folder: Path, draws: st.DataObject
) -> None:
    """Over any ids, valid text or not, and against the library's own decoder."""
    ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=30)
    text = st.text(max_size=20).map(tokenizer.encode)
    ids_drawn = draws.draw(st.one_of(ids, text))
    keep = draws.draw(st.booleans())
    stream = Detokenizer(tokenizer, keep_special=keep)
    pieces, place = [], 0
    while place < len(ids_drawn):
        count = draws.draw(st.integers(1, 3))
        pieces.append(stream.push(ids_drawn[place : place + count]))
        assert stream.waiting <= 3
        place += count
    pieces.append(stream.finish())
    assert "".join(pieces) == tokenizer.decode(ids_drawn, keep_special=keep)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert "".join(pieces) == library.decode(ids_drawn, skip_special_tokens=not keep)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="aé日🙂👩‍", min_size=1, max_size=12))
def test_no_half_character_is_given_out(tokenizer: Tokenizer, text: str) -> None:
    """One byte per token: the hardest split there is."""
    by_byte = {value: tokenizer.id_of(char) for char, value in byte_alphabet().items()}
    stream, given_out = Detokenizer(tokenizer), ""
    for byte in text.encode():
        token_id = by_byte[byte]
        assert token_id is not None
        given_out += stream.push([token_id])
        assert text.startswith(given_out)
        assert "\ufffd" not in given_out
    assert given_out == text
    assert stream.finish() == ""


def test_a_true_replacement_character_is_not_held(tokenizer: Tokenizer) -> None:
    stream = Detokenizer(tokenizer)
    assert stream.push(tokenizer.encode("a\ufffdb")) == "a\ufffdb"


def test_an_unfinished_character_at_the_end(tokenizer: Tokenizer) -> None:
    stream = Detokenizer(tokenizer)
    ids = [tokenizer.id_of(char) or 0 for char, b in byte_alphabet().items() if b in (0xF0, 0x9F)]
    first, second = sorted(ids, key=lambda i: tokenizer.bytes_of(i), reverse=True)
    assert stream.push([first]) + stream.push([second]) == ""
    assert stream.finish() == "\ufffd"


def test_special_tokens_and_strange_ids(tokenizer: Tokenizer) -> None:
    begin = tokenizer.id_of("<｜begin▁of▁sentence｜>")
    assert begin in tokenizer.special_ids
    think = tokenizer.id_of("<think>")
    assert think is not None
    assert think not in tokenizer.special_ids
    assert tokenizer.encode("<｜begin▁of▁sentence｜><think>two words") == [
        begin,
        think,
        tokenizer.id_of("two words"),
    ]
    assert tokenizer.decode([begin or 0, think]) == "<think>"
    assert tokenizer.bytes_of(len(tokenizer) + 5) == b""
    for take in (Detokenizer(tokenizer).push, tokenizer.decode):
        for ids, says in (
            ([[1, 2]], "ids is [[1, 2]], must be a list of token ids"),
            (5, "ids is 5, must be a list of token ids"),
            (["a"], "'a' is not a token id"),
            ([1.5], "1.5 is not a token id"),
        ):
            with pytest.raises(BadInput, match=re.escape(says)):
                take(ids)  # type: ignore[operator]
    with pytest.raises(BadInput, match=re.escape("[1] is not a token id")):
        tokenizer.bytes_of([1])  # type: ignore[arg-type]
    assert tokenizer.id_of("no such token") is None
    with pytest.raises(BadInput, match="-1 is not a token id"):
        tokenizer.decode([-1])
    with pytest.raises(BadInput, match="cannot be encoded"):
        tokenizer.encode("\ud800")


def with_far_token(folder: Path, to: Path, token_id: int) -> Path:
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["vocab"]["zz"] = token_id
    (to / "tokenizer.json").write_text(json.dumps(document))
    return to


def test_ids_that_no_token_has_count_too(folder: Path, tmp_path: Path) -> None:
    """Every id that it makes is below its length."""
    made = Tokenizer(with_far_token(folder, tmp_path, 1000))
    assert len(made) == 1001
    assert made.bytes_of(999) == b""
    with pytest.raises(BadInput, match=r"tokenizer\.json has the id 16,777,216"):
        Tokenizer(with_far_token(folder, tmp_path, 1 << 24))


@pytest.mark.parametrize(
    "change",
    [
        {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
        {"decoder": None},
        {"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a q"]}},
        {"model": 3},
        {"added_tokens": [{"id": "x"}]},
    ],
)
def test_bad_files_are_refused(folder: Path, tmp_path: Path, change: dict[str, object]) -> None:
    document = json.loads((folder / "tokenizer.json").read_text()) | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(BadInput, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_missing_and_linked_files_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be opened"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    with pytest.raises(BadInput, match="symbolic link"):
        Tokenizer(tmp_path)
