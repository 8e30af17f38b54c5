from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ess.errors import BadInput
from ess.models.tiny.trainer.texts import corpus
from ess.models.tiny.trainer.texts.vocabulary import BEGIN_ID, END_ID, encode_file, train_tokenizer

PAGE = """<html><head><title>no</title></head><body>
<nav>skip <p>me</p></nav><div class="sphinxsidebar">and <div>me</div><br> too</div>
<h1>Title<a class="headerlink" href="#x">P</a></h1><p>Some   text
here.</p><ul><li><p>one</p></li><li>two</li></ul><pre>a
    b</pre></body></html>"""


def test_page_becomes_text() -> None:
    text = corpus.tidy(corpus.strip_html(PAGE))
    assert text == "Title\n\nSome text here.\n\n* one\n\n* two\n\na\n    b"


def test_padding_goes() -> None:
    assert corpus.tidy("a      b\n----------------\n\n\n\nc  \n") == "a  b\n--------\n\nc"


def test_no_project_is_on_both_sides() -> None:
    names = [package.name for package in corpus.PACKAGES]
    assert len(set(names)) == len(names)
    assert {package.role for package in corpus.PACKAGES} == {"train", "held-out"}


def test_training_never_sees_a_held_out_sentence(tmp_path: Path) -> None:
    shared = "This paragraph is in both files, which is why one of them must lose it."
    line = "A single line of more than sixty characters that both of the sides have."
    texts = {
        "a.txt": f"{shared}\n\nheld out only, and long enough to be counted as one\n{line}",
        "b.txt": f"train only, and this one is long enough as well, you see\n\n{shared}",
        "c.txt": f"other words around it\n{line}\n\nshort\n\nshort",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    corpus.build_from_text(text=tmp_path, into=tmp_path / "out")
    held_out = (tmp_path / "out" / "held_out.txt").read_text()
    train = (tmp_path / "out" / "train.txt").read_text()
    assert shared in held_out
    assert line in held_out
    assert shared not in train
    assert line not in train
    assert train.count("short") == 2
    assert train.count(corpus.DOCUMENT_END) == 2


def test_one_file_is_too_few(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alone")
    with pytest.raises(BadInput, match="holds 1 text files"):
        corpus.build_from_text(text=tmp_path, into=tmp_path / "out")


def test_tokens_give_the_text_back(tmp_path: Path) -> None:
    texts = ["Töne, 漢字 and 🙂 in one line.\n\n    indented = 12345\n", "the end of the text " * 9]
    path = tmp_path / "text.txt"
    path.write_text("".join(text + corpus.DOCUMENT_END for text in texts))
    tokenizer = train_tokenizer(path, size=270)
    tokens = encode_file(tokenizer, path)
    assert tokens.dtype == np.uint16
    starts, ends = np.flatnonzero(tokens == BEGIN_ID), np.flatnonzero(tokens == END_ID)
    assert [
        tokenizer.decode(tokens[start + 1 : end].tolist())
        for start, end in zip(starts, ends, strict=True)
    ] == texts
