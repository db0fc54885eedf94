"""Softmax over a segment's keys by groups of warps: what the warp-specialized kernel does with one.

By one reference a row, or online, as in softmax.py.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from triton_kernels.kernels.hopper_tiles import (
    KEYS,
    ROWS,
    add_product,
    clear_rows,
    load_head,
    load_rotated,
    product,
    stage_of,
    sums_layout,
    tile_row,
    wait_for_sums,
    zero_sums,
)
from triton_kernels.kernels.softmax import PARTS, reference_of, squares_fit, sum_fits

# Keys among which a row finds its reference: the stream kernel's tile, so that both round alike.
REFERENCE_KEYS: tl.constexpr = tl.constexpr(64)


@gluon.jit
def visit_segment(q, k, v, ping_pong, tile, tiles, first_keys, keys, scale_log2,
                  GROUP: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Over a segment's keys, by one reference a row: sums of the probabilities, and of V by these.

    The first returned is what was subtracted from a row's scaled logits.

    The product of a tile's probabilities and V is computed together with the logits of the next,
    and groups play ping-pong with these: while one multiplies, the other takes exponentials.
    """
    k_main, k_tail, k_full, k_empty = k
    v_main, v_tail, v_full, v_empty = v
    acc, acc_tail = zero_sums(MAIN, TAIL)
    stage, parity = stage_of(tile)
    mbarrier.wait(k_full.index(stage), parity)
    ping_pong_wait(ping_pong, tile, GROUP, MAIN, TAIL)
    logits = product(q, k_main.index(stage), k_tail.index(stage), TAIL)
    logits = warpgroup_mma_wait(0, deps=[logits])
    ping_pong_arrive(ping_pong, GROUP, MAIN, TAIL)
    mbarrier.arrive(k_empty.index(stage), count=1)
    column = gl.arange(0, KEYS, gl.SliceLayout(0, logits.type.layout))[None, :]
    among = gl.where(column < gl.minimum(keys, REFERENCE_KEYS), logits, -float("inf"))
    reference = reference_of(gl.max(among, 1), scale_log2) * scale_log2
    logits = gl.where(column < first_keys, logits, -float("inf"))
    p = gl.exp2(logits * scale_log2 - reference[:, None])
    row_sums = partial_sums(p)
    p = p.to(q[0].dtype)
    for i in range(1, tiles):
        before, before_parity = stage, parity
        stage, parity = stage_of(tile + i)
        mbarrier.wait(v_full.index(before), before_parity)
        ping_pong_wait(ping_pong, tile + i, GROUP, MAIN, TAIL)
        acc, acc_tail = add_product(
            p, v_main.index(before), v_tail.index(before), acc, acc_tail, TAIL
        )
        mbarrier.wait(k_full.index(stage), parity)
        logits = product(q, k_main.index(stage), k_tail.index(stage), TAIL)
        if TAIL > 0:
            logits, acc, acc_tail = warpgroup_mma_wait(0, deps=[logits, acc, acc_tail])
        else:
            logits, acc = warpgroup_mma_wait(0, deps=[logits, acc])
        ping_pong_arrive(ping_pong, GROUP, MAIN, TAIL)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.arrive(v_empty.index(before), count=1)
        p = gl.exp2(logits * scale_log2 - reference[:, None])
        row_sums += partial_sums(p)
        p = p.to(q[0].dtype)
    mbarrier.wait(v_full.index(stage), parity)
    acc, acc_tail = add_product(p, v_main.index(stage), v_tail.index(stage), acc, acc_tail, TAIL)
    acc, acc_tail = wait_for_sums(acc, acc_tail, TAIL)
    mbarrier.arrive(v_empty.index(stage), count=1)
    return reference, gl.sum(row_sums, 1), acc, acc_tail


@gluon.constexpr_function
def uses_ping_pong(main, tail):
    """Whether groups do: where there is a narrow tail. Products of 128 columns lose by it."""
    return 0 < tail < main


@gluon.jit
def ping_pong_wait(ping_pong, tile, GROUP: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):
    """Wait until the other group's products have ended: with the tile before, or with this one."""
    if uses_ping_pong(MAIN, TAIL):
        mbarrier.wait(ping_pong.index(GROUP), tile & 1 ^ (1 - GROUP))


@gluon.jit
def ping_pong_arrive(ping_pong, GROUP: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):
    """Let the other group go on."""
    if uses_ping_pong(MAIN, TAIL):
        mbarrier.arrive(ping_pong.index(1 - GROUP), count=1)


@gluon.jit
def visit_online(q, k, v, descs, tile, tiles, start, first_keys, head, scale_log2,
                 HEADS: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """The same by online softmax, of tiles that the group loads itself, one after the other."""
    _, _, k_desc, k_tail_desc, v_desc, v_tail_desc = descs
    k_main, k_tail, full = k
    v_main, v_tail = v
    S: gl.constexpr = sums_layout(KEYS)
    row_max = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    acc, acc_tail = zero_sums(MAIN, TAIL)
    column = gl.arange(0, KEYS, gl.SliceLayout(0, S))[None, :]
    for i in range(0, tiles):
        tl.debug_barrier()  # all warps have read the tile before
        mbarrier.expect(full, 2 * KEYS * (MAIN + TAIL) * 2)
        row = tile_row(i, start, first_keys)
        keys = gl.where(i == 0, first_keys, KEYS)
        load_rotated(k_desc, k_tail_desc, row, head, k_main, k_tail, full, HEADS, MAIN, TAIL)
        load_head(v_desc, v_tail_desc, row, head, v_main, v_tail, full, MAIN, TAIL)
        mbarrier.wait(full, (tile + i) & 1)
        # The next segment's rows, as their infinities would meet zeros.
        clear_rows(v_main, keys)
        if TAIL > 0:
            clear_rows(v_tail, keys)
        fence_async_shared()
        logits = warpgroup_mma_wait(0, deps=[product(q, k_main, k_tail, TAIL)])
        logits = gl.where(column < keys, logits, -float("inf"))
        new_max = gl.maximum(row_max, gl.max(logits, 1))
        p = gl.exp2((logits - new_max[:, None]) * scale_log2)
        decay = gl.exp2((row_max - new_max) * scale_log2)
        row_max, row_sum = new_max, row_sum * decay + gl.sum(p, 1)
        acc, acc_tail = scaled(acc, acc_tail, decay, TAIL)
        acc, acc_tail = add_product(p.to(q[0].dtype), v_main, v_tail, acc, acc_tail, TAIL)
        acc, acc_tail = wait_for_sums(acc, acc_tail, TAIL)
    return row_max * scale_log2, row_sum, acc, acc_tail


@gluon.jit
def partial_sums(p):
    """Sums of a row [ROWS, PARTS] that take no exchange between threads, see softmax.py."""
    return gl.sum(p.reshape([ROWS, KEYS // PARTS, PARTS]), 1)


@gluon.jit
def scaled(acc, acc_tail, factor, TAIL: gl.constexpr):
    """Sums times a factor for each row."""
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    if TAIL > 0:
        factor = gl.convert_layout(factor, gl.SliceLayout(1, acc_tail.type.layout))
        acc_tail = acc_tail * factor[:, None]
    return acc, acc_tail


@gluon.jit
def reference_fits(row_sum, out, out_tail, dtype: gl.constexpr, TAIL: gl.constexpr):
    """Which rows the reference suits, see softmax.py; the result is not cast yet."""
    ROW: gl.constexpr = gl.SliceLayout(1, out.type.layout)
    squares = gl.sum(out * out, 1)
    if TAIL > 0:
        squares += gl.convert_layout(gl.sum(out_tail * out_tail, 1), ROW)
    return sum_fits(gl.convert_layout(row_sum, ROW), dtype) & squares_fit(squares, dtype)
