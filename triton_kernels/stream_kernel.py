"""Attention within long segments: online softmax over blocks of keys.

A program owns a block of consecutive tokens, whatever segments they belong to, and serves each
segment that reaches into its block. So every row of the result is written by exactly one program,
the grid needs no bound on a segment's length, and long and short segments share one launch.
"""

import triton
import triton.language as tl

from triton_kernels.tiles import (
    cast,
    dot,
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
PARTS: tl.constexpr = tl.constexpr(8)

# Sizes and strides vary from call to call: one binary serves all.
NUMBERS = (
    *("tokens", "segments"),
    *("q_stride", "q_head_stride", "k_stride", "k_head_stride", "v_stride", "v_head_stride"),
    "angle_stride",
)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=("cu_seqlens_ptr",))
def stream_kernel(
    # tensors
    q_ptr, k_ptr, v_ptr, out_ptr,
    cos_ptr, sin_ptr, cu_seqlens_ptr,
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
    # what is rotated here
    ROTATE_Q: tl.constexpr, ROTATE_K: tl.constexpr,
    # rows of a query tile and of a key tile
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for each (head, token block); blocks run fastest and share the head's K and V."""
    # Written out, the factors tell the compiler that it may load 16 bytes at a time.
    UNIT: tl.constexpr = 8 if ALIGNED else 1
    q_stride, k_stride, v_stride = q_stride * UNIT, k_stride * UNIT, v_stride * UNIT
    angle_stride = angle_stride * ANGLE_UNIT
    blocks = tl.cdiv(tokens, BLOCK)
    head = tl.program_id(0) // blocks
    block_start = (tl.program_id(0) % blocks) * BLOCK
    block_end = tl.minimum(block_start + BLOCK, tokens)
    dtype = out_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK)
    key_rows = tl.arange(0, BLOCK_K)
    token = block_start + rows

    first = block_start.to(tl.int64)
    q_ptr += first * q_stride + head.to(tl.int64) * q_head_stride * UNIT
    k_ptr += head.to(tl.int64) * k_head_stride * UNIT
    v_ptr += head.to(tl.int64) * v_head_stride * UNIT
    out_stride = HEADS * HEAD_DIM
    out_ptr += first * out_stride + head * HEAD_DIM

    mask = token < block_end
    q_cos_ptr = cos_ptr + first * angle_stride
    q_sin_ptr = sin_ptr + first * angle_stride
    cos, sin = load_angles(q_cos_ptr, q_sin_ptr, angle_stride, rows, mask, 0, MAIN, ROTARY_DIM)
    q = load_rotary(q_ptr, q_stride, rows, mask, 0, MAIN, HEAD_DIM, ROTARY_DIM, ROTATE_Q)
    q = rotary_tile(q, cos, sin, ROTATE_Q)  # [BLOCK, MAIN]
    q_tail = q  # stands in where there is no tail
    if TAIL > 0:
        cos, sin = load_angles(
            q_cos_ptr, q_sin_ptr, angle_stride, rows, mask, MAIN, TAIL, ROTARY_DIM
        )
        q_tail = load_rotary(
            q_ptr, q_stride, rows, mask, MAIN, TAIL, HEAD_DIM, ROTARY_DIM, ROTATE_Q
        )
        q_tail = rotary_tile(q_tail, cos, sin, ROTATE_Q)  # [BLOCK, TAIL]
    if ROTATE_Q and BLOCK >= 64:
        # Hopper's asynchronous products, which take 64 rows, read what was loaded from shared
        # memory but what was computed from registers, and then wait for each other. So the rotated
        # tile is written to the result, whose rows are this program's own, and loaded again.
        store_columns(out_ptr, out_stride, rows, mask, q, 0, MAIN, HEAD_DIM)
        if TAIL > 0:
            store_columns(out_ptr, out_stride, rows, mask, q_tail, MAIN, TAIL, HEAD_DIM)
        tl.debug_barrier()
        q = load_columns(out_ptr, out_stride, rows, mask, 0, MAIN, HEAD_DIM)
        if TAIL > 0:
            q_tail = load_columns(out_ptr, out_stride, rows, mask, MAIN, TAIL, HEAD_DIM)

    k_step = k_stride.to(tl.int64) * BLOCK_K
    v_step = v_stride.to(tl.int64) * BLOCK_K
    angle_step = angle_stride.to(tl.int64) * BLOCK_K
    covered = tl.zeros([BLOCK], tl.int1)
    first_segment = tl.maximum(last_start_at(cu_seqlens_ptr, block_start, segments), 0)
    last_segment = last_start_at(cu_seqlens_ptr, block_end - 1, segments)
    # What is moved out of this loop stays alive through the loop over keys, in registers or in
    # memory. Only wide heads and fp32, short of registers in any case, run faster that way.
    HOIST: tl.constexpr = HEAD_DIM > 128 or dtype == tl.float32
    # The product of the tail's columns is computed a block of keys ahead: issued behind those with
    # V, it is there when the next block's logits start from it. Small tiles, more of whose programs
    # share a multiprocessor, lose by that, and rotating K takes the registers that it needs.
    AHEAD: tl.constexpr = TAIL > 0 and BLOCK > 64 and not ROTATE_K
    for segment in tl.range(first_segment, last_segment + 1, disable_licm=not HOIST):
        start, end = segment_bounds(cu_seqlens_ptr, segment, tokens)
        keys = tl.where(end > block_start, end - start, 0)  # 0: only padding follows it
        row_max = tl.full([BLOCK], -float("inf"), tl.float32)
        row_sums = tl.zeros([BLOCK, PARTS], tl.float32)
        acc = tl.zeros([BLOCK, MAIN], tl.float32)
        acc_tail = tl.zeros([BLOCK, TAIL if TAIL > 0 else 1], tl.float32)

        # Whole blocks of keys need no mask; what is left over is one block more.
        whole = keys // BLOCK_K * BLOCK_K
        first_key = start.to(tl.int64)
        k_tile, v_tile = k_ptr + first_key * k_stride, v_ptr + first_key * v_stride
        cos_tile, sin_tile = cos_ptr + first_key * angle_stride, sin_ptr + first_key * angle_stride
        if AHEAD:
            key_mask = key_rows < keys
            tail_logits = add_tail_product(
                None, k_tile, cos_tile, sin_tile, k_stride, angle_stride,
                key_rows, key_mask, q_tail,
                HEAD_DIM, ROTARY_DIM, MAIN, TAIL, ROTATE_K,
            )  # fmt: skip
        for key in range(0, whole, BLOCK_K):
            row_max, row_sums, acc, acc_tail = visit_keys(
                k_tile, v_tile, cos_tile, sin_tile, k_stride, v_stride, angle_stride, scale_log2,
                key_rows, None,
                q, q_tail, tail_logits if AHEAD else None, row_max, row_sums, acc, acc_tail,
                HEAD_DIM, ROTARY_DIM, MAIN, TAIL, ROTATE_K,
            )  # fmt: skip
            k_tile += k_step
            v_tile += v_step
            cos_tile += angle_step
            sin_tile += angle_step
            if AHEAD:
                key_mask = key_rows < keys - BLOCK_K - key
                tail_logits = add_tail_product(
                    None, k_tile, cos_tile, sin_tile, k_stride, angle_stride,
                    key_rows, key_mask, q_tail,
                    HEAD_DIM, ROTARY_DIM, MAIN, TAIL, ROTATE_K,
                )  # fmt: skip
        if whole < keys:
            row_max, row_sums, acc, acc_tail = visit_keys(
                k_tile, v_tile, cos_tile, sin_tile, k_stride, v_stride, angle_stride, scale_log2,
                key_rows, key_rows < keys - whole,
                q, q_tail, None, row_max, row_sums, acc, acc_tail,
                HEAD_DIM, ROTARY_DIM, MAIN, TAIL, ROTATE_K,
            )  # fmt: skip

        mask = (token >= start) & (token < end) & (token < block_end)
        covered = covered | mask
        row_sum = tl.sum(row_sums, 1)
        rescale = (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]  # 0: an empty segment
        out = cast(acc * rescale, dtype)
        store_columns(out_ptr, out_stride, rows, mask, out, 0, MAIN, HEAD_DIM)
        if TAIL > 0:
            out = cast(acc_tail * rescale, dtype)
            store_columns(out_ptr, out_stride, rows, mask, out, MAIN, TAIL, HEAD_DIM)

    # Tokens of no segment.
    mask = (token < block_end) & (covered == 0)
    zeros = tl.zeros([BLOCK, MAIN], dtype)
    store_columns(out_ptr, out_stride, rows, mask, zeros, 0, MAIN, HEAD_DIM)
    if TAIL > 0:
        zeros = tl.zeros([BLOCK, TAIL], dtype)
        store_columns(out_ptr, out_stride, rows, mask, zeros, MAIN, TAIL, HEAD_DIM)


@triton.jit
def visit_keys(
    k_ptr, v_ptr, cos_ptr, sin_ptr, k_stride, v_stride, angle_stride, scale_log2,
    # the rows of the key tile from those pointers on, and which of them are keys (None: all)
    rows, mask,
    # the query tile, its tail columns' product with the key tile's (None: not computed ahead), and
    # the state of its online softmax
    q, q_tail, tail_logits, row_max, row_sums, acc, acc_tail,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    ROTATE_K: tl.constexpr,
):  # fmt: skip
    """Fold one block of keys into the online softmax."""
    # V first: see window_kernel.
    v = load_columns(v_ptr, v_stride, rows, mask, 0, MAIN, HEAD_DIM)  # [BLOCK_K, MAIN]
    if TAIL > 0:
        v_tail = load_columns(v_ptr, v_stride, rows, mask, MAIN, TAIL, HEAD_DIM)  # [BLOCK_K, TAIL]
    cos, sin = load_angles(cos_ptr, sin_ptr, angle_stride, rows, mask, 0, MAIN, ROTARY_DIM)
    k = load_rotary(k_ptr, k_stride, rows, mask, 0, MAIN, HEAD_DIM, ROTARY_DIM, ROTATE_K)
    k = rotary_tile(k, cos, sin, ROTATE_K)  # [BLOCK_K, MAIN]
    logits = dot(q, tl.trans(k), tail_logits)  # [BLOCK, BLOCK_K]
    if TAIL > 0 and tail_logits is None:
        logits = add_tail_product(
            logits, k_ptr, cos_ptr, sin_ptr, k_stride, angle_stride, rows, mask, q_tail,
            HEAD_DIM, ROTARY_DIM, MAIN, TAIL, ROTATE_K,
        )  # fmt: skip
    if mask is not None:
        logits = tl.where(mask[None, :], logits, -float("inf"))

    new_max = tl.maximum(row_max, tl.max(logits, 1))
    p = tl.exp2((logits - new_max[:, None]) * scale_log2)
    decay = tl.exp2((row_max - new_max) * scale_log2)
    parts = tl.reshape(p, [p.shape[0], p.shape[1] // PARTS, PARTS])
    row_sums = row_sums * decay[:, None] + tl.sum(parts, 1)
    p = cast(p, k.dtype)

    acc = dot(p, v, acc * decay[:, None])
    if TAIL > 0:
        acc_tail = dot(p, v_tail, acc_tail * decay[:, None])
    return new_max, row_sums, acc, acc_tail


@triton.jit
def add_tail_product(
    logits, k_ptr, cos_ptr, sin_ptr, k_stride, angle_stride, rows, mask, q_tail,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    ROTATE_K: tl.constexpr,
):  # fmt: skip
    """The tail columns' part of the logits [BLOCK, BLOCK_K], added to the others' (None: alone)."""
    cos, sin = load_angles(cos_ptr, sin_ptr, angle_stride, rows, mask, MAIN, TAIL, ROTARY_DIM)
    k_tail = load_rotary(k_ptr, k_stride, rows, mask, MAIN, TAIL, HEAD_DIM, ROTARY_DIM, ROTATE_K)
    k_tail = rotary_tile(k_tail, cos, sin, ROTATE_K)  # [BLOCK_K, TAIL]
    return dot(q_tail, tl.trans(k_tail), logits)


@triton.jit
def last_start_at(cu_seqlens_ptr, token, segments):
    """The last segment whose start is at most `token`, by bisection; -1 if there is none."""
    low = -1
    high = segments
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_ptr + middle) <= token:
            low = middle
        else:
            high = middle
    return low
