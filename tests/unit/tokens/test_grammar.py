"""Matchers over the embedded vocabulary; what a model does under one is in tests/model."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ess.models
from ess.engine.tokens import grammar as grammar_module
from ess.engine.tokens import grammar_child, sandbox
from ess.engine.tokens.grammar import Grammar, Grammars, Matcher, described
from ess.engine.tokens.grammar_child import Follower
from ess.errors import BadInput, Unavailable
from ess.models.text.tokenizer import Tokenizer
from tests.support.kin import is_running, wait_for_end

pytest.importorskip("llguidance")
ROOT = Path(__file__).resolve().parents[3]
CHECKPOINT = Path(ess.models.__file__).parent / "tiny" / "checkpoint"
END = 1
EXPLOSIVE = "start: r0\n" + "".join(f'r{i}: r{i + 1} r{i + 1} | "x"\n' for i in range(1000))
EXPLOSIVE += 'r1000: "y"\n'
VOCABULARY = 4100


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(CHECKPOINT)


@functools.cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), vocabulary=VOCABULARY, ends=frozenset({END}))


def matcher(kind: str, text: str = "", *, by: Grammars | None = None) -> Matcher:
    by, grammar = by or grammars(), Grammar(kind, text)  # type: ignore[arg-type]
    by.want(grammar)
    while (made := by.matcher(grammar)) is None:
        by.wait()
    return made


def ids(text: str) -> list[int]:
    return tokenizer().encode(text)


def texts(mask: np.ndarray) -> set[str]:
    return {tokenizer().decode([token], keep_special=True) for token in np.flatnonzero(mask)}


def test_masks_say_what_may_follow_and_where_the_text_may_end():
    follower = matcher("regex", "ab?")
    [mask] = follower.allowed([], [])
    assert mask.shape == (VOCABULARY,)
    assert texts(mask) == {"a", "ab"}
    assert texts(follower.allowed(ids("a"), [])[0]) == {"b", "<|end|>"}
    assert texts(follower.allowed([*ids("a"), *ids("b")], [])[0]) == {"<|end|>"}
    assert follower.failure == ""


@pytest.mark.parametrize(
    "drafts", [[], ["a"], ["a", "b"], ["a", "x"], ["x"], ["a", "b", None, "a"]]
)
def test_walking_along_drafts_changes_nothing(drafts):
    """None means the end. Masks go up to the first draft that is forbidden or the end."""
    follower = matcher("regex", "(ab|ac)*")
    tokens = [END if text is None else ids(text)[0] for text in drafts]
    masks = follower.allowed([], tokens)
    valid = {(): 1, ("a",): 2, ("a", "b"): 3, ("a", "x"): 2, ("x",): 1, ("a", "b", None, "a"): 3}
    assert len(masks) == valid[tuple(drafts)]
    for count, mask in enumerate(masks):
        fresh = matcher("regex", "(ab|ac)*")
        assert np.array_equal(mask, fresh.allowed(tokens[:count], [])[0])
    again = follower.allowed(ids("a"), [])
    assert np.array_equal(again, matcher("regex", "(ab|ac)*").allowed(ids("a"), []))


@pytest.mark.parametrize(
    ("kind", "text", "space_count"),
    [
        ("json_object", "", 32),
        ("json_schema", '{"type": "array"}', 32),
        ("json_schema", '{"type": "array", "x-guidance": {"whitespace_flexible": false}}', 0),
        ("json_schema", '{"type": "array", "x-guidance": {"whitespace_pattern": "[ ]{0,5}"}}', 5),
        ("json_schema", '{"type": "array", "x-guidance": {"whitespace_pattern": "[ ]*"}}', 99),
        ("json_schema", '{"type": "array", "x-guidance": {"whitespace_flexible": true}}', 32),
        ("json_schema", '{"type": "array", "x-guidance": {"item_separator": ","}}', 32),
        ("json_schema", '{"type": "array", "title": "x-guidance"}', 32),
    ],
)
def test_white_space_is_bounded_unless_the_schema_has_a_pattern_of_its_own(kind, text, space_count):
    opening = ids("{" if kind == "json_object" else "[")
    space = ids(" ")[0]
    drafts = [*opening, *[space] * 99]
    assert len(matcher(kind, text).allowed([], drafts)) - 2 == space_count


def test_two_requests_with_one_grammar_do_not_meet():
    one, two = matcher("lark", 'start: "yes" | "no"'), matcher("lark", 'start: "yes" | "no"')
    one.allowed(ids("no"), [])
    assert texts(two.allowed([], [])[0]) >= {"y", "n"}


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        ("regex", "[a-z", "unclosed character class"),
        ("lark", "start: foo", "unknown name"),
        ("json_schema", "{nope", "json_schema"),
        ("json_schema", '{"type": "nonsense"}', "Invalid type: nonsense"),
        ("json_schema", '{"type": "object", "dependentSchemas": {}}', "dependentSchemas"),
        ("json_schema", '{"$ref": "file:///etc/hostname"}', "does not fetch"),
        ("regex", "(" * 30_000 + "a" + ")" * 30_000, "grammar"),
        ("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000, "nested"),
        ("regex", "\ud800", "surrogates"),
        ("regex", r"[^\s\S]", "no text can be completed$"),
        ("json_schema", '{"$ref": "#"}', "no text can be completed$"),
    ],
)
def test_what_is_no_grammar_is_refused_in_its_own_words(kind, text, sentence):
    with pytest.raises(BadInput, match=sentence):
        matcher(kind, text)


def test_a_long_chain_of_rules_does_not_end_the_process():
    """In a process of its own: if it does, it takes the tests along."""
    rules = "".join(f"a{i:x}: a{i + 1:x}\n" for i in range(4500))
    text = f'start: a0\n{rules}a{4500:x}: "x"'
    code = (
        "from tests.unit.tokens.test_grammar import matcher, ids\n"
        f"chained = matcher('lark', {text!r})\n"
        "assert chained.allowed([], [])[0][ids('x')].all(), chained.failure\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_grammar_that_is_too_much_work_ends_the_text():
    follower, output = matcher("lark", EXPLOSIVE), []
    while not follower.failure:
        assert len(output) < 4, "the limits are not at work"
        [mask] = follower.allowed(output, [])
        output.append(int(np.flatnonzero(mask)[-1]))
    assert texts(mask) == texts(follower.allowed(output, [])[0]) == {"<|end|>"}
    assert "max is 2000" in follower.failure


def follower_of(kind: str, text: str) -> Follower:
    """What the grammar's process has, in ours."""
    vocabulary, ends = grammar_child.tokenizer_of(json.loads(described(tokenizer(), 4100, [END])))
    return Follower(grammar_child.matcher(vocabulary, kind, text, ""), ends)


def test_a_limit_met_on_the_way_allows_only_the_end():
    follower = follower_of("regex", "(a|b)*c")
    follower._matcher = Broken(follower._matcher)
    [mask] = follower.masks([], ids("a"))
    assert not any(mask)
    assert follower.failure == "too much work"


def test_a_limit_met_along_the_drafts_is_no_failure_yet():
    follower = follower_of("regex", "(a|b)*c")
    expected = follower.masks([], [])
    follower._matcher = Broken(follower._matcher, after=1)
    masks = follower.masks([], [*ids("a"), *ids("b")])
    assert masks == expected, "the query behind it does not count"
    assert follower.failure == ""
    assert len(follower.masks(ids("a"), ids("b"))) == 2


class Broken:
    """Meets a limit once it has consumed so many tokens."""

    def __init__(self, matcher, after: int = 0) -> None:
        self._matcher, self._after, self._consumed_count = matcher, after, 0

    def try_consume_tokens(self, tokens):
        self._consumed_count += len(tokens)
        return self._matcher.try_consume_tokens(tokens)

    def compute_bitmask(self):
        return self._matcher.compute_bitmask()

    def is_error(self):
        return self._consumed_count >= self._after

    def get_error(self):
        return "too much work"


def processes(made: Grammars) -> list[int]:
    """Of grammars, the least recently used first."""
    return [room.process for room in made._rooms.values()]


def test_the_oldest_grammar_gives_way_unless_it_is_followed(fresh, monkeypatch):
    monkeypatch.setattr(grammar_module, "ROOMS_MAX", 2)
    followed = matcher("regex", "a", by=fresh)
    for text in ("b", "c"):
        matcher("regex", text, by=fresh).close()
    assert [grammar.text for grammar in fresh._rooms] == ["a", "c"]
    assert texts(followed.allowed([], [])[0]) == {"a"}
    kept = matcher("regex", "c", by=fresh)
    fresh.want(Grammar("regex", "d"))
    for _ in range(3):
        assert fresh.matcher(Grammar("regex", "d")) is None, "both are followed"
    kept.close()
    while (made := fresh.matcher(Grammar("regex", "d"))) is None:
        fresh.wait()
    assert [grammar.text for grammar in fresh._rooms] == ["a", "d"]
    made.close()
    followed.close()


ENDLESS = '{"type": "integer", "multipleOf": 99999989}'
TOO_MUCH = "takes more than 2 s to compile|needs more than 128 MiB"


def test_a_schema_that_never_compiles_is_refused_and_remembered(fresh):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadInput, match=TOO_MUCH):
        matcher("json_schema", ENDLESS, by=fresh)
    assert processes(fresh) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    fresh.want(Grammar("json_schema", ENDLESS))
    with pytest.raises(BadInput, match=TOO_MUCH):
        fresh.matcher(Grammar("json_schema", ENDLESS))


def test_a_few_refusals_are_remembered(fresh, monkeypatch):
    monkeypatch.setattr(grammar_module, "REFUSED_MAX", 2)
    for text in ("[a", "[b", "[c"):
        with pytest.raises(BadInput):
            matcher("regex", text, by=fresh)
    assert [grammar.text for grammar in fresh._refused] == ["[b", "[c"]


def test_compiling_stops_when_its_processor_time_is_over(fresh, patched):
    """Memory would end it first; here it has enough."""
    patched(MEMORY_BYTES_MAX=8 << 30, COMPILE_CPU_S=0.3)
    with pytest.raises(BadInput, match="takes more than 2 s to compile"):
        matcher("json_schema", ENDLESS, by=fresh)


ENDLESS_STEP = f"""
masks = child.Follower.masks
def endless(self, fresh, drafts):
    while {END} in drafts:
        pass
    return masks(self, fresh, drafts)
child.Follower.masks = endless
"""


def test_a_token_that_takes_too_long_fails_its_request_and_no_other(fresh, patched):
    """Some of the library's work is done only here. A draft of the end makes this step endless."""
    patched(ENDLESS_STEP)
    other = matcher("regex", "ab", by=fresh)
    slow = matcher("regex", "(ab)*", by=fresh)
    assert texts(slow.allowed([], [])[0]) == {"a", "ab", "<|end|>"}
    assert texts(slow.allowed([], [END])[0]) == {"<|end|>"}
    assert "takes more than 0.5 s for one token" in slow.failure
    assert texts(slow.allowed([END], [])[0]) == {"<|end|>"}
    assert texts(other.allowed([], [])[0]) == {"ab"}
    with pytest.raises(BadInput, match="for one token"):
        matcher("regex", "(ab)*", by=fresh)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Lets the processes run with other constants, or after more code."""

    def patch(code: str = "", **constants: float) -> None:
        lines = "".join(f"child.{name} = {value}\n" for name, value in constants.items())
        begin = f"import sys\nsys.path.append({str(ROOT)!r})\n"
        begin += "from ess.engine.tokens import grammar_child as child\n"
        (tmp_path / "child.py").write_text(f"{begin}{lines}{code}child.main()\n")
        monkeypatch.setattr(sandbox, "_CHILD", tmp_path / "child.py")

    return patch


@pytest.mark.parametrize("whom", ["first", "grammar"])
def test_a_killed_process_is_replaced_and_nobody_notices(fresh, whom):
    follower, expected = matcher("regex", "(ab|ac)*", by=fresh), matcher("regex", "(ab|ac)*")
    assert np.array_equal(follower.allowed(ids("a"), []), expected.allowed(ids("a"), []))
    first, [own] = fresh._sandbox._process.pid, processes(fresh)
    os.kill(first if whom == "first" else own, signal.SIGKILL)
    wait_for_end(own)
    for output in (ids("a"), [*ids("a"), *ids("b")], [*ids("a"), *ids("b"), *ids("a")]):
        drafts = ids("a")
        assert np.array_equal(follower.allowed(output, drafts), expected.allowed(output, drafts))
    assert follower.failure == ""
    assert len(processes(fresh)) == 1
    assert not is_running(own)


def test_a_process_is_replaced_whose_successor_was_killed_too(fresh):
    """The second follower asks for the first time when two were lost."""
    followers = [matcher("regex", "(ab)*c", by=fresh) for _ in range(2)]
    for follower in followers:
        [own] = processes(fresh)
        os.kill(own, signal.SIGKILL)
        wait_for_end(own)
        assert texts(follower.allowed([], [])[0]) >= {"a", "c"}
        assert follower.failure == ""


def test_a_process_killed_while_it_compiles_is_replaced_once(fresh):
    grammar = Grammar("json_schema", ENDLESS)
    fresh.want(grammar)
    for _ in range(2):
        while not processes(fresh):
            assert fresh.matcher(grammar) is None
            fresh.wait()
        os.kill(processes(fresh)[0], signal.SIGKILL)
        lost = processes(fresh)
        with contextlib.suppress(Unavailable):
            while processes(fresh) == lost:
                assert fresh.matcher(grammar) is None
    assert processes(fresh) == []
    assert grammar not in fresh._wanted
    assert texts(matcher("regex", "ab", by=fresh).allowed([], [])[0]) == {"ab"}


def test_a_compiler_that_gets_no_core_is_waited_for(fresh, monkeypatch):
    """Stopped, it is as on a machine whose cores others have for a minute."""
    matcher("regex", "a", by=fresh).close()
    while not fresh._sandbox._spares:
        fresh.wait()
    [(_, process), *_] = fresh._sandbox._spares
    os.kill(process, signal.SIGSTOP)
    fresh.want(grammar := Grammar("regex", "(ab)*c"))
    assert fresh.matcher(grammar) is None
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 60.0)
    monkeypatch.setattr(grammar_module, "time", later)
    assert fresh.matcher(grammar) is None
    os.kill(process, signal.SIGCONT)
    while (made := fresh.matcher(grammar)) is None:
        fresh.wait()
    assert processes(fresh)[-1] == process
    assert texts(made.allowed([], [])[0]) >= {"a", "c"}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says which processes are stopped")
def test_stopped_processes_are_replaced_soon(fresh, monkeypatch):
    """Not when an answer is overdue: all requests wait meanwhile."""
    monkeypatch.setattr(sandbox, "ANSWER_S", 600.0)
    monkeypatch.setattr(sandbox, "STOPPED_S", 0.05)
    follower = matcher("regex", "ab", by=fresh)
    for process in (*processes(fresh), fresh._sandbox._process.pid):
        os.kill(process, signal.SIGSTOP)
    assert texts(follower.allowed([], [])[0]) == {"ab"}
    assert follower.failure == ""


def test_a_first_process_that_is_stopped_is_lost(fresh, patched):
    """New grammars waited for its forks without end."""
    stops = "child.fork = lambda *_: child.os.kill(child.os.getpid(), child.signal.SIGSTOP)\n"
    patched(f"child.tokenizer_of = lambda _: (None, [])\n{stops}")
    with pytest.raises(Unavailable, match="lost twice"):
        matcher("regex", "ab", by=fresh)


def test_a_compiler_that_never_answers_is_lost(fresh, monkeypatch):
    monkeypatch.setattr(grammar_module, "COMPILING_S", 0.0)
    with pytest.raises(Unavailable, match="lost twice"):
        matcher("json_schema", ENDLESS, by=fresh)
    assert processes(fresh) == []


def test_lost_processes_without_successors_hold_up_a_step_once(fresh, monkeypatch):
    """Of two grammars, four requests; the processes that wait for a grammar do not answer. A loss
    of much later is waited for again."""
    followers = [matcher("regex", text, by=fresh) for text in ("ab", "ab", "(ab)*c", "ab")]
    while len(fresh._sandbox._spares) < sandbox.SPARE_COUNT:
        fresh.wait()
    for _, process in fresh._sandbox._spares:
        os.kill(process, signal.SIGSTOP)
    for process in processes(fresh):
        os.kill(process, signal.SIGKILL)
        wait_for_end(process)
    monkeypatch.setattr(grammar_module, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    monkeypatch.setattr(grammar_module, "WAIT_S", 0.0)
    for begin_s, lost in ((0, followers[:3]), (1000, followers[3:])):
        moments = itertools.count(begin_s)
        for follower in lost:
            assert texts(follower.allowed([], [])[0]) == {"<|end|>"}
            assert "had no successor within 20 s" in follower.failure
        assert 1 <= (next(moments) - begin_s) / grammar_module.RENEWAL_S < 2
    assert not fresh._wanted
    monkeypatch.undo()
    assert texts(matcher("regex", "ab", by=fresh).allowed([], [])[0]) == {"ab"}


def test_a_loss_is_waited_for_soon_after_others_were_replaced(fresh, monkeypatch):
    followers = [matcher("regex", text, by=fresh) for text in ("ab", "ab", "(ab)*c")]
    for begin_s, lost in ((0.0, followers[:2]), (60.0, followers[2:])):
        clock = SimpleNamespace(monotonic=lambda by=begin_s: time.monotonic() + by)
        monkeypatch.setattr(grammar_module, "time", clock)
        for process in processes(fresh):
            os.kill(process, signal.SIGKILL)
            wait_for_end(process)
        for follower in lost:
            follower.allowed([], [])
            assert follower.failure == ""
    assert fresh._renew_by_s == math.inf


def test_what_cannot_be_started_is_our_fault(fresh, monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "_CHILD", tmp_path / "nothing.py")
    with pytest.raises(Unavailable, match="does not start"):
        matcher("regex", "ab", by=fresh)


def test_no_process_outlives_its_parent():
    """Not even one in the middle of its work, and however the parent ends."""
    code = (
        "import sys\nfrom tests.unit.tokens.test_grammar import *\n"
        "made = grammars()\n"
        "made.want(Grammar('json_schema', ENDLESS))\n"
        "while not processes(made):\n"
        "    made.matcher(Grammar('json_schema', ENDLESS))\n"
        "print(made._sandbox._process.pid, *processes(made), flush=True)\n"
        "sys.stdin.read()\n"
    )
    for how in ("kill", "end"):
        parent = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        made = [int(word) for word in parent.stdout.readline().split()]
        assert len(made) == 2
        if how == "kill":
            parent.kill()
        parent.communicate(timeout=60)
        for process in made:
            wait_for_end(process)


def test_without_the_package_or_an_end_it_is_said(monkeypatch):
    with pytest.raises(BadInput, match="end id"):
        Grammars(tokenizer(), vocabulary=VOCABULARY, ends=frozenset())
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Unavailable, match="llguidance"):
        Grammars(tokenizer(), vocabulary=VOCABULARY, ends=frozenset({END}))


def test_a_vocabulary_that_cannot_be_described_is_said_and_nobody_waits(fresh, monkeypatch):
    def broken(token: int) -> bytes:
        raise KeyError(f"no bytes of {token}")

    monkeypatch.setattr(tokenizer(), "bytes_of", broken, raising=True)
    for _ in range(2):
        with pytest.raises(Unavailable, match="no grammars for this vocabulary: KeyError: 'no by"):
            matcher("regex", "a", by=fresh)
        fresh.check()


def test_an_answer_is_heard_on_a_file_of_any_number():
    """An engine with many peers has more than a thousand files open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= before[1] <= 1024:
        pytest.skip("no file may have such a number here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = sandbox.Link(socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 1024)))
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert link.poll() is None
        grammar_child.Channel(theirs).send({"process": 7}, b"raw")
        assert link.poll() == ({"process": 7, "raw": 3}, b"raw")
        link.close()


def test_a_long_answer_comes_in_pieces():
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as other, ours, theirs:
        other.submit(grammar_child.Channel(theirs).send, {}, bytes(1 << 20))
        assert sandbox.Link(ours).ask({}) == ({"raw": 1 << 20}, bytes(1 << 20))
