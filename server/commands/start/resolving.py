"""From settings to those of a run: what the checkpoint and the machine decide of them, and what is
refused before anything starts."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from ess.comm.experts.balance import check_places
from ess.engine.devices import DeviceReport
from ess.engine.entries.refusals import check_settings
from ess.errors import BadInput
from ess.flashtrans import ways
from ess.free_resources import cores_free, memory_free, memory_total
from ess.layout import ModelLayout
from ess.models.weights.expected.kept_bytes import kept_bytes
from ess.overlap import calibration
from ess.pool.device_bytes import check_on_device
from ess.server.commands.start.devices.device_probing import device_reports
from ess.server.commands.start.devices.device_sizing import DeviceNeeds, plan_on_device
from ess.server.commands.start.devices.device_stages import plan_stages
from ess.server.commands.start.files.checkpoint import (
    EMBEDDED,
    Checkpoint,
    default_sampling,
    held_bytes,
    read_checkpoint,
    read_entries,
)
from ess.server.commands.start.files.hidden_files import check_tls
from ess.server.commands.start.files.words import template_names
from ess.server.commands.start.server_facts import kept_responses
from ess.server.commands.start.setting_checks import check_events
from ess.server.commands.start.settings import Resolved, Settings
from ess.server.commands.start.sizing import (
    AUTO,
    MemoryPlan,
    check_sizes,
    now_or_never,
    plan_memory,
)
from ess.units import format_bytes, parse_size

BLOCK_BYTES: Final = 512  # in which the system counts what a file takes


def checked(settings: Settings) -> Checkpoint:
    """Reads the checkpoint, and refuses what can be found wrong in it and in files of settings
    before anything starts; `read_words` does the same for texts."""
    ways.check_environment()
    checkpoint = read_checkpoint(settings.model)
    check_tls(settings.tls_cert, settings.tls_key, settings.tls_ca)
    default_sampling(settings.default_sampling, checkpoint.defaults)
    check_events(settings)
    check_kept(settings.prefix_cache_dir)
    template_names(settings.default_chat_template_kwargs)
    if settings.dp_size > 1 and (count := checkpoint.config.expert_count):
        check_places(count, settings.dp_size, settings.redundant_experts)
    if settings.engine == "model":
        read_entries(Path(checkpoint.path))
    return checkpoint


def check_kept(folder: str) -> None:
    """Makes the folder of pages, as the engine would: if that fails, or nothing can be written
    there, the start is refused at once."""
    try:
        if folder:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = "is no folder" if Path(folder).exists() else f"cannot be made: {error.strerror}"
        raise BadInput(f"prefix_cache_dir {folder} {why}") from None
    if folder and not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise BadInput(f"prefix_cache_dir {folder} cannot be written by user {os.geteuid()}")


def derived(resolved: Resolved, checkpoint: Checkpoint) -> Resolved:
    """Adds what the checkpoint and the machine decide where no setting does. BadInput for a setting
    that contradicts the checkpoint."""
    settings = resolved.settings
    check_sizes(settings)
    kept_responses(settings)
    check_settings(checkpoint.config, settings)
    fresh: dict[str, Any] = {}
    if not settings.served_model_name:
        fresh["served_model_name"] = checkpoint.name
    if checkpoint.config.mtp_layer_count and resolved.origins["mtp"] == "default":
        fresh["mtp"] = 2
    if resolved.origins["row"] == "default" and settings.row != checkpoint.config.usual_row:
        fresh["row"] = checkpoint.config.usual_row
    if settings.threads == 0:
        here = settings.processes_here
        fresh["threads"] = max(1, (cores_free() - 1) // here)
    if not settings.model:
        fresh["model"] = EMBEDDED
    return resolved.deriving(**fresh)


def layout_of(settings: Settings, checkpoint: Checkpoint) -> ModelLayout:
    return checkpoint.config.layout(row=settings.row, has_mtp=settings.mtp > 1)


def calibrated(resolved: Resolved, layout: ModelLayout) -> Resolved:
    """Reads the calibration, so that a wrong one is refused before the engine starts."""
    path = resolved.settings.calibration
    if not path:
        return resolved
    note = f"the calibration {path} was measured on {calibration.load(path, layout).machine}"
    return replace(resolved, notes=(*resolved.notes, note))


def noting_disk(resolved: Resolved) -> Resolved:
    """Says where the disk has less room than pages may take. Pages that are there already are
    room too; those of stages are in folders of their own."""
    folder = resolved.settings.prefix_cache_dir
    if not folder:
        return resolved
    wanted, kept = parse_size(resolved.settings.prefix_cache_disk), Path(folder)
    if (room := shutil.disk_usage(kept).free + _slab_bytes(kept)) >= wanted:
        return resolved
    note = (
        f"prefix_cache_dir {folder} has room for {format_bytes(room)}, less than prefix_cache_disk,"
        f" {format_bytes(wanted)}: when its disk is full, no pages are stored until it has room"
    )
    return replace(resolved, notes=(*resolved.notes, note))


def _slab_bytes(folder: Path) -> int:
    """The bytes that slabs take on the disk. Another process may remove a slab or a folder
    meanwhile."""
    taken = 0
    for home, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".slab"):
                with contextlib.suppress(FileNotFoundError):
                    taken += Path(home, name).stat().st_blocks * BLOCK_BYTES
    return taken


def planned(
    settings: Settings, checkpoint: Checkpoint, layout: ModelLayout, *, shared_by: int = 1
) -> MemoryPlan:
    """The plan for the host's memory, of which `shared_by` workers have equal parts, or for the
    device's, after asking the device whether it can serve."""
    devices = device_reports(settings)
    if devices:
        check_on_device(layout, settings.device)
    empty = {name: replace(each, free_bytes=each.total_bytes) for name, each in devices.items()}
    told = (settings, checkpoint, layout)
    return now_or_never(
        partial(_plan, *told, devices, free=memory_free() // shared_by),
        partial(_plan, *told, empty, free=memory_total() // shared_by),
    )


def _plan(
    settings: Settings,
    checkpoint: Checkpoint,
    layout: ModelLayout,
    reports: Mapping[str, DeviceReport],
    *,
    free: int,
) -> MemoryPlan:
    if reports:
        entries = read_entries(Path(checkpoint.path))
        if settings.is_staged:
            return plan_stages(settings, checkpoint, entries, layout, reports, free=free)
        needed = DeviceNeeds(
            config=checkpoint.config,
            layout=layout,
            weight_bytes=kept_bytes(
                checkpoint.config,
                entries,
                settings.form,
                rank_count=settings.dp_size,
                redundant=settings.redundant_experts,
            ),
            file_bytes=checkpoint.share_bytes(
                settings.dp_size, redundant=settings.redundant_experts
            ),
        )
        return plan_on_device(settings, needed, reports[settings.device], free=free)
    return plan_memory(
        settings,
        layout,
        positions_max=checkpoint.config.positions_max,
        weight_bytes=settings.team_size * weights_of(settings, checkpoint),
        free=free * (settings.nnodes if settings.dp_size == 1 else 1),
    )


def weights_of(settings: Settings, checkpoint: Checkpoint) -> int:
    """Bytes of weights in each process on a CPU; tokens are paced without a model."""
    if settings.engine == "paced":
        return 0
    return held_bytes(
        checkpoint, settings.form, ranks=settings.dp_size, redundant=settings.redundant_experts
    )


def sized(
    resolved: Resolved,
    plan: MemoryPlan,
    *,
    but: Sequence[str] = (),
    written: Callable[[int], str] = format_bytes,
) -> Resolved:
    """Replaces automatic sizes by those of the plan, `but` some. Where workers get these sizes and
    plan with them, they are `written` to the byte: a rounded size may be too little for the longest
    request."""
    names = ["host_bytes", "slot_bytes", "index_bytes"]
    if plan.device is not None:
        names.append("graph_bytes")
    sizes = {name: written(getattr(plan, name)) for name in names}
    sizes["max_model_len"] = str(plan.length_max)
    auto = [name for name in sizes if getattr(resolved.settings, name) == AUTO]
    return resolved.deriving(**{name: sizes[name] for name in auto if name not in but})
