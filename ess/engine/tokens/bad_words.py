"""Words that a request must not say, as sequences of ids. Needs no torch.

A word is forbidden at its last id, behind its other ids. The words are kept by those other ids, so
a step looks up one end of the output per length, however many words there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BadWords:
    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._lasts: dict[tuple[int, ...], list[int]] = {}
        for *before, last in words:
            self._lasts.setdefault(tuple(before), []).append(last)
        self._lengths = sorted({len(before) for before in self._lasts})

    def forbidden(self, output: Sequence[int], drafts: Sequence[int]) -> list[list[int]]:
        """The ids that may not come behind the output, and behind each of the drafts."""
        reach = self._lengths[-1]
        behind = tuple(output[-reach:]) if reach else ()
        tokens = (*behind, *drafts)
        return [self._after(tokens[: len(behind) + count]) for count in range(len(drafts) + 1)]

    def _after(self, tokens: tuple[int, ...]) -> list[int]:
        ids: list[int] = []
        for length in self._lengths:
            if length <= len(tokens):
                ids += self._lasts.get(tokens[len(tokens) - length :], ())
        return ids
