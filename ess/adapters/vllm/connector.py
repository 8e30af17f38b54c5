"""The class that vLLM loads. It has not yet run inside a live vLLM: see docs/vllm.md.

    vllm serve MODEL --kv-cache-dtype fp8_ds_mla --kv-transfer-config '{
      "kv_connector": "EssConnector", "kv_connector_module_path": "ess.adapters.vllm.connector",
      "kv_role": "kv_producer", "kv_connector_extra_config": {"peers_host": "10.0.0.1"}}'

vLLM makes an object of it in its scheduler and one in each worker. Both only pass calls on to
`requests` and `departing`, which decide and know nothing of vLLM's classes. Importing this module
imports vLLM; no other module of ESS imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ess.adapters.vllm.departing import Departing
from ess.adapters.vllm.requests import Reached, Requests, StepOrders
from ess.adapters.vllm.settings import (
    Ranks,
    Settings,
    read_layout,
    read_ranks,
    read_settings,
)
from ess.errors import BadInput, Unavailable

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        SupportsHMA,
    )
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
except ImportError as missing:
    raise Unavailable(
        "ess.adapters.vllm.connector is loaded by vLLM, 0.15 or later, and works nowhere else:"
        f" {missing}"
    ) from missing


@dataclass
class EssMetadata(KVConnectorMetadata):  # type: ignore[misc]
    step: StepOrders


@dataclass
class EssHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    reached: Reached


class EssConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Producer only: rows leave vLLM, none come in."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_role != "kv_producer":
            raise BadInput(f"kv_role is {transfer.kv_role!r}: EssConnector is a kv_producer")
        settings = read_settings(transfer.kv_connector_extra_config)
        ranks = read_ranks(vllm_config.parallel_config)
        ranks.check()
        self._requests: Requests | None = None
        self._departing: Departing | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._requests = Requests(settings, ranks)
        else:
            self._departing = _departing(vllm_config, settings, ranks)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True: a replayed graph would not say when a layer is computed."""
        return True

    # ---- in the scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.admitted(request)

    def build_connector_meta(self, scheduler_output: Any) -> EssMetadata:
        return EssMetadata(self._scheduling.step(scheduler_output))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request, [block for group in block_ids for block in group])

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduling.sent(sorted(connector_output.finished_sending or ()))

    def has_pending_push_work(self) -> bool:
        """While this is True vLLM keeps stepping, and its workers report what has been sent."""
        return self._scheduling.is_pending

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._scheduling.reached({rank: met.reached for rank, met in metadata.items()})

    # ---- in a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._sending.register(kv_caches)

    def get_handshake_metadata(self) -> EssHandshake:
        return EssHandshake(self._sending.reached)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """vLLM calls this once before each step; nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: this side only sends."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Before any block of the step is written: stops reading blocks that were given up."""
        super().bind_connector_metadata(connector_metadata)
        self._sending.begin(connector_metadata.step)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._sending.layer_made(layer_name)

    def wait_for_save(self) -> None:
        self._sending.step_made()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        return self._sending.ended() or None, None

    def shutdown(self) -> None:
        if self._departing is not None:
            self._departing.close()

    @property
    def _scheduling(self) -> Requests:
        assert self._requests is not None, "vLLM asks a worker what only its scheduler knows"
        return self._requests

    @property
    def _sending(self) -> Departing:
        assert self._departing is not None, "vLLM asks its scheduler what only a worker knows"
        return self._departing


def _departing(vllm_config: Any, settings: Settings, ranks: Ranks) -> Departing:
    model = vllm_config.model_config.hf_config.to_dict()
    has_mtp = vllm_config.speculative_config is not None
    return Departing(
        read_layout(model, with_mtp=has_mtp),
        settings,
        ranks,
        rank=get_tensor_model_parallel_rank(),
        block_rows=vllm_config.cache_config.block_size,
    )
