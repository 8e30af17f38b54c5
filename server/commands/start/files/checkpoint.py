"""What a server reads from its model's folder before anything is loaded: no tensor."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec

from ess.decoding import UNDECODABLE
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.models.guest.codes import FILE as CODED_FILE
from ess.models.guest.pins import GUESTS
from ess.models.guest.place import checkpoint_folder
from ess.models.registry import read_config
from ess.models.weights.expected.host_bytes import host_bytes
from ess.models.weights.expected.shapes import expected_tensors
from ess.models.weights.files.folder import Folder
from ess.models.weights.files.header import Entry, read_header
from ess.models.weights.files.placement import open_files
from ess.server.commands.start.files import hub
from ess.server.process.service import SamplingDefaults

EMBEDDED: Final = "ess-embedded"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The facts in a model's folder that the server needs: no tensor."""

    path: str
    name: str
    config: ModelConfig
    architecture: str
    eos_ids: tuple[int, ...]
    defaults: SamplingDefaults
    weight_bytes: int

    def share_bytes(self, rank_count: int, *, redundant: int = 0) -> int:
        """Bytes on a rank that has all else and its share of the experts, of which `redundant` per
        layer have a second place."""
        values = {True: 0, False: 0}
        for spec in expected_tensors(self.config):
            values[spec.expert is not None] += math.prod(spec.shape)
        routed = self.weight_bytes * values[True] // sum(values.values())
        place_count = self.config.expert_count + redundant
        kept = routed * place_count // max(self.config.expert_count, 1) // rank_count
        return self.weight_bytes - routed + kept


def read_checkpoint(model: str) -> Checkpoint:
    path = _place(model)
    if not path.is_dir() or not (path / "config.json").exists():
        raise BadInput(_why_no_checkpoint(model, path))
    folder = Folder(path)
    try:
        raw = folder.read_json("config.json")
        recommended = folder.read_json_or_empty("generation_config.json")
    finally:
        folder.close()
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return Checkpoint(
        path=str(path),
        name=_name(path),
        config=read_config(raw),
        architecture=str((raw.get("architectures") or ["unknown"])[0]),
        eos_ids=_eos_ids(raw.get("eos_token_id"), recommended.get("eos_token_id")),
        defaults=_defaults(recommended),
        weight_bytes=weights,
    )


def _why_no_checkpoint(model: str, path: Path) -> str:
    """What is at the path instead of a checkpoint, and what to do."""
    if path.suffix == ".gguf" or next(path.glob("*.gguf"), None) is not None:
        return f"{model} is in GGUF: give the folder of the original checkpoint, with safetensors"
    if path.is_file():
        return f"the model {model!r} is a file: give its folder"
    if path.is_dir():
        return f"{model} has no config.json: give the folder that has it and the weights"
    close = difflib.get_close_matches(model, GUESTS)
    if hub.NAME.fullmatch(model) and not path.parent.exists():
        how = f"fetch it: `hf download {model}`, then `ess serve {model}`"
    elif close:
        how = f"did you mean {close[0]}?"
    else:
        how = f"give one, {', '.join(GUESTS)}, or no name for the model in the box"
    return f"the model {model!r} is not a folder with config.json and weights; {how}"


def _place(model: str) -> Path:
    """The model's folder. A guest model is fetched and converted at its first use; ./NAME means a
    folder of that name. ORG/NAME that is no folder is looked for where `hf download` puts it."""
    if model in GUESTS:
        return checkpoint_folder(GUESTS[model])
    if not model or model == EMBEDDED:
        return embedded_path()
    is_name = hub.NAME.fullmatch(model) and not Path(model).exists()
    snapshot = hub.snapshot_of(model, os.environ) if is_name else None
    return snapshot or Path(model)


def _name(path: Path) -> str:
    if path == embedded_path():
        return EMBEDDED
    whole = path.resolve()
    return hub.name_of(whole) or whole.name


def read_entries(path: Path) -> dict[str, Entry]:
    """All tensors by name. Checks that every file is there, and as long as its header says, before
    an engine is started that would fail."""
    files: dict[str, int] = {}
    folder = Folder(path)
    try:
        return open_files(folder, files)
    finally:
        for file in files.values():
            os.close(file)
        folder.close()


def held_bytes(checkpoint: Checkpoint, form: str, *, ranks: int = 1, redundant: int = 0) -> int:
    """Bytes of weights that each engine process on a CPU holds, of which `ranks` divide the
    experts."""
    path = Path(checkpoint.path)
    return host_bytes(
        checkpoint.config,
        read_entries(path),
        form,
        coded=_read_coded(path),
        rank_count=ranks,
        redundant=redundant,
    )


def _read_coded(path: Path) -> dict[str, Entry]:
    """The tensors of a guest's codes; none if there is no such file."""
    folder = Folder(path)
    try:
        if CODED_FILE not in folder.names():
            return {}
        file = folder.open(CODED_FILE, where=str(path))
        try:
            return read_header(file, file=CODED_FILE)
        finally:
            os.close(file)
    finally:
        folder.close()


def embedded_path() -> Path:
    from ess import models

    return Path(models.__file__).parent / "tiny" / "checkpoint"


def _eos_ids(*given: Any) -> tuple[int, ...]:
    listed = [id for ids in given for id in (ids if isinstance(ids, list) else [ids])]
    return tuple(sorted({id for id in listed if isinstance(id, int)}))


def _defaults(recommended: Mapping[str, Any]) -> SamplingDefaults:
    """The checkpoint's recommendations; if it says not to sample, greedy."""
    if recommended.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    names = SamplingDefaults.__dataclass_fields__
    given = {name: recommended[name] for name in names if recommended.get(name) is not None}
    try:
        return msgspec.convert(given, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise BadInput(f"generation_config.json: {error}") from None


def default_sampling(text: str, recommended: SamplingDefaults) -> SamplingDefaults:
    """The recommendations with what the setting changes of them, each value within its bounds."""
    try:
        given = msgspec.json.decode(text, type=dict[str, Any]) if text else {}
        if unknown := given.keys() - SamplingDefaults.__dataclass_fields__.keys():
            known = ", ".join(SamplingDefaults.__dataclass_fields__)
            raise BadInput(f"has {min(unknown)!r:.40}; known are {known}")
        made = msgspec.convert({**asdict(recommended), **given}, SamplingDefaults)
        Sampling(**{**asdict(made), "top_k": max(0, made.top_k)})
    except UNDECODABLE as error:
        raise BadInput(f"default_sampling is not a JSON object of numbers: {error}") from None
    except BadInput as error:
        raise BadInput(f"default_sampling: {error}") from None
    return made
