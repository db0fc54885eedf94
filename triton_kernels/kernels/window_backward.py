"""Gradients of attention within short segments: a program holds one segment of one head.

All is computed again from what the forward pass read, so that it keeps nothing: a tile of logits,
its softmax P, and by the result's gradient dO

    dV = P^T dO    dP = dO V^T    dS = P (dP - rowsum(P dP)) scale    dQ = dS K    dK = dS^T Q

where Q and K are rotated, and their gradients rotated back. Everything is read once and written
once; products are of the inputs' dtype, and their sums fp32.
"""

import triton
import triton.language as tl

from triton_kernels.kernels.tiles import (
    ROPE,
    cast,
    dot,
    embedded_tile,
    load_angles,
    load_columns,
    load_pairs,
    padding_bounds,
    rotate_back,
    segment_bounds,
    store_columns,
    store_pairs,
)
from triton_kernels.kernels.window import fill_rows

# Sizes and strides vary from call to call: one binary serves all.
NUMBERS = (
    *("tokens", "segments"),
    *("q_stride", "q_head_stride", "k_stride", "k_head_stride", "v_stride", "v_head_stride"),
    *("out_stride", "out_head_stride", "angle_stride"),
)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=("cu_seqlens_ptr",))
def window_backward_kernel(
    # tensors: what the forward kernel read, the gradient of what it wrote, and those to be written
    q_ptr, k_ptr, v_ptr, out_grad_ptr,
    q_grad_ptr, k_grad_ptr, v_grad_ptr,
    cos_ptr, sin_ptr, cu_seqlens_ptr,
    # sizes and scale
    tokens, segments, scale_log2,
    # strides of what is read, in units of 8 elements, see ANGLE_UNIT; the last axis is contiguous
    q_stride, q_head_stride,
    k_stride, k_head_stride,
    v_stride, v_head_stride,
    out_stride, out_head_stride,
    angle_stride,
    # shape of a head and how it is cut
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr,
    # the angles' stride comes in units of so many elements
    ANGLE_UNIT: tl.constexpr,
    # how many gradients lie side by side in a token's row
    PARTS: tl.constexpr,
    # rows of a tile, at least the longest segment
    BLOCK: tl.constexpr,
    # v and the result's gradient are loaded, q and k loaded again, where they are multiplied
    RELOAD: tl.constexpr,
):  # fmt: skip
    """One program for each (segment, head); heads run fastest, so neighbours share cache lines."""
    # Written out, the factors tell the compiler that it may load 16 bytes at a time.
    q_stride, k_stride, v_stride, out_stride = (
        q_stride * 8,
        k_stride * 8,
        v_stride * 8,
        out_stride * 8,
    )
    angle_stride = angle_stride * ANGLE_UNIT
    segment = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    dtype = q_grad_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK)
    grad_stride = PARTS * HEADS * HEAD_DIM
    q_grad_ptr += head * HEAD_DIM
    k_grad_ptr += head * HEAD_DIM
    v_grad_ptr += head * HEAD_DIM

    start, end = segment_bounds(cu_seqlens_ptr, segment, tokens)
    length = end - start
    mask = rows < length
    # Rows past a segment's end are its last one again, whose loads need no mask. What comes of them
    # as keys is masked, and as queries multiplied by a gradient of 0.
    loaded = tl.minimum(rows, tl.maximum(length - 1, 0))
    # Offsets count from the segment's start and fit 32 bits; an empty segment may start at the end.
    first = tl.minimum(start, tokens - 1).to(tl.int64)
    q_ptr += first * q_stride + head.to(tl.int64) * q_head_stride * 8
    k_ptr += first * k_stride + head.to(tl.int64) * k_head_stride * 8
    v_ptr += first * v_stride + head.to(tl.int64) * v_head_stride * 8
    out_grad_ptr += first * out_stride + head.to(tl.int64) * out_head_stride * 8
    cos_ptr += first * angle_stride
    sin_ptr += first * angle_stride

    q = load_pairs(q_ptr, q_stride, loaded, None, 0, MAIN, HEAD_DIM, ROTARY_DIM)
    k = load_pairs(k_ptr, k_stride, loaded, None, 0, MAIN, HEAD_DIM, ROTARY_DIM)
    if TAIL > 0:
        q_tail = load_pairs(q_ptr, q_stride, loaded, None, MAIN, TAIL, HEAD_DIM, ROTARY_DIM)
        k_tail = load_pairs(k_ptr, k_stride, loaded, None, MAIN, TAIL, HEAD_DIM, ROTARY_DIM)
    if not RELOAD:
        v = load_columns(v_ptr, v_stride, loaded, None, 0, MAIN, HEAD_DIM)  # [BLOCK, MAIN]
        out_grad = load_columns(out_grad_ptr, out_stride, rows, mask, 0, MAIN, HEAD_DIM)
        if TAIL > 0:
            v_tail = load_columns(v_ptr, v_stride, loaded, None, MAIN, TAIL, HEAD_DIM)
            out_grad_tail = load_columns(out_grad_ptr, out_stride, rows, mask, MAIN, TAIL, HEAD_DIM)
    cos, sin = load_angles(cos_ptr, sin_ptr, angle_stride, loaded, None, 0, MAIN, ROTARY_DIM)
    if TAIL > 0:
        cos_tail, sin_tail = load_angles(
            cos_ptr, sin_ptr, angle_stride, loaded, None, MAIN, TAIL, ROTARY_DIM
        )
    padding_end, padding_start = padding_bounds(cu_seqlens_ptr, segments, tokens)
    # All these loads are in flight at once, and rotated outside of the branch that multiplies, as
    # in the forward kernel.
    tl.debug_barrier()
    q = embedded_tile(q, cos, sin, ROPE)  # [BLOCK, MAIN]
    k = embedded_tile(k, cos, sin, ROPE)  # [BLOCK, MAIN]
    if TAIL > 0:
        q_tail = embedded_tile(q_tail, cos_tail, sin_tail, ROPE)  # [BLOCK, TAIL]
        k_tail = embedded_tile(k_tail, cos_tail, sin_tail, ROPE)  # [BLOCK, TAIL]

    if (length > 0) & (length <= BLOCK):
        logits = dot(q, tl.trans(k))  # [BLOCK, BLOCK]
        if TAIL > 0:
            logits = dot(q_tail, tl.trans(k_tail), logits)
        logits = tl.where(mask[None, :], logits, -float("inf"))
        # The difference comes first: it is exactly 0 for the largest, however large that is.
        p = tl.exp2((logits - tl.max(logits, 1)[:, None]) * scale_log2)
        p = p * (1.0 / tl.sum(p, 1))[:, None]

        if RELOAD:
            tl.debug_barrier()
            v = load_columns(v_ptr, v_stride, loaded, None, 0, MAIN, HEAD_DIM)  # [BLOCK, MAIN]
            out_grad = load_columns(out_grad_ptr, out_stride, rows, mask, 0, MAIN, HEAD_DIM)
            if TAIL > 0:
                v_tail = load_columns(v_ptr, v_stride, loaded, None, MAIN, TAIL, HEAD_DIM)
                out_grad_tail = load_columns(
                    out_grad_ptr, out_stride, rows, mask, MAIN, TAIL, HEAD_DIM
                )
        p_grad = dot(out_grad, tl.trans(v))  # [BLOCK, BLOCK]
        if TAIL > 0:
            p_grad = dot(out_grad_tail, tl.trans(v_tail), p_grad)
        s_grad = p * (p_grad - tl.sum(p * p_grad, 1)[:, None])
        factor = scale_log2 * LN_2
        if dtype == tl.float16:
            # Loss scaling takes gradients to where fp16 ends: 1 stands for the tile's largest.
            # (For sm_100 Triton 3.6 and 3.7 reduce no vector to a number here: [1, 1].)
            largest = tl.max(tl.max(tl.abs(s_grad), 1, keep_dims=True), 0, keep_dims=True)
            largest = tl.maximum(largest, 1e-30)
            s_grad = s_grad * (1.0 / largest)
            factor = factor * largest
        s_grad = cast(s_grad, dtype)
        p = cast(p, dtype)

        row = first * grad_stride
        v_grad = cast(dot(tl.trans(p), out_grad), dtype)
        store_columns(v_grad_ptr + row, grad_stride, rows, mask, v_grad, 0, MAIN, HEAD_DIM)
        if TAIL > 0:
            v_grad = cast(dot(tl.trans(p), out_grad_tail), dtype)
            store_columns(v_grad_ptr + row, grad_stride, rows, mask, v_grad, MAIN, TAIL, HEAD_DIM)

        # The angles again, from the cache, as held they would take registers meanwhile.
        tl.debug_barrier()
        cos, sin = load_angles(cos_ptr, sin_ptr, angle_stride, loaded, None, 0, MAIN, ROTARY_DIM)
        if RELOAD:
            k = load_pairs(k_ptr, k_stride, loaded, None, 0, MAIN, HEAD_DIM, ROTARY_DIM)
            k = embedded_tile(k, cos, sin, ROPE)
        q_grad = rotate_back(dot(s_grad, k) * factor, cos, sin, dtype)
        store_pairs(
            q_grad_ptr + row, grad_stride, rows, mask, q_grad, 0, MAIN, HEAD_DIM, ROTARY_DIM
        )
        if RELOAD:
            tl.debug_barrier()
            q = load_pairs(q_ptr, q_stride, loaded, None, 0, MAIN, HEAD_DIM, ROTARY_DIM)
            q = embedded_tile(q, cos, sin, ROPE)
        k_grad = rotate_back(dot(tl.trans(s_grad), q) * factor, cos, sin, dtype)
        store_pairs(
            k_grad_ptr + row, grad_stride, rows, mask, k_grad, 0, MAIN, HEAD_DIM, ROTARY_DIM
        )
        if TAIL > 0:
            cos_tail, sin_tail = load_angles(
                cos_ptr, sin_ptr, angle_stride, loaded, None, MAIN, TAIL, ROTARY_DIM
            )
            if RELOAD:
                tl.debug_barrier()
                k_tail = load_pairs(k_ptr, k_stride, loaded, None, MAIN, TAIL, HEAD_DIM, ROTARY_DIM)
                k_tail = embedded_tile(k_tail, cos_tail, sin_tail, ROPE)
            q_grad = rotate_back(dot(s_grad, k_tail) * factor, cos_tail, sin_tail, dtype)
            store_pairs(
                q_grad_ptr + row, grad_stride, rows, mask, q_grad,
                MAIN, TAIL, HEAD_DIM, ROTARY_DIM,
            )  # fmt: skip
            if RELOAD:
                tl.debug_barrier()
                q_tail = load_pairs(q_ptr, q_stride, loaded, None, MAIN, TAIL, HEAD_DIM, ROTARY_DIM)
                q_tail = embedded_tile(q_tail, cos_tail, sin_tail, ROPE)
            k_grad = rotate_back(dot(tl.trans(s_grad), q_tail) * factor, cos_tail, sin_tail, dtype)
            store_pairs(
                k_grad_ptr + row, grad_stride, rows, mask, k_grad,
                MAIN, TAIL, HEAD_DIM, ROTARY_DIM,
            )  # fmt: skip

    # A segment that breaks the promise of max_seqlen must not pass for a result.
    if length > BLOCK:
        fill_gradients(
            q_grad_ptr, k_grad_ptr, v_grad_ptr, start, end, BLOCK, float("nan"),
            PARTS * HEADS, HEAD_DIM, MAIN, TAIL, BLOCK,
        )  # fmt: skip

    # Each program clears a share of the tokens of no segment.
    share = segments * BLOCK
    fill_gradients(
        q_grad_ptr, k_grad_ptr, v_grad_ptr, segment * BLOCK, padding_end, share, 0.0,
        PARTS * HEADS, HEAD_DIM, MAIN, TAIL, BLOCK,
    )  # fmt: skip
    fill_gradients(
        q_grad_ptr, k_grad_ptr, v_grad_ptr, padding_start + segment * BLOCK, tokens, share, 0.0,
        PARTS * HEADS, HEAD_DIM, MAIN, TAIL, BLOCK,
    )  # fmt: skip


@triton.jit
def fill_gradients(q_grad_ptr, k_grad_ptr, v_grad_ptr, start, end, step, value,
                   HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr,
                   TAIL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """fill_rows of one head of all three, in rows of HEADS heads."""
    fill_rows(q_grad_ptr, start, end, step, value, HEADS, HEAD_DIM, MAIN, TAIL, BLOCK)
    fill_rows(k_grad_ptr, start, end, step, value, HEADS, HEAD_DIM, MAIN, TAIL, BLOCK)
    fill_rows(v_grad_ptr, start, end, step, value, HEADS, HEAD_DIM, MAIN, TAIL, BLOCK)
