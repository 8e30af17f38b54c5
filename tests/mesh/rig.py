"""A mesh in threads: each rank has its part of a small model, and the first one is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from ess.comm.group import Group
from ess.comm.local import local_group
from ess.door import Offload
from ess.door.team_host import TeamHost
from ess.engine.config import EngineConfig
from ess.engine.mesh.engines import Follower, Lead, MeshEngine
from ess.flashtrans.patient import PatientLane
from ess.models.model import Model
from ess.models.registry import build
from ess.models.weights.split import HEAD_TENSORS
from tests.comm.test_local import each
from tests.ranks.rig import weights
from tests.support.manual_lane import ManualLane

LAYERS = 3
PARTS = {1: ((0, 3),), 2: ((0, 1), (1, 3)), 3: ((0, 1), (1, 2), (2, 3))}
PATIENCE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`chunks` of slots for each group; pages of the device, where they are not as many as on the
    host."""

    family: str = "v32"
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    mtp: int = 1
    index_pages: int | None = None


def part_of(shape: Shape, group: Group) -> Model:
    config, whole = weights(shape.family)
    layers = range(*PARTS[shape.pp][group.rank // shape.tp])

    def own(name: str) -> torch.Tensor:
        if not name.endswith(HEAD_TENSORS):
            return whole[name]
        return torch.chunk(whole[name], shape.tp)[group.team.rank].contiguous()

    return build(config, own, layers=layers, tp=shape.tp)


def engine(shape: Shape, group: Group, **config) -> MeshEngine:
    model = part_of(shape, group)
    kept = model.config
    if shape.mtp == 1:
        kept = msgspec.structs.replace(kept, mtp_layer_count=0)
    whole = kept.layout(row="f32", index="f32")
    layout = whole.part(*PARTS[shape.pp][group.rank // shape.tp])
    pages = shape.index_pages
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.group_layers_max * layout.page_bytes * shape.chunks,
        host_bytes=60 * layout.host_page_bytes,
        index_bytes=None if pages is None else pages * layout.index_page_bytes,
        length_max=1024,
        slot_floor=24,
        lane=PatientLane(ManualLane(seed=shape.chunks + group.rank, delay_max=3)),
        common=TeamHost(group.team) if shape.tp > 1 else None,
        poison=True,
    )
    settings = EngineConfig(**{"mtp": shape.mtp, "chunk_tokens": 48, "budget_every": 0, **config})
    made = MeshEngine if group.rank else Lead
    return made(model, offload, settings, group)


def run_mesh(shape: Shape, act: Callable[[Lead], object], **config) -> object:
    """What `act` makes of the lead; then all ranks close, and their pools must be empty."""

    def run(group: Group) -> object:
        try:
            return _ran(engine(shape, group, **config), act)
        except BaseException as wrong:
            group.fail(f"{type(wrong).__name__}: {wrong}")
            raise

    weights(shape.family)  # read once, before there are threads
    groups = local_group(shape.tp * shape.pp, team=shape.tp, patience_s=PATIENCE_S)
    results = each(groups, run)
    wrong = [result for result in results if isinstance(result, BaseException)]
    if wrong:
        raise ExceptionGroup("ranks", wrong)
    return results[0]


def _ran(made: MeshEngine, act: Callable[[Lead], object]) -> object:
    result = None
    if isinstance(made, Lead):
        result = act(made)
        made.close()
    else:
        Follower(made).run()
    made.check()
    made.offload.drain()
    stats = made.offload.stats()
    assert stats.used_slot_count.sum() == 0
    assert stats.free_host_page_count == stats.host_page_count
    made.offload.close()
    return result
