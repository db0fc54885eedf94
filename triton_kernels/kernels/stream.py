"""Attention within long segments: softmax over blocks of keys, for which see softmax.py.

A program owns a block of consecutive tokens, whatever segments they belong to, and serves each
segment that reaches into its block. So every row of the result is written by exactly one program,
the grid needs no bound on a segment's length, and long and short segments share one launch.
"""

import triton
import triton.language as tl

from triton_kernels.checks import MAX_TILED_HEAD_DIM
from triton_kernels.kernels.softmax import reference_fits, scaled_tiles, visit_segment
from triton_kernels.kernels.tiles import (
    angles_from,
    cast,
    embedded_tile,
    load_angles,
    load_columns,
    load_inverse_rms,
    load_rotary,
    normalized,
    sector_shift,
    segment_bounds,
    store_columns,
)

# Columns of the widest heads whose rotated rows hold the tiles of all heads, see rotated_row.
WIDEST_IN_ROWS = tl.constexpr(MAX_TILED_HEAD_DIM)

# Sizes and strides vary from call to call: one binary serves all.
NUMBERS = (
    *("tokens", "segments"),
    *("q_stride", "q_head_stride", "k_stride", "k_head_stride", "v_stride", "v_head_stride"),
    "angle_stride",
)


@triton.jit(
    do_not_specialize=NUMBERS, do_not_specialize_on_alignment=("cu_seqlens_ptr", "q_norm_ptr")
)
def stream_kernel(
    # tensors; the weights of Q's norm, None where it is not normalised here, as K never is
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
    # columns of a chunk of Q and K, of heads that no tile holds: MAIN are then those of V and the
    # result that a program has; None: the head's tiles. How fp32 is multiplied there, see dot
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    # strides of q, k, v come in units of 8 elements, else of 1; the angles' in units of ANGLE_UNIT
    ALIGNED: tl.constexpr, ANGLE_UNIT: tl.constexpr,
    # heads of K and V, each of which serves as many of Q's
    K_HEADS: tl.constexpr,
    # what is done to Q and K here, see tiles.py, and what is added to the mean squares of what is
    # normalised here
    EMBED_Q: tl.constexpr, EMBED_K: tl.constexpr,
    Q_EPS: tl.constexpr, K_EPS: tl.constexpr,
    # online softmax for all rows: see is_online
    ONLINE: tl.constexpr,
    # rows of a query tile and of a key tile
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    # tokens of the shortest segment that is served here; shorter ones are another launch's
    SHORTEST: tl.constexpr,
):  # fmt: skip
    """One program for each (head, token block); blocks run fastest and share the head's K and V.

    Of heads in chunks one for each MAIN of their columns, and every one needs the logits of all.
    """
    # Written out, the factors tell the compiler that it may load 16 bytes at a time.
    UNIT: tl.constexpr = 8 if ALIGNED else 1
    q_stride, k_stride, v_stride = q_stride * UNIT, k_stride * UNIT, v_stride * UNIT
    angle_stride = angle_stride * ANGLE_UNIT
    blocks = tl.cdiv(tokens, BLOCK)
    head = tl.program_id(0) // blocks
    first_column = None
    END: tl.constexpr = None if COLUMNS is None else (HEAD_DIM + MAIN - 1) // MAIN * MAIN
    if COLUMNS is not None:
        first_column = head % (END // MAIN) * MAIN
        head = head // (END // MAIN)
    block_start = (tl.program_id(0) % blocks) * BLOCK
    block_end = tl.minimum(block_start + BLOCK, tokens)
    dtype = out_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK)
    token = block_start + rows

    first = block_start.to(tl.int64)
    q_ptr += first * q_stride + head.to(tl.int64) * q_head_stride * UNIT
    out_stride = HEADS * HEAD_DIM
    out_ptr += first * out_stride + head * HEAD_DIM
    if lse_ptr is not None:
        lse_ptr += head.to(tl.int64) * tokens + first

    # Rows of wide heads that were embedded before have strides for heads, as the caller's have; of
    # others a head's place is among all in a row.
    HAVE_STRIDES: tl.constexpr = HEAD_DIM > WIDEST_IN_ROWS
    Q_PLACES: tl.constexpr = 1 if HAVE_STRIDES else HEADS
    K_PLACES: tl.constexpr = 1 if HAVE_STRIDES else K_HEADS
    q_place = 0 if HAVE_STRIDES else head

    mask = token < block_end
    q_cos_ptr, q_sin_ptr = angles_from(cos_ptr, sin_ptr, first * angle_stride, EMBED_Q)
    if COLUMNS is not None:
        q = q_ptr, q_stride, q_cos_ptr, q_sin_ptr, rows, mask
        q_tail = None
    else:
        cos, sin = load_angles(
            q_cos_ptr, q_sin_ptr, angle_stride, rows, mask, 0, MAIN, ROTARY_DIM, EMBED_Q
        )
        q = load_rotary(
            q_ptr, q_stride, rows, mask, q_place, 0, MAIN, Q_PLACES, HEAD_DIM, ROTARY_DIM, EMBED_Q
        )
        inverse = load_inverse_rms(
            q_ptr, q_stride, rows, mask, Q_EPS, MAIN, TAIL, HEAD_DIM, ROTARY_DIM
        )
        q = normalized(q, inverse, q_norm_ptr, 0, MAIN, HEAD_DIM, ROTARY_DIM)
        q = embedded_tile(q, cos, sin, EMBED_Q, dtype)  # [BLOCK, MAIN]
        q_tail = q  # stands in where there is no tail
        if TAIL > 0:
            cos, sin = load_angles(
                q_cos_ptr, q_sin_ptr, angle_stride, rows, mask, MAIN, TAIL, ROTARY_DIM, EMBED_Q
            )
            q_tail = load_rotary(
                q_ptr, q_stride, rows, mask, q_place, MAIN, TAIL, Q_PLACES, HEAD_DIM, ROTARY_DIM,
                EMBED_Q,
            )  # fmt: skip
            q_tail = normalized(q_tail, inverse, q_norm_ptr, MAIN, TAIL, HEAD_DIM, ROTARY_DIM)
            q_tail = embedded_tile(q_tail, cos, sin, EMBED_Q, dtype)  # [BLOCK, TAIL]
        if EMBED_Q is not None and BLOCK >= 64:
            # Hopper's asynchronous products, which take 64 rows, read what was loaded from shared
            # memory but what was computed from registers, and then wait for each other. So the
            # rotated tile is written to the result, whose rows are this program's own, and loaded
            # again.
            store_columns(out_ptr, out_stride, rows, mask, q, 0, MAIN, HEAD_DIM)
            if TAIL > 0:
                store_columns(out_ptr, out_stride, rows, mask, q_tail, MAIN, TAIL, HEAD_DIM)
            tl.debug_barrier()
            q = load_columns(out_ptr, out_stride, rows, mask, 0, MAIN, HEAD_DIM)
            if TAIL > 0:
                q_tail = load_columns(out_ptr, out_stride, rows, mask, MAIN, TAIL, HEAD_DIM)

    k_head = head if K_HEADS == HEADS else head // (HEADS // K_HEADS)
    k_ptr += k_head.to(tl.int64) * k_head_stride * UNIT
    v_ptr += k_head.to(tl.int64) * v_head_stride * UNIT
    k_place = 0 if HAVE_STRIDES else k_head
    # A row of 72 columns of 16 bits is 144 bytes: every second head's begin within a sector. There
    # the tiles of V, and so of the result, begin as many columns earlier as the sector does.
    v_shift = None
    if ALIGNED and HEAD_DIM % 16 == 8 and dtype != tl.float32 and COLUMNS is None:
        v_shift = sector_shift(v_ptr)
    first_segment = tl.maximum(last_start_at(cu_seqlens_ptr, block_start, segments), 0)
    last_segment = last_start_at(cu_seqlens_ptr, block_end - 1, segments)
    covered, misfits = attend_segments(
        k_ptr, v_ptr, out_ptr, lse_ptr, cos_ptr, sin_ptr, cu_seqlens_ptr, tokens, scale_log2,
        k_stride, v_stride, angle_stride, out_stride, v_shift,
        first_segment, last_segment, block_start, token < block_end, q, q_tail, k_place,
        first_column, END, COLUMNS, EMBED_Q, PRECISION,
        K_PLACES, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, EMBED_K, BLOCK_K, ONLINE, SHORTEST,
    )  # fmt: skip
    if not ONLINE:
        # Rows that their reference does not fit, again. If there are none, for no segment: within a
        # branch the compiler would have the products wait for each other.
        are_misfits = tl.sum(misfits.to(tl.int32), 0) > 0
        attend_segments(
            k_ptr, v_ptr, out_ptr, lse_ptr, cos_ptr, sin_ptr, cu_seqlens_ptr, tokens, scale_log2,
            k_stride, v_stride, angle_stride, out_stride, v_shift,
            first_segment, tl.where(are_misfits, last_segment, -1), block_start, misfits,
            q, q_tail, k_place, first_column, END, COLUMNS, EMBED_Q, PRECISION,
            K_PLACES, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, EMBED_K, BLOCK_K, True, SHORTEST,
        )  # fmt: skip

    # Tokens of no segment.
    mask = (token < block_end) & (covered == 0)
    if lse_ptr is not None:
        tl.store(lse_ptr + rows, tl.zeros([BLOCK], tl.float32), mask=mask)
    zeros = tl.zeros([BLOCK, MAIN], dtype)
    store_columns(
        out_ptr,
        out_stride,
        rows,
        mask,
        zeros,
        0 if first_column is None else first_column,
        MAIN,
        HEAD_DIM,
        None,
        END,
    )
    if TAIL > 0:
        zeros = tl.zeros([BLOCK, TAIL], dtype)
        store_columns(out_ptr, out_stride, rows, mask, zeros, MAIN, TAIL, HEAD_DIM)


@triton.jit
def attend_segments(
    # the head's K and V, and the angles, from their first token on; the results from the block's
    k_ptr, v_ptr, out_ptr, lse_ptr, cos_ptr, sin_ptr, cu_seqlens_ptr, tokens, scale_log2,
    k_stride, v_stride, angle_stride, out_stride, v_shift,
    # from which segment to which; the block's first token, and which of its tokens are wanted; the
    # query tile, and which of so many heads of K it meets; of heads in chunks where the queries
    # are, and the first column of V, of so many
    first_segment, last_segment, block_start, wanted, q, q_tail, head, first_column,
    END: tl.constexpr, COLUMNS: tl.constexpr, EMBED_Q: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr,
    EMBED_K: tl.constexpr, BLOCK_K: tl.constexpr, ONLINE: tl.constexpr, SHORTEST: tl.constexpr,
):  # fmt: skip
    """Write the result of the wanted tokens; returns which have a segment, and which misfit."""
    dtype = out_ptr.dtype.element_ty
    BLOCK: tl.constexpr = wanted.shape[0]
    rows = tl.arange(0, BLOCK)
    token = block_start + rows
    covered = tl.zeros([BLOCK], tl.int1)
    misfits = tl.zeros([BLOCK], tl.int1)
    # What is moved out of this loop stays alive through the loop over keys, in registers or in
    # memory. Only wide heads in chunks or not as wide, and fp32, short of registers in any case,
    # run faster that way; not the two at once, whose products take all.
    SPARE: tl.constexpr = HEAD_DIM <= WIDEST_IN_ROWS or COLUMNS is not None
    IS_SINGLE: tl.constexpr = dtype == tl.float32
    HOIST: tl.constexpr = COLUMNS is None if IS_SINGLE else HEAD_DIM > 128 and SPARE
    for segment in tl.range(first_segment, last_segment + 1, disable_licm=not HOIST):
        start, end = segment_bounds(cu_seqlens_ptr, segment, tokens)
        keys = tl.where(end > block_start, end - start, 0)  # 0: only padding follows it
        if SHORTEST > 0:
            keys = tl.where(end - start < SHORTEST, 0, keys)
        row_max, row_sum, acc, acc_tail = visit_segment(
            k_ptr, v_ptr, cos_ptr, sin_ptr, k_stride, v_stride, angle_stride, v_shift, scale_log2,
            start, keys, q, q_tail, head, first_column, END, COLUMNS, EMBED_Q, PRECISION, BLOCK,
            HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, EMBED_K, BLOCK_K, ONLINE,
        )  # fmt: skip
        divisor = tl.where(row_sum == 0.0, 1.0, row_sum)  # 0: an empty segment
        rescale = (1.0 / divisor)[:, None]
        out, out_tail = scaled_tiles(acc, rescale, COLUMNS), acc_tail * rescale
        mask = (token >= start) & (token < end) & wanted
        covered = covered | mask
        if SHORTEST > 0:
            mask = mask & (token >= end - keys)  # none, where there are no keys
        if not ONLINE:
            fits = reference_fits(row_sum, out, out_tail, dtype, TAIL)
            misfits = misfits | (mask & (fits == 0))
            mask = mask & fits
        if lse_ptr is not None:
            tl.store(lse_ptr + rows, row_max * scale_log2 + tl.log2(divisor), mask=mask)
        if COLUMNS is not None:
            TILE: tl.constexpr = out[0].shape[1]
            for i in tl.static_range(len(out)):
                store_columns(
                    out_ptr, out_stride, rows, mask, cast(out[i], dtype), first_column + i * TILE,
                    TILE, HEAD_DIM, None, END,
                )  # fmt: skip
        else:
            out = cast(out, dtype)
            store_columns(out_ptr, out_stride, rows, mask, out, 0, MAIN, HEAD_DIM, v_shift)
        if TAIL > 0:
            out_tail = cast(out_tail, dtype)
            store_columns(out_ptr, out_stride, rows, mask, out_tail, MAIN, TAIL, HEAD_DIM, v_shift)
    return covered, misfits


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
