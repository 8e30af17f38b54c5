"""Talks to a running server from the command line: `ess chat` and `ess top`. Needs only the
standard library and rich, so that it runs without a server's packages."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Final

from cyclopts import Parameter
from rich.live import Live
from rich.table import Table

from ess import console
from ess.errors import BadInput, EssError
from ess.server.commands.client import URL, Client

ANSWER_S: Final = 5.0
"""`ess top` waits this long for an answer, or for as long as it shows the one before."""
COUNTED: Final = ("made_count", "turn_count", "row_hits", "row_asked")
"""Of an engine's load, what grows with an answer."""
SILENT_S: Final = 2.0
"""An engine reports its state several times a second, between two steps."""


class Watch:
    """Records when text came and what the engine did; exact if it serves no other client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before = self._load()
        self._began_s = time.monotonic()
        self._first_s: float | None = None

    def _load(self) -> dict[str, int]:
        load = self._client.first("/v1/loads?include=core", "loads")
        return {name: load[name] for name in COUNTED}

    def saw_text(self) -> None:
        if self._first_s is None:
            self._first_s = time.monotonic()

    def report(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        ended_s, made_count = time.monotonic(), int(usage["completion_tokens"])
        time.sleep(0.3)  # the engine publishes what it counts a few times a second
        after = self._load()
        grown = {name: after[name] - self._before[name] for name in COUNTED}
        first_s = ended_s if self._first_s is None else self._first_s
        later_s = ended_s - first_s
        return {
            "ttft_ms": round((first_s - self._began_s) * 1e3, 1),
            "tokens_per_s": round((made_count - 1) / later_s, 1) if later_s > 0 else None,
            "tokens": made_count,
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "tokens_per_step": _ratio(grown["made_count"], grown["turn_count"]),
            "row_hit_rate": _ratio(grown["row_hits"], grown["row_asked"]),
        }


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None


def chat(
    question: Annotated[str | None, Parameter(name=["--question", "-q"])] = None,
    *,
    url: str = URL,
    model: str | None = None,
    system: str | None = None,
    max_tokens: int = 256,
    temperature: float | None = None,
    seed: int | None = None,
    stats: bool = False,
    api_key: str | None = None,
    json: bool = False,
) -> None:
    """Talk to a running server.

    Parameters
    ----------
    question
        Ask this and end; without it, lines are read until the end of input.
    url
        The server.
    model
        The model's name there.
    system
        What the conversation begins with.
    max_tokens
        The longest answer.
    temperature
        0 takes the likeliest; the checkpoint's own recommendation if not given.
    seed
        The same seed gives the same answer.
    stats
        After an answer: time to the first token, tokens per second, tokens per step, hit rate.
    api_key
        The server's key; ESS_API_KEY if not given.
    json
        Print one JSON document per answer.
    """
    client = Client(url, api_key)
    client.wait_ready()
    messages = [{"role": "system", "content": system}] if system else []
    asked: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    is_typed = question is None and sys.stdin.isatty()
    model = model or client.first("/v1/models", "data")["id"]
    if is_typed:
        console.note(f"{model} at {client.url}; Ctrl-C stops an answer, Ctrl-D ends")
        console.note("/new begins another conversation")
    answer = partial(_answer, client, stats=stats, json=json)
    body = {**asked, "model": model, "stream": True}
    if question is not None:
        answer({**body, "messages": [*messages, {"role": "user", "content": question}]})
        return
    _converse(answer, body, messages, is_typed=is_typed)


def _converse(
    answer: Callable[[dict[str, Any]], str],
    body: Mapping[str, Any],
    begun: list[dict[str, str]],
    *,
    is_typed: bool,
) -> None:
    """Answers line after line; `begun` is what each conversation begins with."""
    messages = begun
    for line in _lines(is_typed=is_typed):
        if is_typed and line.strip() == "/new":
            messages = begun
            continue
        conversation = [*messages, {"role": "user", "content": line}]
        try:
            text = answer({**body, "messages": conversation})
        except (EssError, KeyboardInterrupt) as error:
            if not is_typed:
                raise
            console.note(f"\n({str(error) or 'stopped'}; forgotten)")
            continue
        messages = [*conversation, {"role": "assistant", "content": text}]


def _lines(*, is_typed: bool) -> Iterator[str]:
    """Typed lines can be edited, and earlier ones come back with the arrow keys."""
    if is_typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    while True:
        try:
            line = input("> " if is_typed else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line


def _answer(client: Client, body: dict[str, Any], *, stats: bool, json: bool) -> str:
    body["stream_options"] = {"include_usage": True}
    watch = Watch(client) if stats or json else None
    screen, text, usage = Screen(), "", None
    for event in client.stream("/v1/chat/completions", body):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            thought = choice["delta"].get("reasoning_content") or ""
            if (piece or thought) and watch is not None:
                watch.saw_text()
            if not json:
                screen.show(piece, thought)
            text += piece
    if not json:
        screen.end()
    if watch is not None and usage is not None:
        report = watch.report(usage)
        if json:
            console.print_json({"text": text, **report})
        else:
            console.note(_sentence(report))
    return text


class Screen:
    """Writes an answer to stdout as it comes, and what the model thinks before it to stderr."""

    def __init__(self) -> None:
        self._is_thinking = False

    def show(self, piece: str, thought: str) -> None:
        if thought:
            self._think(is_thinking=True)
            sys.stderr.write(thought)
            sys.stderr.flush()
        if piece:
            self._think(is_thinking=False)
            sys.stdout.write(piece)
            sys.stdout.flush()

    def end(self) -> None:
        self._think(is_thinking=False)
        print()

    def _think(self, *, is_thinking: bool) -> None:
        if is_thinking == self._is_thinking:
            return
        self._is_thinking = is_thinking
        dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
        sys.stderr.write(dim if is_thinking else f"{plain}\n\n")
        sys.stderr.flush()


def _sentence(report: Mapping[str, Any]) -> str:
    """The measurements in two lines; what was not measured is left out."""
    rate, turns, hits = (report[n] for n in ("tokens_per_s", "tokens_per_step", "row_hit_rate"))
    cached = f" ({report['cached_tokens']} cached)" if report["cached_tokens"] else ""
    prompt = f"{report['prompt_tokens']} tokens of prompt{cached}"
    parts = [f"{report['tokens']} tokens" + (f" at {rate} a second" if rate else "")]
    if turns is not None:
        parts.append(f"{turns:.2f} per step")
    if hits is not None:
        parts.append(f"{hits:.1%} of rows resident")
    return f"{prompt} · first text after {report['ttft_ms']:,.0f} ms\n{' · '.join(parts)}"


def top(
    *,
    url: str = URL,
    every: float = 1.0,
    once: bool = False,
    api_key: str | None = None,
    json: bool = False,
) -> None:
    """Show what a running server does.

    Parameters
    ----------
    url
        The server.
    every
        Seconds between updates.
    once
        Show it once and end.
    api_key
        The server's key; ESS_API_KEY if not given.
    json
        Print one JSON document and end.
    """
    if not 0.05 <= every <= 3600:
        raise BadInput(f"--every {every:g}: must be 0.05 to 3600 seconds")
    client = Client(url, api_key, timeout_s=max(every, ANSWER_S))
    if json:
        console.print_json(client.ask("/v1/loads"))
        return
    out = console.tables()
    if once or not out.is_terminal:
        out.print(_shown(client, ends=""))
        return
    live = Live(_shown(client), console=out, auto_refresh=False)
    with live, contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(every)
            live.update(_table_or_reason(client), refresh=True)


def _table_or_reason(client: Client) -> Table | str:
    """The table, or why there is none: an unreachable server may come back."""
    try:
        return _shown(client)
    except EssError as error:
        return f"{error}; looking again"


def _shown(client: Client, ends: str = "Ctrl-C ends") -> Table:
    load = client.first("/v1/loads", "loads")
    table = Table.grid(padding=(0, 3))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    table.add_row("server", client.url.partition("://")[2], ends)
    heard_s = load.get("heard_s", 0.0)
    silent = f"the engine was heard {heard_s:.1f} s ago" if heard_s > SILENT_S else ""
    table.add_row("state", load.get("state", "-"), silent)
    running = f"of {load['max_running_requests']}"
    table.add_row("running", f"{load['num_running_reqs']}", running)
    short = f"short of {load['limiter']}" if load["limiter"] else ""
    table.add_row("waiting", f"{load['num_waiting_reqs']}", short)
    table.add_row("oldest wait", f"{load['oldest_wait_s']:.1f} s", "without a token")
    table.add_row("tokens/s", f"{load['gen_throughput']:,.1f}", "")
    table.add_row("tokens/step", f"{load['tokens_per_turn']:.2f}", "per request")
    if load["row_asked"]:
        table.add_row("rows resident", f"{load['row_hit_rate']:.1%}", "of those selected")
    else:
        table.add_row("rows resident", "-", "none was selected")
    table.add_row("prefix cached", f"{load['cache_hit_rate']:.1%}", "of prompt tokens")
    for name, pool in load["memory"].items():
        share = pool["used"] / max(pool["capacity"], 1)
        table.add_row(name.replace("_", " "), f"{share:.1%}", f"of {pool['capacity']:,}")
    if load.get("handoff") is not None:
        _add_handoff(table, load["handoff"])
    if load.get("graphs") is not None:
        _add_graphs(table, load["graphs"])
    for stage in load.get("stages", ()):
        _add_stage(table, stage)
    return table


def _add_graphs(table: Table, graphs: Mapping[str, Any]) -> None:
    graph_count, eager_count = graphs["replayed"], sum(graphs["eager"].values())
    share = graph_count / max(graph_count + eager_count, 1)
    table.add_row("steps as graphs", f"{share:.1%}", f"{graphs['held']:,} kept")


def _add_stage(table: Table, stage: Mapping[str, Any]) -> None:
    layers = f"layers {stage['first_layer']} to {stage['last_layer']}"
    details = f"{layers}, {stage['chunks']:,} chunks, heard {stage['heard_s']:.1f} s ago"
    table.add_row(f"stage {stage['stage']}", f"{stage['busy_share']:.0%} busy", details)


def _add_handoff(table: Table, handoff: Mapping[str, Any]) -> None:
    under_way = handoff["open_arrival"] + handoff["open_departure"]
    table.add_row("handoffs open", f"{under_way}", f"{handoff['gb_per_s']:.2f} GB/s lately")
    good, bad = (
        handoff["landed"] + handoff["sent"],
        handoff["missed"] + handoff["lapsed"],
    )
    table.add_row("handed over", f"{good:,}", f"{bad:,} came to nothing")
    for peer in handoff["peers"]:
        heard = f"heard {peer['heard_s']:.1f} s ago" if peer["is_up"] else "not heard"
        table.add_row(peer["address"], "up" if peer["is_up"] else "down", heard)
