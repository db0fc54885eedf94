"""Attention within short segments: a program holds one whole segment of one head in one tile.

No online softmax, and every row of Q and K is rotated exactly once.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernels.tiles import (
    Embedding,
    Head,
    Norm,
    Ref,
    Rows,
    Scalar,
    barrier,
    dot,
    embedded_tile,
    exp2,
    inverse_rms,
    load_angles,
    load_columns,
    load_rotary,
    normalized,
    padding_bounds,
    rotary_dim_of,
    rotary_head,
    segment_bounds,
    store_columns,
    store_numbers,
)


def window_kernel(
    # q, k and v are [tokens, parts, heads, head_dim], those rotated before [tokens, parts, row];
    # the result is [tokens, 1, heads, head_dim]; the norms' weights are [head_dim], None where what
    # they are of is not normalised here
    q_ref: Ref, k_ref: Ref, v_ref: Ref,
    cos_ref: Ref, sin_ref: Ref, cu_seqlens_ref: Ref,
    q_norm_ref: Ref | None, k_norm_ref: Ref | None, out_ref: Ref,
    # log-sum-exp of each row [heads, tokens], in powers of two; None: not wanted
    lse_ref: Ref | None = None,
    *,
    # where q, k and v lie
    parts: tuple[int, int, int],
    # scale times log2(e)
    scale_log2: float,
    # how a head is cut
    main: int, tail: int,
    # what is done to Q and K here, see tiles.py
    embed_q: Embedding, embed_k: Embedding,
    # rows of a tile, at least the longest segment
    block: int,
    # longer segments and padding are another launch's
    shared: bool,
    # what is added to mean squares
    norm_eps: float,
    # by Pallas' interpreter
    interpreted: bool,
) -> None:  # fmt: skip
    """One program for each (segment, head); heads run fastest, so neighbours share cache lines."""
    tokens, _, heads, head_dim = out_ref.shape
    rotary_dim = rotary_dim_of(cos_ref, head_dim)
    segments = cu_seqlens_ref.shape[0] - 1
    segment = pl.program_id(0) // heads
    head = pl.program_id(0) % heads
    dtype = out_ref.dtype
    q_part, k_part, v_part = parts
    k_heads = v_ref.shape[2]
    served_by = head if k_heads == heads else head // (heads // k_heads)
    q_head = rotary_head(q_ref, q_part, head, heads, embed_q)
    k_head = rotary_head(k_ref, k_part, served_by, k_heads, embed_k)
    v_head = Head(v_ref, v_part, served_by)
    out_head = Head(out_ref, 0, head)
    q_norm, k_norm = (
        None if ref is None else Norm((ref,), 0, norm_eps) for ref in (q_norm_ref, k_norm_ref)
    )

    start, end = segment_bounds(cu_seqlens_ref, segment, tokens)
    length = end - start
    rows = Rows(start, block, jnp.arange(block, dtype=jnp.int32) < length)
    # Rows past a segment's end are its last one again: what comes of them is masked, and so their
    # loads need not be. Those of V are masked, as its infinities would meet zeros.
    # An empty segment may start at the end.
    loaded = Rows(jnp.minimum(start, tokens - 1), block, None, last=jnp.maximum(length - 1, 0))

    q = load_rotary(q_head, loaded, 0, main, rotary_dim, embed_q)
    k = load_rotary(k_head, loaded, 0, main, rotary_dim, embed_k)
    if tail > 0:
        q_tail = load_rotary(q_head, loaded, main, tail, rotary_dim, embed_q)
        k_tail = load_rotary(k_head, loaded, main, tail, rotary_dim, embed_k)
    # V before the products: loaded behind them, ptxas 12.8 gets the address of the second of two
    # products with V wrong; a test looks for that in the machine code.
    v = load_columns(v_head, rows, 0, main, head_dim)  # [block, main]
    if tail > 0:
        v_tail = load_columns(v_head, rows, main, tail, head_dim)  # [block, tail]
    # Last the angles, which other heads have brought into the cache, and the bounds of the padding,
    # which are for the end.
    cos, sin = load_angles(cos_ref, sin_ref, loaded, 0, main, rotary_dim, embed_q)
    if tail > 0:
        cos_tail, sin_tail = load_angles(cos_ref, sin_ref, loaded, main, tail, rotary_dim, embed_q)
    padding_end, padding_start = padding_bounds(cu_seqlens_ref, segments, tokens)
    # So all these loads are in flight at once: the launch table's bound on registers leaves room
    # for them, and the barrier keeps the compiler from moving any down to where it is needed.
    barrier(interpreted)

    # Q and K are rotated outside the branch that multiplies them. Within one block of code the
    # compiler moves the layout of the product's operand up to the loads and converts q, cos and
    # sin through shared memory one by one: 130 registers a thread in place of 86.
    q_inverse = inverse_rms(q, q_tail if tail > 0 else None, q_norm, head_dim)
    k_inverse = inverse_rms(k, k_tail if tail > 0 else None, k_norm, head_dim)
    q = normalized(q, q_inverse, q_norm, 0, main, head_dim, rotary_dim)
    q = embedded_tile(q, cos, sin, embed_q, dtype)  # [block, main]
    k = normalized(k, k_inverse, k_norm, 0, main, head_dim, rotary_dim)
    k = embedded_tile(k, cos, sin, embed_k, dtype)  # [block, main]
    if tail > 0:
        q_tail = normalized(q_tail, q_inverse, q_norm, main, tail, head_dim, rotary_dim)
        k_tail = normalized(k_tail, k_inverse, k_norm, main, tail, head_dim, rotary_dim)
        q_tail = embedded_tile(q_tail, cos_tail, sin_tail, embed_q, dtype)  # [block, tail]
        k_tail = embedded_tile(k_tail, cos_tail, sin_tail, embed_k, dtype)  # [block, tail]

    @pl.when((length > 0) & (length <= block))
    def _attend() -> None:
        logits = dot(q, k.T)  # [block, block]
        if tail > 0:
            logits = dot(q_tail, k_tail.T, logits)
        logits = jnp.where(rows.mask[None, :], logits, -jnp.inf)
        # The difference comes first: it is exactly 0 for the largest, however large that is.
        row_max = jnp.max(logits, axis=1)
        p = exp2((logits - row_max[:, None]) * scale_log2, interpreted)
        row_sum = jnp.sum(p, axis=1)
        if lse_ref is not None:
            store_numbers(lse_ref, head, rows, row_max * scale_log2 + jnp.log2(row_sum))
        rescale = (1.0 / row_sum)[:, None]
        p = p.astype(dtype)

        out = (dot(p, v) * rescale).astype(dtype)
        store_columns(out_head, rows, out, 0, main, head_dim)
        if tail > 0:
            out = (dot(p, v_tail) * rescale).astype(dtype)
            store_columns(out_head, rows, out, main, tail, head_dim)

    if shared:
        return

    # A segment that breaks the promise of max_seqlen must not pass for a result.
    @pl.when(length > block)
    def _refuse() -> None:
        fill_rows(out_head, start, end, block, jnp.nan, main, tail, block)

    # Each program clears a share of the tokens of no segment.
    share = segments * block
    fill_rows(out_head, segment * block, padding_end, share, 0.0, main, tail, block)
    fill_rows(out_head, padding_start + segment * block, tokens, share, 0.0, main, tail, block)


def fill_rows(out: Head, start: Scalar, end: Scalar, step: int, value: float, main: int, tail: int,
              block: int) -> None:  # fmt: skip
    """Write value to rows start .. end of one head, block rows every `step`."""
    head_dim, dtype = out.ref.shape[-1], out.ref.dtype

    def fill(i: Scalar, _: None) -> None:
        first = start + i * step
        rows = Rows(first, block, jnp.arange(block, dtype=jnp.int32) < end - first)
        x = jnp.full((block, main), value, dtype)
        store_columns(out, rows, x, 0, main, head_dim)
        if tail > 0:
            x = jnp.full((block, tail), value, dtype)
            store_columns(out, rows, x, main, tail, head_dim)

    jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(end - start, 0), step), fill, None)
