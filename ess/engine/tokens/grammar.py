"""Output that follows a grammar: which tokens may come next, whatever is drafted. Needs no torch.

A matcher stands behind the request's output. For a step it also walks along the drafts, one mask
per query, and back again: a draft that the grammar forbids is simply never drawn, so it is rejected
as any wrong draft is, and the queries behind it do not count. The end ids of the model are allowed
where the text is complete, and nothing else is once it can only end.

Users of a server send grammars, so their size and the work they may cause are limited: each has a
process of its own (`grammar_child`) that compiles it and makes its masks, and is ended when it
takes too much time or memory. So no grammar is ever compiled here, or twice. A grammar that breaks
a limit while it runs allows only the end, and `failure` says why. What was refused is remembered.
White space between the parts of JSON is bounded: without that, models are known to write it until
their last token.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import signal
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from ess.engine.tokens import grammar_child
from ess.engine.tokens.sandbox import Link, Sandbox
from ess.errors import BadInput, EssError, Unavailable, not_installed
from ess.units import div_ceil

if TYPE_CHECKING:
    from ess.models.text.tokenizer import Tokenizer

Kind = Literal["json_schema", "json_object", "regex", "lark"]
GRAMMAR_BYTES_MAX: Final = 64 << 10
ROOMS_MAX: Final = 32
COMPILING_MAX: Final = 2
COMPILING_S: Final = 120.0
"""No request is held up meanwhile. Far more than the processor time that ends a compiler: a busy
machine may give it a fiftieth of a core."""
RENEWAL_S: Final = 20.0
"""All other requests wait meanwhile: it happens within a step."""
REFUSED_MAX: Final = 256
LOST_MAX: Final = 1
WAIT_S: Final = 0.25
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{0,32}"


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
            raise BadInput(f"a grammar of {size:,} bytes; at most {GRAMMAR_BYTES_MAX:,} are read")
        if not self.text and self.kind != "json_object":
            raise BadInput(f"a grammar of kind {self.kind} without a text")


class Follows(Protocol):
    """What restricts the tokens of a request; `failure` says why it cannot any more."""

    @property
    def failure(self) -> str: ...

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> NDArray[np.bool_]: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Room:
    """A grammar's own process."""

    grammar: Grammar
    link: Link
    process: int
    deadline_s: float
    is_compiled: bool = False
    matcher_count: int = 0

    def masks(
        self, number: int, fresh: Sequence[int], drafts: Sequence[int]
    ) -> tuple[str, NDArray[np.uint8]]:
        """OSError if the process is lost."""
        asked = {"verb": "masks", "number": number, "fresh": list(fresh), "drafts": list(drafts)}
        answer, raw = self.link.ask(asked)
        packed = np.frombuffer(raw, np.uint8).reshape(answer["count"], -1)
        return answer["failure"], packed

    def leave(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self.link.send({"verb": "close", "number": number})

    @property
    def is_lost(self) -> bool:
        """Whether its process has ended. Once it has compiled, it says nothing of its own."""
        try:
            return self.is_compiled and self.link.poll() is not None
        except OSError:
            return True


class Grammars:
    """Has grammars compiled for one vocabulary, two at a time, and keeps the processes of those
    that were used last. Nothing here waits for a grammar, except `wait`."""

    def __init__(self, tokenizer: Tokenizer, *, vocabulary: int, ends: frozenset[int]) -> None:
        if not ends:
            raise BadInput("grammars need a model with an end id")
        if importlib.util.find_spec("llguidance") is None:
            raise not_installed("grammars need llguidance, which", extra="serve")
        self.vocabulary = vocabulary
        self.ends = sorted(ends)
        self._sandbox = Sandbox(partial(described, tokenizer, vocabulary, self.ends))
        self._wanted: OrderedDict[Grammar, int] = OrderedDict()
        self._rooms: OrderedDict[Grammar, Room] = OrderedDict()
        self._refused: OrderedDict[Grammar, str] = OrderedDict()
        self._lost: dict[Grammar, int] = {}
        self._renew_by_s = math.inf
        self._numbers = itertools.count()
        self.close = weakref.finalize(self, _close, self._sandbox, self._rooms)

    def want(self, grammar: Grammar) -> None:
        """Another request wants it and calls `matcher` until it gets a matcher, or `leave`."""
        self._wanted[grammar] = self._wanted.get(grammar, 0) + 1

    def leave(self, grammar: Grammar) -> None:
        """A grammar that no request wants any more is not compiled to its end."""
        self._wanted[grammar] -= 1
        if self._wanted[grammar]:
            return
        del self._wanted[grammar]
        self._lost.pop(grammar, None)
        room = self._rooms.get(grammar)
        if room is not None and not room.is_compiled:
            self._end(room)

    def matcher(self, grammar: Grammar) -> Matcher | None:
        """A fresh matcher at the start of its text, None as long as the grammar is compiled,
        BadInput if it cannot be, Unavailable if our own processes fail."""
        room = self._settled(grammar)
        return None if room is None else Matcher(self, room)

    def wait(self) -> None:
        """Until something may have changed."""
        rooms = [room.link.socket for room in self._rooms.values() if not room.is_compiled]
        self._sandbox.wait(rooms, WAIT_S)

    def number(self) -> int:
        return next(self._numbers)

    def renewed(self, room: Room) -> Room:
        """Waits for another room for a grammar whose process was lost. Raises what `matcher`
        raises, and Unavailable where there is no room in time. The grammar's present room may be
        another already, which another request has waited for, and may be lost too."""
        known = self._rooms.get(room.grammar)
        if known is room or (known is not None and known.is_lost):
            self._blame(known, f"takes more than {grammar_child.STEP_CPU_S:g} s for one token")
        self.want(room.grammar)
        self._wanted.move_to_end(room.grammar, last=False)
        until_s = self._renewal_end_s()
        while (fresh := self._settled(room.grammar)) is None:
            if time.monotonic() > until_s:
                self.leave(room.grammar)
                raise Unavailable(
                    "the process that follows the grammar was lost, "
                    f"and had no successor within {RENEWAL_S:g} s"
                )
            self.wait()
        self._renew_by_s = math.inf
        return fresh

    def _renewal_end_s(self) -> float:
        """`RENEWAL_S` after a loss. Losses that follow have the same end, so that all other
        requests wait no longer for many lost processes than for one; after a process that has
        compiled, and `COMPILING_S` behind that end, a loss has an end of its own."""
        now_s = time.monotonic()
        if now_s > self._renew_by_s + COMPILING_S:
            self._renew_by_s = math.inf
        self._renew_by_s = min(self._renew_by_s, now_s + RENEWAL_S)
        return self._renew_by_s

    def check(self) -> None:
        assert len(self._rooms) <= ROOMS_MAX, f"{len(self._rooms)} grammars have a process"
        assert len(self._refused) <= REFUSED_MAX, f"{len(self._refused)} refusals are kept"
        for grammar, room in self._rooms.items():
            assert room.grammar == grammar, "a room is listed under another grammar"
            assert room.matcher_count >= 0, f"{room.matcher_count} matchers follow a grammar"
            assert grammar not in self._refused, "a refused grammar has a process"

    def _settled(self, grammar: Grammar) -> Room | None:
        try:
            self._advance()
            if grammar in self._refused:
                self._refused.move_to_end(grammar)
                raise BadInput(f"grammar ({grammar.kind}): {self._refused[grammar]}")
            if self._lost.get(grammar, 0) > LOST_MAX:
                raise Unavailable("the process that compiles grammars was lost twice; try again")
        except EssError:
            self.leave(grammar)
            raise
        room = self._rooms.get(grammar)
        if room is None or not room.is_compiled:
            return None
        self.leave(grammar)
        self._rooms.move_to_end(grammar)
        return room

    def _advance(self) -> None:
        """Takes the results of compiling processes, and starts more of them."""
        for room in [room for room in self._rooms.values() if not room.is_compiled]:
            self._hear(room)
        for grammar in list(self._wanted):
            if grammar in self._rooms or grammar in self._refused:
                continue
            if self._lost.get(grammar, 0) <= LOST_MAX and not self._begin(grammar):
                return

    def _begin(self, grammar: Grammar) -> bool:
        """Has the grammar compiled; False where no grammar can be begun now."""
        compiling = sum(not room.is_compiled for room in self._rooms.values())
        if compiling >= COMPILING_MAX or not self._has_room():
            return False
        try:
            spare = self._sandbox.spare()
        except OSError:
            self._lost[grammar] = self._lost.get(grammar, 0) + 1
            return False
        if spare is None:
            return False
        room = Room(grammar, *spare, time.monotonic() + COMPILING_S)
        self._rooms[grammar] = room
        try:
            room.link.send({"verb": "compile", "grammar": _asked(grammar)})
        except OSError:
            self._blame(room, "")
        return True

    def _has_room(self) -> bool:
        """Whether a further grammar may have a process. Where all rooms are taken, the room that no
        request needs and that was unused for longest is ended for it."""
        if len(self._rooms) < ROOMS_MAX:
            return True
        for grammar, room in self._rooms.items():
            if room.is_compiled and not room.matcher_count and grammar not in self._wanted:
                self._end(room)
                return True
        return False

    def _hear(self, room: Room) -> None:
        try:
            answer = room.link.poll()
            if answer is None and time.monotonic() > room.deadline_s:
                raise TimeoutError(f"not compiled within {COMPILING_S} s")
        except OSError:
            self._blame(room, f"takes more than {grammar_child.COMPILE_CPU_S:g} s to compile")
            return
        if answer is not None and answer[0]["error"]:
            self._end(room)
            self._refuse(room.grammar, answer[0]["error"])
        elif answer is not None:
            room.is_compiled = True
            self._renew_by_s = math.inf

    def _blame(self, room: Room, too_slow: str) -> None:
        """The room's process is lost, by the grammar's fault or by a cause outside. A grammar that
        took too much processor time is refused with the sentence `too_slow`."""
        match self._end(room):
            case signal.SIGPROF:
                self._refuse(room.grammar, too_slow)
            case signal.SIGABRT | signal.SIGSEGV | signal.SIGBUS:
                most = grammar_child.MEMORY_BYTES_MAX >> 20
                self._refuse(room.grammar, f"needs more than {most} MiB")
            case _:
                self._lost[room.grammar] = self._lost.get(room.grammar, 0) + 1

    def _refuse(self, grammar: Grammar, sentence: str) -> None:
        self._refused[grammar] = sentence
        if len(self._refused) > REFUSED_MAX:
            self._refused.popitem(last=False)

    def _end(self, room: Room) -> int:
        del self._rooms[room.grammar]
        room.link.close()
        return self._sandbox.end(room.process)


class Matcher:
    """Follows one request. `failure` is set when the grammar could not be followed any further."""

    def __init__(self, grammars: Grammars, room: Room) -> None:
        self.failure = ""
        self._grammars = grammars
        self._number = grammars.number()
        self._followed_count = 0
        self._room: Room | None = None
        self._enter(room)

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> NDArray[np.bool_]:
        """Masks [queries, vocabulary] of the query after `output` and of those behind drafts: up to
        the first draft that is forbidden or ends the text. No query behind the last mask counts."""
        assert len(output) >= self._followed_count, "an output never shrinks"
        masks = np.zeros((1, self._grammars.vocabulary), np.bool_)
        if not self.failure:
            masks = self._asked(output, drafts)
        if not masks[0].any():
            masks[0, self._grammars.ends] = True
        assert masks[0].any(), "a grammar allows the end where it allows nothing else"
        assert len(masks) <= 1 + len(drafts), f"{len(masks)} masks for {len(drafts)} drafts"
        return masks

    def close(self) -> None:
        """The request has ended. A second call does nothing."""
        room, self._room = self._room, None
        if room is not None:
            room.matcher_count -= 1
            room.leave(self._number)

    def _enter(self, room: Room) -> None:
        self._room = room
        room.matcher_count += 1

    def _asked(self, output: Sequence[int], drafts: Sequence[int]) -> NDArray[np.bool_]:
        """Asks the grammar's process; where that was lost by a cause outside, its successor, once,
        which then follows the whole output."""
        assert self._room is not None, "a matcher is asked before it is closed"
        try:
            self.failure, packed = self._room.masks(
                self._number, output[self._followed_count :], drafts
            )
        except OSError:
            self.failure, packed = self._asked_again(self._room, output, drafts)
        self._followed_count = len(output)
        vocabulary = self._grammars.vocabulary
        bits = np.unpackbits(packed, axis=1, count=vocabulary, bitorder="little")
        return bits.view(np.bool_)

    def _asked_again(
        self, lost: Room, output: Sequence[int], drafts: Sequence[int]
    ) -> tuple[str, NDArray[np.uint8]]:
        try:
            lost.matcher_count -= 1
            self._room = None
            room = self._grammars.renewed(lost)
            self._enter(room)
            return room.masks(self._number, output, drafts)
        except EssError as error:
            failure = str(error)
        except OSError:
            failure = "the process that follows the grammar was lost twice"
        return failure, np.zeros((1, div_ceil(self._grammars.vocabulary, 8)), np.uint8)


def _asked(grammar: Grammar) -> dict[str, str]:
    """The message to the process that compiles the grammar."""
    text = '{"type": "object"}' if grammar.kind == "json_object" else grammar.text
    whitespace = "" if _chooses_whitespace(text) else WHITESPACE
    return {"kind": grammar.kind, "text": text, "whitespace": whitespace}


def _chooses_whitespace(text: str) -> bool:
    """Whether a schema forbids white space, or gives a pattern of its own; else ours bounds it."""
    if '"x-guidance"' not in text:
        return False
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return False
    given = schema.get("x-guidance") if isinstance(schema, dict) else None
    if not isinstance(given, dict):
        return False
    return "whitespace_pattern" in given or given.get("whitespace_flexible") is False


def described(tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]) -> bytes:
    """The description of the vocabulary that the processes need."""
    described = {
        "tokenizer": tokenizer.to_json(),
        "tokens": [tokenizer.bytes_of(token).hex() for token in range(len(tokenizer))],
        "special": sorted(tokenizer.special_ids),
        "count": max(vocabulary, len(tokenizer)),
        "ends": list(ends),
    }
    return json.dumps(described).encode()


def _close(sandbox: Sandbox, rooms: OrderedDict[Grammar, Room]) -> None:
    for room in rooms.values():
        room.link.close()
    rooms.clear()
    sandbox.close()
