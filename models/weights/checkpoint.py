"""A Hugging Face checkpoint as it lies on disk: opened whole, read tensor by tensor.

Opening reads config.json, the index and every header, and proves that names, shapes and dtypes
are what the configuration promises. No tensor byte is read until a tensor is asked for; then the
file is mapped and the tensor is a view into the mapping.

The mapping is private and copy-on-write: torch wants writable memory, and a write into a view by
mistake changes this process only, never the file.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Mapping
from typing import Any, Final, Self

import msgspec
import torch

from ess.errors import BadInput, BadState
from ess.models.config import ModelConfig
from ess.models.registry import read_config
from ess.models.weights.blocks import as_scale
from ess.models.weights.expected.shapes import HEAD, Spec
from ess.models.weights.expected.verify import FP8, verify
from ess.models.weights.files.folder import Folder
from ess.models.weights.files.header import DTYPE_BYTES, Entry, renamed
from ess.models.weights.files.placement import open_files
from ess.models.weights.stored import stores_fp8

# Not in Python 3.11's mmap module. Without it Linux may refuse a private mapping larger than RAM.
_NORESERVE: Final = 0x4000 if sys.platform == "linux" else 0
_TORCH: Final = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
}


class Checkpoint:
    """An open checkpoint. Views of its tensors stay valid after `close`: they hold the mapping."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mtp: bool | None = None,
    ) -> None:
        """`mtp` None loads the MTP layer if the configuration has one."""
        self._files: dict[str, int] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._folder = Folder(path)
        try:
            self.config: Mapping[str, Any] = self._folder.read_json("config.json")
            config = read_config(self.config)
            stores_fp8(self.config)
            mtp_count = config.mtp_layer_count
            self.mtp = mtp_count > 0 if mtp is None else mtp
            if self.mtp and not mtp_count:
                raise BadInput("config.json: num_nextn_predict_layers is 0, but MTP was asked for")
            self._entries = renamed(open_files(self._folder, self._files), config.words)
            where = str(self._folder.path)
            self.specs: Mapping[str, Spec] = verify(
                self._entries, config, mtp=self.mtp, where=where
            )
            self.model_config = _head_as_stored(config, self.specs)
        except BaseException:
            self.close()
            raise

    def entry(self, name: str) -> Entry:
        """The entry of a tensor, or BadInput."""
        if name not in self._entries:
            raise BadInput(f"{self._folder.path} has no tensor {name[:200]!r}")
        return self._entries[name]

    def blocked(self, name: str) -> bool:
        """Is this weight stored in fp8 blocks?"""
        return self.entry(name).dtype == FP8

    def stored(self, name: str) -> torch.Tensor:
        """The tensor as it is stored: a view of the file, or a copy where it is not aligned."""
        entry = self.entry(name)
        dtype = _TORCH[entry.dtype]
        if not entry.bytes:
            return torch.empty(entry.shape, dtype=dtype)
        mapped = self._map(entry.file)
        if entry.begin % DTYPE_BYTES[entry.dtype]:
            copied = bytearray(mapped[entry.begin : entry.end])
            return torch.frombuffer(copied, dtype=dtype).view(entry.shape)
        count = entry.bytes // DTYPE_BYTES[entry.dtype]
        flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=entry.begin)
        return flat.view(entry.shape)

    def scale(self, name: str) -> torch.Tensor:
        """The f32 scales of an fp8 weight, checked."""
        scale_name = self.specs[name].scale_name
        return as_scale(self.stored(scale_name), what=str(self.entry(scale_name)))

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        self._maps.clear()
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            if file not in self._files:
                raise BadState(f"{self._folder.path} is closed")
            self._maps[file] = mmap.mmap(
                self._files[file],
                0,
                flags=mmap.MAP_PRIVATE | _NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        return self._maps[file]


def _head_as_stored(config: ModelConfig, specs: Mapping[str, Spec]) -> ModelConfig:
    """A stored head is used, even if tie_word_embeddings says that the head is the embedding.
    Transformers does the same where the two differ; where they are equal, it makes no difference.
    """
    if config.tie_head and HEAD in specs:
        return msgspec.structs.replace(config, tie_head=False)
    return config
