"""Settings of `kv_connector_extra_config`, and values read from vLLM's own configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from ess.errors import BadInput, Unavailable
from ess.layout import ModelLayout
from ess.models.registry import read_config
from ess.transfer.messages import Seal

STAGING_MIN: Final = 1024
"""The most that one transfer takes, in pages of keys."""

Port = Annotated[int, Meta(ge=0, le=65535)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`peers_host` is the address of this node for decode workers and routers. Rank r of a node
    listens on `peers_port + r`; transfers take any port unless `transfer_port` gives the first one.
    `weights` names the checkpoint where the decode workers name it too."""

    secret_file: str = ""
    secret_variable: str = "ESS_PEER_SECRET"
    peers_host: str = "127.0.0.1"
    peers_port: Port = 8998
    transfer_host: str = "127.0.0.1"
    transfer_port: Port = 0
    weights: str = ""
    lease_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    wait_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    staging_pages: Annotated[int, Meta(ge=STAGING_MIN, le=1 << 20)] = 4096

    def seal(self) -> Seal:
        return Seal(self._secret().strip().encode())

    def _secret(self) -> str:
        if self.secret_file:
            try:
                return Path(self.secret_file).read_text()
            except (OSError, UnicodeDecodeError) as wrong:
                raise Unavailable(f"secret_file {self.secret_file!r}: {wrong}") from None
        if secret := os.environ.get(self.secret_variable):
            return secret
        raise BadInput(
            f"there is no secret: set secret_file in kv_connector_extra_config, or"
            f" {self.secret_variable} in the environment, to that of the decode workers"
        )


def read_settings(extra: Mapping[str, Any]) -> Settings:
    try:
        return msgspec.convert(dict(extra), Settings)
    except msgspec.ValidationError as wrong:
        raise BadInput(f"kv_connector_extra_config is not as it must be: {wrong}") from None


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers vLLM splits a model over, and which of its engines this is."""

    tensor_count: int = 1
    pipeline_count: int = 1
    context_count: int = 1
    engine: int = 0

    def check(self) -> None:
        for name, count in (
            ("--pipeline-parallel-size", self.pipeline_count),
            ("--decode-context-parallel-size", self.context_count),
        ):
            if count != 1:
                raise BadInput(
                    f"{name} is {count}: every rank must have all rows of all layers, so 1"
                )

    def source(self, uid: int) -> int:
        """The rank that a request leaves from: all have the same rows, and uids are random."""
        return uid % self.tensor_count

    def port(self, first: int, rank: int) -> int:
        """A rank's port; 0 stays 0, which means any port."""
        return first and first + self.engine * self.tensor_count + rank


def read_ranks(parallel: Any) -> Ranks:
    """Reads vLLM's ParallelConfig; the names are the same since 0.11."""
    return Ranks(
        tensor_count=parallel.tensor_parallel_size,
        pipeline_count=parallel.pipeline_parallel_size,
        context_count=getattr(parallel, "decode_context_parallel_size", 1)
        * getattr(parallel, "prefill_context_parallel_size", 1),
        engine=getattr(parallel, "data_parallel_rank", 0),
    )


def read_layout(model: Mapping[str, Any], *, with_mtp: bool) -> ModelLayout:
    """The layout from the model's config.json. Where vLLM does not run the MTP layers it keeps no
    rows for them, and a decode worker that wants them refuses to connect."""
    raw = dict(model) if with_mtp else {**model, "num_nextn_predict_layers": 0}
    config = read_config(raw)
    if config.compressed is not None:
        raise BadInput(f"{config.family} keeps states beside its rows: they are not handed over")
    return config.layout()
