"""Attention within short segments: a program holds one whole segment of one head in one tile.

No online softmax, and every row of Q and K is rotated exactly once.
"""

import triton
import triton.language as tl

from triton_kernels.kernels.tiles import (
    angles_from,
    cast,
    dot,
    embedded_tile,
    inverse_rms,
    load_angles,
    load_columns,
    load_rotary,
    normalized,
    padding_bounds,
    segment_bounds,
    store_columns,
)

# Sizes and strides vary from call to call: one binary serves all.
NUMBERS = (
    *("tokens", "segments"),
    *("q_stride", "q_head_stride", "k_stride", "k_head_stride", "v_stride", "v_head_stride"),
    "angle_stride",
)


# Their addresses may be any.
POINTERS = ("cu_seqlens_ptr", "q_norm_ptr", "k_norm_ptr")


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def window_kernel(
    # tensors; norms' weights, None where what they are of is not normalised here
    q_ptr, k_ptr, v_ptr, out_ptr,
    cos_ptr, sin_ptr, cu_seqlens_ptr,
    # log-sum-exp of each row [heads, tokens], in powers of two; None: not wanted
    lse_ptr,
    q_norm_ptr, k_norm_ptr,
    # sizes and scale
    tokens, segments, scale_log2,
    # strides, see ALIGNED; the last axis is contiguous
    q_stride, q_head_stride,
    k_stride, k_head_stride,
    v_stride, v_head_stride,
    angle_stride,
    # shape of a head and how it is cut
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr,
    # strides of q, k, v come in units of 8 elements, else of 1; the angles' in units of ANGLE_UNIT
    ALIGNED: tl.constexpr, ANGLE_UNIT: tl.constexpr,
    # heads of K and V, each of which serves as many of Q's
    K_HEADS: tl.constexpr,
    # what is done to Q and K here, see tiles.py, and what is added to the mean squares of what is
    # normalised here
    EMBED_Q: tl.constexpr, EMBED_K: tl.constexpr,
    Q_EPS: tl.constexpr, K_EPS: tl.constexpr,
    # rows of a tile, at least the longest segment
    BLOCK: tl.constexpr,
    # longer segments and padding are another launch's
    SHARED: tl.constexpr,
):  # fmt: skip
    """One program for each (segment, head); heads run fastest, so neighbours share cache lines."""
    # Written out, the factors tell the compiler that it may load 16 bytes at a time.
    UNIT: tl.constexpr = 8 if ALIGNED else 1
    q_stride, k_stride, v_stride = q_stride * UNIT, k_stride * UNIT, v_stride * UNIT
    angle_stride = angle_stride * ANGLE_UNIT
    segment = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    k_head = head if K_HEADS == HEADS else head // (HEADS // K_HEADS)
    dtype = out_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK)
    out_stride = HEADS * HEAD_DIM
    out_ptr += head * HEAD_DIM

    start, end = segment_bounds(cu_seqlens_ptr, segment, tokens)
    length = end - start
    mask = rows < length
    # Rows past a segment's end are its last one again: what comes of them is masked, and so their
    # loads need not be. Those of V are masked, as its infinities would meet zeros.
    loaded = tl.minimum(rows, tl.maximum(length - 1, 0))
    # Offsets count from the segment's start and fit 32 bits; an empty segment may start at the end.
    first = tl.minimum(start, tokens - 1).to(tl.int64)
    q_ptr += first * q_stride + head.to(tl.int64) * q_head_stride * UNIT
    k_ptr += first * k_stride + k_head.to(tl.int64) * k_head_stride * UNIT
    v_ptr += first * v_stride + k_head.to(tl.int64) * v_head_stride * UNIT
    cos_ptr, sin_ptr = angles_from(cos_ptr, sin_ptr, first * angle_stride, EMBED_Q)

    q = load_rotary(
        q_ptr, q_stride, loaded, None, head, 0, MAIN, HEADS, HEAD_DIM, ROTARY_DIM, EMBED_Q
    )
    k = load_rotary(
        k_ptr, k_stride, loaded, None, k_head, 0, MAIN, K_HEADS, HEAD_DIM, ROTARY_DIM, EMBED_K
    )
    if TAIL > 0:
        q_tail = load_rotary(
            q_ptr, q_stride, loaded, None, head, MAIN, TAIL, HEADS, HEAD_DIM, ROTARY_DIM, EMBED_Q
        )
        k_tail = load_rotary(
            k_ptr, k_stride, loaded, None, k_head, MAIN, TAIL, K_HEADS, HEAD_DIM, ROTARY_DIM,
            EMBED_K,
        )  # fmt: skip
    # V before the products: loaded behind them, ptxas 12.8 gets the address of the second of two
    # products with V wrong; a test looks for that in the machine code.
    v = load_columns(v_ptr, v_stride, rows, mask, 0, MAIN, HEAD_DIM)  # [BLOCK, MAIN]
    if TAIL > 0:
        v_tail = load_columns(v_ptr, v_stride, rows, mask, MAIN, TAIL, HEAD_DIM)  # [BLOCK, TAIL]
    # Last the angles, which other heads have brought into the cache, and the bounds of the padding,
    # which are for the end.
    cos, sin = load_angles(
        cos_ptr, sin_ptr, angle_stride, loaded, None, 0, MAIN, ROTARY_DIM, EMBED_Q
    )
    if TAIL > 0:
        cos_tail, sin_tail = load_angles(
            cos_ptr, sin_ptr, angle_stride, loaded, None, MAIN, TAIL, ROTARY_DIM, EMBED_Q
        )
    padding_end, padding_start = padding_bounds(cu_seqlens_ptr, segments, tokens)
    # So all these loads are in flight at once: the launch table's bound on registers leaves room
    # for them, and the barrier keeps the compiler from moving any down to where it is needed.
    tl.debug_barrier()

    # Q and K are rotated outside the branch that multiplies them. Within one block of code the
    # compiler moves the layout of the product's operand up to the loads and converts q, cos and
    # sin through shared memory one by one: 130 registers a thread in place of 86.
    q_inverse = inverse_rms(q, q_tail if TAIL > 0 else None, Q_EPS, HEAD_DIM)
    k_inverse = inverse_rms(k, k_tail if TAIL > 0 else None, K_EPS, HEAD_DIM)
    q = normalized(q, q_inverse, q_norm_ptr, 0, MAIN, HEAD_DIM, ROTARY_DIM)
    q = embedded_tile(q, cos, sin, EMBED_Q, dtype)  # [BLOCK, MAIN]
    k = normalized(k, k_inverse, k_norm_ptr, 0, MAIN, HEAD_DIM, ROTARY_DIM)
    k = embedded_tile(k, cos, sin, EMBED_K, dtype)  # [BLOCK, MAIN]
    if TAIL > 0:
        q_tail = normalized(q_tail, q_inverse, q_norm_ptr, MAIN, TAIL, HEAD_DIM, ROTARY_DIM)
        k_tail = normalized(k_tail, k_inverse, k_norm_ptr, MAIN, TAIL, HEAD_DIM, ROTARY_DIM)
        q_tail = embedded_tile(q_tail, cos_tail, sin_tail, EMBED_Q, dtype)  # [BLOCK, TAIL]
        k_tail = embedded_tile(k_tail, cos_tail, sin_tail, EMBED_K, dtype)  # [BLOCK, TAIL]

    if (length > 0) & (length <= BLOCK):
        logits = dot(q, tl.trans(k))  # [BLOCK, BLOCK]
        if TAIL > 0:
            logits = dot(q_tail, tl.trans(k_tail), logits)
        logits = tl.where(mask[None, :], logits, -float("inf"))
        # The difference comes first: it is exactly 0 for the largest, however large that is.
        row_max = tl.max(logits, 1)
        p = tl.exp2((logits - row_max[:, None]) * scale_log2)
        row_sum = tl.sum(p, 1)
        if lse_ptr is not None:
            lse_ptr += head.to(tl.int64) * tokens + first
            tl.store(lse_ptr + rows, row_max * scale_log2 + tl.log2(row_sum), mask=mask)
        rescale = (1.0 / row_sum)[:, None]
        p = cast(p, dtype)

        segment_ptr = out_ptr + first * out_stride
        out = cast(dot(p, v) * rescale, dtype)
        store_columns(segment_ptr, out_stride, rows, mask, out, 0, MAIN, HEAD_DIM)
        if TAIL > 0:
            out = cast(dot(p, v_tail) * rescale, dtype)
            store_columns(segment_ptr, out_stride, rows, mask, out, MAIN, TAIL, HEAD_DIM)

    if SHARED:
        return

    # A segment that breaks the promise of max_seqlen must not pass for a result.
    if length > BLOCK:
        fill_rows(out_ptr, start, end, BLOCK, float("nan"), HEADS, HEAD_DIM, MAIN, TAIL, BLOCK)

    # Each program clears a share of the tokens of no segment.
    share = segments * BLOCK
    fill_rows(out_ptr, segment * BLOCK, padding_end, share, 0.0, HEADS, HEAD_DIM, MAIN, TAIL, BLOCK)
    fill_rows(
        out_ptr, padding_start + segment * BLOCK, tokens, share, 0.0,
        HEADS, HEAD_DIM, MAIN, TAIL, BLOCK,
    )  # fmt: skip


@triton.jit
def fill_rows(out_ptr, start, end, step, value, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
              MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write value to rows start .. end of one head, BLOCK rows every `step`."""
    dtype = out_ptr.dtype.element_ty
    stride = HEADS * HEAD_DIM
    for block in range(0, end - start, step):
        rows = tl.arange(0, BLOCK)
        mask = rows < end - start - block
        ptr = out_ptr + (start.to(tl.int64) + block) * stride
        # In fp32 first: the interpreter of Triton 3.7 and older makes no bf16 constant but 0.
        x = tl.full([BLOCK, MAIN], value, tl.float32).to(dtype)
        store_columns(ptr, stride, rows, mask, x, 0, MAIN, HEAD_DIM)
        if TAIL > 0:
            x = tl.full([BLOCK, TAIL], value, tl.float32).to(dtype)
            store_columns(ptr, stride, rows, mask, x, MAIN, TAIL, HEAD_DIM)
