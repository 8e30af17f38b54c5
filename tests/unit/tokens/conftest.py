"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ess.engine.tokens.grammar import Grammars


@pytest.fixture
def fresh() -> Iterator[Grammars]:
    """Grammars of a test alone, over the embedded vocabulary."""
    from tests.unit.tokens.test_grammar import END, VOCABULARY, tokenizer

    made = Grammars(tokenizer(), vocabulary=VOCABULARY, ends=frozenset({END}))
    yield made
    made.check()
    made.close()
