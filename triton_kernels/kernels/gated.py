"""The activation of a gated MLP whose width is no multiple of what the fast matrix kernels take."""

import triton
import triton.language as tl

from triton_kernels.kernels.tiles import cast

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def silu_times(gate, up):
    """silu(gate) x up in few instructions, which would otherwise take as long as the loads."""
    # A root takes fewer than a division. The bound keeps the power finite; a gate that it changes
    # is closed: the result is below 1e-37 times gate and up.
    root = tl.rsqrt(1.0 + tl.exp2(tl.minimum(gate * -LOG2_E, 126.0)))
    return gate * up * (root * root)


@triton.jit(do_not_specialize=("tokens",))
def aligned_operands_kernel(
    x_ptr,  # [tokens, HIDDEN]
    gate_ptr, up_ptr,  # [tokens, WHOLE] each
    # [WIDTH, HIDDEN] and [WIDTH] each, of which the first WHOLE made gate and up
    gate_weight_ptr, up_weight_ptr,
    gate_bias_ptr, up_bias_ptr,
    weight_ptr,  # [rows, WIDTH]
    hidden_ptr,  # [tokens, STORED]
    stored_ptr,  # [rows, STORED]
    tokens,
    HIDDEN: tl.constexpr, WHOLE: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr,
    # the powers of two that hold HIDDEN, STORED and WIDTH - WHOLE
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, TAIL: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """silu(gate) x up, and a copy of the weight, with rows filled up with zeros.

    One program for each row: first the activation's, then the weight's. The last columns of gate
    and up, too few for a product of their own, are multiplied here.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    if row < tokens:
        whole = column < WHOLE
        gate = tl.load(gate_ptr + row * WHOLE + column, mask=whole, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * WHOLE + column, mask=whole, other=0.0).to(tl.float32)
        if BIASED:
            gate += tl.load(gate_bias_ptr + column, mask=whole, other=0.0).to(tl.float32)
            up += tl.load(up_bias_ptr + column, mask=whole, other=0.0).to(tl.float32)
        y = cast(silu_times(gate, up), hidden_ptr.dtype.element_ty)  # 0 x sigmoid(0) x 0 beyond
        behind = whole | ((column >= WIDTH) & (column < STORED))
        tl.store(hidden_ptr + row * STORED + column, y, mask=behind)

        channel = tl.arange(0, CHANNELS)
        x = tl.load(x_ptr + row * HIDDEN + channel, mask=channel < HIDDEN, other=0.0)
        last = WHOLE + tl.arange(0, TAIL)
        gate = _columns(x, gate_weight_ptr, gate_bias_ptr, last, channel, HIDDEN, WIDTH)
        up = _columns(x, up_weight_ptr, up_bias_ptr, last, channel, HIDDEN, WIDTH)
        y = cast(silu_times(gate, up), hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + row * STORED + last, y, mask=last < WIDTH)
    else:
        row -= tokens
        inside = column < WIDTH
        weight = tl.load(weight_ptr + row * WIDTH + column, mask=inside, other=0.0)
        tl.store(stored_ptr + row * STORED + column, weight, mask=column < STORED)


@triton.jit
def _columns(
    x, weight_ptr, bias_ptr, columns, channel, HIDDEN: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """x weight^T + bias of some columns, in fp32; x is one row."""
    inside = columns < WIDTH
    mask = inside[:, None] & (channel < HIDDEN)[None, :]
    pointers = weight_ptr + columns[:, None] * HIDDEN + channel[None, :]
    weight = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    product = tl.sum(weight * x.to(tl.float32)[None, :], 1)
    return product + tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
