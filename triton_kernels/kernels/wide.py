"""Attention within short segments of wide heads: a tile of logits, and columns chunk by chunk.

No tile holds such a head. A program loops over chunks of columns of Q and K, which add to the
logits of a whole segment, and then over those of V. So every row of Q and K is read, and embedded,
once. Where few segments and heads would leave the GPU idle, several programs share one of them: a
first launch writes the logits of each one's columns, and a second adds them up in a fixed order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triton_kernels.kernels.tiles import (
    add_product,
    angles_from,
    cast,
    dot,
    embedded_tile,
    load_angles,
    load_columns,
    load_rotary,
    padding_bounds,
    segment_bounds,
    store_columns,
)
from triton_kernels.kernels.window import NUMBERS, POINTERS


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def wide_kernel(
    # tensors
    q_ptr, k_ptr, v_ptr, out_ptr,
    cos_ptr, sin_ptr, cu_seqlens_ptr,
    # logits by so many columns [segments, heads, SPLITS, BLOCK, BLOCK]; None: of one program each
    partial_ptr,
    # wide heads have no norms
    q_norm_ptr, k_norm_ptr,
    # sizes and scale
    tokens, segments, scale_log2,
    # strides, see ALIGNED; the last axis is contiguous
    q_stride, q_head_stride,
    k_stride, k_head_stride,
    v_stride, v_head_stride,
    angle_stride,
    # shape of a head and how it is cut
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    # strides of q, k, v come in units of 8 elements, else of 1; the angles' in units of ANGLE_UNIT
    ALIGNED: tl.constexpr, ANGLE_UNIT: tl.constexpr,
    # heads of K and V, each of which serves as many of Q's
    K_HEADS: tl.constexpr,
    # what is done to Q and K here, see tiles.py; how fp32 is multiplied, see dot
    EMBED_Q: tl.constexpr, EMBED_K: tl.constexpr, PRECISION: tl.constexpr,
    # rows of a tile, at least the longest segment
    BLOCK: tl.constexpr,
    # programs that share a segment and head's columns, in the first launch and in the last; query
    # rows of a program in the last
    SPLITS: tl.constexpr, OUT_SPLITS: tl.constexpr, ROWS: tl.constexpr,
    # the first of two launches, which writes partial logits; the second may start while it runs,
    # and then waits for it where it reads these
    IS_FIRST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs for each (segment, head); heads run faster, so neighbours share cache lines."""
    if OVERLAP and IS_FIRST:
        gdc_launch_dependents()
    # Written out, the factors tell the compiler that it may load 16 bytes at a time.
    UNIT: tl.constexpr = 8 if ALIGNED else 1
    q_stride, k_stride, v_stride = q_stride * UNIT, k_stride * UNIT, v_stride * UNIT
    angle_stride = angle_stride * ANGLE_UNIT
    CHUNKS: tl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS
    BLOCKS: tl.constexpr = 1 if IS_FIRST else BLOCK // ROWS
    SHARES: tl.constexpr = SPLITS if IS_FIRST else OUT_SPLITS
    PROGRAMS: tl.constexpr = SHARES * BLOCKS
    SHARE: tl.constexpr = (CHUNKS + SHARES - 1) // SHARES * COLUMNS
    pair = tl.program_id(0) // PROGRAMS
    share = tl.program_id(0) % PROGRAMS // BLOCKS
    block = tl.program_id(0) % BLOCKS
    segment = pair // HEADS
    head = pair % HEADS
    k_head = head if K_HEADS == HEADS else head // (HEADS // K_HEADS)
    first_column = share * SHARE
    end_column = tl.minimum(first_column + SHARE, HEAD_DIM)

    start, end = segment_bounds(cu_seqlens_ptr, segment, tokens)
    length = end - start
    fits = (length > 0) & (length <= BLOCK)
    # Offsets count from the segment's start and fit 32 bits; an empty segment may start at the end.
    first = tl.minimum(start, tokens - 1).to(tl.int64)
    if partial_ptr is not None:
        partial_ptr += pair.to(tl.int64) * (SPLITS * BLOCK * BLOCK)
    rows = tl.arange(0, BLOCK)

    if IS_FIRST or partial_ptr is None:
        logits = tl.zeros([BLOCK, BLOCK], tl.float32)
        if fits:
            q_ptr += first * q_stride + head.to(tl.int64) * q_head_stride * UNIT
            k_ptr += first * k_stride + k_head.to(tl.int64) * k_head_stride * UNIT
            cos_ptr, sin_ptr = angles_from(cos_ptr, sin_ptr, first * angle_stride, EMBED_Q)
            # Rows past a segment's end are its last one again: what comes of them is masked.
            loaded = tl.minimum(rows, length - 1)
            logits = add_products(
                logits, q_ptr, k_ptr, cos_ptr, sin_ptr, cos_ptr, sin_ptr,
                q_stride, k_stride, angle_stride, loaded, None, loaded, None,
                first_column, end_column,
                HEAD_DIM, ROTARY_DIM, COLUMNS, EMBED_Q, EMBED_K, PRECISION,
            )  # fmt: skip
        if IS_FIRST:
            place = rows[:, None] * BLOCK + rows[None, :]
            tl.store(partial_ptr + share * (BLOCK * BLOCK) + place, logits)
    else:
        if OVERLAP:
            gdc_wait()
        logits = added_partials(partial_ptr, block * ROWS, SPLITS, ROWS, BLOCK)

    if not IS_FIRST:
        out_stride = HEADS * HEAD_DIM
        out_ptr += head * HEAD_DIM
        if fits:
            v_ptr += first * v_stride + k_head.to(tl.int64) * v_head_stride * UNIT
            dtype = out_ptr.dtype.element_ty
            mask = rows < length
            logits = tl.where(mask[None, :], logits, -float("inf"))
            # The difference comes first: it is exactly 0 for the largest, however large that is.
            p = tl.exp2((logits - tl.max(logits, 1)[:, None]) * scale_log2)
            rescale = (1.0 / tl.sum(p, 1))[:, None]
            p = cast(p, dtype)
            out_rows = block * ROWS + tl.arange(0, ROWS)
            segment_ptr = out_ptr + first * out_stride
            END: tl.constexpr = CHUNKS * COLUMNS
            for column in range(first_column, end_column, COLUMNS):
                # V's rows past the end are masked, as its infinities would meet zeros.
                v = load_columns(v_ptr, v_stride, rows, mask, column, COLUMNS, HEAD_DIM, None, END)
                out = cast(dot(p, v, None, PRECISION) * rescale, dtype)
                store_columns(
                    segment_ptr, out_stride, out_rows, out_rows < length, out,
                    column, COLUMNS, HEAD_DIM, None, END,
                )  # fmt: skip

        # A segment that breaks the promise of max_seqlen must not pass for a result.
        columns = first_column, end_column
        if length > BLOCK:
            fill_chunks(
                out_ptr, start + block * ROWS, end, BLOCK, float("nan"), columns,
                HEADS, HEAD_DIM, COLUMNS, ROWS,
            )  # fmt: skip
        # Each program clears its columns in a share of the tokens of no segment.
        padding_end, padding_start = padding_bounds(cu_seqlens_ptr, segments, tokens)
        cleared = segment * BLOCK + block * ROWS
        fill_chunks(
            out_ptr, cleared, padding_end, segments * BLOCK, 0.0, columns,
            HEADS, HEAD_DIM, COLUMNS, ROWS,
        )  # fmt: skip
        fill_chunks(
            out_ptr, padding_start + cleared, tokens, segments * BLOCK, 0.0, columns,
            HEADS, HEAD_DIM, COLUMNS, ROWS,
        )  # fmt: skip


@triton.jit
def add_products(
    # sums [rows of Q, rows of K]; one head of Q and of K, and their angles, from their first rows
    logits, q_ptr, k_ptr, q_cos_ptr, q_sin_ptr, k_cos_ptr, k_sin_ptr,
    q_stride, k_stride, angle_stride, q_rows, q_mask, k_rows, k_mask,
    # from which column to which, the first of a chunk
    first_column, end_column,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    EMBED_Q: tl.constexpr, EMBED_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits, not scaled, with the products of some columns added, chunk by chunk."""
    END: tl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS * COLUMNS
    for column in range(first_column, end_column, COLUMNS):
        q = load_rotary(
            q_ptr, q_stride, q_rows, q_mask, 0, column, COLUMNS, 1, HEAD_DIM, ROTARY_DIM,
            EMBED_Q, END,
        )  # fmt: skip
        k = load_rotary(
            k_ptr, k_stride, k_rows, k_mask, 0, column, COLUMNS, 1, HEAD_DIM, ROTARY_DIM,
            EMBED_K, END,
        )  # fmt: skip
        # Within one segment's tile both have the same angles, which the compiler loads once.
        q_cos, q_sin = load_angles(
            q_cos_ptr, q_sin_ptr, angle_stride, q_rows, q_mask, column, COLUMNS, ROTARY_DIM,
            EMBED_Q, END,
        )  # fmt: skip
        k_cos, k_sin = load_angles(
            k_cos_ptr, k_sin_ptr, angle_stride, k_rows, k_mask, column, COLUMNS, ROTARY_DIM,
            EMBED_K, END,
        )  # fmt: skip
        q = embedded_tile(q, q_cos, q_sin, EMBED_Q)  # [rows of Q, COLUMNS]
        k = embedded_tile(k, k_cos, k_sin, EMBED_K)  # [rows of K, COLUMNS]
        logits = add_product(logits, q, tl.trans(k), PRECISION)
    return logits


@triton.jit
def added_partials(partial_ptr, first_row, SPLITS: tl.constexpr, ROWS: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """The logits [ROWS, BLOCK] of some query rows, from those of all splits, in their order."""
    row = first_row + tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    logits = tl.zeros([ROWS, BLOCK], tl.float32)
    # So many are on their way at once. Each is a tile of its own: one of three axes would be spread
    # over threads, which had to exchange what they add.
    SUMMED: tl.constexpr = SPLITS if SPLITS < 8 else 16 if SPLITS % 16 == 0 else 8
    for split in range(0, SPLITS, SUMMED):
        for i in tl.static_range(SUMMED):
            logits += tl.load(partial_ptr + (split + i) * (BLOCK * BLOCK) + place)
    return logits


@triton.jit
def fill_chunks(out_ptr, start, end, step, value, columns, HEADS: tl.constexpr,
                HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Write value to rows start .. end of one head, ROWS rows every `step`, from a column on."""
    dtype = out_ptr.dtype.element_ty
    stride = HEADS * HEAD_DIM
    # In fp32 first: the interpreter of Triton 3.7 and older makes no bf16 constant but 0.
    x = tl.full([ROWS, COLUMNS], value, tl.float32).to(dtype)
    END: tl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS * COLUMNS
    for block in range(0, end - start, step):
        rows = tl.arange(0, ROWS)
        mask = rows < end - start - block
        ptr = out_ptr + (start.to(tl.int64) + block) * stride
        for column in range(columns[0], columns[1], COLUMNS):
            store_columns(ptr, stride, rows, mask, x, column, COLUMNS, HEAD_DIM, None, END)
