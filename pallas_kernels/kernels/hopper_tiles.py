"""Tiles of the warp-specialized kernel: their sizes, a segment's, and how they are loaded."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from pallas_kernels.kernels.tiles import Ref, Scalar, segment_bounds
from pallas_kernels.launching.choose import BLOCK, ROW_UNIT

# Query rows of a group of warps, and groups that compute.
ROWS = 64
GROUPS = BLOCK // ROWS
# Keys of a tile; tiles of K, and of V, that are held at a time: one for each group at least.
KEYS = 128
STAGES = 2
# How a product's sums [ROWS, columns] lie in the registers of a group of warps, and a row's values.
SUMS = mosaic.Layout.WGMMA
ROW = SUMS.reduce(1)


class Operand(NamedTuple):
    """Q, K or V: the tiles of one head.

    Attributes:
        ref: [rows, columns]
        columns: where in a row each tile starts: of Q and K the main and the tail tile.
        tiles: in shared memory, each [so many, rows, columns].
        full: barriers, one for each of so many: has it been loaded?
        empty: has it been read by all groups? None: it stays.
    """

    ref: Ref
    columns: tuple[Scalar, ...]
    tiles: tuple[Ref, ...]
    full: Ref
    empty: Ref | None


class Visited(NamedTuple):
    """The segments that reach into a block of tokens, first_segment to last_segment."""

    cu_seqlens_ref: Ref
    tokens: int
    first_segment: Scalar
    last_segment: Scalar
    block_start: Scalar


class Keys(NamedTuple):
    """A segment's keys: start to end, in so many tiles, the first of which starts at first."""

    start: Scalar
    end: Scalar
    first: Scalar
    tiles: Scalar


def stage_of(tile: Scalar) -> Scalar:
    """Where the tile of a number lies."""
    return lax.rem(tile, STAGES)


def keys_of(visited: Visited, segment: Scalar) -> Keys:
    """A segment's keys; at least one tile is visited for it."""
    cu_seqlens_ref, tokens, _, _, block_start = visited
    start, end = segment_bounds(cu_seqlens_ref, segment, tokens)
    first = lax.div(start, ROW_UNIT) * ROW_UNIT
    tiles = lax.div(jnp.maximum(end - first, 1) + (KEYS - 1), KEYS)
    # Otherwise only padding follows it.
    return Keys(start, end, first, jnp.where(end > block_start, tiles, 1))


def tile_of(keys: Keys, i: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """The first row of a segment's i-th tile, and from and to which of its rows the segment is."""
    row = keys.first + i * KEYS
    return row, keys.start - row, keys.end - row


def load_tile(x: Operand, row: Scalar, index: Scalar, full: Ref) -> None:
    """Start copying the tiles whose first row is given."""
    for tile, column in zip(x.tiles, x.columns, strict=True):
        _, rows, columns = tile.shape
        place = x.ref.at[pl.ds(row, rows), pl.ds(column, columns)]
        mosaic.copy_gmem_to_smem(place, tile.at[index], full)


def filled(
    shape: tuple[int, ...], value: float, layout: Any, dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """The same number everywhere."""
    return mosaic.layout_cast(jnp.full(shape, value, dtype), layout)


def iota(shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """Numbers along an axis."""
    return mosaic.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def by_rows(x: jax.Array, like: jax.Array) -> jax.Array:
    """A value for each row, for all its columns."""
    return lax.broadcast_in_dim(x, like.shape, (0,))
