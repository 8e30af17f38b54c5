"""`ess version` and `ess layout`: what is installed, and what a model's layout costs."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Annotated, Any, Final, Literal

import cyclopts
from rich.table import Table

import ess
from ess import console
from ess.errors import BadInput
from ess.kernels.cpu import native
from ess.layout import ModelLayout, RowCodec
from ess.models.registry import read_config as parse_config
from ess.models.weights.expected.dry_run import PUBLISHED, read_config
from ess.units import PAGE_ROWS, format_bytes, parse_size

RowForm = Literal["fp8", "bf16", "f32"]
PRESETS: Final[dict[str, Callable[..., ModelLayout]]] = {
    "deepseek-v3.2": ModelLayout.deepseek_v32,
    "glm-5": ModelLayout.glm_5,
    "glm-5.2": ModelLayout.glm_52,
    "ess-embedded": ModelLayout.embedded,
}
OF_LAYOUT: Final = (
    *("layer_count", "mtp_layer_count", "group_count", "top_k", "row_bytes", "row_sizes"),
    *("row_tokens", "state_bytes", "state_page_bytes", "key_bytes"),
)
NAMES: Final = (*PRESETS, *(name for name in PUBLISHED if name not in PRESETS))


def version(*, json: bool = False) -> None:
    """The version of ESS and of what it runs on.

    Parameters
    ----------
    json
        Print one JSON document.
    """
    versions = {
        "ess": ess.__version__,
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "torch": _torch_version(),
        "native": native.isa() if native.available() else None,
    }
    if json:
        console.print_json(versions)
        return
    for name, value in versions.items():
        print(f"{name:<7} {value or 'missing'}")


def layout(
    name: Annotated[str, cyclopts.Parameter(help=f"The model: {', '.join(NAMES)}.")],
    /,
    *,
    row: RowForm | None = None,
    host_bytes: str | None = None,
    json: bool = False,
) -> None:
    """What a token of a model costs, and what fits in given memory.

    Parameters
    ----------
    row
        How a latent row is stored; by default in fp8, entries of several tokens in bf16.
    host_bytes
        Host memory for the latent pool, such as 24GiB: adds how many tokens fit.
    json
        Print one JSON document.
    """
    model = _layout_of(name, row)
    cost = _cost(model, host_bytes)
    if json:
        console.print_json(cost)
    else:
        _print_cost(model, cost)


def _layout_of(name: str, row: RowForm | None) -> ModelLayout:
    if name not in NAMES:
        raise BadInput(f"layout {name!r} is unknown; choose from {', '.join(NAMES)}")
    preset = PRESETS.get(name)
    if preset is not None:
        return preset(row=RowCodec(form=row or "fp8"))
    config = parse_config(read_config(name))
    return config.layout(name=name, row=row or config.usual_row)


def _cost(model: ModelLayout, host_size: str | None) -> dict[str, Any]:
    """A token counts its rows and index keys in all layers, MTP included; of rows that hold several
    tokens, its share."""
    host_bytes = None if host_size is None else parse_size(host_size, "--host-bytes")
    page_count = None if host_bytes is None else host_bytes // model.host_page_bytes
    windows = model.window_floor * model.window_slot_bytes
    return {
        "layout": model.name,
        "row_form": model.row.form,
        **{name: getattr(model, name) for name in OF_LAYOUT},
        "key_unit": model.select_unit,
        "key_group_count": model.key_layer_count,
        "window_floor": model.window_floor,
        "token_host_bytes": model.host_page_bytes // model.page_tokens,
        "wire_page_bytes": model.page_bytes,
        "host_page_bytes": model.host_page_bytes,
        "active_page_bytes": model.index_page_bytes,
        "slot_floor": model.slot_floor,
        "slot_floor_bytes": model.slot_floor * model.slot_bytes + windows,
        "host_bytes": host_bytes,
        "host_page_count": page_count,
        "host_token_count": None if page_count is None else page_count * model.page_tokens,
    }


def _print_cost(model: ModelLayout, cost: Mapping[str, Any]) -> None:
    table = Table.grid(padding=(0, 3))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for line in _cost_lines(model, cost):
        table.add_row(*line)
    console.tables().print(table)


def _cost_lines(model: ModelLayout, cost: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    unit = "one token" if model.row_tokens == 1 else f"{model.row_tokens} tokens"
    keyed, windows, page = f"{unit} in one layer group", "", model.page_tokens
    if model.select_unit > 1:
        keyed = f"{model.select_unit} tokens, which are picked together, in one layer group"
    if model.key_layer_count < model.group_count:
        keyed = f"one token in {model.key_layer_count} groups: the others attend to a window"
        windows = f", {model.window_floor:,} for a window"
    floor = f"{model.slot_floor:,} slots in every group{windows}, per running request"
    active = f"{page} tokens on the device: index keys and the row map"
    lines = [
        (model.name, "", f"{model.layer_count} layers + {model.mtp_layer_count} MTP"),
        ("layer groups", f"{model.group_count}", f"each picks {model.top_k:,} rows per query"),
        ("row", _bytes_of(model.row_sizes), f"{model.row.form}, {unit} in one layer"),
        ("index key", f"{model.key_bytes:,} B", keyed),
        ("token", f"{cost['token_host_bytes']:,} B", "on the host: all rows and index keys"),
        ("wire page", f"{model.page_bytes:,} B", f"{PAGE_ROWS} rows of one layer"),
        ("host page", format_bytes(model.host_page_bytes), f"{page} tokens on the host"),
        ("active page", format_bytes(model.index_page_bytes), active),
        ("slot floor", format_bytes(cost["slot_floor_bytes"]), floor),
    ]
    if model.state_bytes:
        more = f"beside rows, and {model.state_page_bytes:,} B for each page, per running request"
        lines.append(("state", format_bytes(model.state_bytes), more))
    if cost["host_bytes"] is not None:
        held = f"tokens in {format_bytes(cost['host_bytes'])} of host memory"
        lines.append(("capacity", f"{cost['host_token_count']:,}", held))
    return lines


def _bytes_of(row_sizes: tuple[int, ...]) -> str:
    """The row sizes as text, the narrowest first."""
    return " or ".join(f"{size:,} B" for size in row_sizes[::-1])


def _torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
