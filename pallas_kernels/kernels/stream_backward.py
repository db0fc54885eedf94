"""Gradients of attention within long segments, of what the forward pass kept: O and log-sum-exp L.

By blocks, of logits S = Q K^T scale and the result's gradient dO,

    P = exp(S - L)    dP = dO V^T    D = rowsum(dO O)    dS = P (dP - D) scale
    dQ = dS K    dK = dS^T Q    dV = P^T dO

where Q and K are rotated, and their gradients rotated back. One kernel sums dQ over blocks of keys
and leaves D to the other, which sums dK and dV over blocks of queries: every row is written by one
program, and nothing is added up by several. As in the stream kernel a program owns a block of
consecutive tokens, whatever segments they belong to, and serves each that reaches into its block.
Products are of the inputs' dtype, and their sums fp32.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernels.stream import last_start_at
from pallas_kernels.kernels.tiles import (
    Head,
    Ref,
    Rotated,
    Rows,
    Scalar,
    dot,
    exp2,
    load_angles,
    load_columns,
    load_numbers,
    load_rotary,
    rotate_back,
    segment_bounds,
    store_columns,
    store_numbers,
    store_pairs,
)
from pallas_kernels.kernels.window_backward import LN_2

# Probabilities of many keys are small: in fp16 they are multiplied by 2 to this, far from its end.
FP16_SHIFT = 12

# Main and tail tile of some rows, or their sums; None where there is no tail.
Tiles = tuple[jax.Array, jax.Array | None]


def stream_backward_q_kernel(
    # rotated q and k [tokens, parts, row], v, the result and its gradient, as v
    # [tokens, parts, heads, head_dim], and the log-sum-exp of each row [heads, tokens]
    q_ref: Ref, k_ref: Ref, v_ref: Ref, out_ref: Ref, out_grad_ref: Ref, lse_ref: Ref,
    cos_ref: Ref, sin_ref: Ref, cu_seqlens_ref: Ref,
    # those to be written: rows' sums D of the result times its gradient, as the log-sum-exps; the
    # gradient of q, or of all three
    delta_ref: Ref, grad_ref: Ref,
    *,
    # where q, k and v lie
    parts: tuple[int, int, int],
    # scale times log2(e)
    scale_log2: float,
    # how a head is cut
    main: int, tail: int,
    # rows of a query tile and of a key tile
    block: int, block_k: int,
    # by Pallas' interpreter
    interpreted: bool,
) -> None:  # fmt: skip
    """One program for each (head, block of queries); blocks run fastest and share K and V."""
    tokens, _, heads, head_dim = out_ref.shape
    blocks = pl.cdiv(tokens, block)
    head = pl.program_id(0) // blocks
    block_start = (pl.program_id(0) % blocks) * block
    block_end = jnp.minimum(block_start + block, tokens)
    token = block_start + jnp.arange(block, dtype=jnp.int32)
    key_rows = jnp.arange(block_k, dtype=jnp.int32)
    q_part, k_part, v_part = parts
    k_head = Rotated(k_ref, k_part, head, heads)
    v_head = Head(v_ref, v_part, head)
    grad_head = Head(grad_ref, 0, head)
    load = functools.partial(load_tiles, main=main, tail=tail, head_dim=head_dim)
    split = (main, tail)

    rows = Rows(block_start, block, token < block_end)
    out_grad = load(Head(out_grad_ref, 0, head), rows)
    out = load(Head(out_ref, 0, head), rows)
    delta = sum(
        jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32), axis=1)
        for x, y in zip(out, out_grad, strict=True)
        if x is not None
    )
    store_numbers(delta_ref, head, rows, delta)
    lse = load_numbers(lse_ref, head, rows, 0.0)
    q = load(Rotated(q_ref, q_part, head, heads), rows)

    def visit_keys(wanted: jax.Array, keys: Rows, acc: Tiles) -> Tiles:
        """Add what a block of keys has of the queries' gradient, not scaled."""
        k, v = load(k_head, keys), load(v_head, keys)
        logits = product(q, k)  # [block, block_k]
        p = exp2(logits * scale_log2 - lse[:, None], interpreted)
        if keys.mask is not None:
            p = jnp.where(keys.mask[None, :], p, 0.0)  # else it may be infinite, and K is 0 there
        p_grad = product(out_grad, v)
        s_grad = p * (p_grad - delta[:, None])
        return add_product(s_grad, wanted, k, acc)

    def differentiate(segment: Scalar, covered: jax.Array) -> jax.Array:
        start, end = segment_bounds(cu_seqlens_ref, segment, tokens)
        keys = jnp.where(end > block_start, end - start, 0)  # 0: only padding follows it
        mask = (token >= start) & (token < end)
        acc = visit_blocks(
            start, keys, key_rows, functools.partial(visit_keys, mask),
            zero_sums(block, split),
        )  # fmt: skip
        grad_rows = rows._replace(mask=mask)
        store_rotated_back(grad_head, cos_ref, sin_ref, grad_rows, acc, scale_log2 * LN_2, split)
        return covered | mask

    covered = over_segments(cu_seqlens_ref, block_start, block_end, block, differentiate)
    # Tokens of no segment.
    clear_rows(grad_head, rows._replace(mask=(token < block_end) & ~covered), split)


def stream_backward_kv_kernel(
    # as above; D, which that kernel wrote, is read
    q_ref: Ref, k_ref: Ref, v_ref: Ref, out_grad_ref: Ref, lse_ref: Ref, delta_ref: Ref,
    cos_ref: Ref, sin_ref: Ref, cu_seqlens_ref: Ref,
    # the gradients of k and v, or of all three
    *grad_refs: Ref,
    parts: tuple[int, int, int],
    # where gradients lie
    grad_parts: tuple[int, int],
    scale_log2: float,
    main: int, tail: int,
    block: int, block_k: int,
    interpreted: bool,
) -> None:  # fmt: skip
    """One program for each (head, block of keys); blocks run fastest and share Q and dO."""
    tokens, _, heads, head_dim = out_grad_ref.shape
    dtype = out_grad_ref.dtype
    blocks = pl.cdiv(tokens, block_k)
    head = pl.program_id(0) // blocks
    block_start = (pl.program_id(0) % blocks) * block_k
    block_end = jnp.minimum(block_start + block_k, tokens)
    token = block_start + jnp.arange(block_k, dtype=jnp.int32)
    query_rows = jnp.arange(block, dtype=jnp.int32)
    q_part, k_part, v_part = parts
    q_head = Rotated(q_ref, q_part, head, heads)
    out_grad_head = Head(out_grad_ref, 0, head)
    refs = grad_refs * (2 // len(grad_refs))
    k_grad_head, v_grad_head = (
        Head(ref, part, head) for ref, part in zip(refs, grad_parts, strict=True)
    )
    load = functools.partial(load_tiles, main=main, tail=tail, head_dim=head_dim)
    split = (main, tail)
    # What fp16's probabilities are multiplied by, and their products divided, as a power of two.
    shift = FP16_SHIFT if dtype == jnp.float16 else 0
    factor = 2.0**-shift

    rows = Rows(block_start, block_k, token < block_end)
    k = load(Rotated(k_ref, k_part, head, heads), rows)
    v = load(Head(v_ref, v_part, head), rows)

    def visit_queries(
        wanted: jax.Array, queries: Rows, sums: tuple[Tiles, Tiles]
    ) -> tuple[Tiles, Tiles]:
        """Add what a block of queries has of the gradients of keys, not scaled, and values."""
        k_acc, v_acc = sums
        q, out_grad = load(q_head, queries), load(out_grad_head, queries)
        # Where there is no query, all probabilities are 0.
        lse = load_numbers(lse_ref, head, queries, jnp.inf)
        delta = load_numbers(delta_ref, head, queries, 0.0)
        if shift:
            lse -= shift
        # Keys run along the rows, so that no tile is transposed for a product but in shared memory.
        logits = product(k, q)  # [block_k, block]
        p = exp2(logits * scale_log2 - lse[None, :], interpreted)
        p_grad = product(v, out_grad)
        s_grad = p * (p_grad - delta[None, :])
        p = p.astype(dtype)
        v_acc = tuple(
            x if x is None else dot(p, y, x) for x, y in zip(v_acc, out_grad, strict=True)
        )
        return add_product(s_grad, wanted, q, k_acc), v_acc

    def differentiate(segment: Scalar, covered: jax.Array) -> jax.Array:
        start, end = segment_bounds(cu_seqlens_ref, segment, tokens)
        queries = jnp.where(end > block_start, end - start, 0)
        mask = (token >= start) & (token < end)
        k_acc, v_acc = visit_blocks(
            start, queries, query_rows, functools.partial(visit_queries, mask),
            (zero_sums(block_k, split), zero_sums(block_k, split)),
        )  # fmt: skip
        grad_rows = rows._replace(mask=mask)
        for acc, first, width in zip(v_acc, (0, main), split, strict=True):
            if acc is not None:
                v_grad = (acc * factor).astype(dtype)
                store_columns(v_grad_head, grad_rows, v_grad, first, width, head_dim)
        store_rotated_back(
            k_grad_head, cos_ref, sin_ref, grad_rows, k_acc, scale_log2 * (LN_2 * factor), split
        )
        return covered | mask

    covered = over_segments(cu_seqlens_ref, block_start, block_end, block_k, differentiate)
    rows = rows._replace(mask=(token < block_end) & ~covered)
    clear_rows(k_grad_head, rows, split)
    clear_rows(v_grad_head, rows, split)


def over_segments(
    cu_seqlens_ref: Ref, block_start: Scalar, block_end: Scalar, block: int,
    differentiate: Callable[[Scalar, jax.Array], jax.Array],
) -> jax.Array:  # fmt: skip
    """Differentiate each segment that reaches into a block; returns which of its rows have one."""
    segments = cu_seqlens_ref.shape[0] - 1
    first_segment = jnp.maximum(last_start_at(cu_seqlens_ref, block_start, segments), 0)
    last_segment = last_start_at(cu_seqlens_ref, block_end - 1, segments)
    none = jnp.zeros((block,), jnp.bool_)
    return jax.lax.fori_loop(first_segment, last_segment + 1, differentiate, none)


def visit_blocks(
    start: Scalar, count: Scalar, block_rows: jax.Array, visit: Callable, sums: tuple
) -> tuple:
    """Visit so many rows of a segment by blocks; of whole ones none is masked, as in softmax.py."""
    block = block_rows.shape[0]

    def visit_whole(_: Scalar, carried: tuple) -> tuple:
        first, sums = carried
        return first + block, visit(Rows(first, block, None), sums)

    whole, rest = count // block, count % block
    _, sums = jax.lax.fori_loop(0, whole, visit_whole, (start, sums))
    last = Rows(start + whole * block, block, block_rows < rest)
    return jax.lax.cond(rest > 0, lambda sums: visit(last, sums), lambda sums: sums, sums)


def load_tiles(x: Head | Rotated, rows: Rows, *, main: int, tail: int, head_dim: int) -> Tiles:
    """Main and tail tile of a head's rows, rotated or not."""

    def load(first: int, width: int) -> jax.Array:
        if isinstance(x, Rotated):
            return load_rotary(x, rows, first, width, 0, None)
        return load_columns(x, rows, first, width, head_dim)

    return load(0, main), load(main, tail) if tail > 0 else None


def zero_sums(rows: int, split: tuple[int, int]) -> Tiles:
    main, tail = (jnp.zeros((rows, n), jnp.float32) if n > 0 else None for n in split)
    return main, tail


def product(a: Tiles, b: Tiles) -> jax.Array:
    """a b^T over the columns of both tiles."""
    sums = dot(a[0], b[0].T)
    return sums if a[1] is None else dot(a[1], b[1].T, sums)


def add_product(s_grad: jax.Array, wanted: jax.Array, x: Tiles, acc: Tiles) -> Tiles:
    """acc + s_grad x, of both tiles. Rows of s_grad that are not wanted may be anything."""
    dtype = x[0].dtype
    if dtype != jnp.float16:
        s_grad = s_grad.astype(dtype)
        return tuple(a if a is None else dot(s_grad, b, a) for a, b in zip(acc, x, strict=True))
    # Loss scaling takes gradients to where fp16 ends: 1 stands for the tile's largest.
    # (For sm_100 Triton 3.6 and 3.7 reduce no vector to a number here: [1, 1].)
    sizes = jnp.where(wanted[:, None] & (s_grad == s_grad), jnp.abs(s_grad), 0.0)
    largest = jnp.max(jnp.max(sizes, axis=1, keepdims=True), axis=0, keepdims=True)
    largest = jnp.maximum(largest, 1e-30)
    s_grad = (s_grad * (1.0 / largest)).astype(dtype)
    return tuple(
        a if a is None else a + dot(s_grad, b) * largest for a, b in zip(acc, x, strict=True)
    )


def store_rotated_back(
    grad: Head, cos_ref: Ref, sin_ref: Ref, rows: Rows, acc: Tiles, factor: float,
    split: tuple[int, int],
) -> None:  # fmt: skip
    """Write the gradient of rows, of which acc times factor is that of the rotated ones."""
    head_dim, dtype, rotary_dim = grad.ref.shape[-1], grad.ref.dtype, 2 * cos_ref.shape[1]
    for x, first, width in zip(acc, (0, split[0]), split, strict=True):
        if x is not None:
            cos, sin = load_angles(cos_ref, sin_ref, rows, first, width, rotary_dim)
            pairs = rotate_back(x * factor, cos, sin, dtype)
            store_pairs(grad, rows, pairs, first, width, head_dim, rotary_dim)


def clear_rows(x: Head, rows: Rows, split: tuple[int, int]) -> None:
    """Zeros into some rows of one head."""
    for first, width in zip((0, split[0]), split, strict=True):
        if width > 0:
            zeros = jnp.zeros((rows.count, width), x.ref.dtype)
            store_columns(x, rows, zeros, first, width, x.ref.shape[-1])
