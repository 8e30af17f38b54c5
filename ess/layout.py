"""What one token costs and how layers share selections: data, validated, no code paths.

Nothing else in ESS knows 656, 61 or "one indexer per layer". A layout carries the row codec, the
index codec, the layer groups (layers that share one indexer selection) and the model's dimensions.
The MTP module is one more layer, the last, in a group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Final, Literal

from ess.errors import BadInput
from ess.row_codec import BYTE_SCALED as BYTE_SCALED
from ess.row_codec import SCALE_BYTES as SCALE_BYTES
from ess.row_codec import SCALE_GROUP as SCALE_GROUP
from ess.row_codec import RowCodec as RowCodec
from ess.row_codec import RowForm as RowForm
from ess.units import PAGE_ROWS, div_ceil

IndexForm = Literal["fp8", "f32"]
ScaleFormat = Literal["ue8m0", "f32"]
RopeStyle = Literal["half", "interleaved"]

EXPERTS_MAX: Final = 512  # of one layer: the most that a compiled stage routes among


def check_part(groups: Sequence[Sequence[int]], layer_count: int, first: int, stop: int) -> None:
    """May main layers first..stop-1 stand alone? Layers that share a selection stay together."""
    if not 0 <= first < stop <= layer_count:
        raise BadInput(f"layers {first}..{stop - 1} are no part of layers 0..{layer_count - 1}")
    for group in groups:
        for edge in (first, stop):
            if group[0] < edge <= group[-1]:
                raise BadInput(
                    f"a part cannot begin at layer {edge}: layers {group[0]}..{group[-1]} share one"
                    f" selection, so a part begins at {group[0]} or {group[-1] + 1}"
                )


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise BadInput(sentence)


def _is_whole(number: object) -> bool:
    """NumPy's whole numbers are; True is a number in Python, and an index of another kind."""
    return isinstance(number, Integral) and not isinstance(number, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCodec:
    """One indexer key. fp8: `key_dim` e4m3 bytes and one f32 scale, block-split per page of 64.

    `unit` neighbouring rows share a key, that of the last of them: a page has 64 / unit keys.

    `hadamard`, `scale_format` and `rope_style` say how a key was made; both sides of a dot product
    must agree on them, so they travel with every page.
    """

    form: IndexForm = "fp8"
    key_dim: int = 128
    head_count: int = 64
    hadamard: bool = True
    scale_format: ScaleFormat = "ue8m0"
    rope_style: RopeStyle = "half"
    unit: int = 1

    def __post_init__(self) -> None:
        _require(self.form in ("fp8", "f32"), f"index form is {self.form!r}, must be fp8 or f32")
        _require(
            self.key_dim > 0 and self.key_dim % 4 == 0,
            f"key_dim is {self.key_dim}, must be a positive multiple of 4",
        )
        _require(self.head_count > 0, f"head_count is {self.head_count}, must be positive")
        _require(
            0 < self.unit <= PAGE_ROWS and PAGE_ROWS % self.unit == 0,
            f"unit is {self.unit}, must divide the {PAGE_ROWS} rows of a page",
        )

    @property
    def value_bytes(self) -> int:
        return self.key_dim if self.form == "fp8" else 4 * self.key_dim

    @property
    def scale_bytes(self) -> int:
        return SCALE_BYTES if self.form == "fp8" else 0

    @property
    def key_bytes(self) -> int:
        return self.value_bytes + self.scale_bytes

    @property
    def page_bytes(self) -> int:
        return PAGE_ROWS // self.unit * self.key_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """A model as the pools see it. `groups` cover layers 0..layer_count-1, then the MTP layers.

    Layers of a group share one selection; its first layer has the indexer. For a model of your own:
    an Offload reads only `groups`, `row`, `index` (None: index keys are not kept here), `top_k`,
    `slot_floor` and the layer counts, and names it by `name`. The other dimensions are for the
    engine and the planner.

    `rows` is the codec of each group where they differ, and `row` is then the widest of them.

    A row may hold `row_tokens` tokens. Then positions and pages count rows, and the lengths of
    texts count tokens. `state_bytes` are what a request of any length keeps on the device beside
    its rows; `state_page_bytes` come on top for each page that it may have. There is room for
    `verified_max` tokens of a step in it (0: for any number); if that is more than one, the rows of
    an MTP module are in it too.

    `windows` gives for each group the number of last tokens that it attends to, 0 where an indexer
    selects among all; it is empty where all groups have an indexer. A group with a window has no
    index keys, and a sequence reserves slots for its window there, not the floor.

    Neighbouring rows that share a key (`index.unit`) are chosen together: an indexer chooses among
    the whole units of a sequence, and the rows behind the last whole one are always in. `top_k` is
    the most rows of a selection, those included.

    A part of a model is a layout too, its layers and groups counted from 0; `first_layer`,
    `first_group` and `first_key_layer` are their numbers in the whole model, `bytes_before` the
    bytes of a token's rows in earlier layers; `mtp_elsewhere`: another part has the MTP layers.
    """

    name: str
    layer_count: int
    groups: tuple[tuple[int, ...], ...]
    row: RowCodec = field(default_factory=RowCodec)
    index: IndexCodec | None = field(default_factory=IndexCodec)
    top_k: int = 2048
    mtp_layer_count: int = 0
    head_count: int = 128
    hidden_dim: int = 7168
    nope_dim: int = 128
    value_dim: int = 128
    query_rank: int = 1536
    slot_floor: int = 6400
    windows: tuple[int, ...] = ()
    rows: tuple[RowCodec, ...] = ()
    row_tokens: int = 1
    state_bytes: int = 0
    state_page_bytes: int = 0
    verified_max: int = field(default=0, compare=False)
    first_layer: int = field(default=0, compare=False)
    first_group: int = field(default=0, compare=False)
    first_key_layer: int = field(default=0, compare=False)
    bytes_before: int = field(default=0, compare=False)
    mtp_elsewhere: bool = field(default=False, compare=False)
    key_groups: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _places: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _require(self.layer_count > 0, f"layer_count is {self.layer_count}, must be positive")
        _require(self.mtp_layer_count >= 0, f"mtp_layer_count is {self.mtp_layer_count}")
        _require(self.top_k > 0, f"top_k is {self.top_k}, must be positive")
        _require(self.slot_floor > 0, f"slot_floor is {self.slot_floor}, must be positive")
        _require(self.row_tokens > 0, f"row_tokens is {self.row_tokens}, must be positive")
        self._check_unit()
        listed = [layer for group in self.groups for layer in group]
        _require(
            listed == list(range(self.layer_total)) and all(self.groups),
            f"groups must list layers 0..{self.layer_total - 1} once each, in order, none empty",
        )
        self._check_windows()
        self._check_rows()
        groups = range(len(self.groups)) if self.index is not None else range(0)
        keyed = tuple(group for group in groups if not self.window_of(group))
        object.__setattr__(self, "key_groups", keyed)
        places = [
            (g, member) for g, group in enumerate(self.groups) for member in range(len(group))
        ]
        object.__setattr__(self, "_places", tuple(places))

    def _check_unit(self) -> None:
        unit = self.select_unit
        _require(
            self.top_k >= unit and (self.top_k + 1) % unit == 0,
            f"top_k {self.top_k} is not some units of {unit} rows and the {unit - 1} behind them",
        )

    def _check_windows(self) -> None:
        _require(
            len(self.windows) in (0, len(self.groups)),
            f"windows has {len(self.windows)} entries for {len(self.groups)} groups",
        )
        for group, window in enumerate(self.windows):
            _require(
                0 <= window <= self.top_k,
                f"group {group} attends to the last {window} tokens: 0 to top_k {self.top_k} are"
                " possible",
            )

    def _check_rows(self) -> None:
        _require(
            len(self.rows) in (0, len(self.groups)),
            f"rows has {len(self.rows)} codecs for {len(self.groups)} groups",
        )
        widest = max((row.row_bytes for row in self.rows), default=self.row.row_bytes)
        _require(
            widest == self.row.row_bytes,
            f"row has {self.row.row_bytes} bytes, the widest of rows {widest}",
        )

    @property
    def layer_total(self) -> int:
        return self.layer_count + self.mtp_layer_count

    @property
    def has_mtp(self) -> bool:
        """Whether the whole model, of which this may be a part, has MTP layers."""
        return self.mtp_layer_count > 0 or self.mtp_elsewhere

    @property
    def group_count(self) -> int:
        return len(self.groups)

    @property
    def main_group_count(self) -> int:
        """The number of groups of main layers; they come first."""
        return self._places[self.layer_count - 1][0] + 1

    @property
    def group_layers_max(self) -> int:
        return max(len(group) for group in self.groups)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the widest layer."""
        return self.row.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in the widest layer: the largest unit on the wire."""
        return PAGE_ROWS * self.row.row_bytes

    def group_row(self, group: int) -> RowCodec:
        return self.rows[group] if self.rows else self.row

    def row_of(self, layer: int) -> RowCodec:
        return self.group_row(self.group_of(layer))

    def layer_bytes(self, layers: range) -> tuple[int, ...]:
        """Bytes of a row in each of these layers."""
        return tuple(self.row_of(layer).row_bytes for layer in layers)

    @property
    def token_row_bytes(self) -> int:
        """Bytes of a token's rows in all layers."""
        return sum(self.layer_bytes(range(self.layer_total)))

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """The different sizes of rows in bytes, the widest first."""
        return tuple(sorted({row.row_bytes for row in self.rows or (self.row,)}, reverse=True))

    def size_groups(self, row_bytes: int) -> tuple[int, ...]:
        """The groups whose rows have `row_bytes` bytes."""
        groups = range(self.group_count)
        return tuple(g for g in groups if self.group_row(g).row_bytes == row_bytes)

    def size_layers_max(self, row_bytes: int) -> int:
        return max(len(self.groups[group]) for group in self.size_groups(row_bytes))

    @property
    def row_runs(self) -> tuple[range, ...]:
        """Ranges of neighbouring layers whose rows have one size."""
        sizes = self.layer_bytes(range(self.layer_total))
        edges = [n for n in range(1, len(sizes)) if sizes[n] != sizes[n - 1]]
        return tuple(map(range, [0, *edges], [*edges, len(sizes)]))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in every layer that chooses among all tokens."""
        return self._slot_bytes(has_window=False)

    @property
    def window_slot_bytes(self) -> int:
        """Bytes of one slot in every layer of a group with a window."""
        return self._slot_bytes(has_window=True)

    def _slot_bytes(self, *, has_window: bool) -> int:
        groups = [g for g in range(self.group_count) if (self.window_of(g) > 0) == has_window]
        return sum(len(self.groups[g]) * self.group_row(g).row_bytes for g in groups)

    @property
    def window_floor(self) -> int:
        """Slots that a sequence of any length reserves in every group with a window: the window and
        the new rows of a step. 0 where there is no window."""
        return max(self.windows) + PAGE_ROWS if any(self.windows) else 0

    @property
    def chunk_bytes(self) -> int:
        """Bytes of 64 slots of the group with the most bytes: what moves between groups."""
        return max(map(self.size_chunk_bytes, self.row_sizes))

    def size_chunk_bytes(self, row_bytes: int) -> int:
        """`chunk_bytes` among the groups whose rows have `row_bytes` bytes."""
        return self.size_layers_max(row_bytes) * PAGE_ROWS * row_bytes

    @property
    def key_layer_count(self) -> int:
        """How many layers have index keys of their own: the first of each group with an indexer."""
        return len(self.key_groups)

    def key_layer_of(self, group: int) -> int | None:
        """The number of this group's key layer among all key layers; None without an indexer."""
        if group not in self.key_groups:
            return None
        return self.key_groups.index(group)

    def key_layers_of(self, groups: range) -> range:
        """The key layers of these groups."""
        before = sum(group < groups.start for group in self.key_groups)
        return range(before, before + sum(group in groups for group in self.key_groups))

    def window_of(self, group: int) -> int:
        """How many of the last tokens the group attends to; 0 if an indexer selects among all."""
        return self.windows[group] if self.windows else 0

    @property
    def select_unit(self) -> int:
        """Neighbouring rows that are chosen together."""
        return self.index.unit if self.index is not None else 1

    @property
    def units_max(self) -> int:
        """The most units that a query chooses."""
        return self.top_k // self.select_unit

    def first_read(self, group: int, length: int) -> int:
        """The first position that the group must hold for a query at position `length`."""
        window = self.window_of(group)
        return max(0, length + 1 - window) if window else 0

    @property
    def key_bytes(self) -> int:
        """Bytes of an index key; 0 where none is kept."""
        return self.index.key_bytes if self.index is not None else 0

    @property
    def key_page_bytes(self) -> int:
        """Bytes of all index keys of a page."""
        return self.key_layer_count * self.index.page_bytes if self.index is not None else 0

    @property
    def host_page_bytes(self) -> int:
        """Bytes of a page on the host: its rows in all layers and all its index keys."""
        return PAGE_ROWS * self.token_row_bytes + self.key_page_bytes

    @property
    def index_page_bytes(self) -> int:
        """Bytes of an active page on the device: its keys and its part of the row -> slot maps."""
        return self.key_page_bytes + self.group_count * PAGE_ROWS * 4

    @property
    def page_tokens(self) -> int:
        """How many tokens a full page holds."""
        return PAGE_ROWS * self.row_tokens

    def pages_of(self, length: int) -> int:
        """How many pages `length` tokens need."""
        return div_ceil(length, self.page_tokens)

    def rows_of(self, length: int) -> int:
        """How many rows `length` tokens fill; a row counts when all its tokens are there."""
        return length // self.row_tokens

    def slots_of(self, length: int, floor: int) -> int:
        """Slots that a request of at most `length` tokens reserves in a group."""
        return min(div_ceil(length, self.row_tokens), floor)

    @property
    def has_states(self) -> bool:
        """Whether requests keep state beside their rows."""
        return self.state_bytes > 0 or self.state_page_bytes > 0

    def request_state_bytes(self, length: int) -> int:
        """Bytes that a request of at most `length` tokens keeps beside its rows."""
        return self.state_bytes + self.pages_of(length) * self.state_page_bytes

    def part(self, first: int, stop: int) -> ModelLayout:
        """Main layers first..stop-1, counted from 0; the last part has the MTP layers as well."""
        check_part(self.groups, self.layer_count, first, stop)
        is_last = stop == self.layer_count
        end = self.layer_total if is_last else stop
        begin = self.group_of(first)
        mine = [group for group in self.groups if first <= group[0] < end]
        before = self.key_layers_of(range(begin))
        rows = self.rows[begin : begin + len(mine)]
        return replace(
            self,
            layer_count=stop - first,
            groups=tuple(tuple(layer - first for layer in group) for group in mine),
            windows=self.windows[begin : begin + len(mine)],
            row=max(rows, key=lambda row: row.row_bytes, default=self.row),
            rows=rows if len(set(rows)) > 1 else (),
            mtp_layer_count=self.mtp_layer_count if is_last else 0,
            first_layer=self.first_layer + first,
            first_group=self.first_group + begin,
            first_key_layer=self.first_key_layer + len(before),
            bytes_before=self.bytes_before + sum(self.layer_bytes(range(first))),
            mtp_elsewhere=self.mtp_elsewhere or (self.mtp_layer_count > 0 and not is_last),
        )

    def group_of(self, layer: int) -> int:
        return self.place_of(layer)[0]

    def place_of(self, layer: int) -> tuple[int, int]:
        """The group of a layer, and the layer's number within the group."""
        self.check_layer(layer)
        return self._places[layer]

    def check_layer(self, layer: int) -> None:
        if type(layer) is not int and not _is_whole(layer):
            raise BadInput(f"layer is {layer!r}, must be a whole number")
        if not 0 <= layer < len(self._places):
            raise BadInput(f"layer {layer} is outside 0..{self.layer_total - 1} of {self.name!r}")

    @classmethod
    def deepseek_v32(cls, *, row: RowCodec | None = None, mtp: bool = True) -> ModelLayout:
        return cls(
            name="deepseek-v3.2",
            layer_count=61,
            groups=tuple((layer,) for layer in range(61 + mtp)),
            row=row or RowCodec(),
            mtp_layer_count=int(mtp),
        )

    @classmethod
    def glm_5(cls, *, row: RowCodec | None = None, mtp: bool = True) -> ModelLayout:
        """GLM-5 and 5.1: an indexer in every layer."""
        return cls(
            name="glm-5",
            layer_count=78,
            groups=tuple((layer,) for layer in range(78 + mtp)),
            row=row or RowCodec(),
            index=IndexCodec(head_count=32, rope_style="interleaved"),
            mtp_layer_count=int(mtp),
            head_count=64,
            hidden_dim=6144,
            nope_dim=192,
            value_dim=256,
            query_rank=2048,
        )

    @classmethod
    def glm_52(cls, *, row: RowCodec | None = None, mtp: bool = True) -> ModelLayout:
        """GLM-5.2 and 5.3: indexers on 21 of 78 layers, groups of four from layer 2 on."""
        groups = ((0,), (1,), *(tuple(range(first, first + 4)) for first in range(2, 78, 4)))
        groups += ((78,),) if mtp else ()
        return replace(cls.glm_5(row=row, mtp=mtp), name="glm-5.2", groups=groups)

    @classmethod
    def embedded(cls, *, row: RowCodec | None = None, mtp: bool = True) -> ModelLayout:
        """The small model in the box: true row size, six layers, eight index heads."""
        return cls(
            name="ess-embedded",
            layer_count=6,
            groups=tuple((layer,) for layer in range(6 + mtp)),
            row=row or RowCodec(),
            index=IndexCodec(head_count=8),
            top_k=256,
            mtp_layer_count=int(mtp),
            head_count=4,
            hidden_dim=256,
            nope_dim=64,
            value_dim=128,
            query_rank=128,
            slot_floor=1024,
        )
