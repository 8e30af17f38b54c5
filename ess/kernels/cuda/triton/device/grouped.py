"""Products of tokens with the weights of their experts.

Weights are the rows of a product and tokens its columns. A tile of weights is then read once for
all tokens of an expert that fit beside it, few tokens waste little, and codes of e4m3 are widened
in registers, from which the tensor cores take their first operand: as the second they would go
through shared memory. Tokens, and weights in bfloat16, come straight from a load and stay there.

A tile of columns never crosses a block of scales, and a step of the depth is one block. So a block
has one scale for the whole product of a step, multiplied into its float32 sums; it is loaded a step
ahead, since nothing else stands between it and the sums.
"""

import triton
import triton.language as tl

from ess.kernels.cuda.triton.device.floats import narrow, operand


@triton.jit(do_not_specialize=["expert_count"])
def products(
    tokens, begin, ends, weights, scales, out, token_stride, out_stride, expert_count,
    HAS_BEGIN: tl.constexpr,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    TOKEN_FORM: tl.constexpr, WEIGHT_FORM: tl.constexpr, OUT_IS_BF16: tl.constexpr,
    IN_BF16: tl.constexpr, INTERPRETED: tl.constexpr, PRECISION: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A task is a run of at most TOKENS tokens of one expert and COLUMNS of its weights.

    How many there are is known here only, so the grid is any number of programs, and each finds its
    tasks among the runs of all experts. Runs of an expert lie side by side: they share weights.

    A token's sums run over the depth in steps, whichever tokens and programs are beside it.
    """
    COLUMN_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < expert_count
    end = tl.load(ends + expert, mask=is_expert, other=0)
    head = tl.load(begin) if HAS_BEGIN else 0
    start = tl.load(ends + expert - 1, mask=is_expert & (expert > 0), other=0)
    start = tl.where(expert == 0, head, start)
    runs = (end - start + (TOKENS - 1)) // TOKENS
    tasks_up_to = tl.cumsum(runs, 0) * COLUMN_TILES
    step = tl.arange(0, STEP)
    for task in range(tl.program_id(0), tl.sum(runs, 0) * COLUMN_TILES, tl.num_programs(0)):
        mine = tl.sum((tasks_up_to <= task).to(tl.int32), 0)
        first = tl.load(ends + mine - 1, mask=mine > 0, other=0)
        first = tl.where(mine == 0, head, first)
        stop = tl.load(ends + mine)
        run_count = (stop - first + (TOKENS - 1)) // TOKENS
        among = task - tl.sum(tl.where(expert < mine, runs, 0), 0) * COLUMN_TILES
        tile = among // run_count
        token = first + among % run_count * TOKENS + tl.arange(0, TOKENS)
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        is_token, is_column = token < stop, column < WIDTH
        given = tokens + token.to(tl.int64)[:, None] * token_stride
        lines = weights + (mine.to(tl.int64) * (WIDTH * DEPTH) + column[:, None] * DEPTH)
        factor = scales + (mine * ((WIDTH + 127) // 128) + tile * COLUMNS // 128) * (
            (DEPTH + 127) // 128
        )
        sums = tl.zeros((COLUMNS, TOKENS), tl.float32)
        scale = tl.load(factor) if WEIGHT_FORM == "fp8" else 1.0
        for depth in range(0, DEPTH, STEP):
            at = (depth + step)[None, :]
            weight = operand(
                lines + at, is_column[:, None] & (at < DEPTH), WEIGHT_FORM, IN_BF16, INTERPRETED
            )
            asked = operand(
                given + at, is_token[:, None] & (at < DEPTH), TOKEN_FORM, IN_BF16, INTERPRETED
            )
            if WEIGHT_FORM == "fp8":
                sums += tl.dot(weight, tl.trans(asked), input_precision=PRECISION) * scale
                ahead = depth + STEP
                scale = tl.load(factor + ahead // 128, mask=ahead < DEPTH, other=0.0)
            else:
                sums = tl.dot(weight, tl.trans(asked), acc=sums, input_precision=PRECISION)
        places = out + token.to(tl.int64)[None, :] * out_stride + column[:, None]
        made = narrow(sums) if OUT_IS_BF16 else sums
        tl.store(places, made, mask=is_token[None, :] & is_column[:, None])
