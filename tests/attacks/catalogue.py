"""All attacks, by name: what each sends, and the memory it may cost."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ess.engine.tokens.grammar import COMPILING_MAX
from ess.engine.tokens.grammar_child import MEMORY_BYTES_MAX
from ess.server.process.bounds import PROBE_CONNECTIONS, READ_BYTES_MAX
from tests.attacks.logs import disk_full, full_and_unread, reader_gone
from tests.attacks.measure import Attack, Target
from tests.attacks.wire import (
    CHUNKED,
    ENDLESS,
    FRAMINGS,
    ONE_BYTE_CHUNKS,
    head,
    listed,
    post,
    pour,
)

ANSWER_S = 30.0
BODY_MIB = 160
READ_MIB = BODY_MIB + (READ_BYTES_MAX >> 20)
FORKED_MIB = 48  # what processes of grammars share counts in each
GRAMMAR_MIB = 64 + COMPILING_MAX * (FORKED_MIB + (MEMORY_BYTES_MAX >> 20))
CONNECTIONS = 64
LEAVERS = 200


# ---- what is sent


def status_of(made: socket.socket) -> str:
    """The code of the answer that comes next; raises TimeoutError if none does."""
    with contextlib.suppress(ConnectionError):
        if told := made.recv(1 << 16):
            return told[9:12].decode()
    return "closed"


def poured(pieces: Iterable[bytes], target: Target) -> str:
    """A body that never ends gets its answer soon or not at all."""
    with target.connection() as made:
        pour(made, pieces)
        made.settimeout(ANSWER_S)
        try:
            return status_of(made)
        except TimeoutError:
            return "taken"


def poured_by(count: int, pieces: Iterable[bytes], target: Target) -> str:
    """So many connections at once."""
    with ThreadPoolExecutor(count) as pool:
        codes = set(pool.map(partial(poured, pieces), [target] * count))
    return " ".join(sorted(codes))


def asked(path: str, body: Callable[[], bytes], target: Target) -> str:
    whole = body()
    with target.connection() as made:
        made.sendall(head(path, f"content-length: {len(whole)}", method="POST"))
        pour(made, [whole])
        return status_of(made)


def long_id(target: Target) -> str:
    """Four streams that repeat an id of 4 MB in every event, and no client reads them."""
    body = {"text": "x", "rid": "r" * 4_000_000, "stream": True}
    body["sampling_params"] = {"max_new_tokens": 1000, "ignore_eos": True}
    whole = json.dumps(body).encode()
    lines = head("/generate", f"content-length: {len(whole)}", method="POST")
    with contextlib.ExitStack() as held:
        made = [held.enter_context(target.connection(room=4096)) for _ in range(4)]
        for each in made:
            each.sendall(lines + whole)
        codes = {each.recv(12)[9:].decode() for each in made}
        if codes == {"200"}:
            time.sleep(target.limit_s)
    return " ".join(codes)


def grammar(target: Target, constraint: dict) -> str:
    body = {"prompt": "x", "max_tokens": 4, "structured_outputs": constraint}
    return asked("/v1/completions", json.dumps(body).encode, target)


@contextlib.contextmanager
def wedged(target: Target) -> Iterator[None]:
    """Three schemas that never compile are under way."""
    schemas = [{**ENDLESS, "multipleOf": each} for each in (99999989, 99999971, 99999959)]
    with contextlib.ExitStack() as held:
        for schema in schemas:
            body = {"prompt": "x", "max_tokens": 4, "structured_outputs": {"json": schema}}
            held.enter_context(target.connection()).sendall(post(json.dumps(body).encode()))
        yield


def endless_grammar(target: Target) -> str:
    """An honest request comes right behind them."""
    with wedged(target):
        began_s = time.monotonic()
        code = grammar(target, {"regex": "yes|no"})
    return f"honest {code} in {time.monotonic() - began_s:.1f} s"


def killed_with_grammar(target: Target) -> str:
    with wedged(target):
        time.sleep(1.0)
        target.process.process.kill()
    return "kill -9"


def killed_engine(target: Target) -> str:
    target.process.kill_engine()
    return "engine -9"


def nothing(target: Target) -> str:
    return "SIGTERM"


def dripped(lines: bytes, drop: bytes, target: Target) -> str:
    """A drop a tenth of a second, until the other side refuses one."""
    told = b""
    with target.connection() as made:
        made.sendall(lines)
        made.settimeout(0.05)
        began_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began_s < target.limit_s:
                made.sendall(drop)
                time.sleep(0.05)
                with contextlib.suppress(TimeoutError):
                    told += made.recv(1 << 16)
    passed_s = time.monotonic() - began_s
    how = "closed" if passed_s < target.limit_s else "open"
    codes = re.findall(r"HTTP/1.1 (\d+)", told.decode())
    return " ".join([*codes, how, f"after {passed_s:.0f} s"])


def hoarded(target: Target) -> str:
    """Everybody who is let in stays; the bystander's probes tell how that was."""
    with contextlib.ExitStack() as held:
        for _ in range(CONNECTIONS + 4 * PROBE_CONNECTIONS):
            pour(held.enter_context(target.connection()), [CHUNKED[:-4]])
        time.sleep(3.0)
        return asked_plainly("/version", target)


def asked_plainly(path: str, target: Target, *headers: str) -> str:
    with target.connection() as made:
        made.sendall(head(path, *headers, method="GET"))
        return status_of(made)


def left_in_body(target: Target) -> str:
    """What the server counts them as."""
    for _ in range(LEAVERS):
        with target.connection() as made:
            made.sendall(post(b" " * 1000)[:-1])
    deadline_s = time.monotonic() + ANSWER_S
    while not (counts := answers(target)).startswith(f"{LEAVERS} x"):
        if time.monotonic() > deadline_s:
            break
    return counts


def answers(target: Target) -> str:
    """To clients that left, and to those for whom it failed."""
    with target.connection() as made:
        made.sendall(head("/metrics", "connection: close"))
        told = b"".join(iter(partial(made.recv, 1 << 16), b""))
    counts = re.findall(rb'ess_answers_total\{[^}]*status="(499|500)"\} (\d+)', told)
    return ", ".join(f"{count.decode()} x {code.decode()}" for code, count in counts)


def foreign(path: str, lines: tuple[str, ...], target: Target, *, method: str = "POST") -> str:
    with target.connection() as made:
        whole = [f"{method} {path} HTTP/1.1", *lines, "content-length: 0", "", ""]
        made.sendall("\r\n".join(whole).encode())
        return status_of(made)


def full_queue(target: Target) -> str:
    """Is a server that is only busy taken for a dead one?"""
    body = json.dumps({"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True})
    with contextlib.ExitStack() as held:
        for _ in range(3):
            made = held.enter_context(target.connection())
            made.sendall(post(body.encode()))
        time.sleep(1.0)
        return asked_plainly("/health_generate", target)


def long_text(word: bytes, count: int) -> bytes:
    return b'{"max_tokens":1,"prompt":"%b"}' % (word * count)


def texts(count: int, length: int) -> bytes:
    return listed("prompt", json.dumps("every word " * (length // 11)), count)


def tools() -> bytes:
    tool = '{"type":"function","function":{"name":"f","parameters":{}}}'
    said = '"messages":[{"role":"user","content":"a"}],'
    return ('{"max_tokens":1,' + said + listed("tools", tool, 300_000).decode()[1:]).encode()


def biases() -> bytes:
    pairs = ",".join(f'"{i}":1' for i in range(1_000_000))
    return f'{{"prompt":"x","max_tokens":1,"logit_bias":{{{pairs}}}}}'.encode()


# ---- all of them

LISTS = {
    "empty-prompts": ("/v1/completions", partial(listed, "prompt", '""', 8_000_000)),
    "texts-32mb": ("/v1/completions", partial(texts, 1600, 20_000)),
    "tokenize-1m": ("/tokenize", partial(listed, "prompt", '"a"', 1_000_000)),
    "generate-1m": ("/generate", partial(listed, "text", '"a"', 1_000_000)),
    "detokenize-2m": ("/detokenize", partial(listed, "tokens", "5", 2_000_000)),
    "messages-500k": (
        "/v1/chat/completions",
        partial(listed, "messages", '{"role":"user","content":"a"}', 500_000),
    ),
    "biases-1m": ("/v1/completions", biases),
    "tools-300k": ("/v1/chat/completions", tools),
    "floats-2m": ("/v1/chat/completions", partial(listed, "messages", "1.5e300", 2_000_000)),
}
BROKEN_LOGS = {"gone": reader_gone, "full": disk_full, "unread": full_and_unread}
KEYED = head("/v1/completions", "content-length: 1000", method="POST")
EVIL = ("host: evil.example", "content-type: text/plain")
CROSS = ("host: localhost", "origin: http://evil.example", "sec-fetch-site: cross-site")


def framings() -> Iterator[Attack]:
    for name, pieces in FRAMINGS.items():
        yield Attack(name=name, act=partial(poured, pieces))
    small = [CHUNKED, *ONE_BYTE_CHUNKS]
    yield Attack(name="one-byte-chunks", act=partial(poured, small))
    yield Attack(name="one-byte-chunks-8", act=partial(poured_by, 8, small))


def long_bodies() -> Iterator[Attack]:
    long = partial(long_text, b"every word ", 2_730_000)
    for name, path, body in (
        ("text-30mb", "/v1/completions", long),
        ("letters-10mb", "/v1/completions", partial(long_text, b"a", 10_000_000)),
        *((name, *given) for name, given in LISTS.items()),
    ):
        act = partial(asked, path, body)
        yield Attack(name=name, act=act, server_mib=BODY_MIB, all_mib=READ_MIB)
    yield Attack(name="id-4mb", act=long_id, limit_s=30.0, server_mib=BODY_MIB, all_mib=READ_MIB)


def ends() -> Iterator[Attack]:
    for name, log in BROKEN_LOGS.items():
        yield Attack(name=f"log-{name}", act=nothing, log=log)
        alone = ("--engine-restarts", "0")
        yield Attack(name=f"log-{name}-engine", act=killed_engine, flags=alone, log=log, ends=True)
    yield Attack(name="grammar", act=endless_grammar, needs_model=True, all_mib=GRAMMAR_MIB)
    yield Attack(
        name="grammar-kill",
        act=killed_with_grammar,
        needs_model=True,
        ends=True,
        all_mib=GRAMMAR_MIB,
    )


def connections() -> Iterator[Attack]:
    drip = partial(dripped, KEYED, b" ")
    yield Attack(name="drip", act=drip, limit_s=40.0)
    yield Attack(name="drip-401", act=drip, flags=("--api-key", "k"), limit_s=10.0)
    yield Attack(
        name="drip-lines",
        act=partial(dripped, head(), b"\r\n"),
        flags=("--idle-s", "3"),
        limit_s=10.0,
    )
    flags = ("--max-connections", str(CONNECTIONS))
    yield Attack(name="hoard", act=hoarded, flags=flags)
    yield Attack(name="left-in-body", act=left_in_body)
    yield Attack(
        name="full-queue", act=full_queue, flags=("--max-running", "2", "--max-waiting", "1")
    )
    offer = partial(asked_plainly, "/version")
    upgrade = ("connection: Upgrade", "upgrade: websocket")
    yield Attack(name="websocket", act=lambda target: offer(target, *upgrade))


def pages() -> Iterator[Attack]:
    for name, path, lines in (
        ("foreign-host", "/flush_cache", EVIL),
        ("cross-site", "/flush_cache", CROSS),
        ("cross-site-abort", "/abort_request", CROSS),
    ):
        yield Attack(name=name, act=partial(foreign, path, lines))
    yield Attack(name="get-flush", act=partial(asked_plainly, "/flush_cache"))


ATTACKS = {
    attack.name: attack
    for attack in itertools.chain(framings(), long_bodies(), ends(), connections(), pages())
}
STARTS = {"empty-key": ("--api-key", ""), "open-host": ("--host", "0.0.0.0")}
