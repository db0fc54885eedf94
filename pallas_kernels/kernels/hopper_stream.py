"""Attention within long segments on Hopper GPUs: one group of warps loads, two multiply.

The result is the stream kernel's, of Q and K that were rotated beforehand. There every warp issues
copies, products and exponentials in turn, and waits for each. Here the GPU's copy engine (TMA)
fetches tiles of keys for two groups of warps that do nothing but compute, each for rows of its own,
so that one multiplies while the other takes exponentials. That division of labour is
FlashAttention-3's (https://arxiv.org/abs/2407.08608); softmax is by one reference a row, see
hopper_softmax.py.

For Pallas' Mosaic GPU backend: its Triton backend has no groups of warps, and no such copies. Here
these start at multiples of eight rows, of arrays that have rows by eights, so that a segment's
first tile has up to seven rows before it; and at multiples of sixteen columns: V of a head that
starts between them is loaded from eight before. Where there is no row they load zeros, and store
nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from pallas_kernels.kernels.hopper_softmax import (
    ping_pong_arrive,
    ping_pong_wait,
    visit_online,
    visit_segment,
)
from pallas_kernels.kernels.hopper_tiles import (
    GROUPS,
    ROW,
    ROWS,
    STAGES,
    SUMS,
    Operand,
    Visited,
    by_rows,
    filled,
    iota,
    keys_of,
    load_tile,
    stage_of,
    store_masked,
    tile_of,
)
from pallas_kernels.kernels.softmax import reference_fits
from pallas_kernels.kernels.stream import last_start_at
from pallas_kernels.kernels.tiles import Ref, Scalar
from pallas_kernels.launching.choose import BLOCK, COLUMN_UNIT, rotated_row

# Registers of a thread: logits, probabilities and sums fill those of a computing one.
REGISTERS = 240
LOADER_REGISTERS = 24


def hopper_stream_kernel(
    # q and k are [rows, parts * row], v is [rows, parts * heads * head_dim], with rows by eights,
    # and the result [tokens, heads * head_dim]
    q_ref: Ref, k_ref: Ref, v_ref: Ref, cu_seqlens_ref: Ref, out_ref: Ref,
    # log-sum-exp of each row, in powers of two, and BLOCK rows of each program; None: not wanted
    lse_ref: Ref | None,
    # in shared memory: tiles of Q, K (main and tail) and V, each group's result, its misfits and
    # its log-sum-exps
    q_tiles: tuple[Ref, ...], k_tiles: tuple[Ref, ...], v_tiles: tuple[Ref, ...],
    out_tiles: Ref, misfits_ref: Ref, lse_tiles: Ref | None,
    # barriers: see Operand; have all groups read all tiles; what each group loads itself; the
    # groups' ping-pong
    q_full: Ref, k_full: Ref, k_empty: Ref, v_full: Ref, v_empty: Ref,
    all_read: Ref, again: Ref, ping_pong: Ref | None,
    # where the interpreter has probabilities
    p_tiles: Ref | None,
    *,
    parts: tuple[int, int, int], scale_log2: float, max_seqlen: int, head_dim: int,
    # of Q, and of K and V
    heads: int, k_heads: int,
    # whether one warp of the loading group does the work of its four
    by_one_warp: bool,
) -> None:  # fmt: skip
    """One program for each (head, token block); blocks run fastest and share the head's K and V."""
    tokens = out_ref.shape[0]
    blocks = pl.cdiv(tokens, BLOCK)
    head = lax.div(lax.axis_index("program"), blocks)
    block_start = lax.rem(lax.axis_index("program"), blocks) * BLOCK
    block_end = jnp.minimum(block_start + BLOCK, tokens)
    segments = cu_seqlens_ref.shape[0] - 1
    visited = Visited(
        cu_seqlens_ref, tokens,
        *segments_of(cu_seqlens_ref, block_start, block_end, segments, max_seqlen),
        block_start,
    )  # fmt: skip

    q_part, k_part, v_part = parts
    k_head = head if k_heads == heads else lax.div(head, heads // k_heads)
    q_row, k_row = rotated_row(heads, head_dim), rotated_row(k_heads, head_dim)
    q_columns = rotated_columns(q_tiles, q_part * q_row, head, heads)
    k_columns = rotated_columns(k_tiles, k_part * k_row, k_head, k_heads)
    v_column, v_shift = (v_part * k_heads + k_head) * head_dim, None
    if head_dim % COLUMN_UNIT > 0:
        v_shift = lax.rem(v_column, COLUMN_UNIT)
        v_column = lax.div(v_column, COLUMN_UNIT) * COLUMN_UNIT
    q = Operand(q_ref, q_columns, q_tiles, q_full, None)
    k = Operand(k_ref, k_columns, k_tiles, k_full, k_empty)
    v = Operand(v_ref, (v_column,), v_tiles, v_full, v_empty)
    group = lax.axis_index("group")

    @pl.when(group == GROUPS)
    def loading() -> None:
        mosaic.set_max_registers(LOADER_REGISTERS, action="decrease")
        load = functools.partial(load_tiles, q, k, v, all_read, visited)
        if by_one_warp:
            mosaic.warp_map(lambda warp: pl.when(warp == 0)(load))
        else:
            load()

    @pl.when(group < GROUPS)
    def computing() -> None:
        mosaic.set_max_registers(REGISTERS, action="increase")
        out_tile = out_tiles.at[group]
        lse_tile = None if lse_tiles is None else lse_tiles.at[group]
        p_tile = None if p_tiles is None else p_tiles.at[group]
        attend_rows(
            q, k, v, all_read, again, ping_pong, out_tile, misfits_ref, lse_tile, p_tile, visited,
            group, v_shift, scale_log2,
        )  # fmt: skip
        mosaic.commit_smem()
        rows = pl.ds(block_start + group * ROWS, ROWS)
        pieces, _, width = out_tile.shape
        for i in range(pieces):
            columns = pl.ds(head * head_dim + i * width, width)
            mosaic.copy_smem_to_gmem(out_tile.at[i], out_ref.at[rows, columns])
        if lse_tile is not None:
            first = lax.axis_index("program") * BLOCK + group * ROWS
            mosaic.copy_smem_to_gmem(lse_tile, lse_ref.at[pl.ds(first, ROWS)])
        # Until they have been read: a kernel ends when all has been written.
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)


def rotated_columns(
    tiles: tuple[Ref, ...], first: Scalar, head: Scalar, heads: int
) -> tuple[Scalar, ...]:
    """Where a head's tiles start in a row of rotated heads from `first` on, see tiles.py."""
    columns = []
    for tile in tiles:
        columns.append(first + head * tile.shape[-1])
        first += heads * tile.shape[-1]
    return tuple(columns)


def segments_of(
    cu_seqlens_ref: Ref, block_start: Scalar, block_end: Scalar, segments: int, max_seqlen: int
) -> tuple[Scalar, Scalar]:
    """The first and the last segment that reach into a block; the first is 0 where none does."""
    # Images of one size mostly have one for each block, and where. To look takes one load.
    guess = jnp.minimum(lax.div(block_start, max_seqlen), segments - 1)
    start, end = cu_seqlens_ref[guess], cu_seqlens_ref[guess + 1]

    def search() -> tuple[Scalar, Scalar]:
        first = jnp.maximum(last_start_at(cu_seqlens_ref, block_start, segments), 0)
        return first, last_start_at(cu_seqlens_ref, block_end - 1, segments)

    return lax.cond((start <= block_start) & (block_end <= end), lambda: (guess, guess), search)


def load_tiles(q: Operand, k: Operand, v: Operand, all_read: Ref, visited: Visited) -> None:
    """The loading warp: the block's queries, and all keys and values of its segments."""
    for group in range(GROUPS):
        load_tile(q, visited.block_start + group * ROWS, group, q.full.at[group])

    def load_segment(segment: Scalar, tile: Scalar) -> Scalar:
        keys = keys_of(visited, segment)

        @pl.loop(0, keys.tiles)
        def load_stage(i: Scalar) -> None:
            stage = stage_of(tile + i)
            row, _, _ = tile_of(keys, i)
            for x in (k, v):
                wait = functools.partial(mosaic.barrier_wait, x.empty.at[stage])
                pl.when(tile + i >= STAGES)(wait)
                load_tile(x, row, stage, x.full.at[stage])

        return tile + keys.tiles

    last_segment = visited.last_segment
    tiles = lax.fori_loop(visited.first_segment, last_segment + 1, load_segment, jnp.int32(0))
    # A barrier must not be left before it is waited for as often as it was completed.
    for stage in range(STAGES):
        for x in (k, v):
            pl.when(stage < tiles)(functools.partial(mosaic.barrier_wait, x.empty.at[stage]))
    mosaic.barrier_wait(all_read)


def attend_rows(
    q: Operand, k: Operand, v: Operand, all_read: Ref, again: Ref, ping_pong: Ref | None,
    # the group's tile [pieces, ROWS, columns], and all groups' rows [GROUPS, ROWS]
    out_tile: Ref, misfits_ref: Ref, lse_tile: Ref | None, p_tile: Ref | None,
    visited: Visited, group: Scalar,
    # columns before the head's in tiles of V; None: never any
    v_shift: Scalar | None,
    scale_log2: float,
) -> None:  # fmt: skip
    """A computing group of warps: the result of its rows, into its tile of the result."""
    q_tiles = tuple(tile.at[group] for tile in q.tiles)
    token = visited.block_start + group * ROWS + iota((ROWS,), 0, ROW)
    for i in range(out_tile.shape[0]):  # of tokens of no segment
        out_tile[i] = filled(out_tile.shape[1:], 0, SUMS, out_tile.dtype)
    if lse_tile is not None:
        lse_tile[...] = filled((ROWS,), 0.0, ROW)
    mosaic.barrier_wait(q.full.at[group])
    # Group 0 multiplies first, and also waits for what is left after all tiles: a barrier has to be
    # waited for as often as it was completed.
    pl.when(group == GROUPS - 1)(functools.partial(ping_pong_arrive, ping_pong, group))

    def attend(segment: Scalar, carried: tuple) -> tuple:
        tile, misfits = carried
        keys = keys_of(visited, segment)
        reference, row_sum, acc = visit_segment(
            q_tiles, k, v, ping_pong, p_tile, tile, keys, scale_log2, group
        )
        out = divided(row_sum, acc, v_shift, out_tile)
        mask = (token >= keys.start) & (token < keys.end)
        store_rows(out_tile, mask, out)  # also rows that do not fit, which are written over later
        if lse_tile is not None:
            store_numbers(lse_tile, mask, reference + jnp.log2(row_sum))
        fits = reference_fits(row_sum, out, None, out_tile.dtype)
        return tile + keys.tiles, jnp.where(fits, misfits, jnp.where(mask, 1, misfits))

    segments = visited.first_segment, visited.last_segment + 1
    misfits = filled((ROWS,), 0, ROW, jnp.int32)
    _, misfits = lax.fori_loop(*segments, attend, (jnp.int32(0), misfits))
    pl.when(group == 0)(functools.partial(ping_pong_wait, ping_pong, group))
    mosaic.barrier_arrive(all_read)
    # Each warp adds up those of all rows: for sums across warps, both groups would have one place.
    misfits_ref[group] = misfits
    all_rows = mosaic.load(misfits_ref.at[group], layout=SUMS.reduce(0), optimized=False)

    @pl.when(jnp.sum(all_rows) > 0)
    def attend_again() -> None:
        """Rows that their reference does not fit."""
        mosaic.barrier_wait(all_read)

        @pl.loop(*segments)
        def attend_online(segment: Scalar) -> None:
            keys = keys_of(visited, segment)
            row_max, row_sum, acc = visit_online(
                q_tiles, k, v, again, p_tile, keys, group, scale_log2
            )
            again_rows = mosaic.load(misfits_ref.at[group], layout=ROW, optimized=False)
            mask = (token >= keys.start) & (token < keys.end) & (again_rows > 0)
            store_rows(out_tile, mask, divided(row_sum, acc, v_shift, out_tile))
            if lse_tile is not None:
                store_numbers(lse_tile, mask, row_max * scale_log2 + jnp.log2(row_sum))


def divided(row_sum: jax.Array, acc: jax.Array, v_shift: Scalar | None, out_tile: Ref) -> jax.Array:
    """The result [ROWS, head_dim], not cast yet, of sums that may have more columns than a head."""
    out = acc * by_rows(1.0 / row_sum, acc)
    if v_shift is None:
        return out
    head_dim = out_tile.shape[0] * out_tile.shape[2]
    return lax.cond(v_shift > 0, lambda x: x[:, -head_dim:], lambda x: x[:, :head_dim], out)


def store_rows(out_tile: Ref, mask: jax.Array, out: jax.Array) -> None:
    """Write some rows of the result."""
    pieces, _, columns = out_tile.shape
    for i in range(pieces):
        store_masked(out_tile.at[i], mask, out[:, i * columns : (i + 1) * columns])


def store_numbers(tile: Ref, mask: jax.Array, numbers: jax.Array) -> None:
    """Write a number for each of some rows."""
    tile[...] = jnp.where(mask, numbers, mosaic.load(tile, layout=ROW, optimized=False))
