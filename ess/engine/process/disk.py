"""An engine's disk tier: made from its settings."""

from __future__ import annotations

from pathlib import Path

from ess import console
from ess.engine.process.arithmetic import arithmetic
from ess.engine.process.messages import Launch
from ess.layout import ModelLayout
from ess.models.weights.files.fingerprint import fingerprint
from ess.pool.disk.tier import DiskTier
from ess.transfer.messages import layout_hash
from ess.units import parse_size


def disk_of(
    launch: Launch, layout: ModelLayout, layers: tuple[int, int] | None = None
) -> DiskTier | None:
    """Pages made from other weights, in another layout or by other arithmetic are other pages. A
    part of the model, by its `layers`, has a folder of its own and its share of the capacity."""
    chosen = launch.config
    if not chosen.prefix_cache_dir:
        return None
    weights = f"{chosen.form} {arithmetic(chosen)} {fingerprint(launch.model).hex()}"
    folder, part = Path(chosen.prefix_cache_dir), layout
    if layers is not None:
        first, stop = layers
        folder, part = folder / f"layers-{first}-{stop - 1}", layout.part(first, stop)
        weights = f"{weights} {first}..{stop - 1}"
    capacity_bytes = parse_size(chosen.prefix_cache_disk)
    tier = DiskTier(
        folder,
        identity=layout_hash(part, weights=weights),
        page_bytes=part.host_page_bytes,
        capacity_bytes=capacity_bytes * part.host_page_bytes // layout.host_page_bytes,
        note=_note,
    )
    if tier.opened:
        _note(tier.opened)
    return tier


def _note(sentence: str) -> None:
    console.note(f"ess: {sentence}")
