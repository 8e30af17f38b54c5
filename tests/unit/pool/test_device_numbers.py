"""Numbers of 32 bits that a device counts with, at sizes that no test allocates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from ess.door.device.memory.keys import WORD, DeviceKeys  # noqa: E402
from ess.layout import ModelLayout  # noqa: E402
from ess.units import PAGE_ROWS  # noqa: E402

LAYOUT = ModelLayout(name="t", layer_count=2, groups=((0, 1),))


@pytest.mark.parametrize("page", [3, 254_200, 1_000_000])
def test_scales_of_keys_of_pages_beyond_two_gigabytes(page):
    keys = DeviceKeys(LAYOUT, 4, SimpleNamespace(home=torch.device("cpu")), poison=False)
    places = keys.places(torch.tensor([page * PAGE_ROWS + 5, -1], dtype=torch.int32))
    assert places.scales.tolist() == [(page * 64 * 132 + 64 * 128) // WORD + 5, -1]
    assert places.values.tolist() == [(page * 64 * 132 + 5 * 128) // 128, -1]
    assert places.scales.dtype == torch.int32
