"""Attention within long segments: online softmax over blocks of keys.

A program owns a block of consecutive tokens, whatever segments they belong to, and serves each
segment that reaches into its block. So every row of the result is written by exactly one program,
the grid needs no bound on a segment's length, and long and short segments share one launch.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.tiles import (
    Head,
    Ref,
    Rows,
    Scalar,
    barrier,
    dot,
    exp2,
    load_angles,
    load_columns,
    load_rotary,
    rotary_tile,
    segment_bounds,
    store_columns,
)

# Sums of a row that are kept apart until its last key: a tile's columns PARTS apart lie in one
# thread's registers, and adding those up takes no exchange between threads. PARTS divides every
# key tile, of which products want 16 columns at least.
PARTS = 8


def stream_kernel(
    # q, k and v are [tokens, parts, heads, head_dim], out is [tokens, 1, heads, head_dim]
    q_ref: Ref, k_ref: Ref, v_ref: Ref,
    cos_ref: Ref, sin_ref: Ref, cu_seqlens_ref: Ref, out_ref: Ref,
    *,
    # where q, k and v lie
    parts: tuple[int, int, int],
    # scale times log2(e)
    scale_log2: float,
    # how a head is cut
    main: int, tail: int,
    # what is rotated here
    rotate_q: bool, rotate_k: bool,
    # rows of a query tile and of a key tile
    block: int, block_k: int,
    # by Pallas' interpreter
    interpreted: bool,
) -> None:  # fmt: skip
    """One program for each (head, token block); blocks run fastest and share the head's K and V."""
    tokens, _, _, head_dim = out_ref.shape
    rotary_dim = 2 * cos_ref.shape[1]
    segments = cu_seqlens_ref.shape[0] - 1
    blocks = pl.cdiv(tokens, block)
    head = pl.program_id(0) // blocks
    block_start = (pl.program_id(0) % blocks) * block
    block_end = jnp.minimum(block_start + block, tokens)
    dtype = out_ref.dtype
    token = block_start + jnp.arange(block, dtype=jnp.int32)
    key_rows = jnp.arange(block_k, dtype=jnp.int32)
    q_head, k_head, v_head = (
        Head(ref, part, head) for ref, part in zip((q_ref, k_ref, v_ref), parts, strict=True)
    )
    out_head = Head(out_ref, 0, head)

    rows = Rows(block_start, block, token < block_end)
    cos, sin = load_angles(cos_ref, sin_ref, rows, 0, main, rotary_dim)
    q = load_rotary(q_head, rows, 0, main, head_dim, rotary_dim, rotate_q)
    q = rotary_tile(q, cos, sin, rotate_q)  # [block, main]
    q_tail = None
    if tail > 0:
        cos, sin = load_angles(cos_ref, sin_ref, rows, main, tail, rotary_dim)
        q_tail = load_rotary(q_head, rows, main, tail, head_dim, rotary_dim, rotate_q)
        q_tail = rotary_tile(q_tail, cos, sin, rotate_q)  # [block, tail]
    if rotate_q and block >= 64:
        # Hopper's asynchronous products, which take 64 rows, read what was loaded from shared
        # memory but what was computed from registers, and then wait for each other. So the rotated
        # tile is written to the result, whose rows are this program's own, and loaded again.
        store_columns(out_head, rows, q, 0, main, head_dim)
        if tail > 0:
            store_columns(out_head, rows, q_tail, main, tail, head_dim)
        barrier(interpreted)
        q = load_columns(out_head, rows, 0, main, head_dim)
        if tail > 0:
            q_tail = load_columns(out_head, rows, main, tail, head_dim)

    # The product of the tail's columns is computed a block of keys ahead: issued behind those with
    # V, it is there when the next block's logits start from it. Small tiles, more of whose programs
    # share a multiprocessor, lose by that, and rotating K takes the registers that it needs.
    ahead = tail > 0 and block > 64 and not rotate_k

    def attend(segment: Scalar, covered: jax.Array) -> jax.Array:
        start, end = segment_bounds(cu_seqlens_ref, segment, tokens)
        keys = jnp.where(end > block_start, end - start, 0)  # 0: only padding follows it
        row_max = jnp.full((block,), -jnp.inf, jnp.float32)
        row_sums = jnp.zeros((block, PARTS), jnp.float32)
        acc = jnp.zeros((block, main), jnp.float32)
        acc_tail = jnp.zeros((block, tail), jnp.float32) if tail > 0 else None

        visit = functools.partial(
            visit_keys, k_head, v_head, cos_ref, sin_ref, scale_log2, q, q_tail,
            main=main, tail=tail, rotate_k=rotate_k, interpreted=interpreted,
        )  # fmt: skip
        tail_product = functools.partial(
            add_tail_product, None, k_head, cos_ref, sin_ref, q_tail=q_tail,
            main=main, tail=tail, rotate_k=rotate_k,
        )  # fmt: skip

        def visit_whole(_: Scalar, carried: tuple) -> tuple:
            first_key, tail_logits, state = carried
            state = visit(Rows(first_key, block_k, None), tail_logits, state)
            first_key += block_k
            if ahead:
                tail_logits = tail_product(Rows(first_key, block_k, key_rows < end - first_key))
            return first_key, tail_logits, state

        # Whole blocks of keys need no mask; what is left over is one block more. The loop carries
        # its first key as the twin's does its pointers: that takes fewer instructions than counting
        # blocks, or than taking the last block's first key from the loop.
        whole, rest = keys // block_k, keys % block_k
        tail_logits = tail_product(Rows(start, block_k, key_rows < keys)) if ahead else None
        state = (row_max, row_sums, acc, acc_tail)
        _, _, state = jax.lax.fori_loop(0, whole, visit_whole, (start, tail_logits, state))
        last = Rows(start + whole * block_k, block_k, key_rows < rest)
        _, row_sums, acc, acc_tail = jax.lax.cond(
            rest > 0, lambda state: visit(last, None, state), lambda state: state, state
        )

        mask = (token >= start) & (token < end) & (token < block_end)
        row_sum = jnp.sum(row_sums, axis=1)
        rescale = (1.0 / jnp.where(row_sum == 0.0, 1.0, row_sum))[:, None]  # 0: an empty segment
        out_rows = rows._replace(mask=mask)
        out = (acc * rescale).astype(dtype)
        store_columns(out_head, out_rows, out, 0, main, head_dim)
        if tail > 0:
            out = (acc_tail * rescale).astype(dtype)
            store_columns(out_head, out_rows, out, main, tail, head_dim)
        return covered | mask

    first_segment = jnp.maximum(last_start_at(cu_seqlens_ref, block_start, segments), 0)
    last_segment = last_start_at(cu_seqlens_ref, block_end - 1, segments)
    covered = jnp.zeros((block,), jnp.bool_)
    covered = jax.lax.fori_loop(first_segment, last_segment + 1, attend, covered)

    # Tokens of no segment.
    rows = rows._replace(mask=(token < block_end) & ~covered)
    store_columns(out_head, rows, jnp.zeros((block, main), dtype), 0, main, head_dim)
    if tail > 0:
        store_columns(out_head, rows, jnp.zeros((block, tail), dtype), main, tail, head_dim)


def hoists(head_dim: int, dtype: jax.typing.DTypeLike) -> bool:
    """Whether the compiler may move values out of the loop over segments.

    There they stay alive through the loop over keys, in registers or in memory. Only wide heads and
    fp32, short of registers in any case, run faster that way. No other kernel nests loops.
    """
    return head_dim > 128 or dtype == jnp.float32


def visit_keys(
    k_head: Head, v_head: Head, cos_ref: Ref, sin_ref: Ref, scale_log2: float,
    # the query tile, the rows of the key tile, the tail columns' part of the logits (None: not
    # computed ahead), and the state of the online softmax
    q: jax.Array, q_tail: jax.Array | None, rows: Rows, tail_logits: jax.Array | None, state: tuple,
    *,
    main: int, tail: int, rotate_k: bool, interpreted: bool,
) -> tuple:  # fmt: skip
    """Fold one block of keys into the online softmax."""
    head_dim, rotary_dim = k_head.ref.shape[-1], 2 * cos_ref.shape[1]
    row_max, row_sums, acc, acc_tail = state
    # V first: see window_kernel.
    v = load_columns(v_head, rows, 0, main, head_dim)  # [block_k, main]
    if tail > 0:
        v_tail = load_columns(v_head, rows, main, tail, head_dim)  # [block_k, tail]
    cos, sin = load_angles(cos_ref, sin_ref, rows, 0, main, rotary_dim)
    k = load_rotary(k_head, rows, 0, main, head_dim, rotary_dim, rotate_k)
    k = rotary_tile(k, cos, sin, rotate_k)  # [block_k, main]
    logits = dot(q, k.T, tail_logits)  # [block, block_k]
    if tail > 0 and tail_logits is None:
        logits = add_tail_product(
            logits, k_head, cos_ref, sin_ref, rows, q_tail, main=main, tail=tail, rotate_k=rotate_k
        )
    if rows.mask is not None:
        logits = jnp.where(rows.mask[None, :], logits, -jnp.inf)

    new_max = jnp.maximum(row_max, jnp.max(logits, axis=1))
    p = exp2((logits - new_max[:, None]) * scale_log2, interpreted)
    decay = exp2((row_max - new_max) * scale_log2, interpreted)
    parts = p.reshape(p.shape[0], p.shape[1] // PARTS, PARTS)
    row_sums = row_sums * decay[:, None] + jnp.sum(parts, axis=1)
    p = p.astype(k.dtype)

    acc = dot(p, v, acc * decay[:, None])
    if tail > 0:
        acc_tail = dot(p, v_tail, acc_tail * decay[:, None])
    return new_max, row_sums, acc, acc_tail


def add_tail_product(
    logits: jax.Array | None, k_head: Head, cos_ref: Ref, sin_ref: Ref, rows: Rows,
    q_tail: jax.Array,
    *,
    main: int, tail: int, rotate_k: bool,
) -> jax.Array:  # fmt: skip
    """The tail columns' part of the logits [block, block_k], added to the others' (None: alone)."""
    head_dim, rotary_dim = k_head.ref.shape[-1], 2 * cos_ref.shape[1]
    cos, sin = load_angles(cos_ref, sin_ref, rows, main, tail, rotary_dim)
    k_tail = load_rotary(k_head, rows, main, tail, head_dim, rotary_dim, rotate_k)
    k_tail = rotary_tile(k_tail, cos, sin, rotate_k)  # [block_k, tail]
    return dot(q_tail, k_tail.T, logits)


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
