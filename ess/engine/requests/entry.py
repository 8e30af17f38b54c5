"""The equipment of a request before its first token: its end ids, its reader, its grammar.

A grammar may take seconds to compile, and the first grammar waits for the whole vocabulary too. So
grammars are compiled in processes of their own, and their requests wait here, on no roster: no
other request waits behind them, and the steps go on. The grammar of a request that is cancelled
while it waits is not compiled any further, unless another request waits for it too.
"""

from __future__ import annotations

from ess.engine.requests.request import Request
from ess.engine.tokens.grammar import Grammar, Grammars
from ess.engine.tokens.stops import Reader
from ess.errors import BadInput, EssError, without_frames
from ess.models.config import ModelConfig
from ess.models.text.tokenizer import Tokenizer
from ess.units import shown


def check_prompt(request: Request, *, vocabulary: int, longest: int) -> None:
    for name, ids in (("prompt", request.prompt), ("prior_output", request.prior_output)):
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            place, wrong = next(each for each in enumerate(ids) if not 0 <= each[1] < vocabulary)
            limit = f"{name} ids must be 0..{vocabulary - 1}"
            raise BadInput(f"{limit}: {name}[{place}] is {shown(wrong)}")
    if request.length_max > longest:
        raise BadInput(
            f"prompt and max_tokens make {request.length_max} positions, at most {longest}"
        )


class Entry:
    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        ends = config.eos_ids
        self._ends = frozenset((ends,) if isinstance(ends, int) else ends)
        self._vocabulary = config.vocab_size
        self._tokenizer = tokenizer
        self._grammars: Grammars | None = None
        self._compiling: dict[Request, Grammar] = {}

    @property
    def is_empty(self) -> bool:
        return not self._compiling

    def equip(self, request: Request, *, longest: int) -> bool:
        """Whether the request may enter; else it waits here for its grammar. BadInput if the
        request asks for what this model or this engine cannot do."""
        assert request not in self._compiling, f"request {request.number} was equipped before"
        assert request.matcher is None, f"request {request.number} has a matcher already"
        check_prompt(request, vocabulary=self._vocabulary, longest=longest)
        sampling = request.sampling
        sampling.check_ids(self._vocabulary)
        request.ends = sampling.stop_ids | (frozenset() if sampling.ignore_eos else self._ends)
        if sampling.stop:
            request.reader = Reader(self._text("stop strings"), sampling.stop)
        request.recall()
        if sampling.grammar is None:
            return True
        self._want(sampling.grammar)
        self._compiling[request] = sampling.grammar
        return False

    def grammars(self) -> Grammars:
        """The compiler of grammars; BadInput or Unavailable where this engine can have none."""
        if self._grammars is None:
            tokenizer = self._text("grammars")
            self._grammars = Grammars(tokenizer, vocabulary=self._vocabulary, ends=self._ends)
        return self._grammars

    def _want(self, grammar: Grammar) -> None:
        self.grammars().want(grammar)

    def compiled(self) -> list[Request]:
        """The requests that wait no more: each has its matcher, or the reason of its refusal."""
        done = []
        for request, grammar in list(self._compiling.items()):
            assert self._grammars is not None, "there is no compiler of grammars"
            assert request.state == "waiting", f"request {request.number} is {request.state}"
            try:
                request.matcher = self._grammars.matcher(grammar)
            except EssError as error:
                request.refusal = without_frames(error)
            if request.matcher is not None or request.refusal is not None:
                del self._compiling[request]
                done.append(request)
        return done

    def wait(self) -> bool:
        """Waits a moment for a grammar; False if no request waits for one."""
        if self._grammars is not None and self._compiling:
            self._grammars.wait()
        return not self.is_empty

    def give_up(self, request: Request) -> bool:
        """Whether the request was waiting here."""
        grammar = self._compiling.pop(request, None)
        if grammar is not None and self._grammars is not None:
            self._grammars.leave(grammar)
        return grammar is not None

    def release(self, request: Request) -> None:
        """The request has ended."""
        if request.matcher is not None:
            request.matcher.close()

    def waiting(self) -> list[Request]:
        return list(self._compiling)

    def check(self) -> None:
        for request in self._compiling:
            name = f"request {request.number}, whose grammar is compiled,"
            assert request.sampling.grammar is not None, f"{name} asks for no grammar"
            assert request.matcher is None, f"{name} has a matcher"
            assert request.refusal is None, f"{name} is refused"
        if self._grammars is not None:
            self._grammars.check()

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()

    def _text(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise BadInput(f"{what} need an engine with a tokenizer; this one has none")
        return self._tokenizer
