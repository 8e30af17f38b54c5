"""The targets by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tests.fuzz.bodies import Bodies
from tests.fuzz.fuzzer import Target
from tests.fuzz.grammars import GrammarTexts
from tests.fuzz.http_bytes import HttpBytes
from tests.fuzz.templates import Templates

TARGETS: Mapping[str, Callable[[], Target]] = MappingProxyType(
    {"http": HttpBytes, "bodies": Bodies, "grammars": GrammarTexts, "templates": Templates}
)
