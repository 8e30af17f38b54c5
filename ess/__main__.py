"""`python -m ess` is the command `ess`."""

from __future__ import annotations

import sys

from ess.scripts import ess

if __name__ == "__main__":
    sys.exit(ess())
