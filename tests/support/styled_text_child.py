"""A text process that writes conversations in the style of this name, whatever model it reads."""

from __future__ import annotations

import sys

from ess.models.chat import styles
from ess.server.process import text_child

if __name__ == "__main__":
    text_child.main(lambda *_, **__: getattr(styles, sys.argv[1])())
