"""Rotation as a pass of its own that keeps the columns' order, for a library's attention."""

import triton
import triton.language as tl

from triton_kernels.kernels.tiles import cast

# Sizes and strides vary from call to call: one binary serves all.
NUMBERS = (
    "tokens",
    *("x_stride", "x_head_stride", "out_stride", "out_head_stride"),
    "angle_stride",
)


@triton.jit(do_not_specialize=NUMBERS)
def rotate_in_order_kernel(
    # tensors; out may be x itself
    x_ptr, out_ptr, cos_ptr, sin_ptr,
    # sizes
    tokens,
    # strides, see ALIGNED; the last axis is contiguous
    x_stride, x_head_stride,
    out_stride, out_head_stride,
    angle_stride,
    # heads of a token; pairs of a head, and of a vector, which divides them
    HEADS: tl.constexpr, HALF: tl.constexpr, VECTOR: tl.constexpr,
    # strides of x and out come in units of 8 elements, else of 1; the angles' of ANGLE_UNIT
    ALIGNED: tl.constexpr, ANGLE_UNIT: tl.constexpr,
    # vectors of a program
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate and keep the columns' order; those behind the rotary dims are left alone.

    All vectors of pairs in a row, heads fastest, cut into programs: no lane is idle whatever
    head_dim is. A pair is read and written by one thread, so out may be x.
    """
    # Written out, the factor tells the compiler that it may load 16 bytes at a time.
    UNIT: tl.constexpr = 8 if ALIGNED else 1
    VECTORS: tl.constexpr = HALF // VECTOR
    # By 64 bits: those of a large tensor are more than 32 bits count.
    vector = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = vector // VECTORS
    token, head = row // HEADS, row % HEADS
    columns = (vector % VECTORS * VECTOR)[:, None] + tl.arange(0, VECTOR)[None, :]
    mask = (token < tokens)[:, None]
    x_ptr += ((token * x_stride + head * x_head_stride) * UNIT)[:, None] + columns
    out_ptr += ((token * out_stride + head * out_head_stride) * UNIT)[:, None] + columns

    x1 = tl.load(x_ptr, mask=mask).to(tl.float32)
    x2 = tl.load(x_ptr + HALF, mask=mask).to(tl.float32)
    angles = (token * angle_stride * ANGLE_UNIT)[:, None] + columns
    cos = tl.load(cos_ptr + angles, mask=mask)
    sin = tl.load(sin_ptr + angles, mask=mask)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr, cast(x1 * cos - x2 * sin, dtype), mask=mask)
    tl.store(out_ptr + HALF, cast(x2 * cos + x1 * sin, dtype), mask=mask)
