"""What the rules let pass: for good, with a reason each, or until it is mended.

An entry that is not needed any more is found by `python -m tests.house`; the lists of what is still
to be mended only ever become shorter.
"""

from __future__ import annotations

from typing import Final

KEPT: Final = {
    "ess.pool.lru.cuda:Residency.clear_blocks": "the twin of SparsePool.move_chunk on a device",
}
"""Unused names that stay."""

CIRCLES: Final[frozenset[frozenset[str]]] = frozenset(
    {
        frozenset({"ess.bench.engine.locality", "ess.bench.engine.step"}),
        frozenset({"ess.bench.headline.document", "ess.bench.headline.measured"}),
        frozenset({"ess.flashtrans.lanes", "ess.flashtrans.stream_lane"}),
    }
)
"""To be cut, by the modules of a shortest walk around."""

UNUSED: Final[frozenset[str]] = frozenset(
    {
        "ess.clock:ManualClock",
        "ess.door.offload:Offload.move_budget",
        "ess.door.step:Resolution.is_ready",
        "ess.flashtrans.rows:gather_rows",
        "ess.flashtrans.views:CheckedCopy.with_own_lists",
        "ess.kernels.backend:Ops.write_keys",
        "ess.kernels.backend:Ops.sparse_attention",
        "ess.kernels.checks:check_attention",
        "ess.kernels.cpu.ops:PLAIN_FORMS",
        "ess.kernels.cpu.ops:sparse_attention",
        "ess.kernels.cuda.triton.ops:PLAIN_FORMS",
        "ess.kernels.cuda.triton.ops:sparse_attention",
        "ess.kernels.cuda.triton.rows:store_keys",
        "ess.kernels.merge:merge_all",
        "ess.kernels.reference.formats:write_keys",
        "ess.kernels.reference.formats:read_keys",
        "ess.kernels.reference.formats:page_parts",
        "ess.kernels.reference.formats:hadamard",
        "ess.kernels.reference.ops:sparse_attention",
        "ess.models.chat.reply:parse",
        "ess.models.plain:Drafter",
        "ess.models.plain:PlainDrafter",
        "ess.models.plain:greedy",
        "ess.models.plain:greedy_mtp",
        "ess.models.plain:_equal_prefix",
        "ess.models.precision:as_stored",
        "ess.models.precision:_row_trip",
        "ess.models.precision:_index_trip",
        "ess.models.reading:KNOWN",
        "ess.sim.prefill.chunking:SAMPLES_MIN",
        "ess.sim.prefill.chunking:SAMPLES_MAX",
        "ess.sim.prefill.chunking:PROFILE_REACH",
        "ess.sim.prefill.chunking:ROUNDING_SHARE",
        "ess.sim.prefill.chunking:profile_lengths",
        "ess.sim.prefill.chunking:fit",
        "ess.sim.prefill.chunking:_least_squares",
    }
)
"""To be deleted, or to be used."""

WIDE: Final = {"models": 19, "models/tiny/trainer": 17}
"""Folders that still hold more modules than a folder should."""

SAYS_WHAT_IT_IS: Final = ("ess/pool/", "ess/overlap/")
"""Folders without a loop variable called `one`; in the end all of them."""

TWINS: Final = {
    "ess/kernels": "a backend's file is named as the operation's file in every other backend",
    "bench": "what is measured on a CPU in kernels/ is measured on a GPU in gpu/",
    "models": "a family is named as its chat format, trained weights as the stored ones",
}
"""Layers in which one file name may stand in several rooms."""
