"""Tiles of the warp-specialized kernel: their sizes, those of a segment, and their loads."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

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
def stage_of(tile):
    """Where the tile of a number lies, and the parity of how often that place was used before."""
    return tile % STAGES, tile // STAGES & 1


@gluon.jit
def keys_of(visited, segment):
    """A segment's start and end, how many tiles of keys are visited, and keys of the first of them.

    All others are whole. Of a segment without keys, or one that only padding follows, a tile is
    visited too, for no row.
    """
    cu_seqlens_ptr, tokens, _, _, block_start = visited
    start, end = segment_bounds(cu_seqlens_ptr, segment, tokens)
    keys = gl.where(end > block_start, gl.maximum(end - start, 1), 1)
    tiles = gl.cdiv(keys, KEYS)
    return start, end, tiles, keys - (tiles - 1) * KEYS


@gluon.jit
def tile_row(i, start, first_keys):
    """The first key of a segment's i-th tile."""
    return gl.where(i == 0, start, start + first_keys + (i - 1) * KEYS)


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
