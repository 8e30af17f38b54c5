"""What a request is given before its first token: its end ids, its reader, its grammar.

A grammar may take half a second to compile, and the first grammar reads the whole vocabulary too.
So grammars are compiled in a thread of their own, one after the other, and their requests wait
here, on no roster: no other request waits behind them, and the steps go on, for the compiler
releases the interpreter's lock. Only that thread touches `Grammars`; the engine's thread gets a
matcher when it is complete. The grammar of a request that is cancelled while it waits is not
compiled, unless the thread has begun with it.
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
        """Whether the request may enter; else it waits here for its grammar. BadInput if the
        request asks for what this model or this engine cannot do."""
        assert request not in self._compiling, f"request {request.number} was equipped before"
        assert request.matcher is None, f"request {request.number} has a matcher already"
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
        """The requests that wait no more: each has its matcher, or the reason of its refusal."""
        done = [request for request, future in self._compiling.items() if future.done()]
        for request in done:
            assert request.state == "waiting", f"request {request.number} is {request.state}"
            try:
                request.matcher = self._compiling.pop(request).result()
            except EssError as error:
                request.refusal = error
        return done

    def wait(self) -> bool:
        """Blocks until a grammar is compiled; False if no request waits for a grammar."""
        wait(self._compiling.values(), return_when=FIRST_COMPLETED)
        return not self.is_empty

    def give_up(self, request: Request) -> bool:
        """Whether the request was waiting here."""
        future = self._compiling.pop(request, None)
        if future is not None:
            future.cancel()
        return future is not None

    def waiting(self) -> list[Request]:
        return list(self._compiling)

    def check(self) -> None:
        for request in self._compiling:
            name = f"request {request.number}, whose grammar is compiled,"
            assert request.sampling.grammar is not None, f"{name} asks for no grammar"
            assert request.matcher is None, f"{name} has a matcher"
            assert request.refusal is None, f"{name} is refused"

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _text(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise BadInput(f"{what} need an engine with a tokenizer; this one has none")
        return self._tokenizer

    def _matcher(self, grammar: Grammar, tokenizer: Tokenizer) -> Matcher:
        """Runs in the grammars' thread, and nowhere else."""
        if self._grammars is None:
            self._grammars = Grammars(tokenizer, vocabulary=self._vocabulary, ends=self._ends)
        return self._grammars.matcher(grammar)
