"""The targets by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from tests.fuzz.bodies import Bodies
from tests.fuzz.fuzzer import Target
from tests.fuzz.grammars import GrammarTexts
from tests.fuzz.http_bytes import HttpBytes
from tests.fuzz.readers import Configs, Disks, Frames, Packs, Traces, Vocabularies, Weights
from tests.fuzz.stored import Stored
from tests.fuzz.templates import Templates

TARGETS: Mapping[str, Callable[[], Target]] = MappingProxyType(
    {
        "http": HttpBytes,
        "bodies": Bodies,
        "grammars": GrammarTexts,
        "templates": Templates,
        **{
            reader.name: partial(Stored, reader)
            for reader in (Weights, Configs, Vocabularies, Packs, Traces, Frames, Disks)
        },
    }
)
