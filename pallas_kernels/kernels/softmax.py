"""Softmax over a segment's keys, block by block: what the stream kernel does with one segment.

A row's softmax is the same whatever is subtracted from its logits, as long as the exponentials fit
into their formats. So one reference is subtracted from all logits of a row: the largest among the
segment's first block of keys. Later blocks need no maximum of their own, and sums no new scale
(FlashDecoding++, https://arxiv.org/abs/2311.01282). If later logits are so much larger that the
reference does not fit, the row is computed again by online softmax, which keeps a running maximum.

With online softmax a row's largest probability is 1. With a reference it can be any number, and is
rounded to the dtype of V as the others are.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernels.tiles import (
    Embedding,
    Head,
    Ref,
    Rotated,
    Rows,
    Scalar,
    add_product,
    dot,
    embedded_tile,
    exp2,
    load_angles,
    load_columns,
    load_rotary,
    rotary_dim_of,
)
from pallas_kernels.kernels.wide import Chunks, Cut, add_products

# Sums of the result: a tile, of heads in chunks several.
Tiles = jax.Array | tuple[jax.Array, ...]
# Of each query row over all keys: what was subtracted from its logits, the sum of probabilities,
# and of V by these [block, main] and [block, tail] (None where there is no tail).
Sums = tuple[jax.Array, jax.Array, Tiles, jax.Array | None]

# Sums of a row that are kept apart until its last key: a tile's columns PARTS apart lie in one
# thread's registers, and adding those up takes no exchange between threads. PARTS divides every
# key tile, of which products want 16 columns at least.
PARTS = 8
# Columns of a tile of a wide head's result, of which a program has several: what a product takes
# beside its sums is that much smaller.
RESULT_TILE = 128


def is_online(dtype: jax.typing.DTypeLike, head_dim: int, max_seqlen: int) -> bool:
    """Whether all rows go by online softmax, as that is faster.

    With few blocks of keys, finding a reference takes longer than it saves. Wide heads and fp32 are
    short of registers, and fp32 spends its time in products.
    """
    return max_seqlen <= 512 or head_dim > 128 or dtype == jnp.float32


def visit_segment(
    k_head: Head | Rotated, v_head: Head, cos_ref: Ref, sin_ref: Ref,
    v_shift: Scalar | None, scale_log2: float,
    q: jax.Array | Chunks, q_tail: jax.Array | None,
    # how a wide head is cut, of which q is no tile, and the first column of V
    cut: Cut | None, first_column: Scalar,
    # the segment's first key, and how many it has
    start: Scalar, keys: Scalar,
    *,
    main: int, tail: int, embed_k: Embedding, block_k: int, online: bool, interpreted: bool,
) -> Sums:  # fmt: skip
    """Over a segment's keys, for all query rows: sums of the probabilities, and of V by these."""
    block = q.shape[0] if cut is None else q.rows.count
    key_rows = jnp.arange(block_k, dtype=jnp.int32)
    row_max = jnp.full((block,), -jnp.inf, jnp.float32)
    row_sums = jnp.zeros((block, PARTS), jnp.float32)
    acc = zero_tiles(block, main, cut)
    acc_tail = jnp.zeros((block, tail), jnp.float32) if tail > 0 else None
    first_rows = Rows(start, block_k, key_rows < keys)
    if not online:
        logits = key_logits(
            k_head, cos_ref, sin_ref, first_rows, q, q_tail, cut, None,
            main=main, tail=tail, embed_k=embed_k,
        )  # fmt: skip
        row_max = reference_of(jnp.max(logits, axis=1), scale_log2)

    visit = functools.partial(
        visit_keys, k_head, v_head, cos_ref, sin_ref, v_shift, scale_log2, q, q_tail,
        cut, first_column,
        main=main, tail=tail, embed_k=embed_k, online=online, interpreted=interpreted,
    )  # fmt: skip
    tail_product = functools.partial(
        add_tail_product, None, k_head, cos_ref, sin_ref, q_tail=q_tail,
        main=main, tail=tail, embed_k=embed_k,
    )  # fmt: skip
    # The product of the tail's columns is computed a block of keys ahead: issued behind those with
    # V, it is there when the next block's logits start from it. Rotating K and fp32 take the
    # registers that it needs.
    ahead = cut is None and tail > 0 and q.dtype != jnp.float32 and embed_k is None

    def visit_whole(_: Scalar, carried: tuple) -> tuple:
        first_key, tail_logits, state = carried
        state = visit(Rows(first_key, block_k, None), tail_logits, state)
        first_key += block_k
        if ahead:
            rest = start + keys - first_key
            tail_logits = tail_product(Rows(first_key, block_k, key_rows < rest))
        return first_key, tail_logits, state

    # Whole blocks of keys need no mask; what is left over is one block more. The loop carries its
    # first key as the twin's does its pointers: that takes fewer instructions than counting blocks,
    # or than taking the last block's first key from the loop.
    whole, rest = keys // block_k, keys % block_k
    tail_logits = tail_product(first_rows) if ahead else None
    state = (row_max, row_sums, acc, acc_tail)
    _, _, state = jax.lax.fori_loop(0, whole, visit_whole, (start, tail_logits, state))
    last = Rows(start + whole * block_k, block_k, key_rows < rest)
    row_max, row_sums, acc, acc_tail = jax.lax.cond(
        rest > 0, lambda state: visit(last, None, state), lambda state: state, state
    )
    return row_max, jnp.sum(row_sums, axis=1), acc, acc_tail


def visit_keys(
    k_head: Head | Rotated, v_head: Head, cos_ref: Ref, sin_ref: Ref,
    v_shift: Scalar | None, scale_log2: float,
    # the query tile, the rows of the key tile, the tail columns' part of the logits (None: not
    # computed ahead); what is subtracted from each row's logits, and the sums so far
    q: jax.Array | Chunks, q_tail: jax.Array | None, cut: Cut | None, first_column: Scalar,
    rows: Rows, tail_logits: jax.Array | None, state: tuple,
    *,
    main: int, tail: int, embed_k: Embedding, online: bool, interpreted: bool,
) -> tuple:  # fmt: skip
    """Add one block of keys to the sums."""
    head_dim = v_head.ref.shape[-1]
    row_max, row_sums, acc, acc_tail = state
    # The products wait for their copies in the order of these loads. Two copies of K are through
    # before V is: if there is a tail, K comes first. Without one that loses.
    if tail == 0 and cut is None:
        v = load_columns(v_head, rows, 0, main, head_dim, v_shift)  # [block_k, main]
    logits = key_logits(
        k_head, cos_ref, sin_ref, rows, q, q_tail, cut, tail_logits,
        main=main, tail=tail, embed_k=embed_k,
    )  # fmt: skip
    if tail > 0:
        v = load_columns(v_head, rows, 0, main, head_dim, v_shift)  # [block_k, main]
        v_tail = load_columns(v_head, rows, main, tail, head_dim, v_shift)  # [block_k, tail]

    if online:
        new_max = jnp.maximum(row_max, jnp.max(logits, axis=1))
        p = exp2((logits - new_max[:, None]) * scale_log2, interpreted)
        decay = exp2((row_max - new_max) * scale_log2, interpreted)[:, None]
        row_max, row_sums, acc = new_max, row_sums * decay, scaled_tiles(acc, decay)
        if tail > 0:
            acc_tail = acc_tail * decay
    else:
        # One multiply-add. How the scaled reference rounds is the same for a whole row: it cancels.
        p = exp2(logits * scale_log2 - (row_max * scale_log2)[:, None], interpreted)
    parts = p.reshape(p.shape[0], p.shape[1] // PARTS, PARTS)
    row_sums += jnp.sum(parts, axis=1)
    p = p.astype(v_head.ref.dtype)

    if cut is None:
        acc = dot(p, v, acc)
    else:
        end = pl.cdiv(head_dim, main) * main
        acc = add_value_products(acc, p, v_head, rows, first_column, end, cut)
    if tail > 0:
        acc_tail = dot(p, v_tail, acc_tail)
    return row_max, row_sums, acc, acc_tail


def zero_tiles(rows: int, width: int, cut: Cut | None) -> Tiles:
    """Sums of the result: a tile, of heads in chunks several of RESULT_TILE columns at most."""
    if cut is None:
        return jnp.zeros((rows, width), jnp.float32)
    tile = min(width, RESULT_TILE)
    return tuple(jnp.zeros((rows, tile), jnp.float32) for _ in range(width // tile))


def scaled_tiles(acc: Tiles, factor: jax.Array) -> Tiles:
    """Sums of the result, a tile or several, by a factor for each row."""
    return jax.tree.map(lambda tile: tile * factor, acc)


def add_value_products(
    acc: tuple[jax.Array, ...], p: jax.Array, v_head: Head, rows: Rows, first_column: Scalar,
    end: int, cut: Cut,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Sums of the result with those of one block of keys, tile by tile of a wide head's columns."""
    tile = acc[0].shape[1]
    tiles = ()
    for i in range(len(acc)):
        v = load_columns(v_head, rows, first_column + i * tile, tile, cut.head_dim, end=end)
        tiles += (add_product(acc[i], p, v, cut.precision),)
    return tiles


def key_logits(
    k_head: Head | Rotated, cos_ref: Ref, sin_ref: Ref, rows: Rows,
    q: jax.Array | Chunks, q_tail: jax.Array | None, cut: Cut | None,
    tail_logits: jax.Array | None,
    *,
    main: int, tail: int, embed_k: Embedding,
) -> jax.Array:  # fmt: skip
    """The logits of one block of keys [block, block_k], not scaled; -inf where there is no key."""
    if cut is not None:
        zeros = jnp.zeros((q.rows.count, rows.count), jnp.float32)
        k = Chunks(k_head, rows, embed_k)
        logits = add_products(zeros, q, k, cos_ref, sin_ref, 0, cut.chunks, cut)
    else:
        rotary_dim = rotary_dim_of(cos_ref, k_head.ref.shape[-1])
        cos, sin = load_angles(cos_ref, sin_ref, rows, 0, main, rotary_dim, embed_k)
        k = load_rotary(k_head, rows, 0, main, rotary_dim, embed_k)
        k = embedded_tile(k, cos, sin, embed_k)  # [block_k, main]
        logits = dot(q, k.T, tail_logits)
        if tail > 0 and tail_logits is None:
            logits = add_tail_product(
                logits,
                k_head,
                cos_ref,
                sin_ref,
                rows,
                q_tail,
                main=main,
                tail=tail,
                embed_k=embed_k,
            )
    return logits if rows.mask is None else jnp.where(rows.mask[None, :], logits, -jnp.inf)


def add_tail_product(
    logits: jax.Array | None, k_head: Head | Rotated, cos_ref: Ref, sin_ref: Ref, rows: Rows,
    q_tail: jax.Array,
    *,
    main: int, tail: int, embed_k: Embedding,
) -> jax.Array:  # fmt: skip
    """The tail columns' part of the logits [block, block_k], added to the others' (None: alone)."""
    rotary_dim = rotary_dim_of(cos_ref, k_head.ref.shape[-1])
    cos, sin = load_angles(cos_ref, sin_ref, rows, main, tail, rotary_dim, embed_k)
    k_tail = load_rotary(k_head, rows, main, tail, rotary_dim, embed_k)
    k_tail = embedded_tile(k_tail, cos, sin, embed_k)  # [block_k, tail]
    return dot(q_tail, k_tail.T, logits)


def reference_of(largest: jax.Array, scale_log2: float) -> jax.Array:
    """Each row's reference, not scaled: its largest logit among the first keys'.

    Scaled, it is rounded. If it is so large that this would count, or no number, infinity takes its
    place, which suits no row: all probabilities are 0 or NaN.
    """
    return jnp.where(jnp.abs(largest * scale_log2) < 4096.0, largest, jnp.inf)


def reference_fits(
    row_sum: jax.Array, out: jax.Array, out_tail: jax.Array | None, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Which rows the reference suits, as the sum of their probabilities and their result tell.

    The reference's own key counts 1 in the sum. The result, not cast to its dtype yet, is not
    finite where sums overflowed; cast, not where probabilities, all rounded up, lift a mean of the
    largest values beyond the dtype. The sum of its squares tells both, and some rows that would do.
    """
    # bf16 has fp32's range.
    is_bf16 = dtype == jnp.bfloat16
    sum_limit, squares_limit = (2.0**100, 2.0**126) if is_bf16 else (2.0**15, 2.0**31)
    squares = jnp.sum(out * out, axis=1)
    if out_tail is not None:
        squares += jnp.sum(out_tail * out_tail, axis=1)
    return (row_sum > 0.5) & (row_sum < sum_limit) & (squares < squares_limit)
