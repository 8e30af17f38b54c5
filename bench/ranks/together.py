"""Runs ranks as threads of one process: returns each one's result, or raises any error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ess.comm.group import Group
from ess.errors import EssError

Made = TypeVar("Made")


def together(groups: Sequence[Group], run: Callable[[Group], Made]) -> list[Made]:
    made: dict[int, Made] = {}
    wrong: list[EssError] = []

    def act(group: Group) -> None:
        try:
            made[group.rank] = run(group)
        except Exception as error:
            group.fail(f"{type(error).__name__}: {error}")
            wrong.append(EssError(f"rank {group.rank}: {error}"))

    threads = [threading.Thread(target=act, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]
    return [made[group.rank] for group in groups]
