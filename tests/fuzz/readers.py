"""Readers of files and frames, each with a few good documents."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers

from ess.errors import BadInput
from ess.models.guest.packed import Packed
from ess.models.registry import read_config
from ess.models.text.tokenizer import Tokenizer
from ess.models.weights.files.header import read_header, renamed
from ess.models.weights.files.strict_json import parse_object
from ess.pool.disk.folder import CATALOGUE, SLAB
from ess.prefill import orders, records, reports
from ess.trace import RequestStep, TraceHeader, TraceReader, TraceWriter
from ess.transfer.members import joined, members_of
from ess.transfer.messages import (
    Again,
    Count,
    Heartbeat,
    Hello,
    Message,
    Piece,
    PieceKind,
    Reason,
    Refused,
    Release,
    Reserved,
    Seal,
)
from tests.disk.bytes_of import content, fill, loaded, tier
from tests.support.checkpoints import AXK2, DOTS3, GLM, HY4, MISTRAL4, TINY_LLAMA, V32

SEAL = Seal(b"a secret of all workers")
TAG_BYTES = 16
PAGE_COUNT = 3
WORDS = (("a", "b.x"), ("d", "c"))


class Weights:
    """The header of a safetensors file."""

    name = "safetensors"
    watched = ("models/weights/files/header.py", "models/weights/files/strict_json.py")

    def __init__(self, folder: Path) -> None:
        self._path = folder / "model.safetensors"
        shapes = {"a": ("F32", [2, 3]), "b": ("F8_E4M3", [5]), "c": ("BF16", []), "d": ("I64", [0])}
        tree, at = {"__metadata__": {"format": "pt"}}, 0
        for name, (dtype, shape) in shapes.items():
            size = int(np.prod(shape)) * {"F32": 4, "F8_E4M3": 1, "BF16": 2, "I64": 8}[dtype]
            tree[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        self.bases: list[Any] = [tree]
        self._data_bytes = at

    def wrapped(self, base: int, raw: bytes) -> bytes:
        return len(raw).to_bytes(8, "little") + raw + bytes(self._data_bytes)

    def read(self, base: int, content: bytes) -> None:
        self._path.write_bytes(content)
        file = os.open(self._path, os.O_RDONLY)
        try:
            entries = read_header(file, file="model.safetensors")
        finally:
            os.close(file)
        assert len(renamed(entries, WORDS)) == len(entries), "a tensor has lost its name"
        at = 8 + int.from_bytes(content[:8], "little")
        for entry in entries.values():
            assert entry.begin == at, "a tensor overlaps another, or there is a hole"
            at = entry.end
        assert at == len(content), "bytes are left over"


class Configs:
    """A model's config.json."""

    name = "configs"
    watched = (
        *(
            "models/config.py",
            "models/config_json/reading.py",
            "models/regis*.py",
            "models/config_json/rope.py",
        ),
        *("models/families/deepseek_v32.py", "models/families/glm_dsa.py"),
        *("models/families/axk2.py", "models/families/hy_v4.py"),
        *("models/families/mistral_large4.py", "models/families/dots3.py"),
    )

    def __init__(self, folder: Path) -> None:
        self.bases: list[Any] = [V32, GLM, TINY_LLAMA, AXK2, HY4, MISTRAL4, DOTS3]

    def wrapped(self, base: int, raw: bytes) -> bytes:
        return raw

    def read(self, base: int, content: bytes) -> None:
        config = read_config(parse_object(content, what="config.json"))
        layout = config.layout(row="bf16" if base == 2 else "fp8")
        assert layout.layer_total >= config.layer_count > 0, f"{layout}"
        if not config.recurrent_layers:  # else rows have other numbers than layers
            for layer in (0, *config.window_layers[:1], *config.still_layers[:1]):
                assert layout.row_of(layer).latent_dim == config.at_layer(layer).latent_dim, layer


class Vocabularies:
    """A tokenizer.json, and text through what was read."""

    name = "tokenizers"
    watched = ("models/text/tokenizer.py", "models/text/detokenizer.py")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        library = tokenizers.Tokenizer(tokenizers.models.BPE())
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=270, show_progress=False, initial_alphabet=alphabet, special_tokens=["<e>"]
        )
        library.train_from_iterator(["one two, three"] * 9, trainer)
        library.add_tokens(["two words"])
        self.bases: list[Any] = [json.loads(library.to_str())]

    def wrapped(self, base: int, raw: bytes) -> bytes:
        return raw

    def read(self, base: int, content: bytes) -> None:
        (self._folder / "tokenizer.json").write_bytes(content)
        made = Tokenizer(self._folder)
        ids = made.encode("one two words, \u00e9 <e>")
        assert all(0 <= each < len(made) for each in ids), f"{ids} of {len(made)}"
        made.decode(ids, keep_special=True)
        for each in ids[:4]:
            made.bytes_of(each)


class Packs:
    """A GGUF file, and the reads to try on it. Each is a new file, because the file before may
    still be mapped."""

    name = "ggufs"
    watched = ("models/guest/head.py", "models/guest/packed.py")

    def __init__(self, folder: Path) -> None:
        self._path = folder / "a.gguf"
        writer = gguf.GGUFWriter(self._path, "llama")
        writer.add_uint32("count", 4)
        writer.add_float32("number", 0.5)
        writer.add_bool("flag", True)
        writer.add_array("tokens", ["one", " two"])
        writer.add_array("scores", [1.0, -2.0, 3.0])
        writer.add_tensor("a", np.arange(64, dtype=np.float32).reshape(2, 32))
        writer.add_tensor("b", np.ones(32, np.float16))
        for write in ("header", "kv_data", "tensors"):
            getattr(writer, f"write_{write}_to_file")()
        writer.close()
        self.bases: list[Any] = [self._path.read_bytes()]

    def wrapped(self, base: int, raw: bytes) -> bytes:
        return raw

    def read(self, base: int, content: bytes) -> None:
        self._path.unlink()
        self._path.write_bytes(content)
        packed = Packed(self._path)
        assert 1 <= packed.count("count", 1 << 20) <= 1 << 20
        packed.number("number")
        packed.flag("flag")
        assert packed.text("general.architecture") is not None
        for key, kind in (("tokens", str), ("scores", float)):
            assert all(isinstance(value, kind) for value in packed.listed(key, kind))
        for name, shape in (("a", (2, 32)), ("b", (32,))):
            floats = packed.floats(name, shape)
            assert (floats.dtype, floats.shape) == (np.float32, shape), f"{floats}"


class Traces:
    """A recorded trace, read from its index and without it."""

    name = "traces"
    watched = ("trace/reader.py", "trace/form.py", "trace/varints.py")

    def __init__(self, folder: Path) -> None:
        self._path = folder / "a.trace"
        header = TraceHeader(layout="x", group_count=2, top_k=4, mtp=2, context=100)
        with TraceWriter(self._path, header=header) as writer:
            for number in range(3):
                for group in range(2):
                    selection = np.array([[1, 5, 9, -1], [0, 2, 4, 50 + number]], np.int32)
                    writer.write_group(group, selection)
                row = RequestStep(request=7, length=60 + number, query_count=2, accepted=1)
                writer.commit_step(number, (row,))
        self.bases: list[Any] = [self._path.read_bytes()]

    def wrapped(self, base: int, raw: bytes) -> bytes:
        return raw

    def read(self, base: int, content: bytes) -> None:
        self._path.write_bytes(content)
        with contextlib.suppress(BadInput), TraceReader(self._path, recover=True) as reader:
            list(map(_walk, reader))
        with TraceReader(self._path) as reader:
            list(map(_walk, reader))


def _walk(step: Any) -> None:
    for group in range(2):
        selection = step.selection(group)
        assert selection.shape[0] == step.query_count, f"{selection.shape}"
        assert (selection >= -1).all(), "a position below the pad"
        assert (selection < 100).all(), "a position beyond the context"


class Frames:
    """Messages of a peer that has the secret, groups of stages, and what stages say."""

    name = "frames"
    watched = (
        *("transfer/messages.py", "transfer/members.py"),
        *("prefill/orders.py", "prefill/reports.py", "prefill/records.py"),
    )

    def __init__(self, folder: Path) -> None:
        hellos = [
            self._sealed(Hello(bytes(32), 64, bytes(16), bytes(16), b"a:1"), epoch)
            for epoch in (1, 2)
        ]
        told = [
            Reserved(5, 1, 200, bytes(16), 1, 48, 64, (3, 4)),
            Refused(5, Reason.FULL, 20),
            Piece(5, PieceKind.ROWS, 0, 2, 0, 3, 4096, 99),
            Again(5, PieceKind.WINDOWS, 0, 2, 0, 3),
            Count(5, 64, 200),
            Release(5, Reason.DONE),
            Heartbeat(3),
        ]
        given = [
            orders.Text(1, (1, 2, 3)),
            orders.Open(number=1, uid=9, cached_count=64, load_max=2, salt=b"s", tokens=(5, 6)),
            orders.Load(1, 2),
            orders.Run(7, (orders.Part(1, 0, 64, False), orders.Part(2, 0, 9, True))),
            orders.Meet(hellos[0]),
        ]
        said = [
            reports.Hello(
                first_layer=0,
                stop_layer=2,
                host_pages=8,
                index_pages=8,
                model=bytes(32),
                metadata=hellos[0],
            ),
            reports.Took(1, reports.Free(1, 2, 3, 4)),
            reports.Ran(7, 0.5),
            reports.Released(1, Reason.DEADLINE, "it is over"),
            reports.Counted(1, 2),
        ]
        sealed = [self._sealed(each, 1)[:-TAG_BYTES] for each in told]
        group = joined(SEAL, [(hellos[0], range(2)), (hellos[1], range(2, 5))])
        self.bases: list[Any] = [
            *sealed,
            group,
            records.head(map(orders.pack, given)),
            reports.pack(said),
        ]
        self._sealed_count = len(sealed)

    def _sealed(self, message: Message, sender: int) -> bytes:
        return SEAL.sealed(message, sender=sender, receiver=2)

    def wrapped(self, base: int, raw: bytes) -> bytes:
        return raw

    def read(self, base: int, content: bytes) -> None:
        if base < self._sealed_count:
            envelope = SEAL.opened(content + SEAL._tag(content))
            again = self._sealed(envelope.message, envelope.sender)
            assert SEAL.opened(again).message == envelope.message, "it is not what was sent"
        elif base == self._sealed_count:
            assert members_of(SEAL, content), "a group of none"
        elif base == self._sealed_count + 1:
            told = orders.unpack(content)
            assert orders.unpack(records.head(map(orders.pack, told))) == told, "other orders"
        else:
            said = reports.unpack(content)
            assert repr(reports.unpack(reports.pack(said))) == repr(said), "other reports"


class Disks:
    """The folder of a disk tier: what is found in it is what was stored."""

    name = "disks"
    watched = ("pool/disk/[!e]*.py",)  # `elsewhere` reads no folder

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "disk"
        made = tier(self._folder, pages=8)
        fill(made, range(PAGE_COUNT))
        made.close()
        slab, catalogue = (self._folder / name for name in (SLAB, CATALOGUE))
        self._slab, self._catalogue = slab.read_bytes(), catalogue.read_bytes()
        self.bases: list[Any] = [self._slab, self._catalogue]

    def wrapped(self, base: int, raw: bytes) -> bytes:
        return raw

    def read(self, base: int, content_: bytes) -> None:
        shutil.rmtree(self._folder)
        self._folder.mkdir()
        (self._folder / SLAB).write_bytes(content_ if base == 0 else self._slab)
        (self._folder / CATALOGUE).write_bytes(content_ if base == 1 else self._catalogue)
        made = tier(self._folder, pages=8)
        try:
            are_there = [loaded(made, content(number)) for number in range(PAGE_COUNT)]
            fill(made, range(PAGE_COUNT))
            assert made.uses.fault or all(loaded(made, content(n)) for n in range(PAGE_COUNT))
            made.check()
        finally:
            made.close()
        if not all(are_there):
            raise BadInput(f"{are_there.count(False)} pages are not found; {made.opened}")
