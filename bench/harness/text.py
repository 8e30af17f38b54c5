"""The text for real decoding: a file, or the reference that comes with Python."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

from ess.errors import Unavailable, unreadable
from ess.models.load import EMBEDDED
from ess.models.text.tokenizer import Tokenizer


@functools.cache
def token_ids(path: Path | None = None) -> tuple[list[int], str]:
    """The text as ids of the embedded model's vocabulary, and its name. Callers share the list."""
    text, name = text_of(path)
    return Tokenizer(EMBEDDED).encode(text), name


def text_of(path: Path | None = None) -> tuple[str, str]:
    return (_reference(), "Python's own reference") if path is None else _read(path)


def _reference() -> str:
    """Half a megabyte of prose in every full Python; the model was trained on similar text."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise Unavailable(
            "this Python comes without its reference (pydoc_data): name a file with --text"
        ) from None
    return "\n".join(topics[name] for name in sorted(topics))


def _read(path: Path) -> tuple[str, str]:
    try:
        return path.read_text(encoding="utf-8"), path.name
    except (OSError, UnicodeError) as error:
        raise unreadable(f"--text {path}", error) from None
