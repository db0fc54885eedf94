"""Tiles of the warp-specialized kernels: their sizes, a segment's, and how they are loaded."""

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
    """Q, K or V: the tiles of one head. Or a number for each of its rows.

    Attributes:
        ref: [rows, columns], or all heads' numbers.
        columns: where in a row each tile starts: of Q and K the main and the tail tile. Or where
            the head's numbers do.
        tiles: in shared memory, each [so many, rows, columns], or [so many, rows].
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
    """A segment's keys: start to end, in so many tiles, the first of which starts at first.

    Or its queries, in a backward pass.
    """

    start: Scalar
    end: Scalar
    first: Scalar
    tiles: Scalar


def stage_of(tile: Scalar, stages: int = STAGES) -> Scalar:
    """Where the tile of a number lies."""
    return lax.rem(tile, stages)


def keys_of(visited: Visited, segment: Scalar, rows: int = KEYS) -> Keys:
    """A segment's keys, in tiles of so many; at least one tile is visited for it."""
    cu_seqlens_ref, tokens, _, _, block_start = visited
    start, end = segment_bounds(cu_seqlens_ref, segment, tokens)
    first = lax.div(start, ROW_UNIT) * ROW_UNIT
    tiles = lax.div(jnp.maximum(end - first, 1) + (rows - 1), rows)
    # Otherwise only padding follows it.
    return Keys(start, end, first, jnp.where(end > block_start, tiles, 1))


def tile_of(keys: Keys, i: Scalar, rows: int = KEYS) -> tuple[Scalar, Scalar, Scalar]:
    """The first row of a segment's i-th tile, and from and to which of its rows the segment is."""
    row = keys.first + i * rows
    return row, keys.start - row, keys.end - row


def load_tile(x: Operand, row: Scalar, index: Scalar, full: Ref) -> None:
    """Start copying the tiles whose first row is given."""
    for tile, column in zip(x.tiles, x.columns, strict=True):
        _, rows, *columns = tile.shape
        if columns:
            place = x.ref.at[pl.ds(row, rows), pl.ds(column, *columns)]
        else:
            place = x.ref.at[pl.ds(column + row, rows)]
        mosaic.copy_gmem_to_smem(place, tile.at[index], full)


def whole_of(keys: Keys, rows: int = KEYS) -> Scalar:
    """How many tiles are done behind a segment's last whole one, the first one in any case."""
    whole = jnp.maximum(lax.div(keys.end - keys.first, rows), 1)
    return jnp.minimum(whole, keys.tiles)


def clear_rows(tile: Ref, low: Scalar, high: Scalar) -> None:
    """Zeros into a tile's rows before `low` and from `high` on."""
    row = iota(tile.shape, 0, SUMS)
    x = tile[...]
    tile[...] = jnp.where((row >= low) & (row < high), x, jnp.zeros_like(x))
    mosaic.commit_smem()


def store_masked(tile: Ref, mask: jax.Array, x: jax.Array) -> None:
    """Write some rows of a tile."""
    x = x.astype(tile.dtype)
    tile[...] = jnp.where(by_rows(mask, x), x, tile[...])


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
