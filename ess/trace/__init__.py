"""Recorded selections: the positions that every query picked, per step and layer group, on disk.

A file is a preamble, then frames that are only ever appended:

    preamble   "ESSTRACE", version, header length, header check, header (msgpack)
    per step   one STEP frame (number, requests with length, queries and accepted, size per group),
               then one SELS frame per layer group, in order; in a scored trace (version 2)
               each is followed by a SCRS frame: a byte for every position a query could select
    at close   one INDX frame (size of every step), then a trailer that says where it begins

Why a damaged file cannot pass for a whole one: the check of a frame covers its payload, its kind,
its length, its place in the file and the header's check. A flipped bit, a frame that moved, or one
that came from another trace all fail it. No length is believed before it is compared with the size
of the file, and a selection of more than `VALUES_MAX` values is refused on both sides.

A file that was never closed has no index. `TraceReader(path, recover=True)` then walks the frames
and serves every step up to the first frame that is torn or damaged.
"""

from ess.trace.form import RequestStep, TraceHeader
from ess.trace.reader import TraceReader, TraceStep
from ess.trace.writer import TraceWriter

__all__ = ["RequestStep", "TraceHeader", "TraceReader", "TraceStep", "TraceWriter"]
