"""Rotation as a pass of its own, for the strategies that want Q or K rotated beforehand.

A norm of the heads, if there is one, goes before it. And back, of gradients that no kernel in
Triton's dialect computed.

Bound by memory alone: one read and one write of x, the angles read once for all heads of a token.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernels.tiles import (
    ROPE,
    Head,
    Norm,
    Ref,
    Rotated,
    Rows,
    Scalar,
    embedded_tile,
    load_angles,
    load_columns,
    load_inverse_rms,
    load_rotary,
    normalized,
    rotary_dim_of,
    rotate_back,
    store_columns,
    store_pairs,
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
    # whether a head's tiles stand side by side, [rows, parts * heads, main + tail]
    joined: bool = False,
) -> None:  # fmt: skip
    """Rotate into the paired order, and the places, that load_rotary reads from.

    One program for each (token block, part, group of heads), of heads in chunks for each of these.
    """
    tokens, _, heads, head_dim = x_ref.shape
    rotary_dim = rotary_dim_of(cos_ref, head_dim)
    parts, groups = out_ref.shape[1] // (heads if joined else 1), pl.cdiv(heads, group)
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

    def rotated(ref: Ref, part: Scalar, head: Scalar) -> Rotated:
        return joined_head(ref, part * heads + head) if joined else Rotated(ref, part, head, heads)

    def rotate_columns(first_column: int, width: int) -> None:
        cos, sin = load_angles(cos_ref, sin_ref, rows, first_column, width, rotary_dim, embed)

        def rotate_head(i: Scalar, _: None) -> None:
            x = Head(x_ref, first_part + part, first_head + i)
            tile = load_rotary(x, rows, first_column, width, rotary_dim, embed)
            inverse = load_inverse_rms(x, rows, norm, main, tail, head_dim, rotary_dim)
            tile = normalized(tile, inverse, norm, first_column, width, head_dim, rotary_dim)
            y = embedded_tile(tile, cos, sin, embed, out_ref.dtype)
            store_rotated(rotated(out_ref, part, first_head + i), rows, y, first_column, width)

        jax.lax.fori_loop(0, jnp.minimum(group, heads - first_head), rotate_head, None)

    rotate_columns(0, main)
    if tail > 0:
        rotate_columns(main, tail)


def rotate_back_kernel(
    # gradients in rotated q and k, joined [rows, heads, row]; in v [rows, 1, heads, columns], which
    # is copied, or None
    q_ref: Ref, k_ref: Ref, v_ref: Ref | None, cos_ref: Ref, sin_ref: Ref,
    # [tokens, 1, heads, head_dim] in q and in k, or [tokens, 3, heads, head_dim] in all
    *out_refs: Ref,
    main: int, tail: int, block: int, group: int,
) -> None:  # fmt: skip
    """Gradients in q and k, of those in what rotate_kernel joined.

    One program for each (token block, group of heads).
    """
    tokens, _, heads, head_dim = out_refs[0].shape
    rotary_dim, dtype = 2 * cos_ref.shape[1], out_refs[0].dtype
    groups = pl.cdiv(heads, group)
    first = (pl.program_id(0) // groups) * block
    first_head = (pl.program_id(0) % groups) * group
    rows = Rows(first, block, jnp.arange(block, dtype=jnp.int32) < tokens - first)
    packed = v_ref is not None
    places = [(out_refs[0], part) for part in range(3)] if packed else [(x, 0) for x in out_refs]

    def rotate_columns(first_column: int, width: int) -> None:
        cos, sin = load_angles(cos_ref, sin_ref, rows, first_column, width, rotary_dim, ROPE)

        def rotate_head(i: Scalar, _: None) -> None:
            head = first_head + i
            for ref, (out_ref, part) in zip((q_ref, k_ref), places, strict=False):
                y = load_rotary(joined_head(ref, head), rows, first_column, width, 0, None)
                pairs = rotate_back(y, cos, sin, dtype)
                out = Head(out_ref, part, head)
                store_pairs(out, rows, pairs, first_column, width, head_dim, rotary_dim)
            if packed:
                x = load_columns(Head(v_ref, 0, head), rows, first_column, width, head_dim)
                out = Head(out_refs[0], 2, head)
                store_columns(out, rows, x, first_column, width, head_dim)

        jax.lax.fori_loop(0, jnp.minimum(group, heads - first_head), rotate_head, None)

    rotate_columns(0, main)
    if tail > 0:
        rotate_columns(main, tail)


def joined_head(ref: Ref, row: Scalar) -> Rotated:
    """A head of a [tokens, parts * heads, main + tail] ref: as if it were a part's only one."""
    return Rotated(ref, row, 0, 1)
