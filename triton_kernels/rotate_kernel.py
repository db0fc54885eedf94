"""Rotation as a pass of its own, for the strategies that want Q or K rotated beforehand.

Bound by memory alone: one read and one write of x, the angles read once for all heads of a token.
"""

import triton
import triton.language as tl

from triton_kernels.tiles import (
    cast,
    load_angles,
    load_pairs,
    offsets,
    pair_columns,
    rotate_pairs,
    store_columns,
)

# Sizes and strides vary from call to call: one binary serves all.
NUMBERS = (
    *("tokens", "heads"),
    *("x_stride", "x_head_stride", "out_stride", "out_head_stride"),
    "angle_stride",
)


@triton.jit(do_not_specialize=NUMBERS)
def rotate_kernel(
    # tensors; out may be x itself where PAIRED is False
    x_ptr, out_ptr, cos_ptr, sin_ptr,
    # sizes
    tokens, heads,
    # strides, see ALIGNED; the last axis is contiguous
    x_stride, x_head_stride,
    out_stride, out_head_stride,
    angle_stride,
    # shape of a head and how it is cut
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr,
    # strides of x and out come in units of 8 elements and the angles' of 4; else of 1
    ALIGNED: tl.constexpr,
    # True: write the paired order that the attention kernels read; False: the order of x
    PAIRED: tl.constexpr,
    # rows of a tile, heads of a program
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program for each (token block, group of heads)."""
    # Written out, the factors tell the compiler that it may load 16 bytes at a time.
    UNIT: tl.constexpr = 8 if ALIGNED else 1
    x_stride, out_stride = x_stride * UNIT, out_stride * UNIT
    angle_stride = angle_stride * (4 if ALIGNED else 1)
    groups = tl.cdiv(heads, GROUP)
    first = (tl.program_id(0) // groups).to(tl.int64) * BLOCK
    first_head = (tl.program_id(0) % groups) * GROUP
    group = tl.minimum(GROUP, heads - first_head)
    rows = tl.arange(0, BLOCK)
    mask = rows < tokens - first
    x_ptr += first * x_stride
    out_ptr += first * out_stride
    cos_ptr += first * angle_stride
    sin_ptr += first * angle_stride

    cos, sin = load_angles(cos_ptr, sin_ptr, angle_stride, rows, mask, 0, MAIN, ROTARY_DIM)
    for i in range(0, group):
        head = (first_head + i).to(tl.int64) * UNIT
        rotate_tile(
            x_ptr + head * x_head_stride, x_stride,
            out_ptr + head * out_head_stride, out_stride,
            rows, mask, cos, sin, 0, MAIN, HEAD_DIM, ROTARY_DIM, PAIRED,
        )  # fmt: skip
    if TAIL > 0:
        cos, sin = load_angles(cos_ptr, sin_ptr, angle_stride, rows, mask, MAIN, TAIL, ROTARY_DIM)
        for i in range(0, group):
            head = (first_head + i).to(tl.int64) * UNIT
            rotate_tile(
                x_ptr + head * x_head_stride, x_stride,
                out_ptr + head * out_head_stride, out_stride,
                rows, mask, cos, sin, MAIN, TAIL, HEAD_DIM, ROTARY_DIM, PAIRED,
            )  # fmt: skip


@triton.jit
def rotate_tile(x_ptr, x_stride, out_ptr, out_stride, rows, mask, cos, sin,
                FIRST: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
                ROTARY_DIM: tl.constexpr, PAIRED: tl.constexpr):  # fmt: skip
    """Rotate columns FIRST .. FIRST + WIDTH (in paired order) of one head."""
    dtype = out_ptr.dtype.element_ty
    x = load_pairs(x_ptr, x_stride, rows, mask, FIRST, WIDTH, HEAD_DIM, ROTARY_DIM)
    y1, y2 = rotate_pairs(x, cos, sin)
    if PAIRED:
        y = tl.interleave(cast(y1, dtype), cast(y2, dtype))
        store_columns(out_ptr, out_stride, rows, mask, y, FIRST, WIDTH, HEAD_DIM)
    else:
        pair, first, distance = pair_columns(FIRST // 2, WIDTH // 2, HEAD_DIM, ROTARY_DIM)
        mask = mask[:, None] & (pair < HEAD_DIM // 2)[None, :]
        ptr = out_ptr + offsets(rows, out_stride, first)
        tl.store(ptr, cast(y1, dtype), mask=mask)
        tl.store(ptr + distance, cast(y2, dtype), mask=mask)
