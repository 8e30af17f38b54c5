"""Everything in this folder needs a CUDA device, and says why it is skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from ess.kernels.cuda import driver

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    missing = driver.why_missing() if ours else None
    for item in ours if missing else ():
        item.add_marker(pytest.mark.skip(reason=missing))
