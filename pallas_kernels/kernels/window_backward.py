"""Gradients of attention within short segments: a program holds one segment of one head.

All is computed again from what the forward pass read, so that it keeps nothing: a tile of logits,
its softmax P, and by the result's gradient dO

    dV = P^T dO    dP = dO V^T    dS = P (dP - rowsum(P dP)) scale    dQ = dS K    dK = dS^T Q

where Q and K are rotated, and their gradients rotated back. Products are of the inputs' dtype, and
their sums fp32.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernels.tiles import (
    ROPE,
    Head,
    Ref,
    Rows,
    barrier,
    dot,
    embedded_tile,
    exp2,
    load_angles,
    load_columns,
    load_pairs,
    padding_bounds,
    rotate_back,
    segment_bounds,
    store_columns,
    store_pairs,
)
from pallas_kernels.kernels.window import fill_rows

LN_2 = 0.6931471805599453


def window_backward_kernel(
    # what the forward kernel read, and the gradient of what it wrote, [tokens, 1, heads, head_dim];
    # then those to be written: one packed, or of each of q, k and v
    q_ref: Ref, k_ref: Ref, v_ref: Ref, out_grad_ref: Ref,
    cos_ref: Ref, sin_ref: Ref, cu_seqlens_ref: Ref, *grad_refs: Ref,
    # where q, k and v lie, and their gradients
    parts: tuple[int, int, int],
    # scale times log2(e)
    scale_log2: float,
    # how a head is cut
    main: int, tail: int,
    # rows of a tile, at least the longest segment
    block: int,
    # v and the result's gradient are loaded, q and k loaded again, where they are multiplied
    reload: bool,
    # by Pallas' interpreter
    interpreted: bool,
) -> None:  # fmt: skip
    """One program for each (segment, head); heads run fastest, so neighbours share cache lines."""
    tokens, _, heads, head_dim = out_grad_ref.shape
    rotary_dim = 2 * cos_ref.shape[1]
    segments = cu_seqlens_ref.shape[0] - 1
    segment = pl.program_id(0) // heads
    head = pl.program_id(0) % heads
    dtype = out_grad_ref.dtype
    refs = (q_ref, k_ref, v_ref), grad_refs * (3 // len(grad_refs))
    (q_head, k_head, v_head), grads = (
        [Head(ref, part, head) for ref, part in zip(each, parts, strict=True)] for each in refs
    )
    q_grad_head, k_grad_head, v_grad_head = grads
    out_grad_head = Head(out_grad_ref, 0, head)

    start, end = segment_bounds(cu_seqlens_ref, segment, tokens)
    length = end - start
    rows = Rows(start, block, jnp.arange(block, dtype=jnp.int32) < length)
    # Rows past a segment's end are its last one again, whose loads need no mask. What comes of them
    # as keys is masked, and as queries multiplied by a gradient of 0.
    # An empty segment may start at the end.
    loaded = Rows(jnp.minimum(start, tokens - 1), block, None, last=jnp.maximum(length - 1, 0))

    q = load_pairs(q_head, loaded, 0, main, head_dim, rotary_dim)
    k = load_pairs(k_head, loaded, 0, main, head_dim, rotary_dim)
    if tail > 0:
        q_tail = load_pairs(q_head, loaded, main, tail, head_dim, rotary_dim)
        k_tail = load_pairs(k_head, loaded, main, tail, head_dim, rotary_dim)
    else:
        q_tail = k_tail = None

    def load_values() -> tuple[jax.Array | None, ...]:
        """V and the result's gradient, main and tail of each."""
        return tuple(
            load_columns(head, at, first, width, head_dim) if width > 0 else None
            for head, at in ((v_head, loaded), (out_grad_head, rows))
            for first, width in ((0, main), (main, tail))
        )

    values = None if reload else load_values()
    cos, sin = load_angles(cos_ref, sin_ref, loaded, 0, main, rotary_dim)  # [block, main / 2]
    if tail > 0:
        cos_tail, sin_tail = load_angles(cos_ref, sin_ref, loaded, main, tail, rotary_dim)
    padding_end, padding_start = padding_bounds(cu_seqlens_ref, segments, tokens)
    # All these loads are in flight at once, and Q and K rotated outside of the branch that
    # multiplies them, as in the forward kernel.
    barrier(interpreted)
    q = embedded_tile(q, cos, sin, ROPE)  # [block, main]
    k = embedded_tile(k, cos, sin, ROPE)  # [block, main]
    if tail > 0:
        q_tail = embedded_tile(q_tail, cos_tail, sin_tail, ROPE)  # [block, tail]
        k_tail = embedded_tile(k_tail, cos_tail, sin_tail, ROPE)  # [block, tail]

    @pl.when((length > 0) & (length <= block))
    def _differentiate() -> None:
        logits = dot(q, k.T)  # [block, block]
        if tail > 0:
            logits = dot(q_tail, k_tail.T, logits)
        logits = jnp.where(rows.mask[None, :], logits, -jnp.inf)
        # The difference comes first: it is exactly 0 for the largest, however large that is.
        p = exp2((logits - jnp.max(logits, axis=1)[:, None]) * scale_log2, interpreted)
        p *= (1.0 / jnp.sum(p, axis=1))[:, None]

        if reload:
            barrier(interpreted)
        v, v_tail, out_grad, out_grad_tail = load_values() if reload else values
        p_grad = dot(out_grad, v.T)  # [block, block]
        if tail > 0:
            p_grad = dot(out_grad_tail, v_tail.T, p_grad)
        s_grad = p * (p_grad - jnp.sum(p * p_grad, axis=1)[:, None])
        factor = scale_log2 * LN_2
        if dtype == jnp.float16:
            # Loss scaling takes gradients to where fp16 ends: 1 stands for the tile's largest.
            # (For sm_100 Triton 3.6 and 3.7 reduce no vector to a number here: [1, 1].)
            largest = jnp.max(jnp.abs(s_grad), axis=1, keepdims=True)
            largest = jnp.maximum(jnp.max(largest, axis=0, keepdims=True), 1e-30)
            s_grad *= 1.0 / largest
            factor *= largest
        s_grad = s_grad.astype(dtype)
        p = p.astype(dtype)

        v_grad = dot(p.T, out_grad).astype(dtype)
        store_columns(v_grad_head, rows, v_grad, 0, main, head_dim)
        if tail > 0:
            v_grad = dot(p.T, out_grad_tail).astype(dtype)
            store_columns(v_grad_head, rows, v_grad, main, tail, head_dim)

        # The angles again, from the cache, as held they would take registers meanwhile.
        barrier(interpreted)
        for first, width, q_tile, k_tile in ((0, main, q, k), (main, tail, q_tail, k_tail)):
            if width == 0:
                continue
            angles = load_angles(cos_ref, sin_ref, loaded, first, width, rotary_dim)
            columns = first, width, head_dim, rotary_dim
            if reload:
                barrier(interpreted)
                k_tile = embedded_tile(load_pairs(k_head, loaded, *columns), *angles, ROPE)
            q_grad = rotate_back(dot(s_grad, k_tile) * factor, *angles, dtype)
            store_pairs(q_grad_head, rows, q_grad, *columns)
            if reload:
                barrier(interpreted)
                q_tile = embedded_tile(load_pairs(q_head, loaded, *columns), *angles, ROPE)
            k_grad = rotate_back(dot(s_grad.T, q_tile) * factor, *angles, dtype)
            store_pairs(k_grad_head, rows, k_grad, *columns)

    # A segment that breaks the promise of max_seqlen must not pass for a result.
    @pl.when(length > block)
    def _refuse() -> None:
        for grad in grads:
            fill_rows(grad, start, end, block, jnp.nan, main, tail, block)

    # Each program clears a share of the tokens of no segment.
    share = segments * block
    for grad in grads:
        fill_rows(grad, segment * block, padding_end, share, 0.0, main, tail, block)
        fill_rows(grad, padding_start + segment * block, tokens, share, 0.0, main, tail, block)
