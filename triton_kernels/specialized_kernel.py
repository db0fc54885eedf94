"""Attention within long segments on Hopper GPUs: one group of warps loads, two multiply.

The result is the stream kernel's, of Q and K that were rotated beforehand. There every warp issues
copies, products and exponentials in turn, and waits for each. Here the GPU's copy engine (TMA)
fetches tiles of keys for two groups of warps that do nothing but compute, each for rows of its own,
so that one multiplies while the other takes exponentials. That division of labour is
FlashAttention-3's (https://arxiv.org/abs/2407.08608); softmax is by one reference a row, as in
softmax.py.

Written in Gluon, Triton's language for what Triton leaves to its compiler. It has no interpreter.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from triton_kernels.softmax import PARTS, reference_of, squares_fit, sum_fits
from triton_kernels.stream_kernel import last_start_at
from triton_kernels.tiles import segment_bounds

# Triton 3.7 and older know but the second name.
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

# Query rows of a group of warps, and groups that compute.
ROWS: tl.constexpr = tl.constexpr(64)
GROUPS: tl.constexpr = tl.constexpr(2)
# Keys of a tile; tiles of K, and of V, that are held at a time: one for each group at least.
KEYS: tl.constexpr = tl.constexpr(128)
STAGES: tl.constexpr = tl.constexpr(2)
# Keys among which a row finds its reference: the stream kernel's tile, so that both round alike.
REFERENCE_KEYS: tl.constexpr = tl.constexpr(64)
# Registers of a thread: logits, probabilities and sums fill those of a computing one.
REGISTERS: tl.constexpr = tl.constexpr(240)
LOADER_REGISTERS: tl.constexpr = tl.constexpr(24)


@gluon.jit(
    do_not_specialize=("tokens", "segments", "max_seqlen"),
    do_not_specialize_on_alignment=("cu_seqlens_ptr",),
)
def specialized_kernel(
    # q and k as rotate_kernel writes them [tokens, row], v [tokens, heads, head_dim]: tiles of each
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc,
    # tensors
    out_ptr, cu_seqlens_ptr,
    # sizes and scale
    tokens, segments, max_seqlen, scale_log2,
    # shape of a head and how it is cut
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """One program for each (head, token block); blocks run fastest and share the head's K and V."""
    BLOCK: gl.constexpr = ROWS * GROUPS
    blocks = gl.cdiv(tokens, BLOCK)
    head = gl.program_id(0) // blocks
    block_start = gl.program_id(0) % blocks * BLOCK
    block_end = gl.minimum(block_start + BLOCK, tokens)
    first_segment, last_segment = segments_of(
        cu_seqlens_ptr, block_start, block_end, segments, max_seqlen
    )
    visited = (cu_seqlens_ptr, tokens, first_segment, last_segment, block_start)

    dtype: gl.constexpr = out_ptr.dtype.element_ty
    q_main = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, MAIN], q_desc.layout)
    k_main = gl.allocate_shared_memory(dtype, [STAGES, KEYS, MAIN], k_desc.layout)
    v_main = gl.allocate_shared_memory(dtype, [STAGES, KEYS, 1, MAIN], v_desc.layout)
    if TAIL > 0:
        q_tail = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, TAIL], q_tail_desc.layout)
        k_tail = gl.allocate_shared_memory(dtype, [STAGES, KEYS, TAIL], k_tail_desc.layout)
        v_tail = gl.allocate_shared_memory(dtype, [STAGES, KEYS, 1, TAIL], v_tail_desc.layout)
    else:  # they stand in
        q_tail, k_tail, v_tail = q_main, k_main, v_main
    q = (q_main, q_tail, barriers(1, 1))
    k = (k_main, k_tail, barriers(STAGES, 1), barriers(STAGES, GROUPS))
    v = (v_main, v_tail, barriers(STAGES, 1), barriers(STAGES, GROUPS))
    again = barriers(GROUPS, 1)
    turns = barriers(GROUPS, 1)
    fence_async_shared()

    descs = (q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc)
    out_ptr += block_start.to(gl.int64) * HEADS * HEAD_DIM + head * HEAD_DIM
    gl.warp_specialize(
        [
            (attend_rows, (q, k, v, again, turns, descs, out_ptr, visited, head, scale_log2,
                           gl.constexpr(0), HEADS, HEAD_DIM, MAIN, TAIL)),
            (attend_rows, (q, k, v, again, turns, descs, out_ptr, visited, head, scale_log2,
                           gl.constexpr(1), HEADS, HEAD_DIM, MAIN, TAIL)),
            (load_tiles, (q, k, v, descs, visited, head, HEADS, MAIN, TAIL)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers in shared memory, each of which wants so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def stage_of(tile):
    """Where the tile of a number lies, and the parity of how often that place was used before."""
    return tile % STAGES, tile // STAGES & 1


@gluon.jit
def segments_of(cu_seqlens_ptr, block_start, block_end, segments, max_seqlen):
    """The first and the last segment that reach into a block; the first is 0 where none does."""
    # Images of one size mostly have one for each block, and where. To look takes one load.
    guess = gl.minimum(block_start // max_seqlen, segments - 1)
    start = gl.load(cu_seqlens_ptr + guess)
    end = gl.load(cu_seqlens_ptr + guess + 1)
    if (start <= block_start) & (block_end <= end):
        first, last = guess, guess
    else:
        first = gl.maximum(last_start_at(cu_seqlens_ptr, block_start, segments), 0)
        last = last_start_at(cu_seqlens_ptr, block_end - 1, segments)
    return first, last


@gluon.jit
def keys_of(visited, segment):
    """A segment's start and end, how many tiles of keys are visited, and keys of the first of them.

    All others are whole. Of a segment without keys, or one that only padding follows, a tile is
    visited too, for no row.
    """
    cu_seqlens_ptr, tokens, _, _, block_start = visited
    start, end = segment_bounds(cu_seqlens_ptr, segment, tokens)
    keys = gl.where(end > block_start, gl.maximum(end - start, 1), 1)
    tiles = gl.cdiv(keys, KEYS)
    return start, end, tiles, keys - (tiles - 1) * KEYS


@gluon.jit
def tile_row(i, start, first_keys):
    """The first key of a segment's i-th tile."""
    return gl.where(i == 0, start, start + first_keys + (i - 1) * KEYS)


@gluon.jit
def load_tiles(q, k, v, descs, visited, head,
               HEADS: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """The loading warp: the block's queries, and all keys and values of its segments."""
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc = descs
    _, _, first_segment, last_segment, block_start = visited
    q_main, q_tail, q_full = q
    gdc_wait()  # for the rotation in front, during which all this may have been launched
    mbarrier.expect(q_full.index(0), GROUPS * ROWS * (MAIN + TAIL) * 2)
    for group in gl.static_range(GROUPS):
        load_rotated(q_desc, q_tail_desc, block_start + group * ROWS, head,
                     q_main.index(group), q_tail.index(group), q_full.index(0),
                     HEADS, MAIN, TAIL)  # fmt: skip
    k_main, k_tail, k_full, k_empty = k
    v_main, v_tail, v_full, v_empty = v
    tile = 0
    for segment in range(first_segment, last_segment + 1):
        start, _, tiles, first_keys = keys_of(visited, segment)
        for i in range(0, tiles):
            stage, parity = stage_of(tile)
            tile += 1
            row = tile_row(i, start, first_keys)
            mbarrier.wait(k_empty.index(stage), parity ^ 1)
            mbarrier.expect(k_full.index(stage), KEYS * (MAIN + TAIL) * 2)
            load_rotated(k_desc, k_tail_desc, row, head, k_main.index(stage), k_tail.index(stage),
                         k_full.index(stage), HEADS, MAIN, TAIL)  # fmt: skip
            mbarrier.wait(v_empty.index(stage), parity ^ 1)
            mbarrier.expect(v_full.index(stage), KEYS * (MAIN + TAIL) * 2)
            load_head(v_desc, v_tail_desc, row, head, v_main.index(stage), v_tail.index(stage),
                      v_full.index(stage), MAIN, TAIL)  # fmt: skip


@gluon.jit
def load_rotated(desc, tail_desc, row, head, main, tail, full,
                 HEADS: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Start copying a tile of rotated rows, see rotated_columns in tiles.py."""
    copy_tile(desc, [row, head * MAIN], full, main)
    if TAIL > 0:
        copy_tile(tail_desc, [row, HEADS * MAIN + head * TAIL], full, tail)


@gluon.jit
def load_head(desc, tail_desc, row, head, main, tail, full,
              MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Start copying a tile of one head's rows; zeros come where there is no row or column."""
    copy_tile(desc, [row, head, 0], full, main)
    if TAIL > 0:
        copy_tile(tail_desc, [row, head, MAIN], full, tail)


@gluon.jit
def attend_rows(q, k, v, again, turns, descs, out_ptr, visited, head, scale_log2,
                GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
                MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """A computing group of warps: the result of its rows."""
    _, _, first_segment, last_segment, block_start = visited
    q_main, q_tail, q_full = q
    q = (q_main.index(GROUP), q_tail.index(GROUP))
    token = block_start + group_rows(GROUP, sums_layout(MAIN))
    misfits = token < 0
    clear_padding(out_ptr, visited, GROUP, HEADS, HEAD_DIM, MAIN, TAIL)
    mbarrier.wait(q_full.index(0), 0)
    tile = 0
    # Moved out of this loop, the result's addresses would take registers from the loop over keys.
    for segment in tl.range(first_segment, last_segment + 1, disable_licm=True):
        start, end, tiles, first_keys = keys_of(visited, segment)
        row_sum, acc, acc_tail = visit_segment(
            q, k, v, turns, tile, tiles, first_keys, end - start, scale_log2, GROUP, MAIN, TAIL
        )
        tile += tiles
        out, out_tail = scaled(acc, acc_tail, 1.0 / row_sum, TAIL)
        # Also rows that do not fit, which the same threads write over later.
        store_rows(out_ptr, start - block_start, end - block_start, None, out, out_tail,
                   GROUP, HEADS, HEAD_DIM, MAIN, TAIL)  # fmt: skip
        fits = reference_fits(row_sum, out, out_tail, out_ptr.dtype.element_ty, TAIL)
        misfits = misfits | ((token >= start) & (token < end) & (fits == 0))

    if gl.sum(misfits.to(gl.int32), 0) > 0:
        attend_again(
            q, k, v, again, descs, out_ptr, visited, head, misfits, tile, scale_log2,
            GROUP, HEADS, HEAD_DIM, MAIN, TAIL,
        )  # fmt: skip


@gluon.jit
def group_rows(GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Which of the block's rows are the group's, as the rows of a layout."""
    return GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def clear_padding(out_ptr, visited, GROUP: gl.constexpr, HEADS: gl.constexpr,
                  HEAD_DIM: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Zeros into all of the group's rows, unless segments surely cover the block.

    Whoever writes them here writes the results over them.
    """
    cu_seqlens_ptr, tokens, first_segment, last_segment, block_start = visited
    covered_to = block_start
    for segment in range(first_segment, last_segment + 1):
        start, end = segment_bounds(cu_seqlens_ptr, segment, tokens)
        covered_to = gl.where(start <= covered_to, gl.maximum(end, covered_to), covered_to)
    if covered_to < gl.minimum(block_start + ROWS * GROUPS, tokens):
        acc, acc_tail = zero_sums(MAIN, TAIL)
        store_rows(out_ptr, 0, tokens - block_start, None, acc, acc_tail,
                   GROUP, HEADS, HEAD_DIM, MAIN, TAIL)  # fmt: skip


@gluon.jit
def attend_again(q, k, v, again, descs, out_ptr, visited, head, misfits, tile, scale_log2,
                 GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
                 MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Rows that their reference does not fit, once all groups have read all tiles."""
    _, _, first_segment, last_segment, block_start = visited
    wait_for_all(k, tile)
    wait_for_all(v, tile)
    k_main, k_tail, _, _ = k
    v_main, v_tail, _, _ = v
    k = (k_main.index(GROUP), k_tail.index(GROUP), again.index(GROUP))
    v = (v_main.index(GROUP), v_tail.index(GROUP))
    tile = 0
    for segment in range(first_segment, last_segment + 1):
        start, end, tiles, first_keys = keys_of(visited, segment)
        row_sum, acc, acc_tail = visit_online(
            q, k, v, descs, tile, tiles, start, first_keys, head, scale_log2, HEADS, MAIN, TAIL
        )
        tile += tiles
        out, out_tail = scaled(acc, acc_tail, 1.0 / row_sum, TAIL)
        store_rows(out_ptr, start - block_start, end - block_start, misfits, out, out_tail,
                   GROUP, HEADS, HEAD_DIM, MAIN, TAIL)  # fmt: skip


@gluon.jit
def visit_segment(q, k, v, turns, tile, tiles, first_keys, keys, scale_log2,
                  GROUP: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Over a segment's keys, by one reference a row: sums of the probabilities, and of V by these.

    The product of a tile's probabilities and V is computed together with the logits of the next,
    and groups take turns in computing these: while one does, the other takes exponentials.
    """
    k_main, k_tail, k_full, k_empty = k
    v_main, v_tail, v_full, v_empty = v
    acc, acc_tail = zero_sums(MAIN, TAIL)
    stage, parity = stage_of(tile)
    mbarrier.wait(k_full.index(stage), parity)
    take_turn(turns, tile, GROUP, MAIN, TAIL)
    logits = key_logits(q, k_main.index(stage), k_tail.index(stage), TAIL)
    logits = warpgroup_mma_wait(0, deps=[logits])
    pass_turn(turns, GROUP, MAIN, TAIL)
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
        take_turn(turns, tile + i, GROUP, MAIN, TAIL)
        acc, acc_tail = add_values(
            p, v_main.index(before), v_tail.index(before), acc, acc_tail, TAIL
        )
        mbarrier.wait(k_full.index(stage), parity)
        logits = key_logits(q, k_main.index(stage), k_tail.index(stage), TAIL)
        if TAIL > 0:
            logits, acc, acc_tail = warpgroup_mma_wait(0, deps=[logits, acc, acc_tail])
        else:
            logits, acc = warpgroup_mma_wait(0, deps=[logits, acc])
        pass_turn(turns, GROUP, MAIN, TAIL)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.arrive(v_empty.index(before), count=1)
        p = gl.exp2(logits * scale_log2 - reference[:, None])
        row_sums += partial_sums(p)
        p = p.to(q[0].dtype)
    mbarrier.wait(v_full.index(stage), parity)
    acc, acc_tail = add_values(p, v_main.index(stage), v_tail.index(stage), acc, acc_tail, TAIL)
    acc, acc_tail = wait_for_sums(acc, acc_tail, TAIL)
    mbarrier.arrive(v_empty.index(stage), count=1)
    return gl.sum(row_sums, 1), acc, acc_tail


@gluon.jit
def take_turn(turns, tile, GROUP: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):
    """Wait until the other group's products have ended: with the tile before, or with this one.

    Only where there is a tail, and it is narrow. Products of 128 columns lose by turns.
    """
    if TAIL > 0 and TAIL < MAIN:
        mbarrier.wait(turns.index(GROUP), tile & 1 ^ (1 - GROUP))


@gluon.jit
def pass_turn(turns, GROUP: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):
    """Let the other group go on."""
    if TAIL > 0 and TAIL < MAIN:
        mbarrier.arrive(turns.index(1 - GROUP), count=1)


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
        logits = warpgroup_mma_wait(0, deps=[key_logits(q, k_main, k_tail, TAIL)])
        logits = gl.where(column < keys, logits, -float("inf"))
        new_max = gl.maximum(row_max, gl.max(logits, 1))
        p = gl.exp2((logits - new_max[:, None]) * scale_log2)
        decay = gl.exp2((row_max - new_max) * scale_log2)
        row_max, row_sum = new_max, row_sum * decay + gl.sum(p, 1)
        acc, acc_tail = scaled(acc, acc_tail, decay, TAIL)
        acc, acc_tail = add_values(p.to(q[0].dtype), v_main, v_tail, acc, acc_tail, TAIL)
        acc, acc_tail = wait_for_sums(acc, acc_tail, TAIL)
    return row_sum, acc, acc_tail


@gluon.jit
def clear_rows(x, count):
    """Zeros into the rows of a tile [rows, 1, columns] from the count-th on."""
    x = x.reshape([x.shape[0], x.shape[2]])
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    x.store(gl.where(row < count, x.load(LAYOUT), gl.full([1, 1], 0.0, x.dtype, LAYOUT)))


@gluon.jit
def wait_for_all(x, tiles):
    """Wait until all groups have read all tiles."""
    _, _, _, empty = x
    for stage in gl.static_range(STAGES):
        uses = (tiles + STAGES - 1 - stage) // STAGES
        mbarrier.wait(empty.index(stage), uses - 1 & 1, pred=uses > 0)


@gluon.jit
def key_logits(q, k_main, k_tail, TAIL: gl.constexpr):
    """Start computing the logits [ROWS, KEYS] of a tile of keys, not scaled."""
    q_main, q_tail = q
    logits = gl.zeros([ROWS, KEYS], gl.float32, sums_layout(KEYS))
    logits = warpgroup_mma(q_main, k_main.permute([1, 0]), logits, use_acc=False, is_async=True)
    if TAIL > 0:
        logits = warpgroup_mma(q_tail, k_tail.permute([1, 0]), logits, is_async=True)
    return logits


@gluon.jit
def add_values(p, v_main, v_tail, acc, acc_tail, TAIL: gl.constexpr):
    """Start adding the product of p [ROWS, KEYS] and a tile of V [KEYS, 1, columns]."""
    v_main = v_main.reshape([KEYS, v_main.shape[2]])
    factors = gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2))
    acc = warpgroup_mma(factors, v_main, acc, is_async=True)
    if TAIL > 0:
        v_tail = v_tail.reshape([KEYS, v_tail.shape[2]])
        factors = gl.convert_layout(p, gl.DotOperandLayout(0, acc_tail.type.layout, 2))
        acc_tail = warpgroup_mma(factors, v_tail, acc_tail, is_async=True)
    return acc, acc_tail


@gluon.constexpr_function
def sums_layout(columns):
    """How the sums of a product [ROWS, columns] lie in the registers of a group of warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def zero_sums(MAIN: gl.constexpr, TAIL: gl.constexpr):
    """No values yet: [ROWS, MAIN] and [ROWS, TAIL], without a tail [ROWS, 16]."""
    COLUMNS: gl.constexpr = TAIL if TAIL > 0 else 16
    acc = gl.zeros([ROWS, MAIN], gl.float32, sums_layout(MAIN))
    return acc, gl.zeros([ROWS, COLUMNS], gl.float32, sums_layout(COLUMNS))


@gluon.jit
def wait_for_sums(acc, acc_tail, TAIL: gl.constexpr):
    """Wait for products with V."""
    if TAIL > 0:
        acc, acc_tail = warpgroup_mma_wait(0, deps=[acc, acc_tail])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, acc_tail


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


@gluon.jit
def store_rows(out_ptr, first, last, wanted, out, out_tail,
               GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
               MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Write those of the group's rows of the result that the block has from first to last - 1.

    wanted: [ROWS], which of these; None: all. out_ptr is where the block's first row goes.
    """
    store_columns(out_ptr, first, last, wanted, out, 0, GROUP, HEADS, HEAD_DIM)
    if TAIL > 0:
        store_columns(out_ptr, first, last, wanted, out_tail, MAIN, GROUP, HEADS, HEAD_DIM)


@gluon.constexpr_function
def stored_layout(columns):
    """How results [ROWS, columns] are stored: a thread has 16 bytes, neighbours have neighbours.

    A product's sums lie in pairs, for each of which a thread would need an address.
    """
    threads = columns // 8
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])


@gluon.jit
def store_columns(out_ptr, first, last, wanted, out, FIRST: gl.constexpr, GROUP: gl.constexpr,
                  HEADS: gl.constexpr, HEAD_DIM: gl.constexpr):  # fmt: skip
    LAYOUT: gl.constexpr = stored_layout(out.shape[1])
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), LAYOUT)
    # Numbered in this layout: to bring rows or masks into it takes as long as to bring the result.
    row = group_rows(GROUP, LAYOUT)
    mask = (row >= first) & (row < last)
    if wanted is not None:
        mask = mask & gl.convert_layout(wanted, row.type.layout)
    column = FIRST + gl.arange(0, out.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    place = out_ptr + row[:, None] * (HEADS * HEAD_DIM) + column
    gl.store(place, out, mask=mask[:, None] & (column < HEAD_DIM))
