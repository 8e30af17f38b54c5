"""What the addresses of pages have in common, for the settings too: they are read without the
packages of a web server."""

from __future__ import annotations

from typing import Final

PORTS: Final = {"http": "80", "https": "443"}
"""The port of a scheme, which browsers leave out."""
ANY: Final = "*"
