"""The token of the greatest score with noise, by one program for a line.

A line of a greedy request has its token already, and its program reads one number.
"""

import triton
import triton.language as tl

from ess.kernels.cuda.triton.device.floats import rising
from ess.kernels.reference.noise import UNIFORM_STEP

STEP = tl.constexpr(UNIFORM_STEP)


@triton.jit
def _mix(x):
    """The finaliser of splitmix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _noise(ids, first, second):
    """`ess.kernels.reference.noise.gumbel`, which has log1p(-share). Here the logarithm of the
    rounded 1 - share is stretched by what the rounding took from or gave to the share: otherwise
    tokens with the most noise, whose shares are small, would have the noise of their neighbours."""
    mixed = (ids.to(tl.uint32) * 0x9E3779B9) ^ first
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D + second
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    mixed = (mixed ^ (mixed >> 16)) & 0x7FFFFFFF
    share = (mixed.to(tl.int32).to(tl.float32) + 0.5) * STEP
    left = 1.0 - share
    taken = 1.0 - left
    stretched = tl.log(left) * (share / tl.where(taken == 0.0, 1.0, taken))
    return -tl.log(tl.where(taken == 0.0, share, -stretched))


@triton.jit(do_not_specialize_on_alignment=["top_k"])
def draw(scores, top_k, seeds, positions, tokens, width, score_stride,
         BLOCK: tl.constexpr):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    if tl.load(top_k + line) == 0:
        return
    values = scores + line * score_stride
    seed = tl.load(seeds + line).to(tl.uint64)
    keys = _mix(_mix(seed) + tl.load(positions + line).to(tl.uint64))
    first, second = keys.to(tl.uint32), (keys >> 32).to(tl.uint32)
    best = tl.zeros((), tl.uint32)
    chosen = tl.zeros((), tl.int32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < width
        value = tl.load(values + at, mask=mask, other=float("-inf")) + _noise(at, first, second)
        seen = tl.where(mask, rising(value), 0)
        top = tl.max(seen, 0)
        first_of_top = tl.min(tl.where(seen == top, at, width), 0)
        chosen = tl.where(top > best, first_of_top, chosen)
        best = tl.maximum(best, top)
    tl.store(tokens + line, chosen.to(tl.int64))
