"""What `ess serve` prints when it starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import msgspec
from rich.table import Table

import ess
from ess import console
from ess.server.commands.client import URL
from ess.server.commands.start.files.checkpoint import EMBEDDED
from ess.server.commands.start.settings import Resolved, Settings
from ess.server.commands.start.sizing import DevicePlan, MemoryPlan
from ess.units import format_bytes

PAGES = (
    ("API", "/v1"),
    ("routes", "/docs"),
    ("dashboard", "/dashboard"),
    ("metrics", "/metrics"),
    ("load", "/v1/loads"),
    ("health", "/health"),
    ("ready", "/ready"),
)


def greet(resolved: Resolved, plan: MemoryPlan, *, url: str, json: bool) -> None:
    """Prints the greeting; a closed stdout is ignored."""
    for sentence in resolved.notes:
        console.note(f"ess: {sentence}")
    try:
        _print(resolved, plan, url=url, json=json)
        sys.stdout.flush()
    except OSError as error:
        console.drop_stdout()
        console.note(f"ess: what is served cannot be printed: {error.strerror}")


def _print(resolved: Resolved, plan: MemoryPlan, *, url: str, json: bool) -> None:
    if json:
        console.print_json(
            {
                "settings": resolved.shown(),
                "memory": msgspec.to_builtins(plan),
                "url": url,
            }
        )
        return
    out = console.tables()
    for line in _title(resolved.settings):
        out.print(line)
    out.print()
    devices = [plan.device] if plan.device is not None else plan.stages
    memory = [_device(device) for device in devices] or [_memory(plan, resolved.settings)]
    for table in (_settings(resolved), *memory, *_host(plan, devices), _rooms(plan)):
        out.print(table)
        out.print()
    out.print(_urls(resolved.settings, url))
    out.print()


def _title(settings: Settings) -> Iterator[str]:
    place = "the CPU" if settings.device == "cpu" else settings.device
    yield f"ESS {ess.__version__} serves {settings.served_model_name or 'a model'} on {place}"
    if settings.model == EMBEDDED:
        real = "; a small real one: `ess serve smollm2`" if settings.role == "both" else ""
        yield f"It is the model in the box, and says nonsense{real}"
    if settings.role == "decode" and not settings.peers and not settings.fake_prefill:
        yield "It knows no prefill worker, as --peers names none: it computes prompts itself"


def _grid(*justify: str) -> Table:
    table = Table.grid(padding=(0, 3))
    for side in justify:
        table.add_column(justify="right" if side == "right" else "left")
    return table


def _settings(resolved: Resolved) -> Table:
    """The settings that are not at their defaults, and their origins."""
    table = _grid("left", "left", "left")
    rest = 0
    for name, shown in resolved.shown().items():
        if shown["from"] == "default":
            rest += 1
        else:
            table.add_row(name.replace("_", "-"), str(shown["value"]) or "-", shown["from"])
    table.add_row("others", f"{rest} settings at their defaults", "/server_info lists all")
    return table


def _memory(plan: MemoryPlan, settings: Settings) -> Table:
    table = _grid("left", "right", "left")
    how = f"in {settings.form}, with the copies that products read"
    how = how if settings.engine == "model" else "tokens are made without a model"
    table.add_row("weights", format_bytes(plan.weight_bytes), how)
    held = f"all rows of {plan.token_capacity:,} tokens"
    table.add_row("host pool", format_bytes(plan.host_bytes), held)
    table.add_row("slots", format_bytes(plan.slot_bytes), "the working set of rows")
    table.add_row("index", format_bytes(plan.index_bytes), "keys of running requests")
    if plan.state_bytes:
        table.add_row("states", format_bytes(plan.state_bytes), "beside rows, and kept for prompts")
    if plan.logit_bytes:
        table.add_row("scores", format_bytes(plan.logit_bytes), "of a selection in every thread")
    table.add_row("together", format_bytes(plan.total_bytes), "")
    return table


def _device(device: DevicePlan) -> Table:
    table = _grid("left", "right", "left")
    for line in device.lines:
        table.add_row(line.item, format_bytes(line.bytes), line.note)
    there = f"of {format_bytes(device.room)} that may be taken of {device.name}"
    table.add_row("on the device", format_bytes(device.taken), there)
    free = f"{format_bytes(device.free)} of {format_bytes(device.total)} are free"
    table.add_row("", "", free)
    return table


def _host(plan: MemoryPlan, devices: Sequence[DevicePlan]) -> Iterator[Table]:
    """The host's memory of an engine on devices."""
    if devices:
        table = _grid("left", "right", "left")
        held = f"all rows of {plan.token_capacity:,} tokens, pages locked"
        table.add_row("host pool", format_bytes(plan.host_bytes), held)
        locked = sum(device.locked for device in devices)
        free = f"of {format_bytes(devices[0].host_free)} that are free"
        table.add_row("locked", format_bytes(locked), free)
        yield table


def _rooms(plan: MemoryPlan) -> Table:
    table = _grid("right", "left", "right", "left")
    for room in plan.rooms:
        limiter = room.limiter.replace("_", "-")
        of = "request of" if room.count == 1 else "requests of"
        table.add_row(f"{room.count:,}", of, f"{room.length:,}", f"limited by {limiter}")
    return table


def _urls(settings: Settings, url: str) -> Table:
    """Where to go next. A worker that only makes or takes prompts is asked through its router."""
    table = _grid("left", "left")
    if settings.role == "both" and not settings.uds:
        table.add_row("chat", "ess chat" if url == URL else f"ess chat --url {url}")
        table.add_row("chat page", f"{url}/chat")
    for name, path in PAGES:
        table.add_row(name, url + path)
    return table
