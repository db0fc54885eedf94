"""Softmax over a segment's keys, block by block: what the stream kernel does with one segment.

A row's softmax is the same whatever is subtracted from its logits, as long as the exponentials fit
into their formats. So one reference is subtracted from all logits of a row: the largest among the
segment's first block of keys. Later blocks need no maximum of their own, and sums no new scale
(FlashDecoding++, https://arxiv.org/abs/2311.01282). If later logits are so much larger that the
reference does not fit, the row is computed again by online softmax, which keeps a running maximum.

With online softmax a row's largest probability is 1. With a reference it can be any number, and is
rounded to the dtype of V as the others are.
"""

import torch
import triton
import triton.language as tl

from triton_kernels.kernels.tiles import (
    add_product,
    angles_from,
    cast,
    dot,
    embedded_tile,
    load_angles,
    load_columns,
    load_rotary,
)
from triton_kernels.kernels.wide import add_products

# Sums of a row that are kept apart until its last key: a tile's columns PARTS apart lie in one
# thread's registers, and adding those up takes no exchange between threads. PARTS divides every
# key tile, of which products want 16 columns at least.
PARTS: tl.constexpr = tl.constexpr(8)
# Columns of a tile of a wide head's result, of which a program has several: what a product takes
# beside its sums is that much smaller.
RESULT_TILE: tl.constexpr = tl.constexpr(128)


def is_online(dtype: torch.dtype, head_dim: int, max_seqlen: int) -> bool:
    """Whether all rows go by online softmax, as that is faster.

    With few blocks of keys, finding a reference takes longer than it saves. Wide heads and fp32 are
    short of registers, and fp32 spends its time in products.
    """
    return max_seqlen <= 512 or head_dim > 128 or dtype == torch.float32


@triton.jit
def visit_segment(
    # the head's K and V, and the angles, from their first token on
    k_ptr, v_ptr, cos_ptr, sin_ptr, k_stride, v_stride, angle_stride, v_shift, scale_log2,
    # the segment's first key, and how many it has
    start, keys,
    # the query tile, and which of so many heads of K it meets; of heads in chunks where the BLOCK
    # queries are, and the first column of V, of so many
    q, q_tail, head, first_column,
    END: tl.constexpr, COLUMNS: tl.constexpr, EMBED_Q: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr,
    EMBED_K: tl.constexpr, BLOCK_K: tl.constexpr, ONLINE: tl.constexpr,
):  # fmt: skip
    """Over a segment's keys, for all query rows: sums of the probabilities, and of V by these.

    The first returned is what was subtracted from a row's logits.
    """
    key_rows = tl.arange(0, BLOCK_K)
    first_key = start.to(tl.int64)
    k_ptr, v_ptr = k_ptr + first_key * k_stride, v_ptr + first_key * v_stride
    cos_ptr, sin_ptr = angles_from(cos_ptr, sin_ptr, first_key * angle_stride, EMBED_K)
    k_step = k_stride.to(tl.int64) * BLOCK_K
    v_step = v_stride.to(tl.int64) * BLOCK_K
    angle_step = angle_stride.to(tl.int64) * BLOCK_K
    row_max = tl.full([BLOCK], -float("inf"), tl.float32)
    row_sums = tl.zeros([BLOCK, PARTS], tl.float32)
    acc = zero_tiles(BLOCK, MAIN, COLUMNS)
    acc_tail = tl.zeros([BLOCK, TAIL if TAIL > 0 else 1], tl.float32)
    if not ONLINE:
        logits = key_logits(
            k_ptr, cos_ptr, sin_ptr, k_stride, angle_stride, key_rows, key_rows < keys,
            q, q_tail, head, None, COLUMNS, EMBED_Q, PRECISION,
            HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, EMBED_K,
        )  # fmt: skip
        row_max = reference_of(tl.max(logits, 1), scale_log2)

    # The product of the tail's columns is computed a block of keys ahead: issued behind those with
    # V, it is there when the next block's logits start from it. Rotating K and fp32 take the
    # registers that it needs.
    AHEAD: tl.constexpr = COLUMNS is None and TAIL > 0 and q.dtype != tl.float32 and EMBED_K is None
    if AHEAD:
        tail_logits = add_tail_product(
            None, k_ptr, cos_ptr, sin_ptr, k_stride, angle_stride, key_rows, key_rows < keys,
            q_tail, head,
            HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, EMBED_K,
        )  # fmt: skip
    # Whole blocks of keys need no mask; what is left over is one block more.
    whole = keys // BLOCK_K * BLOCK_K
    for key in range(0, whole, BLOCK_K):
        row_max, row_sums, acc, acc_tail = visit_keys(
            k_ptr, v_ptr, cos_ptr, sin_ptr, k_stride, v_stride, angle_stride, v_shift, scale_log2,
            key_rows, None,
            q, q_tail, head, tail_logits if AHEAD else None,
            row_max, row_sums, acc, acc_tail, first_column, END, COLUMNS, EMBED_Q, PRECISION,
            HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, EMBED_K, ONLINE,
        )  # fmt: skip
        k_ptr += k_step
        v_ptr += v_step
        cos_ptr, sin_ptr = angles_from(cos_ptr, sin_ptr, angle_step, EMBED_K)
        if AHEAD:
            tail_logits = add_tail_product(
                None, k_ptr, cos_ptr, sin_ptr, k_stride, angle_stride,
                key_rows, key_rows < keys - BLOCK_K - key, q_tail, head,
                HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, EMBED_K,
            )  # fmt: skip
    if whole < keys:
        row_max, row_sums, acc, acc_tail = visit_keys(
            k_ptr, v_ptr, cos_ptr, sin_ptr, k_stride, v_stride, angle_stride, v_shift, scale_log2,
            key_rows, key_rows < keys - whole,
            q, q_tail, head, None, row_max, row_sums, acc, acc_tail,
            first_column, END, COLUMNS, EMBED_Q, PRECISION,
            HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, EMBED_K, ONLINE,
        )  # fmt: skip
    return row_max, tl.sum(row_sums, 1), acc, acc_tail


@triton.jit
def visit_keys(
    k_ptr, v_ptr, cos_ptr, sin_ptr, k_stride, v_stride, angle_stride, v_shift, scale_log2,
    # the rows of the key tile from those pointers on, and which of them are keys (None: all)
    rows, mask,
    # the query tile, and which of so many heads of K it meets; its tail columns' product with the
    # key tile's (None: not computed ahead), what is subtracted from each row's logits, and the sums
    q, q_tail, head, tail_logits, row_max, row_sums, acc, acc_tail, first_column,
    END: tl.constexpr, COLUMNS: tl.constexpr, EMBED_Q: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, EMBED_K: tl.constexpr, ONLINE: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the sums."""
    # The products wait for their copies in the order of these loads. Two copies of K are through
    # before V is: if there is a tail, K comes first. Without one that loses.
    if TAIL == 0 and COLUMNS is None:
        v = load_columns(v_ptr, v_stride, rows, mask, 0, MAIN, HEAD_DIM, v_shift)  # [BLOCK_K, MAIN]
    logits = key_logits(
        k_ptr, cos_ptr, sin_ptr, k_stride, angle_stride, rows, mask,
        q, q_tail, head, tail_logits, COLUMNS, EMBED_Q, PRECISION,
        HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, EMBED_K,
    )  # fmt: skip
    if TAIL > 0:
        v = load_columns(v_ptr, v_stride, rows, mask, 0, MAIN, HEAD_DIM, v_shift)  # [BLOCK_K, MAIN]
        v_tail = load_columns(v_ptr, v_stride, rows, mask, MAIN, TAIL, HEAD_DIM, v_shift)

    if ONLINE:
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        p = tl.exp2((logits - new_max[:, None]) * scale_log2)
        decay = tl.exp2((row_max - new_max) * scale_log2)[:, None]
        row_max, row_sums = new_max, row_sums * decay
        acc, acc_tail = scaled_tiles(acc, decay, COLUMNS), acc_tail * decay
    else:
        # One multiply-add. How the scaled reference rounds is the same for a whole row: it cancels.
        p = tl.exp2(logits * scale_log2 - (row_max * scale_log2)[:, None])
    parts = tl.reshape(p, [p.shape[0], p.shape[1] // PARTS, PARTS])
    row_sums += tl.sum(parts, 1)
    p = cast(p, v_ptr.dtype.element_ty)

    if COLUMNS is None:
        acc = dot(p, v, acc)
    else:
        acc = add_value_products(
            acc, p, v_ptr, v_stride, rows, mask, first_column, HEAD_DIM, END, PRECISION
        )
    if TAIL > 0:
        acc_tail = dot(p, v_tail, acc_tail)
    return row_max, row_sums, acc, acc_tail


@triton.jit
def zero_tiles(ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of the result: a tile, of heads in chunks several of RESULT_TILE columns at most."""
    if COLUMNS is None:
        return tl.zeros([ROWS, WIDTH], tl.float32)
    else:
        TILE: tl.constexpr = min(WIDTH, RESULT_TILE)
        tiles = ()
        for _ in tl.static_range(WIDTH // TILE):
            tiles += (tl.zeros([ROWS, TILE], tl.float32),)
        return tiles


@triton.jit
def scaled_tiles(acc, factor, COLUMNS: tl.constexpr):
    """Sums of the result, a tile or several, by a factor for each row."""
    if COLUMNS is None:
        return acc * factor
    else:
        tiles = ()
        for i in tl.static_range(len(acc)):
            tiles += (acc[i] * factor,)
        return tiles


@triton.jit
def add_value_products(
    acc, p, v_ptr, v_stride, rows, mask, first_column,
    HEAD_DIM: tl.constexpr, END: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of the result with those of one block of keys, tile by tile of a wide head's columns."""
    TILE: tl.constexpr = acc[0].shape[1]
    tiles = ()
    for i in tl.static_range(len(acc)):
        v = load_columns(
            v_ptr, v_stride, rows, mask, first_column + i * TILE, TILE, HEAD_DIM, None, END
        )
        tiles += (add_product(acc[i], p, v, PRECISION),)
    return tiles


@triton.jit
def key_logits(
    k_ptr, cos_ptr, sin_ptr, k_stride, angle_stride, rows, mask,
    q, q_tail, head, tail_logits,
    COLUMNS: tl.constexpr, EMBED_Q: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, EMBED_K: tl.constexpr,
):  # fmt: skip
    """The logits of one block of keys [BLOCK, BLOCK_K], not scaled; -inf where there is no key."""
    if COLUMNS is not None:
        q_ptr, q_stride, q_cos_ptr, q_sin_ptr, q_rows, q_mask = q
        logits = add_products(
            tl.zeros([q_rows.shape[0], rows.shape[0]], tl.float32),
            q_ptr, k_ptr, q_cos_ptr, q_sin_ptr, cos_ptr, sin_ptr,
            q_stride, k_stride, angle_stride, q_rows, q_mask, rows, mask, 0, HEAD_DIM,
            HEAD_DIM, ROTARY_DIM, COLUMNS, EMBED_Q, EMBED_K, PRECISION,
        )  # fmt: skip
    else:
        cos, sin = load_angles(
            cos_ptr, sin_ptr, angle_stride, rows, mask, 0, MAIN, ROTARY_DIM, EMBED_K
        )
        k = load_rotary(
            k_ptr, k_stride, rows, mask, head, 0, MAIN, HEADS, HEAD_DIM, ROTARY_DIM, EMBED_K
        )
        k = embedded_tile(k, cos, sin, EMBED_K)  # [BLOCK_K, MAIN]
        logits = dot(q, tl.trans(k), tail_logits)
        if TAIL > 0 and tail_logits is None:
            logits = add_tail_product(
                logits, k_ptr, cos_ptr, sin_ptr, k_stride, angle_stride, rows, mask,
                q_tail, head,
                HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, EMBED_K,
            )  # fmt: skip
    return logits if mask is None else tl.where(mask[None, :], logits, -float("inf"))


@triton.jit
def add_tail_product(
    logits, k_ptr, cos_ptr, sin_ptr, k_stride, angle_stride, rows, mask,
    q_tail, head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, EMBED_K: tl.constexpr,
):  # fmt: skip
    """The tail columns' part of the logits [BLOCK, BLOCK_K], added to the others' (None: alone)."""
    cos, sin = load_angles(
        cos_ptr, sin_ptr, angle_stride, rows, mask, MAIN, TAIL, ROTARY_DIM, EMBED_K
    )
    k_tail = load_rotary(
        k_ptr, k_stride, rows, mask, head, MAIN, TAIL, HEADS, HEAD_DIM, ROTARY_DIM, EMBED_K
    )
    k_tail = embedded_tile(k_tail, cos, sin, EMBED_K)  # [BLOCK_K, TAIL]
    return dot(q_tail, tl.trans(k_tail), logits)


@triton.jit
def reference_fits(row_sum, out, out_tail, dtype: tl.constexpr, TAIL: tl.constexpr):
    """Which rows the reference suits, as the sum of their probabilities and their result tell.

    The reference's own key counts 1 in the sum. The result, not cast to its dtype yet, is not
    finite where sums overflowed; cast, not where probabilities, all rounded up, lift a mean of the
    largest values beyond the dtype. The sum of its squares tells both, and some rows that would do.
    """
    squares = tl.sum(out * out, 1)
    if TAIL > 0:
        squares += tl.sum(out_tail * out_tail, 1)
    return sum_fits(row_sum, dtype) & squares_fit(squares, dtype)


@triton.jit
def reference_of(largest, scale_log2):
    """Each row's reference, not scaled: its largest logit among the first keys'.

    Scaled, it is rounded. If it is so large that this would count, or no number, infinity takes its
    place, which suits no row: all probabilities are 0 or NaN.
    """
    return tl.where(tl.abs(largest * scale_log2) < 4096.0, largest, float("inf"))


@triton.jit
def sum_fits(row_sum, dtype: tl.constexpr):
    """Which sums of probabilities are such that none of these left their dtype's range."""
    LIMIT: tl.constexpr = 2.0**100 if dtype == tl.bfloat16 else 2.0**15  # bf16 has fp32's range
    return (row_sum > 0.5) & (row_sum < LIMIT)


@triton.jit
def squares_fit(squares, dtype: tl.constexpr):
    """Which sums of a row's squares are such that none of its values leaves a dtype's range."""
    LIMIT: tl.constexpr = 2.0**126 if dtype == tl.bfloat16 else 2.0**31
    return squares < LIMIT
