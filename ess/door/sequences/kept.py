"""States kept for later prompts: what requests have beside their rows.

Rows of a cached prefix are not enough where a request keeps something beside them: it begins where
a state was kept too. One is kept at the end of a page: of the last page before a prompt's last
token, and of every `KEPT_TOKENS` tokens. Like its page it is known by the page's text. It goes when
the page goes, or when others need its room: the longest unused first. It counts as used when a
prompt ends in its page again, and when a request begins with it, except for the first such request:
a conversation continues from its last state once, and leaves a later state. If that first use
counted too, half as many conversations would find their state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Many
from typing import Final

from ess.array_types import Bytes
from ess.units import align_up

KEPT_TOKENS: Final = 8192


class KeptStates:
    """The states take at most `byte_max` bytes of the host. Listens to the prefix cache."""

    def __init__(self, byte_max: int) -> None:
        self.byte_max = byte_max
        self.byte_count = 0
        self._state_of: OrderedDict[bytes, Bytes] = OrderedDict()
        self._begun: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._state_of)

    def keep(self, content: bytes, state: Bytes) -> None:
        """Keeps a copy of the state, unless there is already a copy for this text."""
        if content in self._state_of:
            self._state_of.move_to_end(content)
            return
        while self._state_of and self.byte_count + state.nbytes > self.byte_max:
            self._drop(next(iter(self._state_of)))
        if state.nbytes <= self.byte_max:
            self._state_of[content] = state.copy()
            self.byte_count += state.nbytes

    def longest(self, contents: Many[bytes]) -> int:
        """How many of these pages of one text a request may begin behind."""
        for count in range(len(contents), 0, -1):
            if contents[count - 1] in self._state_of:
                return count
        return 0

    def of(self, content: bytes) -> Bytes:
        return self._state_of[content]

    def begun(self, content: bytes) -> None:
        """A request has begun with the state kept under this content."""
        if content in self._begun:
            self._state_of.move_to_end(content)
        self._begun.add(content)

    def _drop(self, content: bytes) -> None:
        self._begun.discard(content)
        self.byte_count -= self._state_of.pop(content).nbytes

    # ---- as the prefix cache says

    def published(self, content: bytes, *, parent: bytes, text: Many[int]) -> None:
        return

    def forgotten(self, contents: Many[bytes]) -> None:
        for content in contents:
            if content in self._state_of:
                self._drop(content)

    def emptied(self) -> None:
        self.forgotten([*self._state_of])

    def check(self) -> None:
        total = sum(state.nbytes for state in self._state_of.values())
        assert self._begun <= self._state_of.keys(), "a state that is gone counts as begun with"
        assert total == self.byte_count <= self.byte_max, f"{total} bytes of states are kept"


def kept_ends(start: int, stop: int, *, prompt_end: int, page_tokens: int) -> list[int]:
    """The token counts behind which states are kept, from `start` up to `stop`, in a prompt whose
    rows are made of `prompt_end` tokens."""
    every = align_up(KEPT_TOKENS, page_tokens)
    ends = set(range(start // every * every + every, stop + 1, every))
    last = prompt_end // page_tokens * page_tokens
    return sorted(ends | ({last} if start < last <= stop else set()))
