"""Rotation as a pass of its own, for the strategies that want Q or K rotated beforehand.

Bound by memory alone: one read and one write of x, the angles read once for all heads of a token.
"""

import triton
import triton.language as tl

from triton_kernels.tiles import (
    cast,
    load_angles,
    load_columns,
    load_rotary,
    offsets,
    rotary_tile,
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
    x_head_stride = x_head_stride.to(tl.int64) * UNIT
    out_head_stride = out_head_stride.to(tl.int64) * UNIT
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
    x_ptr += first_head * x_head_stride
    out_ptr += first_head * out_head_stride
    if PAIRED:
        rotate_paired(
            x_ptr, x_stride, x_head_stride, out_ptr, out_stride, out_head_stride,
            cos_ptr, sin_ptr, angle_stride, group, rows, mask, HEAD_DIM, ROTARY_DIM, MAIN, TAIL,
        )  # fmt: skip
    else:
        rotate_in_order(
            x_ptr, x_stride, x_head_stride, out_ptr, out_stride, out_head_stride,
            cos_ptr, sin_ptr, angle_stride, group, rows, mask, HEAD_DIM, ROTARY_DIM, MAIN, TAIL,
        )  # fmt: skip


@triton.jit
def rotate_paired(
    x_ptr, x_stride, x_head_stride, out_ptr, out_stride, out_head_stride,
    cos_ptr, sin_ptr, angle_stride, group, rows, mask,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Rotate some rows of a group of heads into the order that the attention kernels read."""
    cos, sin = load_angles(cos_ptr, sin_ptr, angle_stride, rows, mask, 0, MAIN, ROTARY_DIM)
    x_head, out_head = x_ptr, out_ptr
    for _ in range(0, group):
        rotate_tile(
            x_head, x_stride, out_head, out_stride,
            rows, mask, cos, sin, 0, MAIN, HEAD_DIM, ROTARY_DIM,
        )  # fmt: skip
        x_head += x_head_stride
        out_head += out_head_stride
    if TAIL > 0:
        cos, sin = load_angles(cos_ptr, sin_ptr, angle_stride, rows, mask, MAIN, TAIL, ROTARY_DIM)
        x_head, out_head = x_ptr, out_ptr
        for _ in range(0, group):
            rotate_tile(
                x_head, x_stride, out_head, out_stride,
                rows, mask, cos, sin, MAIN, TAIL, HEAD_DIM, ROTARY_DIM,
            )  # fmt: skip
            x_head += x_head_stride
            out_head += out_head_stride


@triton.jit
def rotate_tile(x_ptr, x_stride, out_ptr, out_stride, rows, mask, cos, sin,
                FIRST: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
                ROTARY_DIM: tl.constexpr):  # fmt: skip
    """Rotate columns FIRST .. FIRST + WIDTH (in paired order) of one head."""
    x = load_rotary(x_ptr, x_stride, rows, mask, FIRST, WIDTH, HEAD_DIM, ROTARY_DIM, True)
    y = rotary_tile(x, cos, sin, True)
    store_columns(out_ptr, out_stride, rows, mask, y, FIRST, WIDTH, HEAD_DIM)


@triton.jit
def rotate_in_order(
    x_ptr, x_stride, x_head_stride, out_ptr, out_stride, out_head_stride,
    cos_ptr, sin_ptr, angle_stride, group, rows, mask,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Rotate some rows of a group of heads and keep their order; out may be x itself.

    Each column is read twice, for itself and for the other of its pair, so that whole rows are
    written: halves of 80 bytes would leave sectors of 32 bytes half written.
    """
    dtype = out_ptr.dtype.element_ty
    cos, sin = load_turns(cos_ptr, sin_ptr, angle_stride, rows, mask, 0, MAIN, ROTARY_DIM)
    if TAIL > 0:
        cos_tail, sin_tail = load_turns(
            cos_ptr, sin_ptr, angle_stride, rows, mask, MAIN, TAIL, ROTARY_DIM
        )
    for _ in range(0, group):
        x = load_columns(x_ptr, x_stride, rows, mask, 0, MAIN, HEAD_DIM)
        other = load_partners(x_ptr, x_stride, rows, mask, 0, MAIN, ROTARY_DIM)
        if TAIL > 0:
            x_tail = load_columns(x_ptr, x_stride, rows, mask, MAIN, TAIL, HEAD_DIM)
            other_tail = load_partners(x_ptr, x_stride, rows, mask, MAIN, TAIL, ROTARY_DIM)
        # All of a row is read before any of it is overwritten.
        tl.debug_barrier()
        y = cast(x.to(tl.float32) * cos + other * sin, dtype)
        store_columns(out_ptr, out_stride, rows, mask, y, 0, MAIN, HEAD_DIM)
        if TAIL > 0:
            y = cast(x_tail.to(tl.float32) * cos_tail + other_tail * sin_tail, dtype)
            store_columns(out_ptr, out_stride, rows, mask, y, MAIN, TAIL, HEAD_DIM)
        x_ptr += x_head_stride
        out_ptr += out_head_stride


@triton.jit
def partners(FIRST: tl.constexpr, WIDTH: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """Columns FIRST .. FIRST + WIDTH, the other of each one's pair, and the place of its angle."""
    column = FIRST + tl.arange(0, WIDTH)
    first = column < ROTARY_DIM // 2
    angle = tl.where(first, column, column - ROTARY_DIM // 2)
    return column, tl.where(first, column + ROTARY_DIM // 2, angle), angle


@triton.jit
def load_partners(x_ptr, stride, rows, mask, FIRST: tl.constexpr, WIDTH: tl.constexpr,
                  ROTARY_DIM: tl.constexpr):  # fmt: skip
    """For each column the other of its pair in fp32; zero behind the rotary dims."""
    column, partner, _ = partners(FIRST, WIDTH, ROTARY_DIM)
    mask = mask[:, None] & (column < ROTARY_DIM)[None, :]
    return tl.load(x_ptr + offsets(rows, stride, partner), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_turns(cos_ptr, sin_ptr, stride, rows, mask, FIRST: tl.constexpr, WIDTH: tl.constexpr,
               ROTARY_DIM: tl.constexpr):  # fmt: skip
    """For each column its cos, and its sin with the sign that the other of its pair takes."""
    column, _, angle = partners(FIRST, WIDTH, ROTARY_DIM)
    mask = mask[:, None] & (column < ROTARY_DIM)[None, :]
    cos = tl.load(cos_ptr + offsets(rows, stride, angle), mask=mask, other=1.0)
    sin = tl.load(sin_ptr + offsets(rows, stride, angle), mask=mask, other=0.0)
    return cos, tl.where((column < ROTARY_DIM // 2)[None, :], -sin, sin)
