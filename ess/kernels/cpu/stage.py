"""Stages, compiled: the ops between two calls of attention, for a few tokens in one native call.

A stage is described once, op by op, over float32 registers, and called every step;
csrc/cpu/ops/stage.h says what an op does. What a token gets depends on no other token and not on
their number, so results are the same bits in every batch.

Weights are packed: a second copy, in the order in which the products read them. bfloat16 weights
are multiplied as such where the machine can, else widened; float32 weights stay float32, and codes
stay codes.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.checks import require
from ess.kernels.cpu import native, records
from ess.kernels.cpu.codes import CodedWeight
from ess.layout import EXPERTS_MAX, SCALE_BYTES, SCALE_GROUP, IndexCodec, RopeStyle, RowCodec

FORMS: Final = {torch.bfloat16: 1, torch.float32: 2}
REGISTERS_MAX: Final = 16
KINDS: Final = (
    *("load", "store", "copy", "add", "norm", "center"),
    *("linear", "rotate", "hadamard", "gate", "experts", "encode"),
)

_COUNT: Final = ctypes.c_int64
_POINTER: Final = ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Panels:
    """`count` matrices [out_dim, in_dim], packed."""

    words: Tensor
    count: int
    out_dim: int
    in_dim: int
    half: bool
    bits: int = 0


def pack(weight: Tensor | CodedWeight) -> Panels:
    """From a matrix [out, in], or several of one shape [count, out, in]."""
    if isinstance(weight, CodedWeight):
        return pack_codes(weight, half=has_half())
    if weight.dtype not in (torch.bfloat16, torch.float32) or weight.dim() not in (2, 3):
        raise BadInput(f"weights of {weight.dtype} and {weight.dim()} axes cannot be packed")
    matrices = (weight if weight.dim() == 3 else weight[None]).contiguous()
    count, out_dim, in_dim = matrices.shape
    half = weight.dtype == torch.bfloat16 and has_half()
    size = _function("ess_panel_words", *[_COUNT] * 3, returns=_COUNT)(out_dim, in_dim, half)
    words = torch.empty(count, size, dtype=torch.int32)
    run = _function("ess_pack", _POINTER, *[_COUNT] * 4, _POINTER)
    for matrix, to in zip(matrices, words, strict=True):
        run(matrix.data_ptr(), FORMS[weight.dtype], out_dim, in_dim, half, to.data_ptr())
    return Panels(words, count, out_dim, in_dim, half)


def pack_codes(weight: CodedWeight, *, half: bool) -> Panels:
    """`half`: inputs are rounded to bfloat16, and products made of pairs of them."""
    assert has_half() or not half, "this machine has no products of bfloat16"
    (out_dim, in_dim), bits = weight.shape, weight.bits
    size = _function("ess_code_words", *[_COUNT] * 3, returns=_COUNT)(out_dim, in_dim, bits)
    words = torch.empty(1, size, dtype=torch.int32)
    codes, steps = weight.codes.contiguous(), weight.steps.contiguous()
    run = _function("ess_pack_codes", _POINTER, _POINTER, *[_COUNT] * 3, _POINTER)
    run(codes.data_ptr(), steps.data_ptr(), bits, out_dim, in_dim, words.data_ptr())
    return Panels(words, 1, out_dim, in_dim, half, bits)


def has_half() -> bool:
    return native.kernels() == "avx512_bf16"


@dataclass(frozen=True, slots=True)
class Values:
    """Part of a register: `dim` values of every token from `at` on."""

    register: int
    at: int
    dim: int

    def part(self, at: int, dim: int) -> Values:
        assert 0 <= at <= at + dim <= self.dim, f"values {at}..{at + dim} of {self.dim}"
        return Values(self.register, self.at + at, dim)


@dataclass(frozen=True, slots=True)
class Heads:
    """`count` parts of equal dim, `step` values apart: `rotate`, `hadamard`, `linear` per head."""

    first: Values
    count: int
    step: int


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen from their logits."""

    per_token: int
    group_count: int
    groups_kept: int
    is_normed: bool
    scale: float
    correction: Tensor


@dataclass(frozen=True, slots=True)
class Turns:
    """A rotation that has been checked: cosines and sines are the first two sides of a call."""

    kept: tuple[Tensor, Tensor]
    tokens: int
    sides: tuple[int, ...]


NO_TURNS: Final = (0,) * 6


def look_at_turns(cos: Tensor, sin: Tensor) -> Turns:
    """Checks cosines and sines: float32 [tokens, pairs], dense."""
    tokens, width = cos.shape
    for turn in (cos, sin):
        if turn.dtype != torch.float32 or turn.shape != cos.shape or not turn.is_contiguous():
            shapes = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
            raise BadInput(f"a rotation is dense float32 and the same size twice, got {shapes}")
    stride, form = width * 4, FORMS[torch.float32]
    sides = (cos.data_ptr(), stride, form, sin.data_ptr(), stride, form)
    return Turns((cos, sin), tokens, sides)


@dataclass(frozen=True)
class _Given:
    """A result as the caller gets it, and the form in which values are written there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    form: int

    @functools.cached_property
    def stride(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Stage:
    """Describe it with the methods below in the order of execution, then call it."""

    def __init__(self) -> None:
        self._ops: list[records.Op] = []
        self._widths: list[int] = []
        self._kept: list[Any] = []
        self._sides: list[int | _Given] = []
        self._ready: records.Stage | None = None

    # ---- memory

    def room(self, dim: int) -> Values:
        """A new register; it holds nothing yet."""
        if len(self._widths) == REGISTERS_MAX:
            raise BadInput(f"a stage has at most {REGISTERS_MAX} registers")
        self._widths.append(dim)
        return Values(len(self._widths) - 1, 0, dim)

    def take(self, dim: int) -> Values:
        """The next argument: [tokens, dim], or more axes of as many values."""
        self._sides.append(dim)
        to = self.room(dim)
        self._op("load", from_=len(self._sides) + 1, to=to.register, in_dim=dim)
        return to

    def give(self, values: Values, dtype: torch.dtype, *shape: int) -> None:
        """The next result: [tokens, *shape], else [tokens, dim]."""
        self._give(values, _Given(shape or (values.dim,), dtype, FORMS[dtype]))

    def give_row(self, values: Values, codec: RowCodec) -> None:
        """The next result: encoded rows [tokens, row_bytes]."""
        if codec.form == "fp8":
            groups, tail = codec.scale_count, codec.rope_dim
            self._encode(values, codec.row_bytes, groups, SCALE_GROUP, tail, True)
        else:
            form = FORMS[torch.bfloat16 if codec.form == "bf16" else torch.float32]
            self._give(values, _Given((codec.row_bytes,), torch.uint8, form))

    def give_key(self, values: Values, codec: IndexCodec) -> None:
        """The next result: encoded keys [tokens, key_bytes], the scale behind the values."""
        if codec.form == "fp8":
            is_power = codec.scale_format == "ue8m0"
            self._encode(values, codec.key_bytes, 1, codec.key_dim, 0, is_power)
        else:
            self._give(values, _Given((codec.key_bytes,), torch.uint8, FORMS[torch.float32]))

    def _give(self, values: Values, given: _Given) -> None:
        self._sides.append(given)
        self._op("store", values, to=len(self._sides) + 1)

    def _encode(
        self, values: Values, bytes_: int, groups: int, size: int, tail: int, is_power: bool
    ) -> None:
        strides = records.Strides(1, groups, size, tail, is_power, False, 0, 0, 0)
        encoding = records.Encoding(strides, groups * size, groups * (size + SCALE_BYTES))
        self._sides.append(_Given((bytes_,), torch.uint8, 0))
        self._op("encode", values, to=len(self._sides) + 1, more=encoding)

    # ---- arithmetic

    def copy(self, heads: Heads, to: Heads) -> None:
        self._op("copy", heads.first, to.first, count=heads.count, steps=(heads.step, to.step))

    def add(self, values: Values, to: Values) -> None:
        self._op("add", values, to)

    def norm(self, values: Values, weight: Tensor, eps: float, to: Values | None = None) -> Values:
        """Root-mean-square norm; `to` may be the values themselves."""
        to = to or self.room(values.dim)
        self._op("norm", values, to, weight=weight, value=eps)
        return to

    def center(self, values: Values, weight: Tensor, bias: Tensor, eps: float) -> None:
        """Layer norm, in place."""
        self._op("center", values, values, weight=weight, more=bias, value=eps)

    def linear(self, values: Values, weight: Panels, *, factor: float = 1.0) -> Values:
        to = self.room(weight.out_dim)
        self.linear_into(values, weight, to, factor=factor)
        return to

    def linear_into(
        self, values: Values, weight: Panels, to: Values, *, factor: float = 1.0
    ) -> None:
        self.linear_heads(Heads(values, 1, 0), weight, Heads(to, 1, 0), factor=factor)

    def linear_heads(self, heads: Heads, weight: Panels, to: Heads, *, factor: float = 1.0) -> None:
        """One matrix per head."""
        assert heads.count == to.count == weight.count
        assert (heads.first.dim, to.first.dim) == (weight.in_dim, weight.out_dim)
        self._op(
            "linear",
            heads.first,
            to.first,
            out_dim=weight.out_dim,
            count=heads.count,
            steps=(heads.step, to.step),
            half=weight.half,
            bits=weight.bits,
            weight=weight.words,
            value=factor,
        )

    def rotate(self, heads: Heads, style: RopeStyle) -> None:
        """In place, by the rotation that the call brings."""
        self._turn("rotate", heads, out_dim=style == "half")

    def hadamard(self, heads: Heads) -> None:
        """Orthonormal, in place."""
        dim = heads.first.dim
        if dim & (dim - 1):
            raise BadInput(f"a Hadamard transform needs a power of two, got {dim}")
        self._turn("hadamard", heads, value=dim**-0.5)

    def _turn(self, kind: str, heads: Heads, **more: Any) -> None:
        steps = (heads.step, heads.step)
        self._op(kind, heads.first, heads.first, count=heads.count, steps=steps, **more)

    def gate(self, values: Values) -> Values:
        """silu of the first half times the second half."""
        half = values.part(0, values.dim // 2)
        to = self.room(half.dim)
        self._op("gate", half, to)
        return to

    def experts(
        self, values: Values, logits: Values, routing: Routing, up: Panels, down: Panels, to: Values
    ) -> None:
        """`to` += the weighted sum of what the chosen experts make."""
        assert up.half == down.half
        assert up.bits == 0 == down.bits, "experts are kept as words"
        r = routing
        if up.count > EXPERTS_MAX or (r.group_count > 1 and up.count < 2 * r.group_count):
            raise BadInput(
                f"{up.count} experts in {r.group_count} groups: a stage takes at most "
                f"{EXPERTS_MAX}, and two or more to a group"
            )
        experts = records.Experts(
            *(up.count, r.group_count, r.groups_kept, r.per_token, r.is_normed),
            *(down.in_dim, logits.register),
            *(tensor.data_ptr() for tensor in (r.correction, up.words, down.words)),
            r.scale,
        )
        self._kept += [r.correction, up.words, down.words]
        self._op("experts", values, to, half=up.half, more=experts)

    def _op(
        self,
        kind: str,
        values: Values | None = None,
        into: Values | None = None,
        *,
        from_: int = 0,
        to: int = 0,
        in_dim: int = 0,
        out_dim: int = 0,
        count: int = 1,
        steps: tuple[int, int] = (0, 0),
        half: bool = False,
        bits: int = 0,
        weight: Tensor | None = None,
        more: Any = None,
        value: float = 0.0,
    ) -> None:
        assert self._ready is None, "the stage has been called: it takes no more ops"
        source = values or Values(from_, 0, in_dim)
        target = into or Values(to, 0, 0)
        self._kept += [weight, more]
        self._ops.append(
            records.Op(
                *(KINDS.index(kind), source.register, target.register, source.at, target.at),
                *(source.dim, out_dim, count, *steps, half, bits),
                *(_address(weight), _address(more)),
                value,
            )
        )

    # ---- the call

    def __call__(
        self, arguments: Sequence[Tensor], *, turns: Turns | None = None, threads: int = 1
    ) -> list[Tensor]:
        """Arguments as taken, float32 or bfloat16; results as given."""
        ready, tokens = self._ready or self._close(), arguments[0].shape[0]
        if turns is not None and turns.tokens != tokens:
            raise BadInput(f"a rotation of {turns.tokens} tokens for {tokens}")
        results = [torch.empty(shape, dtype=dtype) for shape, dtype in self.made(tokens)]
        sides, kept = self._listed(arguments, results, turns)
        _run()(ready, struct.pack(f"{len(sides)}q", *sides), tokens, threads)
        del kept
        return results

    def _listed(
        self, arguments: Sequence[Tensor], results: Sequence[Tensor], turns: Turns | None
    ) -> tuple[list[int], list[Tensor]]:
        """Three numbers for each side, and the arguments in memory that has no gaps."""
        tokens, kept, gives = arguments[0].shape[0], list[Tensor](), iter(results)
        listed = [*(NO_TURNS if turns is None else turns.sides)]
        for side in self._sides:
            if isinstance(side, int):
                tensor = _checked(arguments[len(kept)], tokens, side)
                kept.append(tensor)
                listed += (tensor.data_ptr(), side * tensor.itemsize, FORMS[tensor.dtype])
            else:
                listed += (next(gives).data_ptr(), side.stride, side.form)
        return listed, kept

    def made(self, tokens: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each result for this many tokens."""
        given = [side for side in self._sides if not isinstance(side, int)]
        return [((tokens, *side.shape), side.dtype) for side in given]

    def bind(
        self, arguments: Sequence[Tensor], results: Sequence[Tensor], *, turns: Turns | None = None
    ) -> tuple[records.Stage, Any]:
        """The call over memory that stays, for `ess.kernels.cpu.layer`: the stage and its sides. A
        result may be an argument."""
        ready, tokens = self._ready or self._close(), arguments[0].shape[0]
        expected = zip(results, self.made(tokens), strict=True)
        for tensor, (shape, dtype) in expected:
            require("a result", tensor, shape, (dtype,))
        listed, kept = self._listed(arguments, results, turns)
        assert all(map(operator.is_, kept, arguments)), "an argument that is not dense"
        assert all(tensor.is_contiguous() for tensor in results), "a result that is not dense"
        sides = zip(listed[::3], listed[1::3], listed[2::3], strict=True)
        return ready, (records.Bound * (len(listed) // 3))(
            *(records.Bound(*each) for each in sides)
        )

    def _close(self) -> records.Stage:
        ops = (records.Op * len(self._ops))(*self._ops)
        widths = (_COUNT * len(self._widths))(*self._widths)
        self._kept += [ops, widths]
        self._ready = records.Stage(ops, len(self._ops), widths, len(self._widths))
        return self._ready


def _checked(tensor: Tensor, tokens: int, dim: int) -> Tensor:
    if (
        tensor.shape[0] != tokens
        or tensor.numel() != tokens * dim
        or tensor.dtype not in FORMS
        or not tensor.is_cpu
    ):
        raise BadInput(
            f"a stage takes {tokens} x {dim} float32 or bfloat16 values on the host, "
            f"got {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        )
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _address(kept: Any) -> int | None:
    if kept is None:
        return None
    return kept.data_ptr() if isinstance(kept, Tensor) else ctypes.addressof(kept)


def _function(name: str, *types: Any, returns: Any = None) -> Callable[..., Any]:
    return native.function(name, list(types), returns)


@functools.cache
def _run() -> Callable[..., None]:
    """Sides are three numbers each, packed: `ess::Bound` of csrc/cpu/kernels.h."""
    return _function(
        "ess_stage", ctypes.POINTER(records.Stage), ctypes.c_char_p, _COUNT, ctypes.c_int32
    )
