"""No object may be pickled or unpickled while ranks meet and talk."""

from __future__ import annotations

import pickle
from typing import NoReturn


def poison_pickle() -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("an object was pickled")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        setattr(pickle, name, refuse)
