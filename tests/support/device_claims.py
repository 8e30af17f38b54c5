"""Slots for new rows in all groups of a device, on a real one and on the emulated driver."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from ess.kernels.cuda.arrays import DeviceArray
from ess.kernels.cuda.driver import Device
from ess.kernels.cuda.graphs import CudaGraph
from ess.kernels.cuda.streams import CudaStream
from ess.pool.lru import specification
from ess.pool.lru.cuda_new_rows import NewRows
from ess.pool.lru.cuda_shape import NOW, REPORT
from ess.pool.lru.cuda_workspaces import now_of
from tests.support.residency_scenarios import SLAB, arena_on, ints
from tests.support.twins import ROW_COUNT, Side


def new_rows_get_slots_in_all_groups(step_count=6, row_max=12):
    """Two groups over one slab, pads among the rows; then the second group alone."""
    random, device, stream = np.random.default_rng(3), Device(), CudaStream(Device())
    here = Side(specification, (3, 2)).arenas
    slab = {name: DeviceArray(device, getattr(here[0], name)) for name in SLAB[1:-1]}
    there = [SimpleNamespace(**vars(arena_on(device, arena)) | slab) for arena in here]
    line = DeviceArray(device, np.full((1, row_max), -1, np.int32))
    now = DeviceArray(device, np.zeros(len(NOW), np.int32))
    new = NewRows(device, there, line, now, ints=lambda n: ints(device, n), block_max=3)
    graphs = {groups: CudaGraph(device) for groups in (range(2), range(1, 2))}
    for groups, graph in graphs.items():
        with graph.capture(stream.handle):
            new.claim(groups, stream=stream.handle)
    for step in range(300, 300 + step_count):
        groups = range(step % 3 == 0, 2)
        rows = random.permutation(ROW_COUNT)[:row_max].astype(np.int32)
        rows[random.random(row_max) < 0.2] = -1
        kept, arenas = rows[rows >= 0], [here[group] for group in groups]
        slots, absent = np.zeros((len(groups), kept.size), np.int32), np.zeros(2, np.int32)
        given = {"step": step, "out": slots, "absent": absent}
        assert specification.claim_each(arenas, kept, **given) == len(groups)
        line.write(rows[None])
        now.write(now_of(step=step, ticket=0, query_count=77))
        graphs[groups].launch(stream.handle)
        stream.synchronize()
        slots_there = new.slots.read().reshape(2, row_max)[groups.start :]
        np.testing.assert_array_equal(slots_there[:, rows >= 0], slots)
        assert (slots_there[:, rows < 0] == -1).all()
        reports = new.reports.read().reshape(2, len(REPORT))[groups.start :]
        named = dict(zip(REPORT, reports.T.tolist(), strict=True))
        assert named["claimed"] == absent[: len(groups)].tolist()
        assert not any(map(any, (named["places"], named["faults"])))
        for group, arena in enumerate(here):
            for name in SLAB:
                array = getattr(there[group], name).read()
                np.testing.assert_array_equal(array, getattr(arena, name), f"{name} of {group}")
        here[0].dirty[:] = 0
        slab["dirty"].write(here[0].dirty)
