"""Paths of other servers, and of OpenAI's own, that are not served here, and why."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_WHY: Final[Mapping[str, str]] = {
    "/chat talks to the model, /dashboard shows the server at work, /docs its routes": "/",
    "did you mean /health?": "/livez",
    "this server makes text: no embeddings, scores or classes": (
        "/v1/embeddings /embeddings /embed /encode /v1/rerank /v2/rerank /rerank /v1/score /score"
        " /v1/classify /classify /pooling /v1/moderations"
    ),
    "this server makes text from text": "/v1/audio /v1/images /v1/videos /v1/realtime",
    "files, batches and threads are not kept: send each request by itself": (
        "/v1/files /v1/uploads /v1/batches /v1/vector_stores /v1/assistants /v1/threads"
        " /v1/conversations /v1/messages/batches /v1/fine_tuning /v1/evals /v1/containers"
    ),
    "there are no adapters": (
        "/v1/load_lora_adapter /v1/unload_lora_adapter /load_lora_adapter /unload_lora_adapter"
    ),
    "memory is not given back: /pause only pauses, so stop a server that is not needed": (
        "/sleep /wake_up /is_sleeping /release_memory_occupation /resume_memory_occupation"
    ),
    "weights stay as they are: stop the server, and start it with others": (
        "/update_weights_from_disk /update_weights_from_tensor /update_weights_from_distributed"
        " /update_weights_from_ipc /update_weights /init_weights_update_group"
        " /destroy_weights_update_group /init_weight_transfer_engine /get_weights_by_name"
    ),
    "every request has its whole prompt": "/open_session /close_session /v1/responses/compact",
    "the number of workers stays: start another, and tell the router": (
        "/scale_elastic_ep /is_scaling_elastic_ep"
    ),
    "/tokenize and /detokenize use it, and the model's folder has its files": (
        "/tokenizer_info /get_tokenizer_info"
    ),
    "Ollama's routes are not served: take a client of OpenAI, with the address /v1": "/api",
    "llama.cpp's routes are not served: ask /v1/completions": (
        "/completion /infill /props /slots /apply-template /lora-adapters /embedding"
    ),
    "text-generation-inference's routes are not served: ask /v1/completions": (
        "/generate_stream /chat_tokenize /info"
    ),
}
ABSENT: Final[Mapping[str, str]] = MappingProxyType(
    {path: why for why, paths in _WHY.items() for path in paths.split()}
)


def why_absent(path: str) -> str:
    """Why there is no such path, or nothing below it; empty if none of these servers has it."""
    known = path.rstrip("/") or "/"
    while known not in ABSENT and "/" in known[1:]:
        known = known.rpartition("/")[0]
    return ABSENT.get(known, "")
