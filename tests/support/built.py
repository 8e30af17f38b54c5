"""A mark of tests that need the native library."""

from __future__ import annotations

import pytest

from ess.kernels.cpu import native

needs_native = pytest.mark.skipif(not native.available(), reason=native.why_missing())
