"""What the rules let pass for good, with a reason each."""

from __future__ import annotations

from typing import Final

KEPT: Final = {
    "ess.adapters.vllm.connector:EssConnector": "vLLM loads it by the path of its module",
    "ess.door.steps.placement:Resolution.is_ready": "an engine of your own may poll, not wait",
    "ess.flashtrans.rows:gather_rows": "half of FlashTrans' public door, beside scatter_rows",
    "ess.models.compressed.plain:Plain.guesses": "the specification that drafts are held to",
    **dict.fromkeys(
        (
            "ess.kernels.cuda.triton.finish:finish_keys",
            "ess.kernels.cuda.triton.finish:finish_rows",
            "ess.kernels.cuda.triton.finish:hadamard",
            "ess.kernels.cuda.triton.finish:turn_queries",
            "ess.kernels.cuda.triton.received:add_received",
            "ess.kernels.cuda.triton.received:gate_received",
            "ess.kernels.cuda.triton.received:take_received",
            "ess.kernels.cuda.triton.rows:decode_rows",
            "ess.kernels.cuda.triton.rows:encode_rows",
            "ess.kernels.cuda.triton.rows:store_rows",
            "ess.kernels.reference.finish:finish_keys",
            "ess.kernels.reference.finish:turn_queries",
            "ess.kernels.reference.received:add_received",
            "ess.kernels.reference.received:gate_received",
            "ess.kernels.reference.received:take_received",
        ),
        "an op, called by this name of the set of ops",
    ),
    **dict.fromkeys(
        (
            "ess.transfer.transports.inprocess:Exchange",
            "ess.transfer.transports.inprocess:InProcessTransport",
        ),
        "workers of one thread: a campaign injects this transport, so that a seed replays a run",
    ),
}
"""Unused names that stay."""

TWINS: Final = {
    "ess/kernels": "a backend's file is named as the operation's file in every other backend",
    "bench": "what is measured on a CPU in kernels/ is measured on a GPU in gpu/",
    "models": "a family is named as its chat format, trained weights as the stored ones",
}
"""Layers in which one file name may stand in several rooms."""
