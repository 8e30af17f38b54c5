"""`ess version`, `ess layout` and `ess completion`: what is installed, and what a model's layout
costs."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Final, Literal

import cyclopts
import msgspec
from rich.table import Table

import ess
from ess import console
from ess.errors import BadInput
from ess.kernels.cpu import native
from ess.layout import ModelLayout, RowCodec
from ess.models.registry import read_config as parse_config
from ess.models.weights.expected.dry_run import PUBLISHED, read_config
from ess.server.commands import cli
from ess.units import PAGE_ROWS, format_bytes, parse_size

RowForm = Literal["fp8", "bf16", "f32"]
PRESETS: Final[dict[str, Callable[..., ModelLayout]]] = {
    "deepseek-v3.2": ModelLayout.deepseek_v32,
    "glm-5": ModelLayout.glm_5,
    "glm-5.2": ModelLayout.glm_52,
    "ess-embedded": ModelLayout.embedded,
}
NAMES: Final = (*PRESETS, *(name for name in PUBLISHED if name not in PRESETS))


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a layout. A token counts its rows and index keys in all layers, MTP included; of
    rows that hold several tokens, its share."""

    layout: str
    row_form: str
    layer_count: int
    mtp_layer_count: int
    group_count: int
    top_k: int
    row_bytes: int
    row_sizes: tuple[int, ...]
    row_tokens: int
    state_bytes: int
    state_page_bytes: int
    key_bytes: int
    key_unit: int
    key_group_count: int
    window_floor: int
    token_host_bytes: int
    wire_page_bytes: int
    host_page_bytes: int
    active_page_bytes: int
    slot_floor: int
    slot_floor_bytes: int
    host_bytes: int | None
    host_page_count: int | None
    host_token_count: int | None


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
    cost = _cost(_layout_of(name, row), host_bytes)
    if json:
        console.print_json(cost)
    else:
        _print_cost(cost)


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """What makes a shell complete commands and flags: `. <(ess completion bash)`.

    Parameters
    ----------
    shell
        The shell that reads it.
    """
    print(cli.make_app().generate_completion(shell=shell))


def _layout_of(name: str, row: RowForm | None) -> ModelLayout:
    if name not in NAMES:
        raise BadInput(f"layout {name!r} is unknown; choose from {', '.join(NAMES)}")
    preset = PRESETS.get(name)
    if preset is not None:
        return preset(row=RowCodec(form=row or "fp8"))
    config = parse_config(read_config(name))
    return config.layout(name=name, row=row or config.usual_row)


def _cost(model: ModelLayout, host_size: str | None) -> Cost:
    host_bytes = None if host_size is None else parse_size(host_size, "--host-bytes")
    page_count = None if host_bytes is None else host_bytes // model.host_page_bytes
    return Cost(
        layout=model.name,
        row_form=model.row.form,
        layer_count=model.layer_count,
        mtp_layer_count=model.mtp_layer_count,
        group_count=model.group_count,
        top_k=model.top_k,
        row_bytes=model.row_bytes,
        row_sizes=model.row_sizes,
        row_tokens=model.row_tokens,
        state_bytes=model.state_bytes,
        state_page_bytes=model.state_page_bytes,
        key_bytes=model.key_bytes,
        key_unit=model.select_unit,
        key_group_count=model.key_layer_count,
        window_floor=model.window_floor,
        token_host_bytes=model.host_page_bytes // model.page_tokens,
        wire_page_bytes=model.page_bytes,
        host_page_bytes=model.host_page_bytes,
        active_page_bytes=model.index_page_bytes,
        slot_floor=model.slot_floor,
        slot_floor_bytes=model.slot_floor * model.slot_bytes
        + model.window_floor * model.window_slot_bytes,
        host_bytes=host_bytes,
        host_page_count=page_count,
        host_token_count=None if page_count is None else page_count * model.page_tokens,
    )


def _print_cost(cost: Cost) -> None:
    table = Table.grid(padding=(0, 3))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for line in _cost_lines(cost):
        table.add_row(*line)
    console.tables().print(table)


def _cost_lines(cost: Cost) -> list[tuple[str, str, str]]:
    unit = "one token" if cost.row_tokens == 1 else f"{cost.row_tokens} tokens"
    keyed, windows, page = f"{unit} in one layer group", "", PAGE_ROWS * cost.row_tokens
    if cost.key_unit > 1:
        keyed = f"{cost.key_unit} tokens, which are picked together, in one layer group"
    if cost.key_group_count < cost.group_count:
        keyed = f"one token in {cost.key_group_count} groups: the others attend to a window"
        windows = f", {cost.window_floor:,} for a window"
    lines = [
        (cost.layout, "", f"{cost.layer_count} layers + {cost.mtp_layer_count} MTP"),
        ("layer groups", f"{cost.group_count}", f"each picks {cost.top_k:,} rows per query"),
        ("row", _bytes_of(cost.row_sizes), f"{cost.row_form}, {unit} in one layer"),
        ("index key", f"{cost.key_bytes:,} B", keyed),
        ("token", f"{cost.token_host_bytes:,} B", "on the host: all rows and index keys"),
        ("wire page", f"{cost.wire_page_bytes:,} B", f"{PAGE_ROWS} rows of one layer"),
        ("host page", format_bytes(cost.host_page_bytes), f"{page} tokens on the host"),
        (
            "active page",
            format_bytes(cost.active_page_bytes),
            f"{page} tokens on the device: index keys and the row map",
        ),
        (
            "slot floor",
            format_bytes(cost.slot_floor_bytes),
            f"{cost.slot_floor:,} slots in every group{windows}, per running request",
        ),
    ]
    if cost.state_bytes:
        more = f"beside rows, and {cost.state_page_bytes:,} B for each page, per running request"
        lines.append(("state", format_bytes(cost.state_bytes), more))
    if cost.host_token_count is not None and cost.host_bytes is not None:
        held = f"tokens in {format_bytes(cost.host_bytes)} of host memory"
        lines.append(("capacity", f"{cost.host_token_count:,}", held))
    return lines


def _bytes_of(row_sizes: tuple[int, ...]) -> str:
    """The row sizes as text, the narrowest first."""
    return " or ".join(f"{size:,} B" for size in row_sizes[::-1])


def _torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
