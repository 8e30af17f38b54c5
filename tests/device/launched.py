"""`python -m tests.support.pretended tests.device.launched NAME...`: what benchmarks launch once,
so that all is compiled, at sizes for which a host has room."""

from __future__ import annotations

import sys

from ess.bench.engine import device_step
from ess.bench.gpu import attend, experts, layer, layer_points, shapes, suite
from ess.bench.worker import one_gpu
from tests.device import engines

BENCHES, ROWS_OF = attend.benches, device_step.rows_of


def shrink() -> None:
    for at in (layer, layer_points):
        at.BATCHES, at.CONTEXTS = (2, 1), (4 << 10,)
    layer_points.QUERIES = (2,)
    attend.benches = lambda **_: BENCHES(smoke=True)
    shapes.POINTS = [point._replace(batch=2, slab_rows=4096) for point in shapes.POINTS]
    shapes.TOP_K_POINTS, shapes.LOGITS_POINTS = ((2, 32 << 10),), ((1, 2),)
    experts.POINTS = (experts.SMALL,)
    device_step.rows_of = lambda **given: ROWS_OF(**given | {"smoke": True})
    one_gpu.true_plan = one_gpu.small_plan


if __name__ == "__main__":
    shrink()
    with engines.alone():
        for name in sys.argv[1:]:
            suite.launch_all(name)
            print(f"{name} has launched its kernels")
