"""What the warp-specialized backward kernels do before and behind their products: D of a group's
rows, and their gradients, rotated back as they are written.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_kernels.kernels.hopper_stream import store_columns, stored_layout
from triton_kernels.kernels.hopper_tiles import ROWS, group_rows, matrix
from triton_kernels.kernels.tiles import offsets, places_of, rotate_pairs


@gluon.jit
def row_dots(x_ptr, y, rows, GROUP: gl.constexpr, STRIDE: gl.constexpr, HEAD_DIM: gl.constexpr,
             MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Sums [ROWS] of a group's rows of x times those of y, main and tail tile, in fp32.

    x_ptr is where the block's first row, of so many, begins.
    """
    y_main, y_tail = y
    dots = tile_dots(x_ptr, y_main, rows, 0, GROUP, STRIDE, HEAD_DIM)
    if TAIL > 0:
        tail = tile_dots(x_ptr, y_tail, rows, MAIN, GROUP, STRIDE, HEAD_DIM)
        dots += gl.convert_layout(tail, dots.type.layout)
    return dots


@gluon.jit
def tile_dots(x_ptr, y, rows, FIRST: gl.constexpr, GROUP: gl.constexpr, STRIDE: gl.constexpr,
              HEAD_DIM: gl.constexpr):  # fmt: skip
    y = matrix(y)
    LAYOUT: gl.constexpr = stored_layout(y.shape[1])
    row = group_rows(GROUP, LAYOUT)
    column = FIRST + gl.arange(0, y.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    mask = (row < rows)[:, None] & (column < HEAD_DIM)
    x = gl.load(x_ptr + row[:, None] * STRIDE + column, mask=mask, other=0.0)
    return gl.sum(x.to(gl.float32) * y.load(LAYOUT).to(gl.float32), 1)


@gluon.jit
def store_rotated_back(
    grad_ptr, angles, first, last, acc, acc_tail, factor,
    GROUP: gl.constexpr, STRIDE: gl.constexpr, HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr,
    MAIN: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Write the gradient of the group's rows that the block has from first to last - 1.

    acc times factor is that of the rotated ones. grad_ptr is where the block's first row goes, and
    angles are (cos, sin, their stride) from that row on.
    """
    rotate_tile_back(grad_ptr, angles, first, last, acc, factor,
                     0, GROUP, STRIDE, HEAD_DIM, ROTARY_DIM)  # fmt: skip
    if TAIL > 0:
        rotate_tile_back(grad_ptr, angles, first, last, acc_tail, factor,
                         MAIN, GROUP, STRIDE, HEAD_DIM, ROTARY_DIM)  # fmt: skip


@gluon.jit
def rotate_tile_back(grad_ptr, angles, first, last, acc, factor, FIRST: gl.constexpr,
                     GROUP: gl.constexpr, STRIDE: gl.constexpr, HEAD_DIM: gl.constexpr,
                     ROTARY_DIM: gl.constexpr):  # fmt: skip
    """The same of one tile: by pairs, which one thread has, as products' sums lie."""
    cos_ptr, sin_ptr, angle_stride = angles
    PAIRS: gl.constexpr = acc.shape[1] // 2
    y1, y2 = gl.split((acc * factor).reshape([ROWS, PAIRS, 2]))
    LAYOUT: gl.constexpr = y1.type.layout
    row = group_rows(GROUP, LAYOUT)
    pair = FIRST // 2 + gl.arange(0, PAIRS, gl.SliceLayout(0, LAYOUT))
    mask = ((row >= first) & (row < last))[:, None] & (pair < ROTARY_DIM // 2)[None, :]
    at = offsets(row, angle_stride, pair)
    cos = gl.load(cos_ptr + at, mask=mask, other=1.0).to(gl.float32)
    sin = gl.load(sin_ptr + at, mask=mask, other=0.0).to(gl.float32)
    x1, x2 = rotate_pairs((y1, y2), cos, -sin)
    store_halves(grad_ptr, first, last, x1, x2, FIRST, GROUP, STRIDE, HEAD_DIM, ROTARY_DIM)


@gluon.jit
def store_halves(grad_ptr, first, last, x1, x2, FIRST: gl.constexpr, GROUP: gl.constexpr,
                 STRIDE: gl.constexpr, HEAD_DIM: gl.constexpr,
                 ROTARY_DIM: gl.constexpr):  # fmt: skip
    """Write both halves [ROWS, pairs] of a tile where store_pairs in tiles.py would."""
    LAYOUT: gl.constexpr = stored_layout(x1.shape[1])
    x1 = gl.convert_layout(x1.to(grad_ptr.dtype.element_ty), LAYOUT)
    x2 = gl.convert_layout(x2.to(grad_ptr.dtype.element_ty), LAYOUT)
    row = group_rows(GROUP, LAYOUT)
    pair = FIRST // 2 + gl.arange(0, x1.shape[1], gl.SliceLayout(0, LAYOUT))
    column, distance = places_of(pair, HEAD_DIM, ROTARY_DIM)
    mask = ((row >= first) & (row < last))[:, None] & (pair < HEAD_DIM // 2)[None, :]
    place = grad_ptr + row[:, None] * STRIDE + column[None, :]
    gl.store(place, x1, mask=mask)
    gl.store(place + distance, x2, mask=mask)


@gluon.jit
def clear_rotated(grad_ptr, rows, GROUP: gl.constexpr, STRIDE: gl.constexpr,
                  HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr,
                  MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Zeros where store_rotated_back writes, by the same threads, into the block's first rows."""
    clear_halves(grad_ptr, rows, 0, MAIN // 2, GROUP, STRIDE, HEAD_DIM, ROTARY_DIM)
    if TAIL > 0:
        clear_halves(grad_ptr, rows, MAIN, TAIL // 2, GROUP, STRIDE, HEAD_DIM, ROTARY_DIM)


@gluon.jit
def clear_halves(grad_ptr, rows, FIRST: gl.constexpr, PAIRS: gl.constexpr, GROUP: gl.constexpr,
                 STRIDE: gl.constexpr, HEAD_DIM: gl.constexpr,
                 ROTARY_DIM: gl.constexpr):  # fmt: skip
    x = gl.zeros([ROWS, PAIRS], gl.float32, stored_layout(PAIRS))
    store_halves(grad_ptr, 0, rows, x, x, FIRST, GROUP, STRIDE, HEAD_DIM, ROTARY_DIM)


@gluon.jit
def clear_columns(grad_ptr, rows, GROUP: gl.constexpr, STRIDE: gl.constexpr,
                  HEAD_DIM: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """The same where store_columns writes."""
    x = gl.zeros([ROWS, MAIN], gl.float32, stored_layout(MAIN))
    store_columns(grad_ptr, 0, rows, None, x, 0, GROUP, STRIDE, HEAD_DIM)
    if TAIL > 0:
        x = gl.zeros([ROWS, TAIL], gl.float32, stored_layout(TAIL))
        store_columns(grad_ptr, 0, rows, None, x, MAIN, GROUP, STRIDE, HEAD_DIM)
