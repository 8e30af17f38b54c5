"""What one latent row is in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from ess.errors import BadInput
from ess.units import align_up

RowForm = Literal["fp8", "fp8_64", "bf16", "f32", "opaque"]

SCALE_GROUP: Final = 128
SCALE_BYTES: Final = 4
BYTE_SCALED: Final = 64  # values that share a scale of one byte, which is a power of two


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise BadInput(sentence)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCodec:
    """One latent row: `latent_dim` values, then `rope_dim` values.

    fp8 stores the latent part as e4m3 with one f32 scale per 128 values and the rope part as bf16;
    bf16 and f32 store both parts plainly; opaque is bytes that only the owner can read.

    fp8_64 is for rows that are keys and values at once: all but the last `plain_dim` values as
    e4m3, then these as bf16, then a scale for each 64 of the others, a byte each (e8m0: of a power
    of two the exponent), then zeros up to a multiple of 8 bytes.
    """

    form: RowForm = "fp8"
    latent_dim: int = 512
    rope_dim: int = 64
    opaque_bytes: int = 0
    plain_dim: int = 0
    row_bytes: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        forms = get_args(RowForm)
        _require(self.form in forms, f"form is {self.form!r}, must be {', '.join(forms)}")
        if self.form == "opaque":
            _require(self.opaque_bytes > 0, "an opaque row needs opaque_bytes > 0")
        else:
            _require(self.latent_dim > 0, f"latent_dim is {self.latent_dim}, must be positive")
            _require(self.rope_dim >= 0, f"rope_dim is {self.rope_dim}, must not be negative")
        if self.form == "fp8":
            _require(
                self.latent_dim % SCALE_GROUP == 0,
                f"latent_dim {self.latent_dim} is not a multiple of the scale group {SCALE_GROUP}",
            )
        if self.form == "fp8_64":
            coded = self.latent_dim - self.plain_dim
            _require(
                self.rope_dim == 0 and self.plain_dim >= 0 == self.plain_dim % 2,
                f"fp8_64 rows have an even plain_dim, not {self.plain_dim}, and no rope_dim,"
                f" not {self.rope_dim}",
            )
            _require(
                coded > 0 and coded % BYTE_SCALED == 0,
                f"latent_dim {self.latent_dim} without plain_dim {self.plain_dim} is not a positive"
                f" multiple of {BYTE_SCALED}",
            )
        object.__setattr__(self, "row_bytes", self._row_bytes())
        _require(self.row_bytes % 4 == 0, f"a row of {self.row_bytes} bytes is not a multiple of 4")

    @property
    def scale_count(self) -> int:
        if self.form == "fp8_64":
            return (self.latent_dim - self.plain_dim) // BYTE_SCALED
        return self.latent_dim // SCALE_GROUP if self.form == "fp8" else 0

    def _row_bytes(self) -> int:
        match self.form:
            case "fp8":
                return self.latent_dim + self.scale_count * SCALE_BYTES + 2 * self.rope_dim
            case "fp8_64":
                return align_up(self.latent_dim + self.plain_dim + self.scale_count, 8)
            case "bf16":
                return 2 * (self.latent_dim + self.rope_dim)
            case "f32":
                return 4 * (self.latent_dim + self.rope_dim)
            case "opaque":
                return self.opaque_bytes
