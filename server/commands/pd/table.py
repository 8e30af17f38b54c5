"""What `ess serve --pd` prints once everything is ready: the addresses, and an example."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
from rich.table import Table

from ess import console
from ess.server.commands.pd.shares import Share
from ess.units import format_bytes


class Line(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    name: str
    url: str
    pid: int


def show(lines: Sequence[Line], share: Share, *, json: bool) -> None:
    """Prints a line for each process, the router last; a closed stdout is ignored."""
    try:
        _print(lines, share, json=json)
        sys.stdout.flush()
    except OSError as error:
        console.drop_stdout()
        console.note(f"ess: what is served cannot be printed: {error.strerror}")


def _print(lines: Sequence[Line], share: Share, *, json: bool) -> None:
    router = lines[-1]
    if json:
        listed = [msgspec.structs.asdict(line) for line in lines]
        about = {"memory": msgspec.to_builtins(share.plan), "threads": share.threads}
        console.print_json({"url": router.url, "processes": listed, "each_worker": about})
        return
    out = console.tables()
    out.print(_processes(lines))
    out.print()
    out.print(_each(share))
    out.print()
    print(_example(router.url, share.served))


def _processes(lines: Sequence[Line]) -> Table:
    table = Table.grid(padding=(0, 3))
    for line in lines:
        table.add_row(line.name, line.url, f"process {line.pid}")
    return table


def _each(share: Share) -> Table:
    plan = share.plan
    table = Table.grid(padding=(0, 3))
    table.add_row("each worker has")
    table.add_row("threads", f"{share.threads}")
    table.add_row("host pool", f"{format_bytes(plan.host_bytes)}, {plan.token_capacity:,} tokens")
    table.add_row("slots", format_bytes(plan.slot_bytes))
    table.add_row("index", format_bytes(plan.index_bytes))
    table.add_row("longest request", f"{plan.length_max:,} tokens")
    return table


def _example(url: str, model: str) -> str:
    body = msgspec.json.encode({"model": model, "prompt": "The server is", "max_tokens": 16})
    return f"curl {url}/v1/completions -H 'content-type: application/json' -d '{body.decode()}'"
