"""Which files of a folder hold a checkpoint's tensors, and which tensors they hold. Reads none of
them."""

from __future__ import annotations

from typing import Final

from ess.errors import BadInput
from ess.models.weights.files.folder import Folder, check_plain_name
from ess.models.weights.files.header import Entry, read_header

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def open_files(folder: Folder, files: dict[str, int]) -> dict[str, Entry]:
    """Every tensor of every file, each in exactly the file where the index puts it. The descriptors
    go into `files`, whose owner closes them, also if this raises."""
    placed = placement(folder)
    names = [SINGLE_FILE] if placed is None else sorted(set(placed.values()))
    where = str(folder.path) if placed is None else INDEX_FILE
    entries: dict[str, Entry] = {}
    for file in names:
        files[file] = folder.open(file, where=where)
        for name, entry in read_header(files[file], file=file).items():
            if placed is not None and placed.get(name) != file:
                raise BadInput(f"{entry} is not placed in this file by {INDEX_FILE}")
            entries[name] = entry
    for name, file in (placed or {}).items():
        if name not in entries:
            raise BadInput(f"{INDEX_FILE} places tensor {name[:200]!r} in {file}: not there")
    return entries


def placement(folder: Folder) -> dict[str, str] | None:
    """Tensor name -> file by the index; None for a single file. `total_size` is not read: in the
    published V3.2 index it is twice the number of values, not bytes."""
    names = folder.names()
    if INDEX_FILE not in names:
        _check_single(folder, names)
        return None
    placed = folder.read_json(INDEX_FILE).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise BadInput(f"{INDEX_FILE} has no weight_map")
    for name, file in placed.items():
        where = f"{INDEX_FILE}: tensor {name[:200]!r}"
        if not check_plain_name(file, where=where).endswith(".safetensors"):
            raise BadInput(f"{where} is in {file!r}; {_why_not(file)}")
    _check_fetched(names, sorted(set(placed.values())))
    return placed


def _check_fetched(names: list[str], files: list[str]) -> None:
    missing = [file for file in files if file not in names]
    if missing:
        sentence = f"{INDEX_FILE} names {len(files)} files; missing: {len(missing)}"
        raise BadInput(f"{sentence}, first {missing[0]!r}; fetch the weights again")


def _check_single(folder: Folder, names: list[str]) -> None:
    if SINGLE_FILE in names:
        return
    pickled = next((name for name in names if name.endswith(_PICKLED)), None)
    if pickled is not None:
        raise BadInput(f"{folder.path} holds {pickled!r}; {_why_not(pickled)}")
    raise BadInput(f"{folder.path} has neither {INDEX_FILE} nor {SINGLE_FILE}: fetch the weights")


def _why_not(file: str) -> str:
    if file.endswith(_PICKLED):
        return "pickled weights can run code when they are read; convert them to safetensors"
    return "only .safetensors files are read"
