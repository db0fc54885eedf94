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

import triton
import triton.language as tl

from triton_kernels.kernels.stream import last_start_at
from triton_kernels.kernels.tiles import (
    cast,
    dot,
    load_angles,
    load_columns,
    load_rotary,
    rotate_back,
    segment_bounds,
    store_columns,
    store_pairs,
)
from triton_kernels.kernels.window_backward import LN_2

# Sizes and strides vary from call to call: one binary serves all.
NUMBERS = (
    *("tokens", "segments"),
    *("row_stride", "v_stride", "v_head_stride", "out_stride", "out_head_stride", "angle_stride"),
)
# Probabilities of many keys are small: in fp16 they are multiplied by 2 to this, far from its end.
FP16_SHIFT: tl.constexpr = tl.constexpr(12)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=("cu_seqlens_ptr",))
def stream_backward_q_kernel(
    # tensors: rotated q and k, v, the result and its gradient, log-sum-exp of each row; and those
    # to be written, rows' sums D of the result times its gradient first
    q_ptr, k_ptr, v_ptr, out_ptr, out_grad_ptr, lse_ptr,
    delta_ptr, q_grad_ptr,
    cos_ptr, sin_ptr, cu_seqlens_ptr,
    # sizes and scale
    tokens, segments, scale_log2,
    # strides of q's and k's rows, of v and the result's gradient, in units of 8 elements, see
    # ANGLE_UNIT; the last axis is contiguous
    row_stride,
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
    # rows of a query tile and of a key tile
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for each (head, block of queries); blocks run fastest and share K and V."""
    # Written out, the factors tell the compiler that it may load 16 bytes at a time.
    row_stride, v_stride, out_stride = row_stride * 8, v_stride * 8, out_stride * 8
    angle_stride = angle_stride * ANGLE_UNIT
    blocks = tl.cdiv(tokens, BLOCK)
    head = tl.program_id(0) // blocks
    block_start = (tl.program_id(0) % blocks) * BLOCK
    block_end = tl.minimum(block_start + BLOCK, tokens)
    dtype = q_grad_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK)
    key_rows = tl.arange(0, BLOCK_K)
    token = block_start + rows
    mask = token < block_end
    grad_stride = PARTS * HEADS * HEAD_DIM

    first = block_start.to(tl.int64)
    q_ptr += first * row_stride
    out_ptr += first * HEADS * HEAD_DIM + head * HEAD_DIM
    out_grad_ptr += first * out_stride + head.to(tl.int64) * out_head_stride * 8
    lse_ptr += head.to(tl.int64) * tokens + first
    delta_ptr += head.to(tl.int64) * tokens + first
    q_grad_ptr += first * grad_stride + head * HEAD_DIM
    cos_ptr += first * angle_stride
    sin_ptr += first * angle_stride
    v_ptr += head.to(tl.int64) * v_head_stride * 8

    out_grad, out_grad_tail = load_head(out_grad_ptr, out_stride, rows, mask, HEAD_DIM, MAIN, TAIL)
    out, out_tail = load_head(out_ptr, HEADS * HEAD_DIM, rows, mask, HEAD_DIM, MAIN, TAIL)
    delta = tl.sum(out.to(tl.float32) * out_grad.to(tl.float32), 1)
    if TAIL > 0:
        delta += tl.sum(out_tail.to(tl.float32) * out_grad_tail.to(tl.float32), 1)
    tl.store(delta_ptr + rows, delta, mask=mask)
    lse = tl.load(lse_ptr + rows, mask=mask, other=0.0)
    q, q_tail = load_rotated(
        q_ptr, row_stride, rows, mask, head, HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL
    )

    covered = tl.zeros([BLOCK], tl.int1)
    first_segment = tl.maximum(last_start_at(cu_seqlens_ptr, block_start, segments), 0)
    last_segment = last_start_at(cu_seqlens_ptr, block_end - 1, segments)
    HOIST: tl.constexpr = HEAD_DIM > 128 or dtype == tl.float32  # as in the stream kernel
    for segment in tl.range(first_segment, last_segment + 1, disable_licm=not HOIST):
        start, end = segment_bounds(cu_seqlens_ptr, segment, tokens)
        keys = tl.where(end > block_start, end - start, 0)  # 0: only padding follows it
        mask = (token >= start) & (token < end)
        first_key = start.to(tl.int64)
        k_block, v_block = k_ptr + first_key * row_stride, v_ptr + first_key * v_stride
        acc = tl.zeros([BLOCK, MAIN], tl.float32)
        acc_tail = tl.zeros([BLOCK, TAIL if TAIL > 0 else 1], tl.float32)
        # Whole blocks of keys need no mask; what is left over is one block more.
        whole = keys // BLOCK_K * BLOCK_K
        for _ in range(0, whole, BLOCK_K):
            acc, acc_tail = visit_keys(
                k_block, v_block, row_stride, v_stride, key_rows, None,
                q, q_tail, out_grad, out_grad_tail, lse, delta, mask, head, scale_log2,
                acc, acc_tail, HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL,
            )  # fmt: skip
            k_block += row_stride.to(tl.int64) * BLOCK_K
            v_block += v_stride.to(tl.int64) * BLOCK_K
        if whole < keys:
            acc, acc_tail = visit_keys(
                k_block, v_block, row_stride, v_stride, key_rows, key_rows < keys - whole,
                q, q_tail, out_grad, out_grad_tail, lse, delta, mask, head, scale_log2,
                acc, acc_tail, HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL,
            )  # fmt: skip
        store_rotated_back(
            q_grad_ptr, grad_stride, cos_ptr, sin_ptr, angle_stride, rows, mask,
            acc, acc_tail, scale_log2 * LN_2, HEAD_DIM, ROTARY_DIM, MAIN, TAIL,
        )  # fmt: skip
        covered = covered | mask

    # Tokens of no segment.
    clear_rows(q_grad_ptr, grad_stride, rows, (token < block_end) & (covered == 0),
               HEAD_DIM, MAIN, TAIL)  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=("cu_seqlens_ptr",))
def stream_backward_kv_kernel(
    # as above; D, which that kernel wrote, is read
    q_ptr, k_ptr, v_ptr, out_grad_ptr, lse_ptr, delta_ptr,
    k_grad_ptr, v_grad_ptr,
    cos_ptr, sin_ptr, cu_seqlens_ptr,
    tokens, segments, scale_log2,
    row_stride,
    v_stride, v_head_stride,
    out_stride, out_head_stride,
    angle_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr,
    ANGLE_UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for each (head, block of keys); blocks run fastest and share Q and dO."""
    row_stride, v_stride, out_stride = row_stride * 8, v_stride * 8, out_stride * 8
    angle_stride = angle_stride * ANGLE_UNIT
    blocks = tl.cdiv(tokens, BLOCK_K)
    head = tl.program_id(0) // blocks
    block_start = (tl.program_id(0) % blocks) * BLOCK_K
    block_end = tl.minimum(block_start + BLOCK_K, tokens)
    dtype = k_grad_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK_K)
    query_rows = tl.arange(0, BLOCK)
    token = block_start + rows
    mask = token < block_end
    grad_stride = PARTS * HEADS * HEAD_DIM

    first = block_start.to(tl.int64)
    k_ptr += first * row_stride
    v_ptr += first * v_stride + head.to(tl.int64) * v_head_stride * 8
    k_grad_ptr += first * grad_stride + head * HEAD_DIM
    v_grad_ptr += first * grad_stride + head * HEAD_DIM
    cos_ptr += first * angle_stride
    sin_ptr += first * angle_stride
    out_grad_ptr += head.to(tl.int64) * out_head_stride * 8
    lse_ptr += head.to(tl.int64) * tokens
    delta_ptr += head.to(tl.int64) * tokens

    k, k_tail = load_rotated(
        k_ptr, row_stride, rows, mask, head, HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL
    )
    v, v_tail = load_head(v_ptr, v_stride, rows, mask, HEAD_DIM, MAIN, TAIL)

    covered = tl.zeros([BLOCK_K], tl.int1)
    first_segment = tl.maximum(last_start_at(cu_seqlens_ptr, block_start, segments), 0)
    last_segment = last_start_at(cu_seqlens_ptr, block_end - 1, segments)
    HOIST: tl.constexpr = HEAD_DIM > 128 or dtype == tl.float32
    COLUMNS: tl.constexpr = TAIL if TAIL > 0 else 1
    # What fp16's probabilities are multiplied by, and their products divided.
    UNSHIFT: tl.constexpr = 2.0**-FP16_SHIFT if dtype == tl.float16 else 1.0
    for segment in tl.range(first_segment, last_segment + 1, disable_licm=not HOIST):
        start, end = segment_bounds(cu_seqlens_ptr, segment, tokens)
        queries = tl.where(end > block_start, end - start, 0)
        mask = (token >= start) & (token < end)
        first_query = start.to(tl.int64)
        q_block = q_ptr + first_query * row_stride
        out_grad_block = out_grad_ptr + first_query * out_stride
        lse_block, delta_block = lse_ptr + first_query, delta_ptr + first_query
        k_acc = tl.zeros([BLOCK_K, MAIN], tl.float32)
        k_acc_tail = tl.zeros([BLOCK_K, COLUMNS], tl.float32)
        v_acc = tl.zeros([BLOCK_K, MAIN], tl.float32)
        v_acc_tail = tl.zeros([BLOCK_K, COLUMNS], tl.float32)
        whole = queries // BLOCK * BLOCK
        for _ in range(0, whole, BLOCK):
            k_acc, k_acc_tail, v_acc, v_acc_tail = visit_queries(
                q_block, out_grad_block, lse_block, delta_block, row_stride, out_stride,
                query_rows, None, k, k_tail, v, v_tail, mask, head, scale_log2,
                k_acc, k_acc_tail, v_acc, v_acc_tail, HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL,
            )  # fmt: skip
            q_block += row_stride.to(tl.int64) * BLOCK
            out_grad_block += out_stride.to(tl.int64) * BLOCK
            lse_block += BLOCK
            delta_block += BLOCK
        if whole < queries:
            k_acc, k_acc_tail, v_acc, v_acc_tail = visit_queries(
                q_block, out_grad_block, lse_block, delta_block, row_stride, out_stride,
                query_rows, query_rows < queries - whole, k, k_tail, v, v_tail, mask, head,
                scale_log2, k_acc, k_acc_tail, v_acc, v_acc_tail,
                HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL,
            )  # fmt: skip
        v_grad = cast(v_acc * UNSHIFT, dtype)
        store_columns(v_grad_ptr, grad_stride, rows, mask, v_grad, 0, MAIN, HEAD_DIM)
        if TAIL > 0:
            v_grad = cast(v_acc_tail * UNSHIFT, dtype)
            store_columns(v_grad_ptr, grad_stride, rows, mask, v_grad, MAIN, TAIL, HEAD_DIM)
        store_rotated_back(
            k_grad_ptr, grad_stride, cos_ptr, sin_ptr, angle_stride, rows, mask,
            k_acc, k_acc_tail, scale_log2 * (LN_2 * UNSHIFT), HEAD_DIM, ROTARY_DIM, MAIN, TAIL,
        )  # fmt: skip
        covered = covered | mask

    mask = (token < block_end) & (covered == 0)
    clear_rows(k_grad_ptr, grad_stride, rows, mask, HEAD_DIM, MAIN, TAIL)
    clear_rows(v_grad_ptr, grad_stride, rows, mask, HEAD_DIM, MAIN, TAIL)


@triton.jit
def visit_keys(
    # a block of keys, and which of its rows are keys (None: all)
    k_ptr, v_ptr, row_stride, v_stride, rows, mask,
    # what is known of the queries, and which of them count
    q, q_tail, out_grad, out_grad_tail, lse, delta, wanted, head, scale_log2,
    acc, acc_tail,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Add what a block of keys has of the queries' gradient, not scaled."""
    k, k_tail = load_rotated(
        k_ptr, row_stride, rows, mask, head, HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL
    )
    v, v_tail = load_head(v_ptr, v_stride, rows, mask, HEAD_DIM, MAIN, TAIL)
    logits = product(q, q_tail, k, k_tail, TAIL)  # [BLOCK, BLOCK_K]
    p = tl.exp2(logits * scale_log2 - lse[:, None])
    if mask is not None:
        p = tl.where(mask[None, :], p, 0.0)  # else it may be infinite, and K is 0 there
    p_grad = product(out_grad, out_grad_tail, v, v_tail, TAIL)
    s_grad = p * (p_grad - delta[:, None])
    return add_product(s_grad, wanted, k, k_tail, acc, acc_tail, TAIL)


@triton.jit
def visit_queries(
    # a block of queries, and which of its rows are queries (None: all)
    q_ptr, out_grad_ptr, lse_ptr, delta_ptr, row_stride, out_stride, rows, mask,
    # the keys, and which of them count
    k, k_tail, v, v_tail, wanted, head, scale_log2,
    k_acc, k_acc_tail, v_acc, v_acc_tail,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Add what a block of queries has of the gradients of keys, not scaled, and values."""
    q, q_tail = load_rotated(
        q_ptr, row_stride, rows, mask, head, HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL
    )
    out_grad, out_grad_tail = load_head(out_grad_ptr, out_stride, rows, mask, HEAD_DIM, MAIN, TAIL)
    # Where there is no query, all probabilities are 0.
    lse = tl.load(lse_ptr + rows, mask=mask, other=None if mask is None else float("inf"))
    delta = tl.load(delta_ptr + rows, mask=mask, other=None if mask is None else 0.0)
    if q.dtype == tl.float16:
        lse -= FP16_SHIFT
    # Keys run along the rows, so that no tile is transposed for a product but in shared memory.
    logits = product(k, k_tail, q, q_tail, TAIL)  # [BLOCK_K, BLOCK]
    p = tl.exp2(logits * scale_log2 - lse[None, :])
    p_grad = product(v, v_tail, out_grad, out_grad_tail, TAIL)
    s_grad = p * (p_grad - delta[None, :])
    p = cast(p, q.dtype)
    v_acc = dot(p, out_grad, v_acc)
    if TAIL > 0:
        v_acc_tail = dot(p, out_grad_tail, v_acc_tail)
    k_acc, k_acc_tail = add_product(s_grad, wanted, q, q_tail, k_acc, k_acc_tail, TAIL)
    return k_acc, k_acc_tail, v_acc, v_acc_tail


@triton.jit
def load_head(x_ptr, stride, rows, row_mask,
              HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """Main and tail tile of a head's rows; where there is no tail the main tile stands in."""
    x = load_columns(x_ptr, stride, rows, row_mask, 0, MAIN, HEAD_DIM)
    x_tail = x
    if TAIL > 0:
        x_tail = load_columns(x_ptr, stride, rows, row_mask, MAIN, TAIL, HEAD_DIM)
    return x, x_tail


@triton.jit
def load_rotated(x_ptr, stride, rows, row_mask, head, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                 ROTARY_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """The same of a head's rotated rows."""
    x = load_rotary(x_ptr, stride, rows, row_mask, head, 0, MAIN, HEADS, HEAD_DIM, ROTARY_DIM, None)
    x_tail = x
    if TAIL > 0:
        x_tail = load_rotary(
            x_ptr, stride, rows, row_mask, head, MAIN, TAIL, HEADS, HEAD_DIM, ROTARY_DIM, None
        )
    return x, x_tail


@triton.jit
def product(a, a_tail, b, b_tail, TAIL: tl.constexpr):
    """a b^T over the columns of both tiles."""
    sums = dot(a, tl.trans(b))
    if TAIL > 0:
        sums = dot(a_tail, tl.trans(b_tail), sums)
    return sums


@triton.jit
def add_product(s_grad, wanted, x, x_tail, acc, acc_tail, TAIL: tl.constexpr):
    """acc + s_grad x, of both tiles of x. Rows of s_grad that are not wanted may be anything."""
    if x.dtype == tl.float16:
        # Loss scaling takes gradients to where fp16 ends: 1 stands for the tile's largest.
        # (For sm_100 Triton 3.6 and 3.7 reduce no vector to a number here: [1, 1].)
        sizes = tl.where(wanted[:, None] & (s_grad == s_grad), tl.abs(s_grad), 0.0)
        largest = tl.max(tl.max(sizes, 1, keep_dims=True), 0, keep_dims=True)
        largest = tl.maximum(largest, 1e-30)
        s_grad = cast(s_grad * (1.0 / largest), x.dtype)
        acc += dot(s_grad, x) * largest
        if TAIL > 0:
            acc_tail += dot(s_grad, x_tail) * largest
    else:
        s_grad = cast(s_grad, x.dtype)
        acc = dot(s_grad, x, acc)
        if TAIL > 0:
            acc_tail = dot(s_grad, x_tail, acc_tail)
    return acc, acc_tail


@triton.jit
def store_rotated_back(
    grad_ptr, grad_stride, cos_ptr, sin_ptr, angle_stride, rows, mask, acc, acc_tail, factor,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Write the gradient of rows, of which acc times factor is that of the rotated ones."""
    dtype = grad_ptr.dtype.element_ty
    cos, sin = load_angles(cos_ptr, sin_ptr, angle_stride, rows, mask, 0, MAIN, ROTARY_DIM)
    grad = rotate_back(acc * factor, cos, sin, dtype)
    store_pairs(grad_ptr, grad_stride, rows, mask, grad, 0, MAIN, HEAD_DIM, ROTARY_DIM)
    if TAIL > 0:
        cos, sin = load_angles(cos_ptr, sin_ptr, angle_stride, rows, mask, MAIN, TAIL, ROTARY_DIM)
        grad = rotate_back(acc_tail * factor, cos, sin, dtype)
        store_pairs(grad_ptr, grad_stride, rows, mask, grad, MAIN, TAIL, HEAD_DIM, ROTARY_DIM)


@triton.jit
def clear_rows(x_ptr, stride, rows, mask,
               HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """Zeros into some rows of one head."""
    dtype = x_ptr.dtype.element_ty
    zeros = tl.zeros([rows.shape[0], MAIN], dtype)
    store_columns(x_ptr, stride, rows, mask, zeros, 0, MAIN, HEAD_DIM)
    if TAIL > 0:
        zeros = tl.zeros([rows.shape[0], TAIL], dtype)
        store_columns(x_ptr, stride, rows, mask, zeros, MAIN, TAIL, HEAD_DIM)
