"""What lies on the device, beside what plans say: run by `test_pretended_steps`."""

from __future__ import annotations

import gc

import pytest
import torch

from ess.door import Offload
from ess.kernels.cuda import driver
from ess.pool.device_bytes import PoolShape, pool_bytes
from tests.device import engines
from tests.support.pretended import is_there


def tensor_bytes() -> int:
    """Of the tensors of the device that are alive, memory that several share counted once."""
    gc.collect()
    there = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    with torch._C.DisableTorchFunction():
        held = [tensor.untyped_storage() for tensor in there if is_there(tensor)]
        return sum({memory.data_ptr(): memory.nbytes() for memory in held}.values())


def driver_bytes() -> int:
    free_bytes, total_bytes = driver.Device().memory()
    return total_bytes - free_bytes


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("family", ["v32", "glm"])
def test_pools_take_what_their_plan_says(family, mtp):
    config = engines.model(family, "cpu").config
    layout = config.layout(row="fp8")
    if not mtp:
        layout = engines.without_mtp(config).layout(row="f32", index="f32")
    shape = PoolShape(
        layout=layout, chunks=37, index_pages=21, sequence_max=5, length_max=700, query_max=12
    )
    tensors, given = tensor_bytes(), driver_bytes()
    offload = Offload.create(
        layout,
        device="cuda:0",
        slot_bytes=37 * layout.chunk_bytes,
        host_bytes=33 * layout.host_page_bytes,
        index_bytes=21 * layout.index_page_bytes,
        sequence_max=5,
        length_max=700,
        query_max=12,
        slot_floor=16,
    )
    planned = pool_bytes(shape)
    pools = offload._pools
    assert planned["slots"] == pools.sparse.slab.nbytes
    assert planned["index keys"] == pools.index.keys.pages.nbytes
    assert planned["row maps"] == pools.sparse.slot_of.nbytes
    assert sum(planned.values()) == tensor_bytes() - tensors + driver_bytes() - given
    offload.close()
