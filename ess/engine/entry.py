"""What a request is given before its first token: its end ids, its grammar, its reader."""

from __future__ import annotations

from ess.engine.grammar import Grammar, Grammars, Matcher
from ess.engine.request import Request
from ess.engine.stops import Reader
from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.models.tokenizer import Tokenizer


class Entry:
    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        found = config.eos_ids
        self._ends = frozenset((found,) if isinstance(found, int) else found)
        self._vocabulary = config.vocab_size
        self._tokenizer = tokenizer
        self._grammars: Grammars | None = None

    def equip(self, request: Request) -> None:
        """Refuses what this model cannot follow."""
        sampling = request.sampling
        sampling.check_ids(self._vocabulary)
        request.ends = sampling.stop_ids | (frozenset() if sampling.ignore_eos else self._ends)
        if sampling.stop:
            request.reader = Reader(self._text("stop strings"), sampling.stop)
        if sampling.grammar is not None:
            request.matcher = self._matcher(sampling.grammar)

    def _text(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise BadInput(f"{what} need an engine with a tokenizer; this one has none")
        return self._tokenizer

    def _matcher(self, grammar: Grammar) -> Matcher:
        if self._grammars is None:
            self._grammars = Grammars(
                self._text("grammars"), vocabulary=self._vocabulary, ends=self._ends
            )
        return self._grammars.matcher(grammar)
