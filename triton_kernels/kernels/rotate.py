"""Rotation as a pass of its own, for the strategies that want Q or K rotated beforehand.

A norm of the heads, if there is one, goes before it.

Bound by memory alone: one read and one write of x, the angles read once for all heads of a token.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from triton_kernels.kernels.tiles import (
    angles_from,
    embedded_tile,
    load_angles,
    load_inverse_rms,
    load_rotary,
    normalized,
    store_rotated,
)

# Sizes and strides vary from call to call: one binary serves all.
NUMBERS = (
    "tokens",
    *("x_stride", "x_head_stride", "out_stride", "out_part_stride"),
    "angle_stride",
)


@triton.jit(
    do_not_specialize=NUMBERS, do_not_specialize_on_alignment=("norm_ptr", "second_norm_ptr")
)
def rotate_kernel(
    # tensors; the weights of each part's norm, None without
    x_ptr, out_ptr, cos_ptr, sin_ptr,
    norm_ptr, second_norm_ptr,
    # sizes
    tokens,
    # strides, see ALIGNED; the last axis is contiguous
    x_stride, x_head_stride,
    out_stride, out_part_stride,
    angle_stride,
    # shape of a head and how it is cut
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr,
    # strides of x and out come in units of 8 elements, else of 1; the angles' of ANGLE_UNIT
    ALIGNED: tl.constexpr, ANGLE_UNIT: tl.constexpr,
    # columns of a chunk, of heads that no tile holds, each of which has a place of so many columns;
    # None: the head's tiles
    COLUMNS: tl.constexpr, HEAD_ROW: tl.constexpr,
    # how many of Q and K there are, whose heads stand one behind the other in x
    PARTS: tl.constexpr,
    # what is done to a tile, see tiles.py
    EMBED: tl.constexpr,
    # what is added to a head's mean square; None without a norm
    EPS: tl.constexpr,
    # rows of a tile, heads of a program
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
    # attention that is launched early may start, as soon as there is room for it
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rotate into the paired order, and the places, that load_rotary reads from.

    One program for each (token block, part, group of heads), of heads in chunks for each of these.
    """
    if OVERLAP:
        gdc_launch_dependents()
    # Written out, the factors tell the compiler that it may load 16 bytes at a time.
    UNIT: tl.constexpr = 8 if ALIGNED else 1
    x_stride, out_stride = x_stride * UNIT, out_stride * UNIT
    x_head_stride = x_head_stride.to(tl.int64) * UNIT
    out_part_stride = out_part_stride.to(tl.int64) * UNIT
    angle_stride = angle_stride * ANGLE_UNIT
    GROUPS: tl.constexpr = tl.cdiv(HEADS, GROUP)
    program = tl.program_id(0)
    CHUNKS: tl.constexpr = 1 if COLUMNS is None else HEAD_ROW // COLUMNS
    if COLUMNS is not None:
        first_column = program % CHUNKS * COLUMNS
        program = program // CHUNKS
    first = (program // GROUPS // PARTS).to(tl.int64) * BLOCK
    part = program // GROUPS % PARTS
    first_head = (program % GROUPS) * GROUP
    group = tl.minimum(GROUP, HEADS - first_head)
    rows = tl.arange(0, BLOCK)
    mask = rows < tokens - first
    cos_ptr, sin_ptr = angles_from(cos_ptr, sin_ptr, first * angle_stride, EMBED)
    x_ptr += first * x_stride + (part * HEADS + first_head) * x_head_stride
    out_ptr += first * out_stride + part * out_part_stride
    if EPS is not None and PARTS == 2:
        norm_ptr = tl.where(part == 0, norm_ptr, second_norm_ptr)
    if COLUMNS is not None:
        cos, sin = load_angles(
            cos_ptr, sin_ptr, angle_stride, rows, mask, first_column, COLUMNS, ROTARY_DIM, EMBED,
            HEAD_ROW,
        )  # fmt: skip
        for i in range(0, group):
            x = load_rotary(
                x_ptr, x_stride, rows, mask, 0, first_column, COLUMNS, 1, HEAD_DIM, ROTARY_DIM,
                EMBED, HEAD_ROW,
            )  # fmt: skip
            y = embedded_tile(x, cos, sin, EMBED, out_ptr.dtype.element_ty)
            place = out_ptr + (first_head + i) * HEAD_ROW
            store_rotated(place, out_stride, rows, mask, y, 0, 1, first_column, COLUMNS)
            x_ptr += x_head_stride
    else:
        cos, sin = load_angles(
            cos_ptr, sin_ptr, angle_stride, rows, mask, 0, MAIN, ROTARY_DIM, EMBED
        )
        x_head = x_ptr
        for i in range(0, group):
            rotate_tile(
                x_head, x_stride, out_ptr, out_stride, norm_ptr,
                rows, mask, cos, sin, first_head + i, 0, MAIN,
                HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, EMBED, EPS,
            )  # fmt: skip
            x_head += x_head_stride
        if TAIL > 0:
            cos, sin = load_angles(
                cos_ptr, sin_ptr, angle_stride, rows, mask, MAIN, TAIL, ROTARY_DIM, EMBED
            )
            x_head = x_ptr
            for i in range(0, group):
                rotate_tile(
                    x_head, x_stride, out_ptr, out_stride, norm_ptr,
                    rows, mask, cos, sin, first_head + i, MAIN, TAIL,
                    HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, EMBED, EPS,
                )  # fmt: skip
                x_head += x_head_stride


@triton.jit
def rotate_tile(x_ptr, x_stride, out_ptr, out_stride, norm_ptr, rows, mask, cos, sin, head,
                FIRST: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
                HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
                MAIN: tl.constexpr, TAIL: tl.constexpr, EMBED: tl.constexpr,
                EPS: tl.constexpr):  # fmt: skip
    """Rotate columns FIRST .. FIRST + WIDTH (in paired order) of one head; 0 past head_dim."""
    x = load_rotary(x_ptr, x_stride, rows, mask, 0, FIRST, WIDTH, 1, HEAD_DIM, ROTARY_DIM, EMBED)
    inverse = load_inverse_rms(x_ptr, x_stride, rows, mask, EPS, MAIN, TAIL, HEAD_DIM, ROTARY_DIM)
    x = normalized(x, inverse, norm_ptr, FIRST, WIDTH, HEAD_DIM, ROTARY_DIM)
    y = embedded_tile(x, cos, sin, EMBED, out_ptr.dtype.element_ty)
    store_rotated(out_ptr, out_stride, rows, mask, y, head, HEADS, FIRST, WIDTH)
