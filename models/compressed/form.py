"""What a request has beside its entries: the last tokens, as rows and as the input of entries.

Needs no torch. The state has the same size however long the request is. Each field is a ring: the
token at position p lies in line p % lines. The number of lines follows from what is read at any
length L, plus the drafts that may be rejected:

- window: the rows of the last `window` - 1 tokens, which the next token attends to.
- heavy: values and gates of the open window, fewer than `rate` tokens.
- sparse, and the indexer's own: of the open window and, since windows overlap, of the one before.

The header and each field begin at a multiple of `unit` values, a row's: so rows of windows, and
entries behind the state, are rows of one matrix, which attention reads in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from ess.errors import BadInput
from ess.units import PAGE_ROWS, align_up

if TYPE_CHECKING:
    from ess.models.config import Compressed, ModelConfig

Name = Literal["window", "entries", "keys"]
HEADER_BYTES: Final = 16
"""Two whole numbers: the length, and how far lines were ever written."""
HEADER_ALIGNMENT: Final = 8
VALUE_BYTES: Final = 4


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
    unit: int

    @property
    def values(self) -> int:
        """How many values lie behind the header."""
        return sum(align_up(field.values, self.unit) for field in self.fields)

    @property
    def byte_count(self) -> int:
        """The bytes of a state in float32, with its header."""
        return VALUE_BYTES * (self.unit + self.values)

    def bytes_of(self, *, value_bytes: int, row_bytes: int) -> int:
        """With values of `value_bytes`, and rows in a form of `row_bytes`."""
        return sum(
            field.lines * (row_bytes if field.name == "window" else field.width * value_bytes)
            for field in self.fields
        )

    def offset(self, name: Name, layer: int) -> int:
        """Where a field begins, in values behind the header."""
        return self.place(name, layer)[1]

    def place(self, name: Name, layer: int) -> tuple[Field, int]:
        at = 0
        for field in self.fields:
            if (field.name, field.layer) == (name, layer):
                return field, at
            at += align_up(field.values, self.unit)
        raise AssertionError(f"layer {layer} has no {name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPages:
    """Where entries lie that all tokens attend to, behind the state: pages with as many entries of
    each of these layers as a page of the pools has tokens for."""

    layers: tuple[int, ...]
    per_page: int

    @property
    def page_units(self) -> int:
        return len(self.layers) * self.per_page

    def unit(self, layer: int, entries: Any) -> Any:
        """The places of entries in the units after the state; `entries` is a number or an array."""
        before = entries // self.per_page * len(self.layers) + self.layers.index(layer)
        return before * self.per_page + entries % self.per_page


def entry_pages(config: ModelConfig) -> EntryPages:
    own = _own(config)
    layers = tuple(n for n, kind in enumerate(own.kinds) if kind == "heavy")
    page_tokens = PAGE_ROWS * own.sparse_rate
    if layers and page_tokens % own.heavy_rate:
        raise BadInput(
            f"entries of {own.heavy_rate} tokens do not divide a page of {page_tokens} tokens"
        )
    return EntryPages(layers=layers, per_page=page_tokens // own.heavy_rate)


def state_form(config: ModelConfig, *, drafts: int) -> StateForm:
    if drafts < 0:
        raise BadInput(f"{drafts} drafts cannot be taken back")
    own = _own(config)
    fields = []
    for layer in range(config.layer_total):
        kind = own.kinds[layer]
        rings: list[tuple[Name, int, int]] = [("window", own.window - 1, config.value_dim)]
        if kind == "heavy":
            rings += [("entries", own.heavy_rate, 2 * config.value_dim)]
        if kind == "sparse":
            rings += [("entries", 2 * own.sparse_rate, 4 * config.value_dim)]
            rings += [("keys", 2 * own.sparse_rate, 4 * config.index_dim)]
        fields += [
            Field(name=name, layer=layer, lines=lines + drafts, width=width)
            for name, lines, width in rings
        ]
    return StateForm(fields=tuple(fields), drafts=drafts, unit=config.value_dim)


def _own(config: ModelConfig) -> Compressed:
    assert config.compressed is not None, f"{config.family} keeps nothing beside its rows"
    return config.compressed
