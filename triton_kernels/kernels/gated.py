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
    # gate and up, [tokens, WIDTH] each with rows PITCH apart, and their biases [WIDTH]
    gate_ptr, up_ptr,
    gate_bias_ptr, up_bias_ptr,
    weight_ptr,  # [rows, WIDTH]
    hidden_ptr,  # [tokens, STORED]
    stored_ptr,  # [rows, STORED]
    tokens,
    WIDTH: tl.constexpr, PITCH: tl.constexpr, STORED: tl.constexpr,
    # the power of two that holds a stored row
    COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """silu(gate) x up, and a copy of the weight, with rows filled up with zeros.

    One program for each row: first the activation's, then the weight's.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside, stored = column < WIDTH, column < STORED
    if row < tokens:
        gate = tl.load(gate_ptr + row * PITCH + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * PITCH + column, mask=inside, other=0.0).to(tl.float32)
        if BIASED:
            gate += tl.load(gate_bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(up_bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        y = cast(silu_times(gate, up), hidden_ptr.dtype.element_ty)  # 0 x sigmoid(0) x 0 beyond
        tl.store(hidden_ptr + row * STORED + column, y, mask=stored)
    else:
        row -= tokens
        weight = tl.load(weight_ptr + row * WIDTH + column, mask=inside, other=0.0)
        tl.store(stored_ptr + row * STORED + column, weight, mask=stored)
