"""Rope as config.json says it, in both spellings, read as transformers reads it. Needs no torch.

New files have `rope_parameters`; old ones `rope_theta` beside `rope_scaling`, which is also what
people add to switch YaRN on. Where a file has both, `rope_scaling` replaces the other whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta, field

from ess.errors import BadInput

Positive = Annotated[float, Meta(gt=0.0, le=1e12)]
Theta = Annotated[float, Meta(gt=1.0, le=1e12)]
Share = Annotated[float, Meta(ge=0.0, le=1e6)]

THETA: Final = 10000.0
LENGTH_MAX: Final = 1 << 32

Kind = Literal["default", "yarn"]


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind = field(name="rope_type", default="default")
    theta: Theta = field(name="rope_theta", default=THETA)
    positions_trained: Annotated[int, Meta(ge=1, le=LENGTH_MAX)] = field(
        name="original_max_position_embeddings", default=1
    )
    factor: Annotated[float, Meta(ge=1.0, le=1e6)] = 1.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    mscale: Share = 0.0
    mscale_all_dim: Share = 0.0
    attention_factor: Positive | None = None

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def rotation_scale(self) -> float:
        """YaRN's factor on cos and sin; 1 for all published configurations."""
        if self.kind == "default":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def softmax_scale(self) -> float:
        """YaRN's factor on attention scores."""
        if self.kind == "default" or not self.mscale_all_dim:
            return 1.0
        return self._magnitude(self.mscale_all_dim) ** 2


def read_rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `Rope` as `given`, a config.json without its nulls, says them.

    A null in the object counts as absent too, but for `factor` and `truncate`, where transformers
    takes it to mean something.
    """
    name, fields = _object(given)
    rope = {key: value for key, value in fields.items() if value is not None}
    rope = {"rope_type": rope.pop("type", "default"), **rope}
    rope.setdefault("rope_theta", given.get("rope_theta", THETA))
    if (kind := rope["rope_type"]) not in get_args(Kind):
        only = " and ".join(get_args(Kind))
        raise BadInput(f"rope_type {kind!r:.40} in {name} is not supported, only {only}")
    if rope.pop("partial_rotary_factor", 1) != 1:
        raise BadInput(f"partial_rotary_factor of {name} is not supported, only 1")
    known = {field.encode_name for field in msgspec.structs.fields(Rope)}
    if unknown := sorted(rope.keys() - known):
        raise BadInput(f"{unknown[0][:60]} in {name} is not supported")
    if kind == "yarn":
        _complete_yarn(rope, fields, given, name=name)
    return rope


def _object(given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The object that counts, and its key."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(given.get(name, {}), Mapping):
            raise BadInput(f"{name} is {given[name]!r:.80}, expected an object")
    scaling, parameters = given.get("rope_scaling"), given.get("rope_parameters", {})
    if not scaling:
        return "rope_parameters", parameters
    theta, replaced = given.get("rope_theta", THETA), parameters.get("rope_theta")
    if scaling.get("rope_theta") is None and replaced not in (None, theta):
        raise BadInput(
            f"rope_scaling replaces rope_parameters whole, and with it rope_theta {replaced!r:.40}"
            f" by {theta!r:.40}: say the rope_theta that is meant in rope_scaling"
        )
    return "rope_scaling", scaling


def _complete_yarn(
    rope: dict[str, Any], fields: Mapping[str, Any], given: Mapping[str, Any], *, name: str
) -> None:
    """The length that the model was trained for, and the factor that follows from it if it is null.

    transformers takes a trained length beside the object before the one in it.
    """
    trained_name, longest = "original_max_position_embeddings", given["max_position_embeddings"]
    trained = given.get(trained_name, rope.get(trained_name, longest))
    rope[trained_name] = trained
    if "factor" not in fields:
        raise BadInput(f"{name} has no factor, which yarn needs")
    if fields.get("truncate", True) is None:
        raise BadInput(f"truncate of {name} is null, must be true or false")
    if fields["factor"] is None:
        if rope.get("mscale_all_dim"):
            raise BadInput(f"factor of {name} is null, but mscale_all_dim needs a number")
        rope["factor"] = _ratio(longest, trained)


def _ratio(longest: Any, trained: Any) -> float | None:
    """None where a length is not valid: that is refused by its own name."""
    for length in (longest, trained):
        if not (isinstance(length, int) and 0 < length <= LENGTH_MAX):
            return None
    return float(longest / trained)
