"""DeepGEMM's products of experts in fp8, in the form whose counts lie on the device.

It multiplies codes by codes, so tokens are quantised here, 128 numbers to a scale that is a power
of two, and put where it wants them: every expert has room for all of them, since the host does not
know how many each will get. That takes memory, so it serves decode and not prompts. Scales are
given as they are and laid out by the library. A probe compares with the reference over the same
codes; a GPU for which it would round the weights' scales to powers of two fails it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ess.errors import BadInput, Unavailable
from ess.kernels.calls import Products
from ess.kernels.checks import check_products
from ess.kernels.cuda.adapters.deep_gemm import CODEC, MODULES
from ess.kernels.cuda.adapters.layouts import counts_to_build
from ess.kernels.cuda.adapters.modules import Library, first_that, name_of
from ess.kernels.ops import Ops
from ess.kernels.own import own_ops
from ess.kernels.served import ROOM_BYTES_MAX, ROOM_UNIT
from ess.layout import SCALE_GROUP, IndexCodec
from ess.units import align_up, div_ceil

MASKED: Final = ("m_grouped_fp8_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked")
"""Of one function: sgl-deep-gemm up to 0.1.7 has the second alone."""
WIDTH_UNIT: Final = 64
BOUND: Final = 2**-7
SERVES: Final = (
    f"for weights in e4m3 of {WIDTH_UNIT} x {SCALE_GROUP} and multiples, up to "
    f"{ROOM_BYTES_MAX >> 30} GiB of room; else triton"
)


def load(device: torch.device, *, names: Sequence[str] = MODULES) -> DeepGemmExperts:
    """The first of these modules that is there and answers the probe."""
    return first_that(names, (), lambda library: DeepGemmExperts(library, device))


class Coded(NamedTuple):
    """Codes [n, depth] in e4m3 and a float32 scale for each 128 of a token."""

    codes: Tensor
    scales: Tensor


def coded(ops: Ops, values: Tensor, codec: IndexCodec) -> Coded:
    """The codes of values [n, depth] of any type; the depth is a multiple of 128."""
    keys = ops.encode_keys(values.reshape(-1, SCALE_GROUP), codec)
    codes = keys.values.view(torch.float8_e4m3fn).view(values.shape)
    return Coded(codes, keys.scales.view(len(values), -1))


class DeepGemmExperts:
    def __init__(self, library: Library, device: torch.device) -> None:
        self._module: Any = library.module
        self._name = name_of(library.module, MASKED)
        self._ops = own_ops("cuda" if device.type == "cuda" else "reference")
        self._probe(device)
        self.line = f"{library.line}, tokens rounded to e4m3, {SERVES}"

    def takes(self, call: Products) -> bool:
        in_fp8 = call.scales is not None and call.begin is None
        return in_fp8 and not (wrong_size(call.weights) or no_room(len(call.tokens), call.weights))

    def counts_to_build(self, weights: Tensor, line_max: int) -> list[int]:
        """Lines of tokens, as many for each expert as meet another layout. Where there is no room
        for as many, our own kernels multiply."""
        experts, width, depth = weights.shape
        room = ROOM_BYTES_MAX // (experts * max(depth, 2 * width)) // ROOM_UNIT * ROOM_UNIT
        most = min(line_max, room)
        if wrong_size(weights) or not most:
            return []
        each = counts_to_build(div_ceil(most, experts))
        return sorted({min(count * experts, most) for count in each})

    def expert_products(
        self,
        tokens: Tensor,
        ends: Tensor,
        weights: Tensor,
        *,
        scales: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """By the contract of `Ops.expert_products`, for weights in e4m3, but that tokens are
        rounded to e4m3 and results to bfloat16; a graph can hold it. `ends` are not looked at.
        """
        check_products(tokens, ends, weights, scales, out)
        refusal = wrong_size(weights) or no_room(len(tokens), weights)
        if refusal:
            raise BadInput(refusal)
        room = tokens.new_zeros(len(tokens), weights.shape[1]) if out is None else out
        if not len(tokens):
            return room
        return self._run(coded(self._ops, tokens, CODEC), ends, weights, scales, room)

    def _run(
        self, given: Coded, ends: Tensor, weights: Tensor, scales: Tensor, out: Tensor
    ) -> Tensor:
        """Tokens behind the last end go to the row behind all room, which is never read."""
        experts, width, _ = weights.shape
        count, room = len(out), align_up(len(out), ROOM_UNIT)
        starts = torch.nn.functional.pad(ends, (1, 0))
        token = torch.arange(count, dtype=torch.int32, device=out.device)
        expert = torch.searchsorted(ends, token, right=True)
        is_token = expert < experts
        place = (expert * room + token - starts[expert]).where(is_token, experts * room)
        asked = tuple(_scattered(part, place, experts, room) for part in given)
        products = torch.empty(experts, room, width, dtype=torch.bfloat16, device=out.device)
        getattr(self._module, self._name)(
            asked, (weights, scales), products, starts.diff(), div_ceil(count, experts)
        )
        lines = products.view(-1, width)[place.clamp(max=experts * room - 1)]
        return out.copy_(torch.where(is_token[:, None], lines.to(out.dtype), out))

    def _probe(self, device: torch.device) -> None:
        """Experts with several tokens, none and one, and a token behind them that is no number.

        The same codes go to the reference. What is left is the rounding of the result, 2^-9 of it,
        and sums of at most 128 products in less than float32, which together stay below `BOUND` of
        the products' sizes; a wrong scale or place does not.
        """
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randn(7, 384, generator=generator)
        tokens[6] = torch.nan
        weights = torch.randn(3, 256, 384, generator=generator).to(torch.float8_e4m3fn).to(device)
        scales = (torch.rand(3, 2, 3, generator=generator) + 0.5).to(device)
        ends = torch.tensor([5, 5, 6], dtype=torch.int32, device=device)
        asked = coded(self._ops, tokens.to(device), CODEC)
        out = torch.full((7, 256), 7.0, device=device)
        self._run(asked, ends, weights, scales, out)
        plain = asked.codes.float() * asked.scales.repeat_interleave(SCALE_GROUP, 1)
        reference = own_ops("reference")
        want = reference.expert_products(plain, ends, weights, scales=scales)
        sizes = reference.expert_products(plain.abs(), ends, unsigned(weights), scales=scales)
        error = float(((out - want)[:6].abs() / sizes[:6]).max())
        if not error <= BOUND:
            raise Unavailable(f"the probe failed: products are wrong by {error}, due {BOUND}")
        if not bool((out[6] == 7.0).all()):
            raise Unavailable("the probe failed: it wrote behind the last token")


def wrong_size(weights: Tensor) -> str | None:
    width, depth = weights.shape[-2:]
    if depth % SCALE_GROUP == 0 and width % WIDTH_UNIT == 0:
        return None
    return (
        f"weights of {width} x {depth}: DeepGEMM takes multiples of {WIDTH_UNIT} and {SCALE_GROUP}"
    )


def no_room(count: int, weights: Tensor) -> str | None:
    """Why there is no room for `count` tokens; None if there is."""
    experts, width, depth = weights.shape
    room = experts * align_up(count, ROOM_UNIT) * max(depth, 2 * width)
    if room <= ROOM_BYTES_MAX:
        return None
    needed = f"{count} tokens for {experts} experts take {room} bytes of room"
    return f"{needed}, more than {ROOM_BYTES_MAX}"


def _scattered(lines: Tensor, place: Tensor, experts: int, room: int) -> Tensor:
    """Each line at its place of [experts, room, ...]; the other places are left unset."""
    padded = lines.new_empty(experts * room + 1, lines.shape[1])
    whole = padded.view(torch.uint8)
    whole[place] = lines.view(torch.uint8)
    return padded[:-1].view(experts, room, -1)


def unsigned(weights: Tensor) -> Tensor:
    """Codes of e4m3 without their signs."""
    return (weights.view(torch.uint8) & 0x7F).view(torch.float8_e4m3fn)
