"""Does a checkpoint hold exactly the tensors that its configuration promises?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.models.weights.expected.shapes import Spec, expected_tensors, scale_shape
from ess.models.weights.files.header import Entry

FP8: Final = "F8_E4M3"
# F8_E8M0 and U8 hold power-of-two scales as bare exponents.
SCALE_DTYPES: Final = ("F32", "F8_E8M0", "U8")
_DTYPES: Final = {
    "linear": (FP8, "BF16", "F16", "F32"),
    "table": ("BF16", "F16", "F32"),
    "norm": ("F32", "BF16", "F16"),
    "correction": ("F32", "BF16"),
    "numbers": ("I64", "I32"),
}
_PACKED: Final = (".weight_packed", ".weight_shape", ".weight_scale", ".weight_zero_point")
_NAMED_MAX: Final = 4


def verify(
    entries: Mapping[str, Entry], config: ModelConfig, *, mtp: bool, where: str
) -> dict[str, Spec]:
    """The specs to load, by name. With `mtp` off, MTP tensors may be there, whole or in part."""
    _refuse_packed(entries)
    known = {spec.name: spec for spec in expected_tensors(config)}
    wanted = {spec.name: spec for spec in expected_tensors(config, mtp=mtp)}
    present = [spec for name, spec in known.items() if name in entries]
    for spec in present:
        _check_tensor(entries, spec)
    scales = {spec.scale_name: spec for spec in present if entries[spec.name].dtype == FP8}
    required = [name for name, spec in wanted.items() if not spec.optional]
    required += [name for name, spec in scales.items() if spec.name in wanted]
    missing = [name for name in required if name not in entries]
    if missing:
        raise BadInput(f"{where} lacks {_some(missing)}")
    unexpected = [name for name in entries if name not in known and name not in scales]
    unexpected = [name for name in unexpected if not name.startswith(config.unread_prefixes)]
    if unexpected:
        file = entries[unexpected[0]].file
        raise BadInput(f"{where}: {file} holds {_some(unexpected)}, not in the shape formula")
    return {spec.name: spec for spec in present if spec.name in wanted}


def _check_tensor(entries: Mapping[str, Entry], spec: Spec) -> None:
    entry = entries[spec.name]
    if entry.shape != spec.shape:
        raise BadInput(f"{entry} is {list(entry.shape)}, the configuration says {list(spec.shape)}")
    if entry.dtype not in _DTYPES[spec.role]:
        raise BadInput(f"{entry} is {entry.dtype}, a {spec.role} is one of {_DTYPES[spec.role]}")
    if entry.dtype != FP8 or spec.scale_name not in entries:
        return
    scale, needed = entries[spec.scale_name], scale_shape(spec.shape)
    if scale.shape != needed:
        raise BadInput(
            f"{scale} is {list(scale.shape)}, but {list(spec.shape)} has {list(needed)} blocks"
        )
    if scale.dtype not in SCALE_DTYPES:
        raise BadInput(f"{scale} is {scale.dtype}, a scale is one of {SCALE_DTYPES}")


def _refuse_packed(entries: Mapping[str, Entry]) -> None:
    for entry in entries.values():
        if entry.name.endswith(_PACKED):
            raise BadInput(
                f"{entry} belongs to a compressed-tensors pack;"
                " ESS reads DeepSeek's fp8 blocks and plain bf16, f16 or f32"
            )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    shown = ", ".join(repr(name[:120]) for name in listed[:_NAMED_MAX])
    more = len(listed) - _NAMED_MAX
    word = "tensor" if len(listed) == 1 else f"{len(listed):,} tensors:"
    return f"{word} {shown}" + (f" and {more:,} more" if more > 0 else "")
