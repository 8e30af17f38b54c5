"""Compiles and follows grammars that clients send. Run by path; imports nothing of ESS.

A grammar of a hundred bytes may take years to compile or to follow, and the library's own limits do
not count all of that work. So every grammar has a process of its own, forked from this one, which
has read the vocabulary: memory is shared until it is written. The system limits its memory, and
counts its processor time: a signal ends it in the middle of its work. Time that a busy machine
spends elsewhere does not count.

The processes end with this one, and this one ends when its parent closes the channel or ends.

    to the first process:  {"verb": "fork"} with a socket, {"verb": "end", "process"}
    to a grammar's:        {"verb": "compile", "grammar"} once, then, by numbers of requests,
                           {"verb": "masks", "number", "fresh", "drafts"} and {"verb": "close", ...}
    from either:           {..., "raw"}, then as many bytes: the masks

A message is 8 bytes of length, then JSON. A forked process first says {"process"}, its number; all
but "fork" and "close" are answered.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
from typing import Any

MEMORY_BYTES_MAX = 128 << 20
STEP_BYTES_MAX = 64 << 20
STACK_BYTES = 256 << 20
COMPILE_CPU_S = 2.0
STEP_CPU_S = 0.5
LEXER_STATES_MAX = 50_000
MESSAGE_CHARS_MAX = 2000
ENDS_WITH_PARENT = 1
VERBOSE = "<non-verbose/>"
DEAD_END = "no token may come next, so no text can be completed"


class Channel:
    def __init__(self, made: socket.socket) -> None:
        self.socket = made

    def receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        """The next message and the files that came with it; None when the other side has closed."""
        prefix, files, _, _ = socket.recv_fds(self.socket, 8, 1)
        prefix += self._read(8 - len(prefix)) if prefix else b""
        if len(prefix) < 8:
            return None, []
        raw = self._read(int.from_bytes(prefix, "little"))
        return json.loads(raw), list(files)

    def _read(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            piece = self.socket.recv(count - len(received))
            if not piece:
                return b""
            received += piece
        return bytes(received)

    def send(self, answer: dict[str, Any], raw: bytes = b"") -> None:
        head = json.dumps({**answer, "raw": len(raw)}).encode()
        self.socket.sendall(len(head).to_bytes(8, "little") + head + raw)


class Follower:
    """Follows one request's output, and walks ahead along its drafts and back."""

    def __init__(self, compiled: Any, ends: list[int]) -> None:
        self.failure = ""
        self._compiled = compiled
        self._matcher = compiled.deep_copy()
        self._ends = frozenset(ends)
        self._output: list[int] = []

    def masks(self, fresh: list[int], drafts: list[int]) -> list[bytes]:
        """Masks for the query behind the output and for those behind drafts, up to the first draft
        that is forbidden or ends the text. A mask without a token means that only the end is
        left."""
        self._follow(fresh)
        masks = [self._matcher.compute_bitmask()]
        if self._matcher.is_error():
            self.failure = self.failure or _failure_of(self._matcher)
            return [bytes(len(masks[0]))]
        return masks + self._along(drafts)

    def _along(self, drafts: list[int]) -> list[bytes]:
        """A limit that breaks here may lie behind a draft that is rejected. So the matcher starts
        over and forgets the break; if the draft is accepted, the next step meets the limit again.
        """
        masks: list[bytes] = []
        for draft in drafts:
            if draft in self._ends or not self._matcher.try_consume_tokens([draft]):
                break
            masks.append(self._matcher.compute_bitmask())
            if self._matcher.is_error() or _is_empty(masks[-1]):
                self._start_over()
                return masks[:-1]
        rolled_back = self._matcher.rollback(len(masks))
        assert rolled_back, "a matcher goes back over the drafts it has accepted"
        return masks

    def _start_over(self) -> None:
        output, self._output = self._output, []
        self._matcher = self._compiled.deep_copy()
        self._follow(output)

    def _follow(self, fresh: list[int]) -> None:
        if fresh and not self.failure:
            consumed = self._matcher.try_consume_tokens(fresh)
            assert consumed == len(fresh) or self._matcher.is_error(), (
                f"token {fresh[consumed]} was made, and the grammar forbids it"
            )
        self._output += fresh


def _failure_of(matcher: Any) -> str:
    """Why a matcher has stopped; nothing if it has not. The library has a word for a text that
    nothing can follow, and marks what it would say at length."""
    message = matcher.get_error().replace(VERBOSE, "")[:MESSAGE_CHARS_MAX].strip()
    return DEAD_END if message == "NoExtensionBias" else message


def _is_empty(mask: bytes) -> bool:
    return mask.count(0) == len(mask)


class Room:
    """The process of one grammar."""

    def __init__(self, tokenizer: Any, ends: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._compiled: Any = None
        self._followers: dict[int, Follower] = {}

    def serve(self, channel: Channel) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        _limit_memory(STACK_BYTES + MEMORY_BYTES_MAX)
        channel.send({"process": os.getpid()})
        while (asked := channel.receive()[0]) is not None:
            if asked["verb"] == "close":
                self._followers.pop(asked["number"], None)
                continue
            with _processor_time(COMPILE_CPU_S if asked["verb"] == "compile" else STEP_CPU_S):
                answer, masks = self._answer(asked)
            channel.send(answer, b"".join(masks))

    def _answer(self, asked: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        if asked["verb"] == "compile":
            return {"error": _on_deep_stack(lambda: self._compile(**asked["grammar"]))}, []
        number = asked["number"]
        if number not in self._followers:
            _limit_memory(STEP_BYTES_MAX)
            self._followers[number] = Follower(self._compiled, self._ends)
        follower = self._followers[number]
        masks = follower.masks(asked["fresh"], asked["drafts"])
        return {"failure": follower.failure, "count": len(masks)}, masks

    def _compile(self, kind: str, text: str, whitespace: str) -> str:
        """Why it is refused, or nothing. The first mask is computed too: much is done only then."""
        try:
            self._compiled = matcher(self._tokenizer, kind, text, whitespace)
            failure = self._compiled.get_error()
            if not failure:
                first = self._compiled.deep_copy()
                first.compute_bitmask()
                failure = _failure_of(first)
        except MemoryError:
            failure = f"needs more than {MEMORY_BYTES_MAX >> 20} MiB"
        except BaseException as error:  # the library panics on some texts: that is no Exception
            failure = str(error) or type(error).__name__
        return str(failure[:MESSAGE_CHARS_MAX]).strip()


def matcher(tokenizer: Any, kind: str, text: str, whitespace: str) -> Any:
    import llguidance

    make: Any = llguidance.LLMatcher
    if kind == "regex":
        source = make.grammar_from_regex(text)
    elif kind == "lark":
        source = make.grammar_from_lark(text)
    else:
        defaults = {"whitespace_pattern": whitespace} if whitespace else {}
        source = make.grammar_from_json_schema(text, defaults=defaults)
    limits = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=LEXER_STATES_MAX)
    return make(tokenizer, source, log_level=0, limits=limits)


@contextlib.contextmanager
def _processor_time(seconds: float) -> Any:
    """SIGPROF ends a process that takes more."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0.0)


def _limit_memory(more_bytes: int) -> None:
    """Limits memory to what is in use now and `more_bytes`."""
    with open("/proc/self/statm") as pages:
        used = int(pages.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, resource.RLIM_INFINITY))


def _on_deep_stack(work: Any) -> Any:
    """The compiler recurses from rule to rule, and a chain of some thousand rules overruns an
    ordinary stack, which ends the process. This one is deeper than the longest text needs; only
    what is used of it takes memory."""
    results: list[Any] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


class Vocabulary:
    """A tokenizer with the interface that the library expects. Text that a grammar forces is
    encoded as the model has learned it."""

    def __init__(self, described: dict[str, Any]) -> None:
        self.eos_token_id = min(described["ends"])
        self.bos_token_id = None
        self.tokens = [bytes.fromhex(token) for token in described["tokens"]]
        self.special_token_ids = described["special"]
        import tokenizers

        self._library = tokenizers.Tokenizer.from_str(described["tokenizer"])

    def __call__(self, text: str) -> list[int]:
        return list(self._library.encode(text, add_special_tokens=False).ids)


def tokenizer_of(described: dict[str, Any]) -> tuple[Any, list[int]]:
    """The library's own, and the ids that end a text."""
    import llguidance

    tokenizer = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(Vocabulary(described)),
        n_vocab=described["count"],
        eos_token=described["ends"],
    )
    return tokenizer, described["ends"]


def fork(channel: Channel, file: int, tokenizer: Any, ends: list[int]) -> None:
    if os.fork():
        os.close(file)
        return
    try:
        end_with_parent()
        channel.socket.close()
        Room(tokenizer, ends).serve(Channel(socket.socket(fileno=file)))
    finally:
        os._exit(0)


def end_with_parent() -> None:
    """Linux only; elsewhere the closed channel ends the process once it is idle."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(ENDS_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(0)


def end(process: int) -> dict[str, Any]:
    """Ends the process and says by which signal it has ended. A process that was ending already
    keeps its own signal: its channel closes a moment before it can be reaped. Only we reap our
    children, so the number cannot belong to another process; a child of the process that was here
    before us has ended with that."""
    try:
        ended, status = os.waitpid(process, os.WNOHANG)
    except ChildProcessError:
        return {"signal": 0}
    if not ended:
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
    return {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=sys.stdin.fileno()))
    with os.fdopen(int(sys.argv[1]), "rb") as stream:
        tokenizer, ends = tokenizer_of(json.load(stream))
    gc.collect()
    gc.freeze()
    channel.send({})
    while True:
        asked, files = channel.receive()
        if asked is None:
            return
        if asked["verb"] == "fork":
            fork(channel, files[0], tokenizer, ends)
        else:
            channel.send(end(asked["process"]))


if __name__ == "__main__":
    main()
