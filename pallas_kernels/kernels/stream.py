"""Attention within long segments: softmax over blocks of keys, for which see softmax.py.

A program owns a block of consecutive tokens, whatever segments they belong to, and serves each
segment that reaches into its block. So every row of the result is written by exactly one program,
the grid needs no bound on a segment's length, and long and short segments share one launch.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.checks import MAX_TILED_HEAD_DIM
from pallas_kernels.kernels.softmax import Sums, reference_fits, scaled_tiles, visit_segment
from pallas_kernels.kernels.tiles import (
    Embedding,
    Head,
    Norm,
    Ref,
    Rows,
    Scalar,
    barrier,
    embedded_tile,
    load_angles,
    load_columns,
    load_inverse_rms,
    load_rotary,
    normalized,
    rotary_dim_of,
    rotary_head,
    sector_shift,
    segment_bounds,
    store_columns,
    store_numbers,
)
from pallas_kernels.kernels.wide import Chunks, Cut


def stream_kernel(
    # q, k and v are [tokens, parts, heads, head_dim], those rotated before [tokens, parts, row];
    # the result is [tokens, 1, heads, head_dim]; the weights of Q's norm are [head_dim], None where
    # it is not normalised here, as K never is
    q_ref: Ref, k_ref: Ref, v_ref: Ref,
    cos_ref: Ref, sin_ref: Ref, cu_seqlens_ref: Ref,
    q_norm_ref: Ref | None, k_norm_ref: None, out_ref: Ref,
    # log-sum-exp of each row [heads, tokens], in powers of two; None: not wanted
    lse_ref: Ref | None = None,
    *,
    # where q, k and v lie
    parts: tuple[int, int, int],
    # scale times log2(e)
    scale_log2: float,
    # how a head is cut; columns of a chunk of Q and K, of heads that no tile holds: main are then
    # those of V and the result that a program has; None: the head's tiles. How fp32 is multiplied
    # there, see dot
    main: int, tail: int, columns: int | None, precision: str,
    # what is done to Q and K here, see tiles.py
    embed_q: Embedding, embed_k: Embedding,
    # online softmax for all rows: see is_online
    online: bool,
    # rows of a query tile and of a key tile
    block: int, block_k: int,
    # tokens of the shortest segment that is served here; shorter ones are another launch's
    shortest: int,
    # what is added to mean squares
    norm_eps: float,
    # by Pallas' interpreter
    interpreted: bool,
) -> None:  # fmt: skip
    """One program for each (head, token block); blocks run fastest and share the head's K and V.

    Of heads in chunks one for each `main` of their columns, and every one needs the logits of all.
    """
    tokens, _, heads, head_dim = out_ref.shape
    rotary_dim = rotary_dim_of(cos_ref, head_dim)
    segments = cu_seqlens_ref.shape[0] - 1
    blocks = pl.cdiv(tokens, block)
    head = pl.program_id(0) // blocks
    first_column, end, cut = 0, None, None
    if columns is not None:
        parts_of_head = pl.cdiv(head_dim, main)
        first_column, end = head % parts_of_head * main, parts_of_head * main
        head = head // parts_of_head
        cut = Cut(head_dim, columns, precision)
    block_start = (pl.program_id(0) % blocks) * block
    block_end = jnp.minimum(block_start + block, tokens)
    dtype = out_ref.dtype
    token = block_start + jnp.arange(block, dtype=jnp.int32)
    q_part, k_part, v_part = parts
    k_heads = v_ref.shape[2]
    served_by = head if k_heads == heads else head // (heads // k_heads)
    q_head = rotary_head(q_ref, q_part, head, heads, embed_q)
    k_head = rotary_head(k_ref, k_part, served_by, k_heads, embed_k)
    v_head = Head(v_ref, v_part, served_by)
    out_head = Head(out_ref, 0, head)
    norm = None if q_norm_ref is None else Norm((q_norm_ref,), 0, norm_eps)

    rows = Rows(block_start, block, token < block_end)
    q_tail = None
    if cut is not None:
        q = Chunks(q_head, rows, embed_q)
    else:
        cos, sin = load_angles(cos_ref, sin_ref, rows, 0, main, rotary_dim, embed_q)
        q = load_rotary(q_head, rows, 0, main, rotary_dim, embed_q)
        inverse = load_inverse_rms(q_head, rows, norm, main, tail, head_dim, rotary_dim)
        q = normalized(q, inverse, norm, 0, main, head_dim, rotary_dim)
        q = embedded_tile(q, cos, sin, embed_q, dtype)  # [block, main]
        if tail > 0:
            cos, sin = load_angles(cos_ref, sin_ref, rows, main, tail, rotary_dim, embed_q)
            q_tail = load_rotary(q_head, rows, main, tail, rotary_dim, embed_q)
            q_tail = normalized(q_tail, inverse, norm, main, tail, head_dim, rotary_dim)
            q_tail = embedded_tile(q_tail, cos, sin, embed_q, dtype)  # [block, tail]
        if embed_q is not None and block >= 64:
            # Hopper's asynchronous products, which take 64 rows, read what was loaded from shared
            # memory but what was computed from registers, and then wait for each other. So the
            # rotated tile is written to the result, whose rows are this program's own, and loaded
            # again.
            store_columns(out_head, rows, q, 0, main, head_dim)
            if tail > 0:
                store_columns(out_head, rows, q_tail, main, tail, head_dim)
            barrier(interpreted)
            q = load_columns(out_head, rows, 0, main, head_dim)
            if tail > 0:
                q_tail = load_columns(out_head, rows, main, tail, head_dim)

    # A row of 72 columns of 16 bits is 144 bytes: every second head's begin within a sector. There
    # the tiles of V, and so of the result, begin as many columns earlier as the sector does.
    v_shift = None
    if head_dim % 16 == 8 and dtype != jnp.float32 and cut is None:
        v_shift = sector_shift(v_head)
    visit = functools.partial(
        visit_segment, k_head, v_head, cos_ref, sin_ref, v_shift, scale_log2, q, q_tail,
        cut, first_column,
        main=main, tail=tail, embed_k=embed_k, block_k=block_k, interpreted=interpreted,
    )  # fmt: skip

    first_segment = jnp.maximum(last_start_at(cu_seqlens_ref, block_start, segments), 0)
    last_segment = last_start_at(cu_seqlens_ref, block_end - 1, segments)
    attend = functools.partial(
        attend_segments, cu_seqlens_ref, out_head, lse_ref, v_shift, tokens, block_start,
        scale_log2, visit, first_column, end, main=main, tail=tail, shortest=shortest,
    )  # fmt: skip
    covered, misfits = attend(first_segment, last_segment, token < block_end, online=online)
    if not online:
        # Rows that their reference does not fit, again. If there are none, for no segment: within a
        # branch the compiler would have the products wait for each other.
        are_misfits = jnp.sum(misfits.astype(jnp.int32)) > 0
        last_segment = jnp.where(are_misfits, last_segment, -1)
        attend(first_segment, last_segment, misfits, online=True)

    # Tokens of no segment.
    rows = rows._replace(mask=(token < block_end) & ~covered)
    if lse_ref is not None:
        store_numbers(lse_ref, head, rows, jnp.zeros((block,), jnp.float32))
    zeros = jnp.zeros((block, main), dtype)
    store_columns(out_head, rows, zeros, first_column, main, head_dim, end=end)
    if tail > 0:
        store_columns(out_head, rows, jnp.zeros((block, tail), dtype), main, tail, head_dim)


def attend_segments(
    cu_seqlens_ref: Ref, out_head: Head, lse_ref: Ref | None, v_shift: Scalar | None, tokens: int,
    block_start: Scalar, scale_log2: float,
    # `visit_segment` of this block's queries and head
    visit: Callable[..., Sums],
    # the first column of V, and behind the last of all programs; of heads that a tile holds 0, None
    first_column: Scalar, end_column: int | None,
    # from which segment to which, and which of the block's tokens are wanted
    first_segment: Scalar, last_segment: Scalar, wanted: jax.Array,
    *,
    main: int, tail: int, online: bool, shortest: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Write the result of the wanted tokens; returns which have a segment, and which misfit."""
    head_dim, dtype = out_head.ref.shape[-1], out_head.ref.dtype
    block = wanted.shape[0]
    token = block_start + jnp.arange(block, dtype=jnp.int32)

    def attend(segment: Scalar, masks: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        covered, misfits = masks
        start, end = segment_bounds(cu_seqlens_ref, segment, tokens)
        keys = jnp.where(end > block_start, end - start, 0)  # 0: only padding follows it
        if shortest > 0:
            keys = jnp.where(end - start < shortest, 0, keys)
        row_max, row_sum, acc, acc_tail = visit(start, keys, online=online)
        divisor = jnp.where(row_sum == 0.0, 1.0, row_sum)  # 0: an empty segment
        rescale = (1.0 / divisor)[:, None]
        out = scaled_tiles(acc, rescale)
        out_tail = acc_tail * rescale if tail > 0 else None
        mask = (token >= start) & (token < end) & wanted
        covered |= mask
        if shortest > 0:
            mask &= token >= end - keys  # none, where there are no keys
        if not online:
            fits = reference_fits(row_sum, out, out_tail, dtype)
            misfits |= mask & ~fits
            mask &= fits
        rows = Rows(block_start, block, mask)
        if lse_ref is not None:
            lse = row_max * scale_log2 + jnp.log2(divisor)
            store_numbers(lse_ref, out_head.head, rows, lse)
        for i, tile in enumerate(out if isinstance(out, tuple) else (out,)):
            width = tile.shape[1]
            place = first_column + i * width, width, head_dim, v_shift, end_column
            store_columns(out_head, rows, tile.astype(dtype), *place)
        if tail > 0:
            store_columns(out_head, rows, out_tail.astype(dtype), main, tail, head_dim, v_shift)
        return covered, misfits

    none = jnp.zeros((block,), jnp.bool_)
    return jax.lax.fori_loop(first_segment, last_segment + 1, attend, (none, none))


def hoists(head_dim: int, dtype: jax.typing.DTypeLike, columns: int | None) -> bool:
    """Whether the compiler may move values out of the loop over segments.

    There they stay alive through the loop over keys, in registers or in memory. Only wide heads in
    chunks or not as wide, and fp32, short of registers in any case, run faster that way; not the
    two at once, whose products take all. No other kernel nests loops.
    """
    if dtype == jnp.float32:
        return columns is None
    return head_dim > 128 and (head_dim <= MAX_TILED_HEAD_DIM or columns is not None)


def last_start_at(cu_seqlens_ref: Ref, token: Scalar, segments: int) -> Scalar:
    """The last segment whose start is at most `token`, by bisection; -1 if there is none."""

    def halve(bounds: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        low, high = bounds
        middle = (low + high) // 2
        at_most = cu_seqlens_ref[middle] <= token
        return jnp.where(at_most, middle, low), jnp.where(at_most, high, middle)

    bounds = (jnp.int32(-1), jnp.int32(segments))
    low, _ = jax.lax.while_loop(lambda bounds: bounds[1] - bounds[0] > 1, halve, bounds)
    return low
