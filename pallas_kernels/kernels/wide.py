"""Attention within short segments of wide heads: a tile of logits, and columns chunk by chunk.

No tile holds such a head. A program loops over chunks of columns of Q and K, which add to the
logits of a whole segment, and then over those of V. So every row of Q and K is read, and embedded,
once. Where few segments and heads would leave the GPU idle, several programs share one of them: a
first launch writes the logits of each one's columns, and a second adds them up in a fixed order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernels.tiles import (
    Embedding,
    Head,
    Ref,
    Rows,
    Scalar,
    add_product,
    dot,
    embedded_tile,
    exp2,
    load_angles,
    load_columns,
    load_partial,
    load_rotary,
    padding_bounds,
    rotary_dim_of,
    segment_bounds,
    store_columns,
    store_partial,
)


class Chunks(NamedTuple):
    """Rows of a wide head of Q or K, which are read in chunks of columns.

    Attributes:
        head, rows: what is read.
        embed: what is done to it.
    """

    head: Head
    rows: Rows
    embed: Embedding


class Cut(NamedTuple):
    """How a wide head is cut and multiplied: its columns, those of a chunk, and as `dot` says."""

    head_dim: int
    columns: int
    precision: str

    @property
    def chunks(self) -> int:
        """How many there are."""
        return pl.cdiv(self.head_dim, self.columns)

    @property
    def end(self) -> int:
        """Behind the last chunk's last column."""
        return self.chunks * self.columns


def wide_kernel(
    # q, k and v are [tokens, parts, heads, head_dim], those embedded before have as many columns as
    # whole chunks; logits by so many columns are [pairs of a segment and a head, splits, block,
    # block], None where a pair is one program's; the result is [tokens, 1, heads, head_dim], but of
    # the first of two launches it is these logits
    q_ref: Ref, k_ref: Ref, v_ref: Ref,
    cos_ref: Ref, sin_ref: Ref, cu_seqlens_ref: Ref,
    partial_ref: Ref | None, out_ref: Ref,
    *,
    # where q, k and v lie
    parts: tuple[int, int, int],
    # of q
    heads: int,
    # scale times log2(e)
    scale_log2: float,
    # columns of a chunk, and how fp32 is multiplied
    columns: int, precision: str,
    # what is done to Q and K here, see tiles.py
    embed_q: Embedding, embed_k: Embedding,
    # rows of a tile, at least the longest segment
    block: int,
    # programs that share a pair's columns, in the first launch and in the last; query rows of a
    # program in the last
    splits: int, out_splits: int, out_rows: int,
    # the first of two launches, which writes partial logits
    is_first: bool,
    # by Pallas' interpreter
    interpreted: bool,
) -> None:  # fmt: skip
    """Programs for each (segment, head); heads run faster, so neighbours share cache lines."""
    tokens, _, k_heads, head_dim = v_ref.shape
    segments = cu_seqlens_ref.shape[0] - 1
    cut = Cut(head_dim, columns, precision)
    blocks = 1 if is_first else block // out_rows
    shares = splits if is_first else out_splits
    programs, share_chunks = shares * blocks, pl.cdiv(cut.chunks, shares)
    pair = pl.program_id(0) // programs
    share = pl.program_id(0) % programs // blocks
    row_block = pl.program_id(0) % blocks
    segment, head = pair // heads, pair % heads
    served_by = head if k_heads == heads else head // (heads // k_heads)
    q_part, k_part, v_part = parts
    first_chunk = share * share_chunks
    end_chunk = jnp.minimum(first_chunk + share_chunks, cut.chunks)

    start, end = segment_bounds(cu_seqlens_ref, segment, tokens)
    length = end - start
    fits = (length > 0) & (length <= block)

    if is_first or partial_ref is None:
        # Rows past a segment's end are its last one again: what comes of them is masked. An empty
        # segment may start at the end.
        last = jnp.maximum(length - 1, 0)
        loaded = Rows(jnp.minimum(start, tokens - 1), block, None, last=last)
        logits = add_products(
            jnp.zeros((block, block), jnp.float32),
            Chunks(Head(q_ref, q_part, head), loaded, embed_q),
            Chunks(Head(k_ref, k_part, served_by), loaded, embed_k),
            cos_ref, sin_ref, first_chunk, jnp.where(fits, end_chunk, first_chunk), cut,
        )  # fmt: skip
        if is_first:
            store_partial(out_ref, pair, share, logits)
            return
    else:
        logits = added_partials(partial_ref, pair, row_block * out_rows, out_rows)

    v_head, out_head = Head(v_ref, v_part, served_by), Head(out_ref, 0, head)
    chunks = first_chunk, end_chunk

    @pl.when(fits)
    def _attend() -> None:
        mask = jnp.arange(block, dtype=jnp.int32) < length
        masked = jnp.where(mask[None, :], logits, -jnp.inf)
        # The difference comes first: it is exactly 0 for the largest, however large that is.
        p = exp2((masked - jnp.max(masked, axis=1)[:, None]) * scale_log2, interpreted)
        rescale = (1.0 / jnp.sum(p, axis=1))[:, None]
        p = p.astype(v_ref.dtype)
        # V's rows past the end are masked, as its infinities would meet zeros.
        keys = Rows(start, block, mask)
        row = row_block * out_rows + jnp.arange(out_rows, dtype=jnp.int32)
        written = Rows(start + row_block * out_rows, out_rows, row < length)

        def attend_chunk(chunk: Scalar, _: None) -> None:
            where = chunk * columns, columns, head_dim
            v = load_columns(v_head, keys, *where, end=cut.end)
            out = (dot(p, v, None, precision) * rescale).astype(v.dtype)
            store_columns(out_head, written, out, *where, end=cut.end)

        jax.lax.fori_loop(*chunks, attend_chunk, None)

    # A segment that breaks the promise of max_seqlen must not pass for a result.
    @pl.when(length > block)
    def _refuse() -> None:
        first = start + row_block * out_rows
        fill_chunks(out_head, first, end, block, jnp.nan, chunks, cut, out_rows)

    # Each program clears its columns in a share of the tokens of no segment.
    padding_end, padding_start = padding_bounds(cu_seqlens_ref, segments, tokens)
    cleared = segment * block + row_block * out_rows
    step = segments * block
    fill_chunks(out_head, cleared, padding_end, step, 0.0, chunks, cut, out_rows)
    fill_chunks(out_head, padding_start + cleared, tokens, step, 0.0, chunks, cut, out_rows)


def add_products(
    logits: jax.Array, q: Chunks, k: Chunks, cos_ref: Ref, sin_ref: Ref,
    first_chunk: Scalar, end_chunk: Scalar, cut: Cut,
) -> jax.Array:  # fmt: skip
    """Logits [rows of Q, rows of K], not scaled, with the products of some chunks added."""
    rotary_dim = rotary_dim_of(cos_ref, cut.head_dim)

    def chunk_of(x: Chunks, angles: tuple, column: Scalar) -> jax.Array:
        tile = load_rotary(x.head, x.rows, column, cut.columns, rotary_dim, x.embed, cut.end)
        return embedded_tile(tile, *angles, x.embed)

    def add_chunk(chunk: Scalar, logits: jax.Array) -> jax.Array:
        column = chunk * cut.columns
        q_angles, k_angles = (
            load_angles(cos_ref, sin_ref, x.rows, column, cut.columns, rotary_dim, x.embed, cut.end)
            for x in (q, k)
        )
        if k.rows is q.rows and k.embed == q.embed:  # within one segment's tile
            k_angles = q_angles
        q_tile, k_tile = chunk_of(q, q_angles, column), chunk_of(k, k_angles, column)
        return add_product(logits, q_tile, k_tile.T, cut.precision)

    return jax.lax.fori_loop(first_chunk, end_chunk, add_chunk, logits)


def added_partials(partial_ref: Ref, pair: Scalar, first_row: Scalar, rows: int) -> jax.Array:
    """The logits [rows, block] of some query rows, from those of all splits, in their order."""
    _, splits, _, block = partial_ref.shape
    # So many are on their way at once. Each is a tile of its own: one of three axes would be spread
    # over threads, which had to exchange what they add.
    summed = splits if splits < 8 else 16 if splits % 16 == 0 else 8

    def add(i: Scalar, logits: jax.Array) -> jax.Array:
        for j in range(summed):
            logits += load_partial(partial_ref, pair, i * summed + j, first_row, rows)
        return logits

    return jax.lax.fori_loop(0, splits // summed, add, jnp.zeros((rows, block), jnp.float32))


def fill_chunks(
    out: Head, start: Scalar, end: Scalar, step: int, value: float,
    chunks: tuple[Scalar, Scalar], cut: Cut, count: int,
) -> None:  # fmt: skip
    """Write value to rows start .. end of some chunks of a head, so many rows every `step`."""
    x = jnp.full((count, cut.columns), value, out.ref.dtype)

    def fill(i: Scalar, _: None) -> None:
        first = start + i * step
        rows = Rows(first, count, jnp.arange(count, dtype=jnp.int32) < end - first)

        def fill_chunk(chunk: Scalar, _: None) -> None:
            column = chunk * cut.columns
            store_columns(out, rows, x, column, cut.columns, cut.head_dim, end=cut.end)

        jax.lax.fori_loop(*chunks, fill_chunk, None)

    jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(end - start, 0), step), fill, None)
