"""Rotation as a pass of its own, for the strategies that want Q or K rotated beforehand.

A norm of the heads, if there is one, goes before it.

Bound by memory alone: one read and one write of x, the angles read once for all heads of a token.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernels.tiles import (
    Head,
    Norm,
    Ref,
    Rotated,
    Rows,
    Scalar,
    embedded_tile,
    load_angles,
    load_inverse_rms,
    load_rotary,
    normalized,
    rotary_dim_of,
    store_columns,
    store_rotated,
)


def rotate_kernel(
    # x is [tokens, parts, heads, head_dim], out [rows, parts that are rotated, row], of heads in
    # chunks [rows, parts, heads, columns of whole chunks]; rows past the tokens are left; of each
    # of these parts the weights of its norm, [head_dim], if there is one
    x_ref: Ref, cos_ref: Ref, sin_ref: Ref, norm_refs: tuple[Ref, ...], out_ref: Ref,
    *,
    # the first part of x that is rotated; as many are as out has
    first_part: int,
    # how a head is cut; columns of a chunk, of heads that no tile holds, None: the head's tiles
    main: int, tail: int, columns: int | None,
    # what is done to a tile, see tiles.py
    embed: str,
    # rows of a tile, heads of a program
    block: int, group: int,
    # what is added to mean squares
    norm_eps: float,
) -> None:  # fmt: skip
    """Rotate into the paired order, and the places, that load_rotary reads from.

    One program for each (token block, part, group of heads), of heads in chunks for each of these.
    """
    tokens, _, heads, head_dim = x_ref.shape
    rotary_dim = rotary_dim_of(cos_ref, head_dim)
    parts, groups = out_ref.shape[1], pl.cdiv(heads, group)
    program = pl.program_id(0)
    if columns is not None:
        row = out_ref.shape[-1]
        chunk, program = program % (row // columns), program // (row // columns)
    first = (program // groups // parts) * block
    part = program // groups % parts
    first_head = (program % groups) * group
    rows = Rows(first, block, jnp.arange(block, dtype=jnp.int32) < tokens - first)
    norm = Norm(norm_refs, part, norm_eps) if norm_refs else None

    def rotate_chunk(i: Scalar, angles: tuple[jax.Array, jax.Array]) -> tuple:
        x = Head(x_ref, first_part + part, first_head + i)
        tile = load_rotary(x, rows, chunk * columns, columns, rotary_dim, embed, row)
        y = embedded_tile(tile, *angles, embed, out_ref.dtype)
        out = Head(out_ref, part, first_head + i)
        store_columns(out, rows, y, chunk * columns, columns, row, end=row)
        return angles

    if columns is not None:
        where = chunk * columns, columns, rotary_dim
        angles = load_angles(cos_ref, sin_ref, rows, *where, embed, row)
        jax.lax.fori_loop(0, jnp.minimum(group, heads - first_head), rotate_chunk, angles)
        return

    def rotate_columns(first_column: int, width: int) -> None:
        cos, sin = load_angles(cos_ref, sin_ref, rows, first_column, width, rotary_dim, embed)

        def rotate_head(i: Scalar, _: None) -> None:
            x = Head(x_ref, first_part + part, first_head + i)
            tile = load_rotary(x, rows, first_column, width, rotary_dim, embed)
            inverse = load_inverse_rms(x, rows, norm, main, tail, head_dim, rotary_dim)
            tile = normalized(tile, inverse, norm, first_column, width, head_dim, rotary_dim)
            y = embedded_tile(tile, cos, sin, embed, out_ref.dtype)
            out = Rotated(out_ref, part, first_head + i, heads)
            store_rotated(out, rows, y, first_column, width)

        jax.lax.fori_loop(0, jnp.minimum(group, heads - first_head), rotate_head, None)

    rotate_columns(0, main)
    if tail > 0:
        rotate_columns(main, tail)
