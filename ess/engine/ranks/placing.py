"""Where the experts of each layer go, as rank 0 decides from a file of measured loads and tells all
ranks; and that file, which rank 0 writes.

    {"form": "ess expert loads 1", "steps": 2048, "ranks": 4, "experts": 256,
     "layers": {"3": [812, 90, ...], ...}}     of each layer how often each expert was chosen

Layers that the file does not name are placed as if all their experts were chosen equally often.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from ess.comm.experts.balance import Shares, balanced, check_places
from ess.comm.experts.expert_ranks import ExpertRanks
from ess.comm.experts.placement import Placement, Places, even
from ess.comm.team import Team
from ess.errors import BadInput, unreadable
from ess.models.config import ModelConfig

FORM: Final = "ess expert loads 1"
FILE_BYTES_MAX: Final = 64 << 20


class RecordedLoads(msgspec.Struct, frozen=True, kw_only=True):
    form: str
    steps: int
    ranks: int
    experts: int
    layers: dict[int, list[int]]


class AgreedPlaces(msgspec.Struct, frozen=True):
    """The shares of layers without a share of their own, and of layers with one."""

    usual: Shares
    own: dict[int, Shares] = {}


def agreed_places(team: Team, config: ModelConfig, *, redundant: int, path: str) -> Places:
    """The same on all ranks; only rank 0 needs the file, and only its settings count."""
    encoded = b""
    if team.rank == 0:
        encoded = msgspec.json.encode(decided(config, team.size, redundant=redundant, path=path))
    decoded = msgspec.json.decode(team.broadcast(encoded), type=AgreedPlaces)
    own = {layer: Placement(shares) for layer, shares in decoded.own.items()}
    return Places(Placement(decoded.usual), own)


def decided(config: ModelConfig, rank_count: int, *, redundant: int, path: str) -> AgreedPlaces:
    """Without a file or copies experts are where checkpoints have them: in contiguous runs."""
    count = config.expert_count
    check_places(count, rank_count, redundant)
    if not path and not redundant:
        return AgreedPlaces(even(count, rank_count).places)
    loads = {} if not path else read_loads(Path(path), config)
    own = {layer: balanced(chosen, rank_count, redundant) for layer, chosen in loads.items()}
    return AgreedPlaces(balanced([1] * count, rank_count, redundant), own)


def read_loads(path: Path, config: ModelConfig) -> Mapping[int, list[int]]:
    """The loads by layer; BadInput names the file and what is wrong with it."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise BadInput(f"expert_load {path} has more than {FILE_BYTES_MAX:,} bytes")
        recorded = msgspec.json.decode(path.read_bytes(), type=RecordedLoads)
    except OSError as error:
        raise unreadable(f"expert_load {path}", error) from None
    except msgspec.MsgspecError as error:
        raise BadInput(f"expert_load {path} has no expert loads: {error}") from None
    if recorded.form != FORM:
        raise BadInput(f"expert_load {path} has the form {recorded.form!r:.40}, not {FORM!r}")
    _check_loads(path, recorded, config)
    return recorded.layers


def _check_loads(path: Path, recorded: RecordedLoads, config: ModelConfig) -> None:
    count = config.expert_count
    for layer, loads in recorded.layers.items():
        if not 0 <= layer < config.layer_total or not config.has_experts(layer):
            raise BadInput(f"expert_load {path} has layer {layer}, which has no experts here")
        if len(loads) != count or min(loads, default=0) < 0:
            raise BadInput(
                f"expert_load {path} has {len(loads)} loads for layer {layer}, the least"
                f" {min(loads, default=0)}; this model has {count} experts a layer"
            )


def write_loads(path: Path, expert_ranks: ExpertRanks) -> None:
    """Writes the recent choices. A reader sees the former file until the new file is complete."""
    recorded = RecordedLoads(
        form=FORM,
        steps=expert_ranks.loads.step_count,
        ranks=expert_ranks.team.size,
        experts=expert_ranks.places.usual.expert_count,
        layers=expert_ranks.loads.recent(),
    )
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    draft.write_bytes(msgspec.json.encode(recorded))
    draft.replace(path)
