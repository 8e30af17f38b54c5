"""How many requests a GPU's memory holds, by the ledger that would admit them.

Slots and index share the device memory. For a batch the index gets exactly what its pages need, and
slots get the rest. The ledger then says whether the batch is admitted, and if not, which account
falls short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ess.errors import BadInput, PoolFull
from ess.layout import ModelLayout
from ess.pool.capacity import Capacity, needs, page_count
from ess.pool.ledger import Ledger

BATCH_MAX: Final = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One GPU's memory for latent slots and index, and its share of host memory.

    `count_map` adds the row -> slot map (4 bytes per token and group) to an index page; published
    tables leave it out.
    """

    layout: ModelLayout = field(default_factory=ModelLayout.deepseek_v32)
    device_bytes: int
    host_bytes: int | None = None
    count_map: bool = True

    @property
    def slot_bytes(self) -> int:
        return self.layout.slot_bytes

    @property
    def index_page_bytes(self) -> int:
        return self.layout.index_page_bytes if self.count_map else self.layout.key_page_bytes

    def index_bytes(self, *, context: int, batch: int) -> int:
        return batch * page_count(context) * self.index_page_bytes

    def window_bytes(self, *, context: int, batch: int) -> int:
        """Bytes of slots in groups with a window."""
        floor = self.layout.window_floor
        return batch * min(context, floor) * self.layout.window_slot_bytes

    def slots_each(self, *, context: int, batch: int) -> int:
        """Slots per layer group that every request of this batch can have; 0 if none are left."""
        left = self.device_bytes - self.index_bytes(context=context, batch=batch)
        left -= self.window_bytes(context=context, batch=batch)
        return min(context, max(0, left) // self.slot_bytes // max(batch, 1))

    def books(self, *, context: int, batch: int) -> Ledger:
        """A ledger with memory divided for this batch."""
        pages = batch * page_count(context)
        windows = batch * min(context, self.layout.window_floor)
        return self._ledger(index_pages=pages, page_total=pages, window_slots=windows)

    def _ledger(self, *, index_pages: int, page_total: int, window_slots: int = 0) -> Ledger:
        """A ledger with at most `index_pages`, then at most `window_slots`, and slots from the
        rest. A host without a given memory has `page_total` pages."""
        index_pages = min(index_pages, self.device_bytes // self.index_page_bytes)
        left = self.device_bytes - index_pages * self.index_page_bytes
        if window_slots:
            window_slots = min(window_slots, left // self.layout.window_slot_bytes)
            left -= window_slots * self.layout.window_slot_bytes
        if self.host_bytes is not None:
            page_total = self.host_bytes // self.layout.host_page_bytes
        capacity = Capacity(
            slots=left // self.slot_bytes,
            window_slots=window_slots,
            index_pages=index_pages,
            host_pages=page_total,
        )
        return Ledger(capacity.accounts(self.layout, index_page_bytes=self.index_page_bytes))

    def split_for(self, lengths: Sequence[int], *, slot_floor: int | None) -> Ledger:
        """A division for requests of these lengths: slots and index pages run out together.

        Each reserves its floor of slots, or its whole length where no floor is given. The longest
        gets its pages if the device can hold them.
        """
        pages = [page_count(length) for length in lengths]
        slots = [length if slot_floor is None else min(length, slot_floor) for length in lengths]
        windows = sum(min(each, self.layout.window_floor) for each in slots)
        window_bytes = windows * self.layout.window_slot_bytes
        index_bytes = sum(pages) * self.index_page_bytes
        total = index_bytes + window_bytes + sum(slots) * self.slot_bytes
        share = index_bytes / total
        index_pages = max(int(share * self.device_bytes) // self.index_page_bytes, max(pages))
        windows = int(windows / total * self.device_bytes)
        return self._ledger(index_pages=index_pages, page_total=sum(pages), window_slots=windows)

    def admit(self, *, context: int, batch: int, slots_each: int) -> None:
        """Raises PoolFull, with the limiter and the numbers, unless the whole batch is admitted."""
        books = self.books(context=context, batch=batch)
        floor = self.layout.window_floor
        books.reserve(needs(context, slots=slots_each, window_floor=floor, batch=batch))
        books.check()

    def refusal(self, *, context: int, batch: int, slots_each: int) -> PoolFull | None:
        try:
            self.admit(context=context, batch=batch, slots_each=slots_each)
        except PoolFull as full:
            return full
        return None

    def batch_max(self, *, context: int, slots_each: int, multiple: int = 1) -> int:
        """The largest admitted batch, in whole multiples; 0 when not one request fits."""
        if context < 1 or slots_each < 0 or multiple < 1:
            asked = f"context {context}, slots {slots_each}, multiple {multiple}"
            raise BadInput(f"{asked}: context and multiple must be 1 or more, slots not negative")
        fits, fails = 0, BATCH_MAX
        while fails - fits > 1:
            middle = (fits + fails) // 2
            short = self.refusal(context=context, batch=middle, slots_each=slots_each)
            fits, fails = (middle, fails) if short is None else (fits, middle)
        return fits // multiple * multiple
