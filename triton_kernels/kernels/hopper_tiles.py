"""Tiles of the warp-specialized kernels: sizes, those of a segment, their loads and products."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from triton_kernels.kernels.tiles import segment_bounds

# Triton 3.7 and older know but the second name.
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

# Query rows of a group of warps, and groups that compute.
ROWS: tl.constexpr = tl.constexpr(64)
GROUPS: tl.constexpr = tl.constexpr(2)
# Keys of a tile; tiles of K, and of V, that are held at a time: one for each group at least.
KEYS: tl.constexpr = tl.constexpr(128)
STAGES: tl.constexpr = tl.constexpr(2)


@gluon.jit
def stage_of(tile, COUNT: gl.constexpr = STAGES):
    """Where, of so many places, the tile of a number lies; the parity of its uses before."""
    return tile % COUNT, tile // COUNT & 1


@gluon.jit
def keys_of(visited, segment, TILE: gl.constexpr = KEYS):
    """A segment's start and end, how many tiles of keys are visited, and keys of the first of them.

    All others are whole. Of a segment without keys, or one that only padding follows, a tile is
    visited too, for no row.
    """
    cu_seqlens_ptr, tokens, _, _, block_start = visited
    start, end = segment_bounds(cu_seqlens_ptr, segment, tokens)
    keys = gl.where(end > block_start, gl.maximum(end - start, 1), 1)
    tiles = gl.cdiv(keys, TILE)
    return start, end, tiles, keys - (tiles - 1) * TILE


@gluon.jit
def tile_row(i, start, first_keys, TILE: gl.constexpr = KEYS):
    """The first key of a segment's i-th tile."""
    return gl.where(i == 0, start, start + first_keys + (i - 1) * TILE)


@gluon.jit
def load_rotated(desc, tail_desc, row, head, main, tail, full,
                 HEADS: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Start copying a tile of rotated rows, see rotated_columns in tiles.py."""
    copy_tile(desc, [row, head * MAIN], full, main)
    if TAIL > 0:
        copy_tile(tail_desc, [row, HEADS * MAIN + head * TAIL], full, tail)


@gluon.jit
def load_head(desc, tail_desc, row, head, main, tail, full,
              MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Start copying a tile of one head's rows; zeros come where there is no row or column."""
    copy_tile(desc, [row, head, 0], full, main)
    if TAIL > 0:
        copy_tile(tail_desc, [row, head, MAIN], full, tail)


@gluon.jit
def group_rows(GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Which of the block's rows are the group's, as the rows of a layout."""
    return GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))


@gluon.constexpr_function
def sums_layout(columns):
    """How the sums of a product [ROWS, columns] lie in the registers of a group of warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def matrix(x):
    """A tile [rows, columns], also of one that load_head copies, [rows, 1, columns]."""
    if len(x.shape) == 3:
        return x.reshape([x.shape[0], x.shape[2]])
    else:
        return x


@gluon.jit
def clear_rows(x, count):
    """Zeros into the rows of a tile from the count-th on."""
    x = matrix(x)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    x.store(gl.where(row < count, x.load(LAYOUT), gl.full([1, 1], 0.0, x.dtype, LAYOUT)))


@gluon.jit
def product(a, b_main, b_tail, TAIL: gl.constexpr):
    """Start computing the products [ROWS, rows of b] of a's rows, main and tail tile, and b's."""
    a_main, a_tail = a
    COLUMNS: gl.constexpr = b_main.shape[0]
    sums = gl.zeros([ROWS, COLUMNS], gl.float32, sums_layout(COLUMNS))
    b_main = matrix(b_main).permute([1, 0])
    sums = warpgroup_mma(matrix(a_main), b_main, sums, use_acc=False, is_async=True)
    if TAIL > 0:
        b_tail = matrix(b_tail).permute([1, 0])
        sums = warpgroup_mma(matrix(a_tail), b_tail, sums, is_async=True)
    return sums


@gluon.jit
def add_product(p, b_main, b_tail, acc, acc_tail, TAIL: gl.constexpr):
    """Start adding the product of p [ROWS, rows of b], in registers, and a tile of rows b."""
    acc = add_columns(p, b_main, acc)
    if TAIL > 0:
        acc_tail = add_columns(p, b_tail, acc_tail)
    return acc, acc_tail


@gluon.jit
def add_columns(p, b, acc):
    b = matrix(b)
    factors = gl.convert_layout(p, gl.DotOperandLayout(0, sums_layout(b.shape[1]), 2))
    return warpgroup_mma(factors, b, acc, is_async=True)


@gluon.jit
def zero_sums(MAIN: gl.constexpr, TAIL: gl.constexpr):
    """No values yet: [ROWS, MAIN] and [ROWS, TAIL], without a tail [ROWS, 16]."""
    COLUMNS: gl.constexpr = TAIL if TAIL > 0 else 16
    acc = gl.zeros([ROWS, MAIN], gl.float32, sums_layout(MAIN))
    return acc, gl.zeros([ROWS, COLUMNS], gl.float32, sums_layout(COLUMNS))


@gluon.jit
def wait_for_sums(acc, acc_tail, TAIL: gl.constexpr):
    """Wait for them."""
    if TAIL > 0:
        acc, acc_tail = warpgroup_mma_wait(0, deps=[acc, acc_tail])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, acc_tail
