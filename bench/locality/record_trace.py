"""Selections on real text, recorded as a trace: the rows that each next token selects.

The text is read, not written: the tokens are those of the text whatever the model would say. So the
selections are those of prefill, 32 queries at a time, which is what an offload is handed as windows
when a prompt's last chunk is done. They are the same that decode would make behind the same words.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from ess.bench.engine.around import Around
from ess.bench.engine.decode_arm import lay_in
from ess.bench.harness.prefix import Prefix
from ess.door import Offload, Sequence
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.pool.warmup import WINDOW_MAX
from ess.trace import RequestStep, TraceHeader, TraceWriter
from ess.units import PAGE_ROWS

Windows = npt.NDArray[np.int32]


class Windowed(Around):
    """Keeps the windows that the last prompt brought."""

    windows: Windows

    def warm(self, sequence: Sequence, windows: Windows) -> None:
        self.windows = windows.copy()


def record(path: Path, prefix: Prefix, ids: list[int], *, query_count: int, mtp: int) -> None:
    """The selections of `query_count` words that follow the prefix, `mtp` to a step.

    `prefix` must be laid out of `ids`, so that what follows in `ids` follows in the text.
    """
    if query_count % WINDOW_MAX or WINDOW_MAX % mtp:
        raise BadInput(f"{query_count} queries, {mtp} a step: take multiples of {WINDOW_MAX}")
    start = prefix.length
    if len(ids) <= start + query_count:
        raise BadInput(f"the text has {len(ids)} tokens, {start + query_count + 1} are read")
    header = TraceHeader(
        layout=prefix.layout.name,
        group_count=prefix.layout.group_count,
        top_k=prefix.layout.top_k,
        mtp=mtp,
        context=start + query_count,
        metadata={"text": prefix.text, "context": prefix.shortcut},
    )
    with TraceWriter(path, header=header) as writer:
        for number, windows in enumerate(_windows(prefix, ids, query_count)):
            _write(writer, number * WINDOW_MAX, start, windows, mtp)


def _windows(prefix: Prefix, ids: list[int], query_count: int) -> list[Windows]:
    """Prompt after prompt, each 32 words longer; all but its end is prefix of the one before."""
    layout, start = prefix.layout, prefix.length
    pages = -(-(start + query_count + WINDOW_MAX) // PAGE_ROWS) + 4
    recorded = []
    kept = Windowed()
    with Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.group_layers_max * layout.page_bytes,
        host_bytes=pages * layout.host_page_bytes,
        length_max=pages * PAGE_ROWS,
        slot_floor=1,
        placement=kept.over,
    ) as offload:
        engine = Engine(prefix.model, offload, EngineConfig(mtp=1))
        lay_in(offload, prefix, [ids[: start + 1]])
        for stop in range(start + WINDOW_MAX, start + query_count + 1, WINDOW_MAX):
            request = engine.add(ids[: stop + 1], Sampling(tokens_max=1))
            while request.state in ("waiting", "prefilling"):
                engine.step()
            engine.cancel(request)
            offload.drain()
            recorded.append(kept.windows)
    return recorded


def _write(writer: TraceWriter, first: int, start: int, windows: Windows, mtp: int) -> None:
    for at in range(0, WINDOW_MAX, mtp):
        for group, selections in enumerate(windows):
            writer.write_group(group, selections[at : at + mtp])
        length = start + first + at
        request_step = RequestStep(request=0, length=length, query_count=mtp, accepted=mtp)
        writer.commit_step((first + at) // mtp, [request_step])
