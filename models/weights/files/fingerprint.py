"""Whether two workers serve the same checkpoint, told from little of it.

Rows of other weights do not fail: they give fluent wrong answers. So workers compare fingerprints
before they exchange rows: of config.json as a whole and, of each file of weights, its name, its
size and `SAMPLES` blocks over its length, the first of them its header's beginning.
"""

from __future__ import annotations

import hashlib
import os
from typing import Final

from ess.models.weights.files.folder import Folder, read_at

SAMPLES: Final = 64
BLOCK_BYTES: Final = 4096
FINGERPRINT_BYTES: Final = 32


def fingerprint(path: str | os.PathLike[str]) -> bytes:
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    folder = Folder(path)
    try:
        digest.update(folder.read("config.json"))
        for name in folder.names():
            if name.endswith(".safetensors"):
                digest.update(_sampled(folder, name))
    finally:
        folder.close()
    return digest.digest()


def _sampled(folder: Folder, name: str) -> bytes:
    fd = folder.open(name, where="the fingerprint of the weights")
    try:
        size = os.fstat(fd).st_size
        digest = hashlib.blake2b(f"{name} {size}".encode())
        for number in range(SAMPLES):
            at = max(0, size - BLOCK_BYTES) * number // (SAMPLES - 1)
            digest.update(read_at(fd, at, min(BLOCK_BYTES, size - at)))
        return digest.digest()
    finally:
        os.close(fd)
