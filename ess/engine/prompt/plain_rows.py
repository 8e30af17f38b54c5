"""On a device, a pack's sequences position by position, for two layers at a time.

A layer's rows from before the pack come from the host, page by page, one layer ahead on a stream of
their own; the pack's rows are written behind them as they are made. So a query reads no row over
the link: every page crosses it once, whatever selects it. Two sides take turns: a side is filled
for the layer after next when everything that reads it has been queued.

The last page before a pack may be there in part. It is copied whole, and the pack's rows are
written over its rest, behind the copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ess import door
from ess.door.device.memory.uploads import sent
from ess.engine.prompt.downloads import Downloads
from ess.engine.step_bytes import SIDES
from ess.kernels.streams import RowCopy
from ess.units import PAGE_ROWS, align_up

if TYPE_CHECKING:
    from ess.engine.prompt.pack import Computer, Span
    from ess.flashtrans.mover import RowMover


class PlainRows:
    def __init__(self, computer: Computer, spans: Sequence[Span]) -> None:
        device, layout = computer.model.device, computer.offload.layout
        self._computer, self._spans = computer, tuple(spans)
        sizes = [align_up(span.stop, PAGE_ROWS) for span in spans]
        *self._bases, count = accumulate(sizes, initial=0)
        self._sides = [
            torch.empty((count, layout.row_bytes), dtype=torch.uint8, device=device)
            for _ in range(SIDES)
        ]
        self._pages, self._places = (sent(pages, device) for pages in self._before())
        self._stream = _stream(device)
        for each in (*self._sides, self._pages, self._places):
            each.record_stream(self._stream)  # a prompt may end midway, while a copy is under way
        self._landed: dict[int, Any] = {}
        self._downloads = Downloads(device)
        self._numbers = [layer.number for layer in computer.model.layers]
        if layout.mtp_layer_count and computer.model.mtp is not None:
            self._numbers.append(computer.model.mtp.layer.number)

    def _before(self) -> tuple[Tensor, Tensor]:
        """Host pages of what is there before the pack, and where on a side they go, in the order in
        which the pages lie on the host: pages of one region of addresses then cross together."""
        pages, places = [torch.empty(0, dtype=torch.int32)], [torch.empty(0, dtype=torch.int32)]
        for span, base in zip(self._spans, self._bases, strict=True):
            rows = span.sequence.host_rows(0, span.start)[::PAGE_ROWS]
            pages.append((rows // PAGE_ROWS).int())
            places.append(base // PAGE_ROWS + torch.arange(len(rows), dtype=torch.int32))
        order = torch.argsort(torch.cat(pages))
        return torch.cat(pages)[order], torch.cat(places)[order]

    def enter(self, layer: int) -> None:
        """The layer begins, and so does the copy of the next layer."""
        if layer == self._numbers[0]:
            self._fetch(layer)
        at = self._numbers.index(layer)
        if at + 1 < len(self._numbers):
            self._fetch(self._numbers[at + 1])

    def _fetch(self, layer: int) -> None:
        if not len(self._pages):
            return
        memory, device = self._computer.offload.memory(layer), self._computer.model.device
        width = PAGE_ROWS * memory.host.shape[1]
        copy = RowCopy(
            source=memory.host.view(-1, width),
            source_rows=self._pages,
            target=self._side(layer).view(-1, width),
            target_rows=self._places,
        )
        self._stream.wait_stream(torch.cuda.current_stream(device))
        _mover(device.index or 0).queue([copy], self._stream.cuda_stream)
        landed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        landed.record(self._stream)
        self._landed[layer] = landed

    def put(self, layer: int, rows: Sequence[Tensor]) -> None:
        """The new rows of each span."""
        side, landed = self._side(layer), self._landed.pop(layer, None)
        if landed is not None:
            torch.cuda.current_stream(side.device).wait_event(landed)
        for span, base, mine in zip(self._spans, self._bases, rows, strict=True):
            side[base + span.start : base + span.stop].copy_(mine)
            brings = partial(span.sequence.import_rows, layer, span.start)
            self._downloads.bring(mine, brings)

    def put_keys(self, layer: int, keys: Sequence[Tensor]) -> None:
        """Queries read them where they are placed at once."""
        for span, mine in zip(self._spans, keys, strict=True):
            rows = span.sequence
            assert isinstance(rows, door.Sequence), "a device's rows that others have mapped"
            rows.place_keys(layer, span.start, mine)
            brings = partial(rows.import_keys, layer, span.start, is_placed=True)
            self._downloads.bring(mine, brings)

    def tell(self, then: Callable[[], None]) -> None:
        self._downloads.mark(then)

    @property
    def has_landed(self) -> bool:
        return self._downloads.has_landed

    def land(self) -> None:
        self._downloads.land()

    def reading(self, layer: int, at: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
        codes = torch.where(chosen >= 0, chosen + self._bases[at], -1)
        return self._side(layer), codes

    def _side(self, layer: int) -> Tensor:
        return self._sides[self._numbers.index(layer) % SIDES]


@functools.cache
def _stream(device: torch.device) -> Any:
    """One stream serves all packs of a device. Torch has 32 streams and lends them in turn: if each
    pack took its own, every 32nd would share a stream with another owner, and pages would wait for
    that owner's work."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@functools.cache
def _mover(ordinal: int) -> RowMover:
    from ess.flashtrans.mover import RowMover
    from ess.kernels.cuda.driver import shared_device

    return RowMover(shared_device(ordinal))
