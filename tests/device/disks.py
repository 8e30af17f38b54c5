"""Pages of the prefix cache that come from a disk: run by `test_forward_steps`."""

from __future__ import annotations

import pytest

from ess.door import Offload
from ess.engine.tokens.sampling import Sampling
from ess.pool.disk.tier import DiskTier
from tests.device import engines
from tests.support.checkpoints import tokens

pytestmark = pytest.mark.usefixtures("alone")

COUNT = 200


def said(device, **more):
    """What the engine said, and how much of the prompt it found."""
    eng = engines.engine(device, mode="dba", **more)
    prompt = tokens(COUNT, engines.VOCABULARY, seed=5)
    request = eng.add(prompt, Sampling(tokens_max=6, ignore_eos=True))
    for _ in eng.run():
        eng.check()
    eng.offload.close()
    return request.output, request.cached_count


def test_another_process_goes_on_from_the_disk(tmp_path, monkeypatch):
    wanted, _ = said("cpu")
    create = Offload.create

    def with_disk(layout, **given):
        page_bytes = layout.host_page_bytes
        disk = DiskTier(
            tmp_path, identity=b"tiny", page_bytes=page_bytes, capacity_bytes=64 * page_bytes
        )
        return create(layout, disk=disk, **given)

    monkeypatch.setattr(Offload, "create", with_disk)
    assert said("cuda") == (wanted, 0)
    made, cached_count = said("cuda", graphs="many")
    assert made == wanted
    assert cached_count >= 128
