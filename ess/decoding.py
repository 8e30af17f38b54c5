"""The errors that msgspec raises for bytes that are not a document of the wanted kind."""

from __future__ import annotations

from typing import Final

import msgspec

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""In this order: another document, text that is not UTF-8, a document nested too deeply."""
