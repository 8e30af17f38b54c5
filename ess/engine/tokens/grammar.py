"""Output that follows a grammar: which tokens may come next, whatever is drafted. Needs no torch.

A matcher stands behind the request's output. For a step it also walks along the drafts, one mask
per query, and back again: a draft that the grammar forbids is simply never drawn, so it is rejected
as any wrong draft is, and the queries behind it do not count. The end ids of the model are allowed
where the text is complete, and nothing else is once it can only end.

Users of a server send grammars, so their size and the work they may cause are limited. A grammar
that breaks a limit while it runs allows only the end, and `failure` says why. White space between
the parts of JSON is bounded: without that, models are known to write it until their last token.
"""

from __future__ import annotations

import importlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ess.errors import BadInput, Unavailable

if TYPE_CHECKING:
    from ess.models.text.tokenizer import Tokenizer

Kind = Literal["json_schema", "json_object", "regex", "lark"]
GRAMMAR_BYTES_MAX: Final = 64 << 10
COMPILED_MAX: Final = 64
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{0,32}"
STACK_BYTES: Final = 256 << 20
MESSAGE_CHARS_MAX: Final = 2000


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text` is the schema, the expression or the Lark grammar; "json_object" needs none."""

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise BadInput(f"grammar kind {self.kind!r} is not one of {', '.join(get_args(Kind))}")
        size = len(self.text.encode("utf-8", "replace"))
        if size > GRAMMAR_BYTES_MAX:
            raise BadInput(f"a grammar of {size} bytes; at most {GRAMMAR_BYTES_MAX} are read")
        if not self.text and self.kind != "json_object":
            raise BadInput(f"a grammar of kind {self.kind} without a text")


class Grammars:
    """Compiles grammars for one vocabulary, and keeps the last `COMPILED_MAX` that were used."""

    def __init__(self, tokenizer: Tokenizer, *, vocabulary: int, ends: frozenset[int]) -> None:
        if not ends:
            raise BadInput("grammars need a model with an end id")
        self._library = _library()
        self._ends = ends
        self._vocabulary = vocabulary
        self._tokenizer = self._library.LLTokenizer(
            self._library.TokenizerWrapper(_Vocabulary(tokenizer, min(ends))),
            n_vocab=max(vocabulary, len(tokenizer)),
            eos_token=sorted(ends),
        )
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def matcher(self, grammar: Grammar) -> Matcher:
        """A fresh matcher, at the start of its text; BadInput if the grammar does not compile."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            self._compiled[grammar] = compiled
            if len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        assert len(self._compiled) <= COMPILED_MAX, f"{len(self._compiled)} grammars are kept"
        return Matcher(compiled, vocabulary=self._vocabulary, ends=self._ends)

    def _compile(self, grammar: Grammar) -> Any:
        try:
            compiled = _on_deep_stack(lambda: self._matcher_of(grammar))
            failure = compiled.get_error()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library panics on some texts: that is no Exception
            failure = str(error) or type(error).__name__
        if failure:
            raise BadInput(f"grammar ({grammar.kind}): {failure[:MESSAGE_CHARS_MAX].strip()}")
        return compiled

    def _matcher_of(self, grammar: Grammar) -> Any:
        made = self._library.LLMatcher
        limits = self._library.LLParserLimits(verbose_errors=False)
        return made(self._tokenizer, _source(made, grammar), log_level=0, limits=limits)


class Matcher:
    """Follows one request. `failure` is set when the grammar could not be followed any further."""

    def __init__(self, compiled: Any, *, vocabulary: int, ends: frozenset[int]) -> None:
        self.failure = ""
        self._compiled = compiled
        self._matcher = compiled.deep_copy()
        self._vocabulary = vocabulary
        self._ends = sorted(ends)
        self._followed_count = 0

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> NDArray[np.bool_]:
        """Masks [queries, vocabulary] of the query after `output` and of those behind drafts: up to
        the first draft that is forbidden or ends the text. No query behind the last mask counts."""
        self._follow(output)
        masks = [self._mask()]
        if self._matcher.is_error():
            self.failure = self.failure or self._matcher.get_error()[:MESSAGE_CHARS_MAX].strip()
            masks[0][:] = False
        if not masks[0].any():
            masks[0][self._ends] = True
        assert masks[0].any(), "a grammar allows the end where it allows nothing else"
        return np.stack(masks if self.failure else masks + self._along(output, drafts))

    def _along(self, output: Sequence[int], drafts: Sequence[int]) -> list[NDArray[np.bool_]]:
        """A limit that breaks here may lie behind a draft that is rejected. So the matcher starts
        over and forgets the break; if the draft is accepted, the next step meets the limit again.
        """
        masks: list[NDArray[np.bool_]] = []
        for draft in drafts:
            if draft in self._ends or not self._matcher.try_consume_tokens([draft]):
                break
            masks.append(self._mask())
            if self._matcher.is_error() or not masks[-1].any():
                self._start_over(output)
                return masks[:-1]
        rolled_back = self._matcher.rollback(len(masks))
        assert rolled_back, "a matcher goes back over the drafts it has accepted"
        assert len(masks) <= len(drafts), f"{len(masks)} masks for {len(drafts)} drafts"
        return masks

    def _start_over(self, output: Sequence[int]) -> None:
        self._matcher = self._compiled.deep_copy()
        self._followed_count = 0
        self._follow(output)

    def _follow(self, output: Sequence[int]) -> None:
        assert len(output) >= self._followed_count, "an output never shrinks"
        fresh = list(output[self._followed_count :])
        if fresh and not self.failure:
            consumed = self._matcher.try_consume_tokens(fresh)
            assert consumed == len(fresh) or self._matcher.is_error(), (
                f"token {fresh[consumed]} was made, and the grammar forbids it"
            )
        self._followed_count = len(output)

    def _mask(self) -> NDArray[np.bool_]:
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(packed, count=self._vocabulary, bitorder="little")
        return bits.view(np.bool_)


class _Vocabulary:
    """A tokenizer in the shape that the library asks for."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self.eos_token_id = end
        self.bos_token_id = None
        self.tokens = [tokenizer.bytes_of(token) for token in range(len(tokenizer))]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _source(library: Any, grammar: Grammar) -> str:
    """A schema whose x-guidance says what it wants of white space gets that."""
    match grammar.kind:
        case "json_schema" | "json_object":
            text = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
            defaults = {} if '"x-guidance"' in text else {"whitespace_pattern": WHITESPACE}
            return str(library.grammar_from_json_schema(text, defaults=defaults))
        case "regex":
            return str(library.grammar_from_regex(grammar.text))
        case "lark":
            return str(library.grammar_from_lark(grammar.text))


def _on_deep_stack(work: Callable[[], Any]) -> Any:
    """The compiler recurses from rule to rule, and a chain of some thousand rules overruns an
    ordinary stack, which ends the process. This one is deeper than the longest text needs; only
    what is used of it takes memory."""
    with ThreadPoolExecutor(1) as threads:
        before = threading.stack_size(STACK_BYTES)
        try:
            future = threads.submit(work)
        finally:
            threading.stack_size(before)
        return future.result()


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise Unavailable(
            "grammars need the package llguidance: pip install 'ess[serve]'"
        ) from None
