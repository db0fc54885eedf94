"""Attention within long segments on Hopper GPUs: one group of warps loads, two multiply.

The result is the stream kernel's, of Q and K that were rotated beforehand. There every warp issues
copies, products and exponentials in turn, and waits for each. Here the GPU's copy engine (TMA)
fetches tiles of keys for two groups of warps that do nothing but compute, each for rows of its own,
so that one multiplies while the other takes exponentials. That division of labour is
FlashAttention-3's (https://arxiv.org/abs/2407.08608); softmax is by one reference a row, see
hopper_softmax.py.

Written in Gluon, Triton's language for what Triton leaves to its compiler. It has no interpreter.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from triton_kernels.kernels.hopper_softmax import (
    reference_fits,
    scaled,
    visit_online,
    visit_segment,
)
from triton_kernels.kernels.hopper_tiles import (
    GROUPS,
    KEYS,
    ROWS,
    STAGES,
    group_rows,
    keys_of,
    load_head,
    load_rotated,
    stage_of,
    sums_layout,
    tile_row,
    zero_sums,
)
from triton_kernels.kernels.stream import last_start_at
from triton_kernels.kernels.tiles import segment_bounds

# Registers of a thread: logits, probabilities and sums fill those of a computing one.
REGISTERS: tl.constexpr = tl.constexpr(240)
LOADER_REGISTERS: tl.constexpr = tl.constexpr(24)


@gluon.jit(
    do_not_specialize=("tokens", "segments", "max_seqlen"),
    do_not_specialize_on_alignment=("cu_seqlens_ptr",),
)
def hopper_stream_kernel(
    # q and k as rotate_kernel writes them [tokens, row], v [tokens, heads, head_dim]: tiles of each
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc,
    # tensors
    out_ptr, cu_seqlens_ptr,
    # log-sum-exp of each row [heads, tokens], in powers of two; None: not wanted
    lse_ptr,
    # sizes and scale
    tokens, segments, max_seqlen, scale_log2,
    # shape of a head and how it is cut
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr,
    # heads of K and V, each of which serves as many of Q's
    K_HEADS: gl.constexpr,
):  # fmt: skip
    """One program for each (head, token block); blocks run fastest and share the head's K and V."""
    head, block_start, visited = block_of(cu_seqlens_ptr, tokens, segments, max_seqlen)
    k_head = head if K_HEADS == HEADS else head // (HEADS // K_HEADS)

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
    ping_pong = barriers(GROUPS, 1)
    fence_async_shared()

    descs = (q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc)
    out_ptr += block_start.to(gl.int64) * HEADS * HEAD_DIM + head * HEAD_DIM
    if lse_ptr is not None:
        lse_ptr += head.to(gl.int64) * tokens + block_start
    gl.warp_specialize(
        [
            (attend_rows, (q, k, v, again, ping_pong, descs, out_ptr, lse_ptr, visited, k_head,
                           scale_log2, gl.constexpr(0), HEADS, HEAD_DIM, MAIN, TAIL, K_HEADS)),
            (attend_rows, (q, k, v, again, ping_pong, descs, out_ptr, lse_ptr, visited, k_head,
                           scale_log2, gl.constexpr(1), HEADS, HEAD_DIM, MAIN, TAIL, K_HEADS)),
            (load_tiles, (q, k, v, descs, visited, head, k_head, HEADS, MAIN, TAIL, K_HEADS)),
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
def block_of(cu_seqlens_ptr, tokens, segments, max_seqlen):
    """A program's head and block of tokens; and what its groups of warps are to know of these."""
    BLOCK: gl.constexpr = ROWS * GROUPS
    blocks = gl.cdiv(tokens, BLOCK)
    head = gl.program_id(0) // blocks
    block_start = gl.program_id(0) % blocks * BLOCK
    block_end = gl.minimum(block_start + BLOCK, tokens)
    first_segment, last_segment = segments_of(
        cu_seqlens_ptr, block_start, block_end, segments, max_seqlen
    )
    return head, block_start, (cu_seqlens_ptr, tokens, first_segment, last_segment, block_start)


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
def load_tiles(q, k, v, descs, visited, head, k_head, HEADS: gl.constexpr,
               MAIN: gl.constexpr, TAIL: gl.constexpr, K_HEADS: gl.constexpr):  # fmt: skip
    """The loading warp: the block's queries, and all keys and values of its segments."""
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc = descs
    _, _, _, _, block_start = visited
    q_main, q_tail, q_full = q
    gdc_wait()  # for the rotation in front, during which all this may have been launched
    mbarrier.expect(q_full.index(0), GROUPS * ROWS * (MAIN + TAIL) * 2)
    for group in gl.static_range(GROUPS):
        load_rotated(q_desc, q_tail_desc, block_start + group * ROWS, head,
                     q_main.index(group), q_tail.index(group), q_full.index(0),
                     HEADS, MAIN, TAIL)  # fmt: skip
    load_keys(k, v, (k_desc, k_tail_desc, v_desc, v_tail_desc), visited, k_head,
              MAIN, TAIL, K_HEADS)  # fmt: skip


@gluon.jit
def load_keys(k, v, descs, visited, k_head,
              MAIN: gl.constexpr, TAIL: gl.constexpr, K_HEADS: gl.constexpr):  # fmt: skip
    """All keys and values of the block's segments, by tiles, as places for them become free."""
    k_desc, k_tail_desc, v_desc, v_tail_desc = descs
    _, _, first_segment, last_segment, _ = visited
    k_main, k_tail, k_full, k_empty = k
    v_main, v_tail, v_full, v_empty = v
    tile = 0
    for segment in range(first_segment, last_segment + 1):
        start, _, tiles, first_keys = keys_of(visited, segment)
        for i in range(0, tiles):
            stage, parity = stage_of(tile, k_main.shape[0])
            row = tile_row(i, start, first_keys)
            mbarrier.wait(k_empty.index(stage), parity ^ 1)
            mbarrier.expect(k_full.index(stage), KEYS * (MAIN + TAIL) * 2)
            load_rotated(k_desc, k_tail_desc, row, k_head, k_main.index(stage), k_tail.index(stage),
                         k_full.index(stage), K_HEADS, MAIN, TAIL)  # fmt: skip
            stage, parity = stage_of(tile, v_main.shape[0])
            tile += 1
            mbarrier.wait(v_empty.index(stage), parity ^ 1)
            mbarrier.expect(v_full.index(stage), KEYS * (MAIN + TAIL) * 2)
            load_head(v_desc, v_tail_desc, row, k_head, v_main.index(stage), v_tail.index(stage),
                      v_full.index(stage), MAIN, TAIL)  # fmt: skip


@gluon.jit
def attend_rows(q, k, v, again, ping_pong, descs, out_ptr, lse_ptr, visited, k_head, scale_log2,
                GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
                MAIN: gl.constexpr, TAIL: gl.constexpr, K_HEADS: gl.constexpr):  # fmt: skip
    """A computing group of warps: the result of its rows."""
    _, _, first_segment, last_segment, block_start = visited
    q_main, q_tail, q_full = q
    q = (q_main.index(GROUP), q_tail.index(GROUP))
    token = block_start + group_rows(GROUP, sums_layout(MAIN))
    misfits = token < 0
    clear_padding(out_ptr, lse_ptr, visited, GROUP, HEADS, HEAD_DIM, MAIN, TAIL)
    mbarrier.wait(q_full.index(0), 0)
    tile = 0
    # Moved out of this loop, the result's addresses would take registers from the loop over keys.
    for segment in tl.range(first_segment, last_segment + 1, disable_licm=True):
        start, end, tiles, first_keys = keys_of(visited, segment)
        reference, row_sum, acc, acc_tail = visit_segment(
            q, k, v, ping_pong, tile, tiles, first_keys, end - start, scale_log2, GROUP, MAIN, TAIL
        )
        tile += tiles
        store_lse(lse_ptr, start - block_start, end - block_start, None, reference, row_sum, GROUP)
        out, out_tail = scaled(acc, acc_tail, 1.0 / row_sum, TAIL)
        # Also rows that do not fit, which the same threads write over later.
        store_rows(out_ptr, start - block_start, end - block_start, None, out, out_tail,
                   GROUP, HEADS, HEAD_DIM, MAIN, TAIL)  # fmt: skip
        fits = reference_fits(row_sum, out, out_tail, out_ptr.dtype.element_ty, TAIL)
        misfits = misfits | ((token >= start) & (token < end) & (fits == 0))

    if gl.sum(misfits.to(gl.int32), 0) > 0:
        attend_again(
            q, k, v, again, descs, out_ptr, lse_ptr, visited, k_head, misfits, tile, scale_log2,
            GROUP, HEADS, HEAD_DIM, MAIN, TAIL, K_HEADS,
        )  # fmt: skip


@gluon.jit
def clear_padding(out_ptr, lse_ptr, visited, GROUP: gl.constexpr, HEADS: gl.constexpr,
                  HEAD_DIM: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Zeros into all of the group's rows, unless segments surely cover the block.

    The threads that write them write the results over them. This may be before the rotation has
    ended, which does not read here.
    """
    _, tokens, _, _, block_start = visited
    if not_covered(visited):
        acc, acc_tail = zero_sums(MAIN, TAIL)
        store_rows(out_ptr, 0, tokens - block_start, None, acc, acc_tail,
                   GROUP, HEADS, HEAD_DIM, MAIN, TAIL)  # fmt: skip
        S: gl.constexpr = sums_layout(KEYS)
        none = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        store_lse(lse_ptr, 0, tokens - block_start, None, none, none + 1.0, GROUP)


@gluon.jit
def not_covered(visited):
    """Whether segments do not cover the block, or not surely."""
    cu_seqlens_ptr, tokens, first_segment, last_segment, block_start = visited
    covered_to = block_start
    for segment in range(first_segment, last_segment + 1):
        start, end = segment_bounds(cu_seqlens_ptr, segment, tokens)
        covered_to = gl.where(start <= covered_to, gl.maximum(end, covered_to), covered_to)
    return covered_to < gl.minimum(block_start + ROWS * GROUPS, tokens)


@gluon.jit
def attend_again(q, k, v, again, descs, out_ptr, lse_ptr, visited, k_head, misfits, tile,
                 scale_log2, GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
                 MAIN: gl.constexpr, TAIL: gl.constexpr, K_HEADS: gl.constexpr):  # fmt: skip
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
        row_max, row_sum, acc, acc_tail = visit_online(
            q, k, v, descs, tile, tiles, start, first_keys, k_head, scale_log2, K_HEADS, MAIN, TAIL
        )
        tile += tiles
        store_lse(lse_ptr, start - block_start, end - block_start, misfits, row_max, row_sum, GROUP)
        out, out_tail = scaled(acc, acc_tail, 1.0 / row_sum, TAIL)
        store_rows(out_ptr, start - block_start, end - block_start, misfits, out, out_tail,
                   GROUP, HEADS, HEAD_DIM, MAIN, TAIL)  # fmt: skip


@gluon.jit
def store_lse(lse_ptr, first, last, wanted, reference, row_sum, GROUP: gl.constexpr):
    """Write the log-sum-exp of the rows that store_rows would write; None: of none."""
    if lse_ptr is not None:
        row = group_rows(GROUP, sums_layout(KEYS))
        mask = (row >= first) & (row < last)
        if wanted is not None:
            mask = mask & gl.convert_layout(wanted, row.type.layout)
        lse = reference + gl.log2(gl.convert_layout(row_sum, row.type.layout))
        gl.store(lse_ptr + row, lse, mask=mask)


@gluon.jit
def wait_for_all(x, tiles):
    """Wait until all groups have read all tiles."""
    _, _, _, empty = x
    for stage in gl.static_range(STAGES):
        uses = (tiles + STAGES - 1 - stage) // STAGES
        mbarrier.wait(empty.index(stage), uses - 1 & 1, pred=uses > 0)


@gluon.jit
def store_rows(out_ptr, first, last, wanted, out, out_tail,
               GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
               MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Write those of the group's rows of the result that the block has from first to last - 1.

    wanted: [ROWS], which of these; None: all. out_ptr is where the block's first row goes.
    """
    STRIDE: gl.constexpr = HEADS * HEAD_DIM
    store_columns(out_ptr, first, last, wanted, out, 0, GROUP, STRIDE, HEAD_DIM)
    if TAIL > 0:
        store_columns(out_ptr, first, last, wanted, out_tail, MAIN, GROUP, STRIDE, HEAD_DIM)


@gluon.constexpr_function
def stored_layout(columns):
    """How results [ROWS, columns] are stored: a thread has 16 bytes, neighbours have neighbours.

    A product's sums lie in pairs, for each of which a thread would need an address.
    """
    threads = columns // 8
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])


@gluon.jit
def store_columns(out_ptr, first, last, wanted, out, FIRST: gl.constexpr, GROUP: gl.constexpr,
                  STRIDE: gl.constexpr, HEAD_DIM: gl.constexpr):  # fmt: skip
    LAYOUT: gl.constexpr = stored_layout(out.shape[1])
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), LAYOUT)
    # Numbered in this layout: to bring rows or masks into it takes as long as to bring the result.
    row = group_rows(GROUP, LAYOUT)
    mask = (row >= first) & (row < last)
    if wanted is not None:
        mask = mask & gl.convert_layout(wanted, row.type.layout)
    column = FIRST + gl.arange(0, out.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    place = out_ptr + row[:, None] * STRIDE + column
    gl.store(place, out, mask=mask[:, None] & (column < HEAD_DIM))
