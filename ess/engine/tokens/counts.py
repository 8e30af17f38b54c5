"""The distinct tokens of a request's prompt and output, and how often its output has each.

A tally follows the output as it grows, so a step costs what is new and not what there is. Drafts
are counted ahead without being entered: query i of a step sees the drafts up to its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Ahead:
    """Ids [n]; for each query of a step how many `times` each is in the output, and whether it was
    `seen` at all: in the prompt or in the output."""

    ids: NDArray[np.int64]
    times: NDArray[np.float32]
    seen: NDArray[np.bool_]


class Tally:
    def __init__(self, prompt: Sequence[int]) -> None:
        ids = np.unique(np.asarray(prompt, np.int64))
        self._place = {token: place for place, token in enumerate(ids.tolist())}
        self._ids = ids
        self._times = np.zeros(len(ids), np.float32)
        self._followed_count = 0

    def follow(self, output: Sequence[int]) -> None:
        """Enter the tokens of `output` that are new since the last call."""
        assert len(output) >= self._followed_count, "an output never shrinks"
        for token in output[self._followed_count :]:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                self._grow()
            self._ids[place] = token
            self._times[place] += 1
        self._followed_count = len(output)

    def ahead(self, drafts: Sequence[int]) -> Ahead:
        """The counts as each query sees them: the first query, and the query behind each draft."""
        known = len(self._place)
        fresh = {token: known + i for i, token in enumerate(set(drafts) - self._place.keys())}
        shape = (len(drafts) + 1, known + len(fresh))
        times, seen = np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
        times[:, :known] = self._times[:known]
        seen[:, :known] = True
        for query, token in enumerate(drafts, start=1):
            assert token >= 0, f"{token} is no token"
            place = fresh[token] if token in fresh else self._place[token]
            times[query:, place] += 1
            seen[query:, place] = True
        return Ahead(np.append(self._ids[:known], np.array([*fresh], np.int64)), times, seen)

    def check(self, output: Sequence[int]) -> None:
        """`output` is the list that `follow` was given last, perhaps grown since."""
        known, counted = len(self._place), output[: self._followed_count]
        assert len(counted) == self._followed_count, "more tokens were counted than were made"
        assert known <= len(self._ids) == len(self._times), f"{known} tokens in {len(self._ids)}"
        assert [*self._place.values()] == [*range(known)], "two tokens share a place"
        assert self._ids[:known].tolist() == [*self._place], "a place has another token's id"
        counts = Counter(counted)
        times = [counts[token] for token in self._place]
        assert self._times[:known].tolist() == times, "a token was counted too often or too seldom"

    def _grow(self) -> None:
        room = max(64, len(self._ids))
        self._ids = np.append(self._ids, np.zeros(room, np.int64))
        self._times = np.append(self._times, np.zeros(room, np.float32))
