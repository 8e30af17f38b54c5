"""What a request is given before its first token: its end ids, its reader, its grammar.

A grammar from a stranger may take half a second to compile, and the first one reads the whole
vocabulary too. So they are compiled in one thread of their own, one after the other, and their
requests wait here, on no roster: nobody stands behind them, and the steps go on (the compiler lets
go of the interpreter's lock). Everything of `Grammars` happens in that thread; a matcher is handed
over whole. Who is given up while waiting is compiled no more, unless that has begun.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from ess.engine.request import Request
from ess.engine.tokens.grammar import Grammar, Grammars, Matcher
from ess.engine.tokens.stops import Reader
from ess.errors import BadInput, EssError
from ess.models.config import ModelConfig
from ess.models.text.tokenizer import Tokenizer


class Entry:
    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        ends = config.eos_ids
        self._ends = frozenset((ends,) if isinstance(ends, int) else ends)
        self._vocabulary = config.vocab_size
        self._tokenizer = tokenizer
        self._grammars: Grammars | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ess-grammars")
        self._compiling: dict[Request, Future[Matcher]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._compiling

    def equip(self, request: Request) -> bool:
        """Whether it may enter; else it waits for its grammar. Refuses what this model cannot
        follow."""
        sampling = request.sampling
        sampling.check_ids(self._vocabulary)
        request.ends = sampling.stop_ids | (frozenset() if sampling.ignore_eos else self._ends)
        if sampling.stop:
            request.reader = Reader(self._text("stop strings"), sampling.stop)
        if sampling.grammar is None:
            return True
        tokenizer = self._text("grammars")
        self._compiling[request] = self._thread.submit(self._matcher, sampling.grammar, tokenizer)
        return False

    def compiled(self) -> list[Request]:
        """Those that wait no more: each with its matcher, or with the reason why it is refused."""
        done = [request for request, future in self._compiling.items() if future.done()]
        for request in done:
            try:
                request.matcher = self._compiling.pop(request).result()
            except EssError as error:
                request.refusal = error
        return done

    def wait(self) -> bool:
        """Until a grammar is compiled; False if there is none to wait for."""
        wait(self._compiling.values(), return_when=FIRST_COMPLETED)
        return not self.is_empty

    def give_up(self, request: Request) -> bool:
        """Whether the request was waiting here."""
        future = self._compiling.pop(request, None)
        if future is not None:
            future.cancel()
        return future is not None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _text(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise BadInput(f"{what} need an engine with a tokenizer; this one has none")
        return self._tokenizer

    def _matcher(self, grammar: Grammar, tokenizer: Tokenizer) -> Matcher:
        if self._grammars is None:
            self._grammars = Grammars(tokenizer, vocabulary=self._vocabulary, ends=self._ends)
        return self._grammars.matcher(grammar)
