"""Loading a segment's rows as tiles, rotated on the way: what the kernels have in common.

A tile's sides are powers of two, a head's width need not be: head_dim is cut into a main tile and
a tail tile (80 = 64 + 16) so that no product is padded where splitting can avoid it.

Rotated tiles hold their columns in pairs, x1 and x2 of one angle side by side (the two halves of
the NeoX form interleaved). Q K^T does not care in which order the columns stand as long as Q and K
agree, and joining the halves this way moves no data between threads. V and the result keep the
caller's order.

This is the file that speaks Pallas' Triton dialect; q, k and v are refs of four axes,
[tokens, parts, heads, head_dim], of which a kernel reads one part and one head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

Ref = Any
Scalar = Any


class Head(NamedTuple):
    """One head of one part of a [tokens, parts, heads, head_dim] ref."""

    ref: Ref
    part: int
    head: Scalar


def dot(a: jax.Array, b: jax.Array, acc: jax.Array | None = None) -> jax.Array:
    """acc + a b, summed in fp32; fp32 operands are multiplied as such, never as tf32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    product = jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
    return product if acc is None else acc + product


def segment_bounds(cu_seqlens_ref: Ref, segment: Scalar, tokens: int) -> tuple[Scalar, Scalar]:
    """Start and end of a segment, forced into [0, tokens] whatever cu_seqlens holds."""
    start = jnp.clip(cu_seqlens_ref[segment], 0, tokens)
    end = jnp.clip(cu_seqlens_ref[segment + 1], start, tokens)
    return start, end


def _window(x: Head | Ref, first_row: Scalar, rows: int, columns: pl.Slice | jax.Array) -> Ref:
    """The part of a ref that a tile covers; columns are a slice, or a vector of indices."""
    prefix = (np.int32(x.part), x.head) if isinstance(x, Head) else ()
    ref = x.ref if isinstance(x, Head) else x
    if isinstance(columns, pl.Slice):
        return ref.at[pl.ds(first_row, rows), *prefix, columns]
    shape = (rows, columns.shape[0])
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + first_row
    return ref.at[row, *prefix, jnp.broadcast_to(columns[None, :], shape)]


def _columns(first: int, width: int, limit: int) -> tuple[pl.Slice | jax.Array, jax.Array | None]:
    """Columns first .. first + width, and the mask of those below limit where some are not."""
    if first + width <= limit:
        return pl.ds(first, width), None
    column = first + jnp.arange(width, dtype=jnp.int32)
    return column, column < limit


def _and(row_mask: jax.Array, column_mask: jax.Array | None) -> jax.Array:
    mask = row_mask[:, None]
    return mask if column_mask is None else mask & column_mask[None, :]


def load_columns(x: Head, first_row: Scalar, row_mask: jax.Array, first: int, width: int,
                 head_dim: int) -> jax.Array:  # fmt: skip
    """Columns first .. first + width of some rows; zero where masked or past head_dim."""
    columns, column_mask = _columns(first, width, head_dim)
    window = _window(x, first_row, row_mask.shape[0], columns)
    return plgpu.load(window, mask=_and(row_mask, column_mask), other=0.0)


def store_columns(x: Head, first_row: Scalar, row_mask: jax.Array, tile: jax.Array, first: int,
                  width: int, head_dim: int) -> None:  # fmt: skip
    """The inverse of load_columns."""
    columns, column_mask = _columns(first, width, head_dim)
    window = _window(x, first_row, row_mask.shape[0], columns)
    plgpu.store(window, tile, mask=_and(row_mask, column_mask))


def pair_columns(first: int, width: int, head_dim: int, rotary_dim: int) -> tuple[Any, Any, Any]:
    """The two columns of each pair first .. first + width, and the mask of the pairs that exist.

    Rotary pairs are (i, i + rotary_dim / 2). The dims that pass unrotated form pairs of the same
    kind behind them, so that one code serves both: their angle is 0.
    """
    if rotary_dim == head_dim and first + width <= head_dim // 2:
        return pl.ds(first, width), pl.ds(first + head_dim // 2, width), None
    pair = first + jnp.arange(width, dtype=jnp.int32)
    rotary = pair < rotary_dim // 2
    column = jnp.where(rotary, pair, pair + rotary_dim // 2)
    partner = column + jnp.where(rotary, rotary_dim // 2, (head_dim - rotary_dim) // 2)
    return column, partner, pair < head_dim // 2


def load_angles(cos_ref: Ref, sin_ref: Ref, first_row: Scalar, row_mask: jax.Array, first: int,
                width: int, rotary_dim: int) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """cos and sin [rows, width / 2] for the rotated tile of columns first .. first + width."""
    columns, column_mask = _columns(first // 2, width // 2, rotary_dim // 2)
    mask = _and(row_mask, column_mask)
    rows = row_mask.shape[0]
    cos = plgpu.load(_window(cos_ref, first_row, rows, columns), mask=mask, other=1.0)
    sin = plgpu.load(_window(sin_ref, first_row, rows, columns), mask=mask, other=0.0)
    return cos, sin


def load_pairs(x: Head, first_row: Scalar, row_mask: jax.Array, cos: jax.Array, sin: jax.Array,
               first: int, width: int, head_dim: int,
               rotary_dim: int) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The two halves [rows, width / 2] of a tile, rotated in fp32: x1 c - x2 s, x2 c + x1 s."""
    column, partner, column_mask = pair_columns(first // 2, width // 2, head_dim, rotary_dim)
    mask = _and(row_mask, column_mask)
    rows = row_mask.shape[0]
    x1 = plgpu.load(_window(x, first_row, rows, column), mask=mask, other=0.0)
    x2 = plgpu.load(_window(x, first_row, rows, partner), mask=mask, other=0.0)
    x1, x2 = x1.astype(jnp.float32), x2.astype(jnp.float32)
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


def interleave(y1: jax.Array, y2: jax.Array) -> jax.Array:
    """[rows, n] twice -> [rows, 2 n], columns in pairs."""
    return jnp.stack([y1, y2], axis=-1).reshape(y1.shape[0], 2 * y1.shape[1])


def load_rotary(x: Head, first_row: Scalar, row_mask: jax.Array, cos: jax.Array, sin: jax.Array,
                first: int, width: int, head_dim: int, rotary_dim: int,
                rotate: bool) -> jax.Array:  # fmt: skip
    """A tile of Q or K in paired order: rotated here, or read as rotate_kernel left it."""
    if not rotate:
        return load_columns(x, first_row, row_mask, first, width, head_dim)
    y1, y2 = load_pairs(x, first_row, row_mask, cos, sin, first, width, head_dim, rotary_dim)
    dtype = x.ref.dtype
    return interleave(y1.astype(dtype), y2.astype(dtype))
