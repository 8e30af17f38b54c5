"""JSON from strangers: bounded before it is parsed, one meaning per key, no NaN."""

from __future__ import annotations

import json
from typing import Any, Final

from ess.errors import BadInput

VALUES_MAX: Final = 2_000_000


def parse_object(raw: bytes, *, what: str) -> dict[str, Any]:
    """An object, or BadInput that names `what`.

    The parsed form of a JSON text can be fifty times its size ("[0,0,0..." is two bytes a value),
    so the number of values is bounded by the number of commas before any of them is made.
    """
    if raw.count(b",") > VALUES_MAX:
        raise BadInput(f"{what} has more than {VALUES_MAX:,} JSON values")
    try:
        document = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise BadInput(f"{what} is nested too deeply to be a checkpoint's JSON") from None
    except ValueError as error:
        raise BadInput(f"{what} is not readable JSON: {str(error)[:200]}") from None
    if b"\\ud" in raw.lower():
        _check_characters(document, what=what)
    if not isinstance(document, dict):
        raise BadInput(f"{what} is a JSON {type(document).__name__}, expected an object")
    return document


def _check_characters(document: Any, *, what: str) -> None:
    """An escape may be half of a pair: such a text cannot be written down, or compared with one."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise BadInput(f"{what} has the half of a character, \\u{ord(half):x}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in members if names.count(key) > 1)
        raise BadInput(f"the key {twice[:200]!r} appears twice")
    return members


def _refuse_constant(text: str) -> Any:
    raise BadInput(f"{text} is not JSON")
