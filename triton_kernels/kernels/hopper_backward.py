"""Gradients of attention in long segments on Hopper GPUs: one group of warps loads, two multiply.

The results are those of stream_backward.py, by the same sums; who loads and who multiplies is as in
hopper_stream.py: the copy engine (TMA) fetches tiles for two groups of four warps, each of which
has rows of its own, queries in one kernel and keys in the other. What a group makes of logits, in
registers, is multiplied by the tile that gave them. It always has a product in flight while it
computes: the gradients of probabilities beside the exponentials, and a tile's last products beside
the next one's logits.

A segment's first tile alone may be of fewer rows than a tile has. Behind them are another segment's
rows: they are overwritten by zeros where they are summed over, as their NaN would meet zeros.

Of bf16 only: fp16 would want the largest gradient of each tile, see stream_backward.py.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from triton_kernels.kernels.hopper_rotate_back import (
    clear_columns,
    clear_rotated,
    row_dots,
    store_rotated_back,
)
from triton_kernels.kernels.hopper_stream import (
    LOADER_REGISTERS,
    REGISTERS,
    barriers,
    block_of,
    load_keys,
    not_covered,
    store_columns,
)
from triton_kernels.kernels.hopper_tiles import (
    GROUPS,
    KEYS,
    ROWS,
    add_product,
    clear_rows,
    group_rows,
    keys_of,
    load_head,
    load_rotated,
    product,
    stage_of,
    sums_layout,
    tile_row,
    wait_for_sums,
    zero_sums,
)
from triton_kernels.kernels.window_backward import LN_2

# Queries of a tile, as registers hold sums of two gradients. Tiles of Q, and of dO, that are held
# at a time: one that is summed over, one that logits are made of, one to come.
QUERIES: tl.constexpr = tl.constexpr(64)
QUERY_STAGES: tl.constexpr = tl.constexpr(3)


@gluon.constexpr_function
def key_stages(columns):
    """Tiles of K that are held at a time: as QUERY_STAGES if there is room for them."""
    return 3 if columns < 128 else 2


@gluon.jit(
    do_not_specialize=("tokens", "segments", "max_seqlen", "angle_stride"),
    do_not_specialize_on_alignment=("cu_seqlens_ptr",),
)
def hopper_backward_q_kernel(
    # q and k as rotate_kernel writes them [tokens, row], v and the result's gradient
    # [tokens, heads, head_dim]: tiles of each
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc, grad_desc, grad_tail_desc,
    # tensors, as stream_backward_q_kernel has them
    out_ptr, lse_ptr, delta_ptr, q_grad_ptr, cos_ptr, sin_ptr, cu_seqlens_ptr,
    # sizes and scale
    tokens, segments, max_seqlen, scale_log2,
    # in units of ANGLE_UNIT elements
    angle_stride,
    # shape of a head and how it is cut
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr,
    MAIN: gl.constexpr, TAIL: gl.constexpr,
    ANGLE_UNIT: gl.constexpr,
    # how many gradients lie side by side in a token's row
    PARTS: gl.constexpr,
):  # fmt: skip
    """One program for each (head, block of queries); blocks run fastest and share K and V."""
    head, block_start, visited = block_of(cu_seqlens_ptr, tokens, segments, max_seqlen)
    dtype: gl.constexpr = q_grad_ptr.dtype.element_ty
    K_STAGES: gl.constexpr = key_stages(MAIN + TAIL)
    q_main = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, MAIN], q_desc.layout)
    grad_main = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, 1, MAIN], grad_desc.layout)
    k_main = gl.allocate_shared_memory(dtype, [K_STAGES, KEYS, MAIN], k_desc.layout)
    v_main = gl.allocate_shared_memory(dtype, [2, KEYS, 1, MAIN], v_desc.layout)
    if TAIL > 0:
        q_tail = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, TAIL], q_tail_desc.layout)
        grad_tail = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, 1, TAIL], grad_tail_desc.layout)
        k_tail = gl.allocate_shared_memory(dtype, [K_STAGES, KEYS, TAIL], k_tail_desc.layout)
        v_tail = gl.allocate_shared_memory(dtype, [2, KEYS, 1, TAIL], v_tail_desc.layout)
    else:  # they stand in
        q_tail, grad_tail, k_tail, v_tail = q_main, grad_main, k_main, v_main
    full = barriers(1, 1)
    k = (k_main, k_tail, barriers(K_STAGES, 1), barriers(K_STAGES, GROUPS))
    v = (v_main, v_tail, barriers(2, 1), barriers(2, GROUPS))
    cleared = barriers(1, GROUPS)
    fence_async_shared()

    first = block_start.to(gl.int64)
    out_ptr += first * HEADS * HEAD_DIM + head * HEAD_DIM
    lse_ptr += head.to(gl.int64) * tokens + first
    delta_ptr += head.to(gl.int64) * tokens + first
    q_grad_ptr += first * PARTS * HEADS * HEAD_DIM + head * HEAD_DIM
    angle_stride = angle_stride * ANGLE_UNIT
    angles = (cos_ptr + first * angle_stride, sin_ptr + first * angle_stride, angle_stride)
    rows = (q_main, q_tail, grad_main, grad_tail, full)
    q_descs = (q_desc, q_tail_desc, grad_desc, grad_tail_desc)
    k_descs = (k_desc, k_tail_desc, v_desc, v_tail_desc)
    read = (out_ptr, lse_ptr, delta_ptr)
    gl.warp_specialize(
        [
            (query_gradients, (rows, k, v, cleared, read, q_grad_ptr, angles, visited, scale_log2,
                               gl.constexpr(0), HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, PARTS)),
            (query_gradients, (rows, k, v, cleared, read, q_grad_ptr, angles, visited, scale_log2,
                               gl.constexpr(1), HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, PARTS)),
            (load_for_queries, (rows, k, v, q_descs, k_descs, visited, head, HEADS, MAIN, TAIL)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def load_for_queries(rows, k, v, q_descs, k_descs, visited, head,
                     HEADS: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """The loading warp: the block's Q and dO, and all keys and values of its segments."""
    gdc_wait()  # for the rotation in front, during which all this may have been launched
    load_rows(rows, q_descs, visited, head, HEADS, MAIN, TAIL)
    load_keys(k, v, k_descs, visited, head, MAIN, TAIL, HEADS)


@gluon.jit
def load_rows(rows, descs, visited, head,
              HEADS: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """The block's rows, of Q and dO or of K and V."""
    x_main, x_tail, y_main, y_tail, full = rows
    x_desc, x_tail_desc, y_desc, y_tail_desc = descs
    _, _, _, _, block_start = visited
    full = full.index(0)
    mbarrier.expect(full, 2 * GROUPS * ROWS * (MAIN + TAIL) * 2)
    for group in gl.static_range(GROUPS):
        row = block_start + group * ROWS
        load_rotated(x_desc, x_tail_desc, row, head, x_main.index(group), x_tail.index(group),
                     full, HEADS, MAIN, TAIL)  # fmt: skip
        load_head(y_desc, y_tail_desc, row, head, y_main.index(group), y_tail.index(group),
                  full, MAIN, TAIL)  # fmt: skip


@gluon.jit
def query_gradients(rows, k, v, cleared, read, q_grad_ptr, angles, visited, scale_log2,
                    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
                    ROTARY_DIM: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr,
                    PARTS: gl.constexpr):  # fmt: skip
    """A computing group of warps: the gradient of its rows of Q, and D of these."""
    _, tokens, first_segment, last_segment, block_start = visited
    q_main, q_tail, grad_main, grad_tail, full = rows
    q = (q_main.index(GROUP), q_tail.index(GROUP))
    out_grad = (grad_main.index(GROUP), grad_tail.index(GROUP))
    out_ptr, lse_ptr, delta_ptr = read
    STRIDE: gl.constexpr = PARTS * HEADS * HEAD_DIM
    if not_covered(visited):  # the threads that write zeros write the results over them
        clear_rotated(q_grad_ptr, tokens - block_start, GROUP, STRIDE,
                      HEAD_DIM, ROTARY_DIM, MAIN, TAIL)  # fmt: skip
    row = group_rows(GROUP, sums_layout(KEYS))
    is_token = row < tokens - block_start
    lse = gl.load(lse_ptr + row, mask=is_token, other=0.0)
    mbarrier.wait(full.index(0), 0)
    delta = row_dots(out_ptr, out_grad, tokens - block_start, GROUP, HEADS * HEAD_DIM,
                     HEAD_DIM, MAIN, TAIL)  # fmt: skip
    delta = gl.convert_layout(delta, row.type.layout)
    gl.store(delta_ptr + row, delta, mask=is_token)
    tile, clears = 0, 0
    for segment in tl.range(first_segment, last_segment + 1, disable_licm=True):
        start, end, tiles, first_keys = keys_of(visited, segment)
        acc, acc_tail = visit_keys(q, out_grad, lse, delta, k, v, cleared, clears, tile, tiles,
                                   first_keys, scale_log2, GROUP, MAIN, TAIL)  # fmt: skip
        tile += tiles
        clears += (first_keys < KEYS).to(gl.int32)
        store_rotated_back(
            q_grad_ptr, angles, start - block_start, end - block_start, acc, acc_tail,
            scale_log2 * LN_2, GROUP, STRIDE, HEAD_DIM, ROTARY_DIM, MAIN, TAIL,
        )  # fmt: skip


@gluon.jit
def visit_keys(q, out_grad, lse, delta, k, v, cleared, clears, tile, tiles, first_keys, scale_log2,
               GROUP: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Over a segment's keys: the gradient of a group's queries, rotated and not scaled.

    The product of the logits' gradients and K is computed together with the next tile's logits.
    """
    k_main, k_tail, k_full, k_empty = k
    K_STAGES: gl.constexpr = k_main.shape[0]
    acc, acc_tail = zero_sums(MAIN, TAIL)
    stage, parity = stage_of(tile, K_STAGES)
    mbarrier.wait(k_full.index(stage), parity)
    if first_keys < KEYS:
        if GROUP == 0:
            clear_rows(k_main.index(stage), first_keys)
        elif TAIL > 0:
            clear_rows(k_tail.index(stage), first_keys)
        wait_for_both(cleared, clears)
    logits = product(q, k_main.index(stage), k_tail.index(stage), TAIL)
    logits = warpgroup_mma_wait(0, deps=[logits])
    s_grad = logit_gradients(logits, out_grad, lse, delta, v, tile, first_keys, scale_log2, TAIL)
    for i in range(1, tiles):
        before = stage
        stage, parity = stage_of(tile + i, K_STAGES)
        acc, acc_tail = add_product(
            s_grad, k_main.index(before), k_tail.index(before), acc, acc_tail, TAIL
        )
        mbarrier.wait(k_full.index(stage), parity)
        logits = product(q, k_main.index(stage), k_tail.index(stage), TAIL)
        if TAIL > 0:
            logits, acc, acc_tail = warpgroup_mma_wait(0, deps=[logits, acc, acc_tail])
        else:
            logits, acc = warpgroup_mma_wait(0, deps=[logits, acc])
        mbarrier.arrive(k_empty.index(before), count=1)
        s_grad = logit_gradients(logits, out_grad, lse, delta, v, tile + i, None, scale_log2, TAIL)
    acc, acc_tail = add_product(
        s_grad, k_main.index(stage), k_tail.index(stage), acc, acc_tail, TAIL
    )
    acc, acc_tail = wait_for_sums(acc, acc_tail, TAIL)
    mbarrier.arrive(k_empty.index(stage), count=1)
    return acc, acc_tail


@gluon.jit
def logit_gradients(logits, out_grad, lse, delta, v, tile, keys, scale_log2, TAIL: gl.constexpr):
    """Those [ROWS, KEYS] of a tile, as products take them; of so many keys (None: of all)."""
    v_main, v_tail, v_full, v_empty = v
    stage, parity = stage_of(tile, v_main.shape[0])
    mbarrier.wait(v_full.index(stage), parity)
    p_grad = product(out_grad, v_main.index(stage), v_tail.index(stage), TAIL)
    p = gl.exp2(logits * scale_log2 - lse[:, None])
    p_grad = warpgroup_mma_wait(0, deps=[p_grad])
    mbarrier.arrive(v_empty.index(stage), count=1)
    s_grad = p * (p_grad - delta[:, None])
    if keys is not None:  # others may be infinite, or another segment's
        column = gl.arange(0, KEYS, gl.SliceLayout(0, s_grad.type.layout))[None, :]
        s_grad = gl.where(column < keys, s_grad, 0.0)
    return s_grad.to(v_main.dtype)


@gluon.jit
def wait_for_both(cleared, clears):
    """Wait until both groups have written their zeros, for the so many-th time."""
    fence_async_shared()
    mbarrier.arrive(cleared.index(0), count=1)
    mbarrier.wait(cleared.index(0), clears & 1)


@gluon.jit(
    do_not_specialize=("tokens", "segments", "max_seqlen", "angle_stride"),
    do_not_specialize_on_alignment=("cu_seqlens_ptr",),
)
def hopper_backward_kv_kernel(
    # as above; tiles of q and the result's gradient have QUERIES rows, those of k and v ROWS
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc, grad_desc, grad_tail_desc,
    # D, which that kernel wrote, is read
    lse_ptr, delta_ptr, k_grad_ptr, v_grad_ptr, cos_ptr, sin_ptr, cu_seqlens_ptr,
    tokens, segments, max_seqlen, scale_log2,
    angle_stride,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, ROTARY_DIM: gl.constexpr,
    MAIN: gl.constexpr, TAIL: gl.constexpr,
    ANGLE_UNIT: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """One program for each (head, block of keys); blocks run fastest and share Q and dO."""
    head, block_start, visited = block_of(cu_seqlens_ptr, tokens, segments, max_seqlen)
    dtype: gl.constexpr = k_grad_ptr.dtype.element_ty
    STAGES: gl.constexpr = QUERY_STAGES
    k_main = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, MAIN], k_desc.layout)
    v_main = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, 1, MAIN], v_desc.layout)
    q_main = gl.allocate_shared_memory(dtype, [STAGES, QUERIES, MAIN], q_desc.layout)
    grad_main = gl.allocate_shared_memory(dtype, [STAGES, QUERIES, 1, MAIN], grad_desc.layout)
    if TAIL > 0:
        k_tail = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, TAIL], k_tail_desc.layout)
        v_tail = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, 1, TAIL], v_tail_desc.layout)
        q_tail = gl.allocate_shared_memory(dtype, [STAGES, QUERIES, TAIL], q_tail_desc.layout)
        grad_tail = gl.allocate_shared_memory(
            dtype, [STAGES, QUERIES, 1, TAIL], grad_tail_desc.layout
        )
    else:  # they stand in
        q_tail, grad_tail, k_tail, v_tail = q_main, grad_main, k_main, v_main
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], NUMBERS)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], NUMBERS)
    full = barriers(1, 1)
    # The copies' arrival, and that of the numbers which the loading warp copies itself.
    queries = (q_main, q_tail, grad_main, grad_tail, lse, delta,
               barriers(STAGES, 2), barriers(STAGES, GROUPS))  # fmt: skip
    cleared = barriers(1, GROUPS)
    fence_async_shared()

    first = block_start.to(gl.int64)
    lse_ptr += head.to(gl.int64) * tokens
    delta_ptr += head.to(gl.int64) * tokens
    k_grad_ptr += first * PARTS * HEADS * HEAD_DIM + head * HEAD_DIM
    v_grad_ptr += first * PARTS * HEADS * HEAD_DIM + head * HEAD_DIM
    angle_stride = angle_stride * ANGLE_UNIT
    angles = (cos_ptr + first * angle_stride, sin_ptr + first * angle_stride, angle_stride)
    rows = (k_main, k_tail, v_main, v_tail, full)
    grads = (k_grad_ptr, v_grad_ptr)
    k_descs = (k_desc, k_tail_desc, v_desc, v_tail_desc)
    q_descs = (q_desc, q_tail_desc, grad_desc, grad_tail_desc)
    gl.warp_specialize(
        [
            (key_gradients, (rows, queries, cleared, grads, angles, visited, scale_log2,
                             gl.constexpr(0), HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, PARTS)),
            (key_gradients, (rows, queries, cleared, grads, angles, visited, scale_log2,
                             gl.constexpr(1), HEADS, HEAD_DIM, ROTARY_DIM, MAIN, TAIL, PARTS)),
            (load_for_keys, (rows, queries, lse_ptr, delta_ptr, k_descs, q_descs, visited, head,
                             HEADS, MAIN, TAIL)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def load_for_keys(rows, queries, lse_ptr, delta_ptr, k_descs, q_descs, visited, head,
                  HEADS: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """The loading warp: the block's K and V, and Q, dO, L and D of its segments' queries."""
    load_rows(rows, k_descs, visited, head, HEADS, MAIN, TAIL)
    q_desc, q_tail_desc, grad_desc, grad_tail_desc = q_descs
    q_main, q_tail, grad_main, grad_tail, lse, delta, full, empty = queries
    _, _, first_segment, last_segment, _ = visited
    query = gl.arange(0, QUERIES, gl.BlockedLayout([2], [32], [1], [0]))
    tile = 0
    for segment in range(first_segment, last_segment + 1):
        start, end, tiles, first_queries = keys_of(visited, segment, QUERIES)
        for i in range(0, tiles):
            stage, parity = stage_of(tile, QUERY_STAGES)
            tile += 1
            row = tile_row(i, start, first_queries, QUERIES)
            count = gl.minimum(end - row, gl.where(i == 0, first_queries, QUERIES))
            # Where there is no query, all probabilities are 0.
            lse_row = gl.load(lse_ptr + row + query, mask=query < count, other=float("inf"))
            delta_row = gl.load(delta_ptr + row + query, mask=query < count, other=0.0)
            at = full.index(stage)
            mbarrier.wait(empty.index(stage), parity ^ 1)
            mbarrier.expect(at, 2 * QUERIES * (MAIN + TAIL) * 2)
            load_rotated(q_desc, q_tail_desc, row, head, q_main.index(stage), q_tail.index(stage),
                         at, HEADS, MAIN, TAIL)  # fmt: skip
            load_head(grad_desc, grad_tail_desc, row, head, grad_main.index(stage),
                      grad_tail.index(stage), at, MAIN, TAIL)  # fmt: skip
            lse.index(stage).store(lse_row)
            delta.index(stage).store(delta_row)
            mbarrier.arrive(at, count=1)


@gluon.jit
def key_gradients(rows, queries, cleared, grads, angles, visited, scale_log2,
                  GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
                  ROTARY_DIM: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr,
                  PARTS: gl.constexpr):  # fmt: skip
    """A computing group of warps: the gradients of its rows of K and V."""
    _, tokens, first_segment, last_segment, block_start = visited
    k_main, k_tail, v_main, v_tail, full = rows
    k = (k_main.index(GROUP), k_tail.index(GROUP))
    v = (v_main.index(GROUP), v_tail.index(GROUP))
    k_grad_ptr, v_grad_ptr = grads
    STRIDE: gl.constexpr = PARTS * HEADS * HEAD_DIM
    if not_covered(visited):
        clear_rotated(k_grad_ptr, tokens - block_start, GROUP, STRIDE,
                      HEAD_DIM, ROTARY_DIM, MAIN, TAIL)  # fmt: skip
        clear_columns(v_grad_ptr, tokens - block_start, GROUP, STRIDE, HEAD_DIM, MAIN, TAIL)
    mbarrier.wait(full.index(0), 0)
    tile, clears = 0, 0
    for segment in tl.range(first_segment, last_segment + 1, disable_licm=True):
        start, end, tiles, first_queries = keys_of(visited, segment, QUERIES)
        k_acc, k_acc_tail, v_acc, v_acc_tail = visit_queries(
            k, v, queries, cleared, clears, tile, tiles, first_queries, scale_log2,
            GROUP, MAIN, TAIL,
        )  # fmt: skip
        tile += tiles
        clears += (first_queries < QUERIES).to(gl.int32)
        first, last = start - block_start, end - block_start
        store_columns(v_grad_ptr, first, last, None, v_acc, 0, GROUP, STRIDE, HEAD_DIM)
        if TAIL > 0:
            store_columns(v_grad_ptr, first, last, None, v_acc_tail, MAIN, GROUP, STRIDE, HEAD_DIM)
        store_rotated_back(
            k_grad_ptr, angles, first, last, k_acc, k_acc_tail,
            scale_log2 * LN_2, GROUP, STRIDE, HEAD_DIM, ROTARY_DIM, MAIN, TAIL,
        )  # fmt: skip


@gluon.jit
def visit_queries(k, v, queries, cleared, clears, tile, tiles, first_queries, scale_log2,
                  GROUP: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Over a segment's queries: gradients of a group's keys, rotated and not scaled, and of values.

    Keys run along the rows. A tile's last products are computed together with the next's logits,
    and waited for before the loop goes back: of products in flight there, ptxas lets each wait for
    the one before.
    """
    q_main, q_tail, grad_main, grad_tail, _, _, full, empty = queries
    k_acc, k_acc_tail = zero_sums(MAIN, TAIL)
    v_acc, v_acc_tail = zero_sums(MAIN, TAIL)
    stage, parity = stage_of(tile, QUERY_STAGES)
    mbarrier.wait(full.index(stage), parity)
    if first_queries < QUERIES:  # rows behind may be another segment's, whose NaN would meet zeros
        if GROUP == 0:
            clear_rows(q_main.index(stage), first_queries)
            if TAIL > 0:
                clear_rows(q_tail.index(stage), first_queries)
        else:
            clear_rows(grad_main.index(stage), first_queries)
            if TAIL > 0:
                clear_rows(grad_tail.index(stage), first_queries)
        wait_for_both(cleared, clears)
    logits = product(k, q_main.index(stage), q_tail.index(stage), TAIL)
    logits = warpgroup_mma_wait(0, deps=[logits])
    for i in range(1, tiles):
        k_acc, k_acc_tail, v_acc, v_acc_tail = add_queries(
            logits, v, queries, stage, scale_log2, k_acc, k_acc_tail, v_acc, v_acc_tail, TAIL
        )
        before = stage
        stage, parity = stage_of(tile + i, QUERY_STAGES)
        mbarrier.wait(full.index(stage), parity)
        logits = product(k, q_main.index(stage), q_tail.index(stage), TAIL)
        if TAIL > 0:
            logits, k_acc, k_acc_tail, v_acc, v_acc_tail = warpgroup_mma_wait(
                0, deps=[logits, k_acc, k_acc_tail, v_acc, v_acc_tail]
            )
        else:
            logits, k_acc, v_acc = warpgroup_mma_wait(0, deps=[logits, k_acc, v_acc])
        mbarrier.arrive(empty.index(before), count=1)
    k_acc, k_acc_tail, v_acc, v_acc_tail = add_queries(
        logits, v, queries, stage, scale_log2, k_acc, k_acc_tail, v_acc, v_acc_tail, TAIL
    )
    k_acc, k_acc_tail = wait_for_sums(k_acc, k_acc_tail, TAIL)
    v_acc, v_acc_tail = wait_for_sums(v_acc, v_acc_tail, TAIL)
    mbarrier.arrive(empty.index(stage), count=1)
    return k_acc, k_acc_tail, v_acc, v_acc_tail


@gluon.jit
def add_queries(logits, v, queries, stage, scale_log2, k_acc, k_acc_tail, v_acc, v_acc_tail,
                TAIL: gl.constexpr):  # fmt: skip
    """Start adding what a tile of queries has of the gradients, of its logits [ROWS, QUERIES]."""
    q_main, q_tail, grad_main, grad_tail, lse, delta, _, _ = queries
    COLUMN: gl.constexpr = gl.SliceLayout(0, sums_layout(QUERIES))
    p_grad = product(v, grad_main.index(stage), grad_tail.index(stage), TAIL)
    p = gl.exp2(logits * scale_log2 - lse.index(stage).load(COLUMN)[None, :])
    v_acc, v_acc_tail = add_product(
        p.to(q_main.dtype), grad_main.index(stage), grad_tail.index(stage), v_acc, v_acc_tail, TAIL
    )
    # All but the product just begun, which is two where there is a tail.
    p_grad = warpgroup_mma_wait(2 if TAIL > 0 else 1, deps=[p_grad])
    s_grad = p * (p_grad - delta.index(stage).load(COLUMN)[None, :])
    k_acc, k_acc_tail = add_product(
        s_grad.to(q_main.dtype), q_main.index(stage), q_tail.index(stage), k_acc, k_acc_tail, TAIL
    )
    return k_acc, k_acc_tail, v_acc, v_acc_tail
