"""A pytest plugin for a file of tests whose device only other processes open: none is skipped.

Processes that they start get the pretended device by `tests/device/beside`.
"""

from __future__ import annotations

from ess.kernels.cuda import driver

driver.why_missing = lambda: None
