"""What a request has beside its entries: the last tokens, as rows and as what entries are made of.

Needs no torch. It is one state of one size, however long the request is. Each field is a ring: the
token at position p stands in line p % lines. How many lines there are follows from what is read at
any length L, plus the drafts that may be taken back:

- window: the rows of the last `window` - 1 tokens, which the next token attends to.
- heavy: values and gates of the open window, fewer than `rate` tokens.
- sparse, and the indexer's own: of the open window and, since windows overlap, of the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.units import div_ceil

Name = Literal["window", "entries", "keys"]
WORD_BYTES: Final = 8
HEADER_BYTES: Final = (
    2 * WORD_BYTES
)  # two whole numbers: the length, and how far lines were ever written


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """`lines` of `width` values each of one layer: rows, or what entries or index keys are made
    of."""

    name: Name
    layer: int
    lines: int
    width: int

    @property
    def values(self) -> int:
        return self.lines * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class StateForm:
    fields: tuple[Field, ...]
    drafts: int
    """How many tokens may be taken back."""

    @property
    def values(self) -> int:
        return sum(field.values for field in self.fields)

    @property
    def byte_count(self) -> int:
        """In float32, with the header, in whole words."""
        return HEADER_BYTES + div_ceil(4 * self.values, WORD_BYTES) * WORD_BYTES

    def bytes_of(self, *, value_bytes: int, row_bytes: int) -> int:
        """With values of `value_bytes`, and rows in a form of `row_bytes`."""
        return sum(
            field.lines * (row_bytes if field.name == "window" else field.width * value_bytes)
            for field in self.fields
        )

    def offset(self, name: Name, layer: int) -> int:
        """Where a field begins, in values."""
        at = 0
        for field in self.fields:
            if (field.name, field.layer) == (name, layer):
                return at
            at += field.values
        raise AssertionError(f"layer {layer} has no {name}")


def state_form(config: ModelConfig, *, drafts: int) -> StateForm:
    if drafts < 0:
        raise BadInput(f"{drafts} drafts cannot be taken back")
    own = config.compressed
    assert own is not None, f"{config.family} keeps nothing beside its rows"
    fields = []
    for layer, kind in enumerate(own.kinds):
        made: list[tuple[Name, int, int]] = [("window", own.window - 1, config.value_dim)]
        if kind == "heavy":
            made += [("entries", own.heavy_rate, 2 * config.value_dim)]
        if kind == "sparse":
            made += [("entries", 2 * own.sparse_rate, 4 * config.value_dim)]
            made += [("keys", 2 * own.sparse_rate, 4 * config.index_dim)]
        fields += [
            Field(name=name, layer=layer, lines=lines + drafts, width=width)
            for name, lines, width in made
        ]
    return StateForm(fields=tuple(fields), drafts=drafts)
