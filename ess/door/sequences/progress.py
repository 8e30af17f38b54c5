"""A sequence's tokens, how many of its rows exist, and the steps that it is in."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from ess.door.memory.pools import Pools
from ess.door.sequences.holding import Holding
from ess.door.sequences.kept import kept_ends
from ess.errors import BadInput, BadState
from ess.pool.index import NONE
from ess.pool.prefix import page_hash
from ess.units import PAGE_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a sequence has at first: `length` rows, of `text_length` of its `tokens`, on
    `published_count` full pages. `text_hash` is the hash of the last of these, or the salt's."""

    tokens: list[int]
    length: int
    text_length: int
    text_hash: bytes
    published_count: int


class Progress:
    """The door tells it what happens; `Sequence` shows the caller what it knows."""

    def __init__(
        self,
        pools: Pools,
        holding: Holding,
        start: Start,
        number: int,
    ) -> None:
        self.number = number
        self.tokens = start.tokens
        self.length = start.length
        self.cached_count = start.length // PAGE_ROWS * PAGE_ROWS
        self.step_numbers: tuple[int, ...] = ()
        self.ahead_count = 0
        self.arrival_count = 0
        self.text_hash = start.text_hash
        self.published_count = start.published_count
        self._layout = pools.layout
        self._text_length = start.text_length
        self.is_withheld = False
        self._pools = pools
        self._holding = holding
        self._noticed_count = 0
        self._begun_count = 0
        self._has_stepped = False

    @property
    def text_length(self) -> int:
        """How many tokens the rows, and the state beside them, cover."""
        return self.length if self._layout.row_tokens == 1 else self._text_length

    def reached(self, text_length: int) -> None:
        """Notes that rows of `text_length` tokens have been imported, and the state beside them."""
        self.refresh()
        wanted = self._layout.rows_of(text_length)
        if self.length != wanted or not self._text_length <= text_length <= len(self.tokens):
            raise BadInput(
                f"sequence {self.number} has {self.length} rows and {len(self.tokens)} tokens, of"
                f" which {self._text_length} were reached: {text_length} need {wanted} rows"
            )
        self._text_length = text_length
        self._pools.tables.set_text(self._holding.line, text_length)
        self.keep_state(prompt_end=len(self.tokens) - 1)

    def keep_state(self, *, prompt_end: int) -> None:
        """Where a state is to be kept, unless a step that is not learned has changed it."""
        end, size, states = self.text_length, self._layout.page_tokens, self._pools.states
        if states is None or self.is_withheld:
            return
        if self._holding.line != NONE and end != self._device_length:
            return
        if end in kept_ends(max(0, end - 1), end, prompt_end=prompt_end, page_tokens=size):
            done = self.published_count * size
            content = self.text_hash
            for start in range(done, end, size):
                content = page_hash(content, self.tokens[start : start + size])
            self._holding.keep_state(content, end)

    @property
    def _device_length(self) -> int:
        """How many tokens the state beside the rows covers; steps that are not learned count."""
        tables = self._pools.tables
        counts = tables.lengths if self._layout.row_tokens == 1 else tables.texts
        return int(counts[self._holding.line])

    def refresh(self) -> None:
        """Takes notice of what has been imported since."""
        if self._noticed_count != self.arrival_count:
            self._noticed_count = self.arrival_count
            if self._has_stepped:  # its rows may be on their way to the host, which counts them
                self._pools.inflight.drain()
            self.length = self._pools.latent.leading_count(self._holding.host_pages)
            if self._holding.line != NONE:
                self._pools.tables.set_length(self._holding.line, self.length)
            self.publish()

    def loaded(self, count: int) -> None:
        """`count` pages more than were cached before have come from the disk."""
        self.cached_count += count * PAGE_ROWS
        self.arrival_count += 1
        self._begun_count = self.arrival_count
        self.refresh()

    def landed(self) -> None:
        """Notes that all rows before the last token, and the state beside them, have come from
        another worker."""
        self.arrival_count += 1
        self._text_length = len(self.tokens) - 1
        self.refresh()
        if self._holding.saved is not None:
            self.keep_state(prompt_end=self.text_length)

    def check_start(self, start: int | None) -> int:
        """Where the next step starts at most: behind the rows that are there. Where imported rows
        end early that is most likely a mistake of the caller, who would bring the row of another
        position; so then `start` must say it. Where nothing was imported the steps themselves bring
        every row.
        """
        if self._noticed_count != self.arrival_count:
            self.refresh()
        end = self.length + self.ahead_count
        if start is not None and not self.length <= start <= end:
            raise BadInput(f"sequence {self.number} continues at position {end}, not at {start}")
        if start is not None or self._begun_count == self.arrival_count:
            return end
        known_count = self._layout.rows_of(len(self.tokens) - 1)
        if self.length < known_count:
            raise BadState(
                f"sequence {self.number}: of {known_count} rows before its last token "
                f"{self._arrived(known_count)}; import the others, or say starts=[{self.length}]"
            )
        return end

    def _arrived(self, known_count: int) -> str:
        """How many of these rows the layers of the main model have, in words."""
        rows, latent = self._holding.host_rows(0, known_count), self._pools.latent
        counts = [int(latent.is_stored(n, rows).sum()) for n in range(latent.layout.layer_count)]
        least, most = int(np.argmin(counts)), int(np.argmax(counts))
        if counts[least] == counts[most]:
            return f"every layer has {counts[least]}"
        return f"layer {least} has {counts[least]}, layer {most} has {counts[most]}"

    def joined(self, step_number: int, count: int) -> None:
        """A step brings `count` rows; the host will learn how many of them are kept."""
        self._begun_count = self.arrival_count
        self.step_numbers = (*self.step_numbers, step_number)
        self.ahead_count += count

    def learned(
        self, step_number: int, count: int, kept: int, ids: Many[int] | None, *, text: int
    ) -> None:
        """The step brought `count` rows, of which `kept` were kept; `text` are their tokens."""
        assert self.step_numbers[0] == step_number, "steps are learned in their order"
        assert 0 <= kept <= count <= self.ahead_count, "rows were learned that no step brought"
        before = self.length if self._layout.row_tokens == 1 else self._text_length
        if ids is not None and (known_count := len(self.tokens) - before) >= 0:
            self.tokens.extend(ids[known_count:])
        self._has_stepped = True
        self.length += kept
        self._text_length += text
        self.ahead_count -= count
        self.step_numbers = self.step_numbers[1:]
        if self.length >= (self.published_count + 1) * PAGE_ROWS:
            self.publish()
        if self._pools.states is not None and len(self.tokens) >= self.text_length:
            self.keep_state(prompt_end=0)

    def withhold(self) -> None:
        """From now on no page of its text is published."""
        self.is_withheld = True

    def publish(self) -> None:
        """Publishes the pages that are complete and whose text is known, in order."""
        if self.is_withheld or self.length < (self.published_count + 1) * PAGE_ROWS:
            return
        latent, size = self._pools.latent, self._layout.page_tokens
        full_count = min(self.length, self._layout.rows_of(len(self.tokens))) // PAGE_ROWS
        full = self._holding.host_pages[self.published_count : full_count]
        complete = full[: latent.complete_count(full)].tolist()
        for page, host_page in enumerate(complete, start=self.published_count):
            text = self.tokens[page * size : (page + 1) * size]
            parent, self.text_hash = self.text_hash, page_hash(self.text_hash, text)
            self.published_count = page + 1
            latent.publish(host_page, self.text_hash, parent=parent, text=text)
