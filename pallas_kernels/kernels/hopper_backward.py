"""Gradients of attention within long segments on Hopper GPUs: one group of warps loads, two
multiply.

The two kernels are stream_backward.py's, step by step; who loads and who multiplies is as in
hopper_stream.py. A program owns a block of queries, or of keys, half of it each group that
computes; it stays in shared memory, and a ring of tiles of the segment's keys, or queries, passes.

Of a tile that passes, two products give logits and dP; of what they make, in registers, one or two
more add to the gradients. Where registers are enough, those of a tile are computed together with
the first two of the next, and waited for once.

All tiles have a head's columns by sixteens, the last of no column 0: those of Q and K in paired
order, side by side, as Mosaic multiplies by tiles of any such width. Their gradients leave so, too:
rotate_back_kernel has the rest. A tile's rows of another segment are masked; where they are summed
over, they are overwritten by zeros before, as their infinities would meet zeros.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from pallas_kernels.kernels.hopper_softmax import (
    accumulator,
    ping_pong_arrive,
    ping_pong_wait,
)
from pallas_kernels.kernels.hopper_stream import LOADER_REGISTERS, REGISTERS, segments_of
from pallas_kernels.kernels.hopper_tiles import (
    GROUPS,
    ROW,
    ROWS,
    SUMS,
    Keys,
    Operand,
    Visited,
    by_rows,
    clear_rows,
    filled,
    iota,
    keys_of,
    load_tile,
    stage_of,
    store_masked,
    tile_of,
    whole_of,
)
from pallas_kernels.kernels.tiles import Ref, Scalar
from pallas_kernels.kernels.window_backward import LN_2
from pallas_kernels.launching.choose import BLOCK

# How a number for each column of a product's sums lies in registers.
COLUMN = SUMS.reduce(0)


class Ring(NamedTuple):
    """Tiles that pass.

    Attributes:
        operands: what has a tile in each stage.
        full: barriers, one for each stage: has it been loaded?
        empty: has it been read by all groups?
        cleared: have rows of other segments been overwritten? For each stage, as one group could
            otherwise do so twice before the other has looked.
        summed: of the operands those that sums run over the rows of.
    """

    operands: tuple[Operand, ...]
    full: Ref
    empty: Ref
    cleared: Ref
    summed: tuple[Operand, ...]

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.operands[0].tiles[0].shape[1]

    @property
    def stages(self) -> int:
        """How many there are."""
        return self.operands[0].tiles[0].shape[0]


def hopper_backward_q_kernel(
    # rotated q and k [rows, parts * heads * row], v, the result and its gradient
    # [rows, parts * heads * columns], with rows by eights; the log-sum-exp of each row, in powers
    # of two, and BLOCK rows of each program
    q_ref: Ref, k_ref: Ref, v_ref: Ref, out_ref: Ref, out_grad_ref: Ref, lse_ref: Ref,
    cu_seqlens_ref: Ref,
    # those to be written: rows' sums D of the result times its gradient, as the log-sum-exps; the
    # gradient of rotated q [rows, heads * row]
    delta_ref: Ref, grad_ref: Ref,
    # in shared memory, of each group: its queries, their result and its gradient, and numbers; in
    # place of the result then their gradient
    q_tiles: Ref, out_tiles: Ref, out_grad_tiles: Ref, lse_tiles: Ref, delta_tiles: Ref,
    # in each stage
    k_tiles: Ref, v_tiles: Ref,
    # barriers: has all of a group been loaded? See Ring; the groups' ping-pong
    loaded: Ref, full: Ref, empty: Ref, cleared: Ref, ping_pong: Ref | None,
    # where the interpreter has what it multiplies by
    s_grad_tiles: Ref | None,
    *,
    # where q, k and v lie
    parts: tuple[int, int, int],
    # scale times log2(e)
    scale_log2: float,
    # of a rotated head
    row: int,
    max_seqlen: int, tokens: int, heads: int, by_one_warp: bool, ahead: bool,
) -> None:  # fmt: skip
    """One program for each (head, block of queries); blocks run fastest and share K and V."""
    head, visited = block_of(cu_seqlens_ref, tokens, max_seqlen)
    place = functools.partial(place_of, head=head, heads=heads)
    q_part, k_part, v_part = parts
    kept = (
        place(q_ref, q_tiles, loaded, row, q_part),
        place(out_ref, out_tiles, loaded),
        place(out_grad_ref, out_grad_tiles, loaded),
        numbers_of(lse_ref, lse_tiles, loaded, head, tokens),
    )
    k = place(k_ref, k_tiles, full, row, k_part)
    v = place(v_ref, v_tiles, full, None, v_part)
    ring = Ring((k, v), full, empty, cleared, (k,))
    group = lax.axis_index("group")
    pl.when(group == GROUPS)(functools.partial(loading, kept, ring, visited, by_one_warp))

    @pl.when(group < GROUPS)
    def computing() -> None:
        mosaic.set_max_registers(REGISTERS, action="increase")
        q_tile, out_grad_tile = q_tiles.at[group], out_grad_tiles.at[group]
        out_tile, delta_tile = out_tiles.at[group], delta_tiles.at[group]
        s_grad_tile = None if s_grad_tiles is None else s_grad_tiles.at[group]
        mosaic.barrier_wait(loaded.at[group])
        delta = out_tile[...].astype(jnp.float32) * out_grad_tile[...].astype(jnp.float32)
        delta = jnp.sum(delta, axis=1)
        delta_tile[...] = delta
        mosaic.commit_smem()  # before anything is written where other threads may still read
        lse = mosaic.load(lse_tiles.at[group], layout=ROW, optimized=False)

        def logits_and_gradients(stage: Scalar, s_ref: Ref, p_grad_ref: Ref) -> None:
            mosaic.wgmma(s_ref, q_tile, k_tiles.at[stage].transpose((1, 0)))
            mosaic.wgmma(p_grad_ref, out_grad_tile, v_tiles.at[stage].transpose((1, 0)))

        def factors(
            stage: Scalar, bounds: tuple[Scalar, Scalar] | None, s: jax.Array, p_grad: jax.Array
        ) -> tuple[jax.Array, ...]:
            del stage
            p = jnp.exp2(s * scale_log2 - by_rows(lse, s))
            s_grad = p * (p_grad - by_rows(delta, s))
            return (masked(s_grad, bounds).astype(k_ref.dtype),)

        def add(accs: Sequence[Ref], factors: tuple[jax.Array, ...], stage: Scalar) -> None:
            multiply(accs[0], factors[0], s_grad_tile, k_tiles.at[stage])

        def store(mask: jax.Array, sums: tuple[jax.Array, ...]) -> None:
            store_masked(out_tile, mask, sums[0] * (scale_log2 * LN_2))

        out_tile[...] = filled(out_tile.shape, 0, SUMS, out_tile.dtype)  # of tokens of no segment
        widths = (out_tile.shape[-1],)
        steps = Steps(logits_and_gradients, factors, add, store, ahead)
        differentiate_rows(ring, visited, ping_pong, group, steps, widths)
        mosaic.commit_smem()
        first = visited.block_start + group * ROWS
        columns = pl.ds(head * row, out_tile.shape[-1])
        mosaic.copy_smem_to_gmem(out_tile, grad_ref.at[pl.ds(first, ROWS), columns])
        number = first_number(head, tokens) + first
        mosaic.copy_smem_to_gmem(delta_tile, delta_ref.at[pl.ds(number, ROWS)])
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)


def hopper_backward_kv_kernel(
    # as above; D, which that kernel wrote, is read
    q_ref: Ref, k_ref: Ref, v_ref: Ref, out_grad_ref: Ref, lse_ref: Ref, delta_ref: Ref,
    cu_seqlens_ref: Ref,
    # the gradients of rotated k [rows, heads * row] and of v [rows, heads * columns]
    k_grad_ref: Ref, v_grad_ref: Ref,
    # of each group: its keys and values, and their gradients
    k_tiles: Ref, v_tiles: Ref, k_grad_tiles: Ref, v_grad_tiles: Ref,
    # in each stage
    q_tiles: Ref, out_grad_tiles: Ref, lse_tiles: Ref, delta_tiles: Ref,
    loaded: Ref, full: Ref, empty: Ref, cleared: Ref, ping_pong: Ref | None,
    p_tiles: Ref | None, s_grad_tiles: Ref | None,
    *,
    parts: tuple[int, int, int], scale_log2: float, row: int,
    max_seqlen: int, tokens: int, heads: int, by_one_warp: bool, ahead: bool,
) -> None:  # fmt: skip
    """One program for each (head, block of keys); blocks run fastest and share Q and dO."""
    head, visited = block_of(cu_seqlens_ref, tokens, max_seqlen)
    place = functools.partial(place_of, head=head, heads=heads)
    q_part, k_part, v_part = parts
    kept = (
        place(k_ref, k_tiles, loaded, row, k_part),
        place(v_ref, v_tiles, loaded, None, v_part),
    )
    q = place(q_ref, q_tiles, full, row, q_part)
    out_grad = place(out_grad_ref, out_grad_tiles, full)
    lse = numbers_of(lse_ref, lse_tiles, full, head, tokens)
    delta = numbers_of(delta_ref, delta_tiles, full, head, tokens)
    ring = Ring((q, out_grad, lse, delta), full, empty, cleared, (q, out_grad))
    group = lax.axis_index("group")
    pl.when(group == GROUPS)(functools.partial(loading, kept, ring, visited, by_one_warp))

    @pl.when(group < GROUPS)
    def computing() -> None:
        mosaic.set_max_registers(REGISTERS, action="increase")
        k_tile, v_tile = k_tiles.at[group], v_tiles.at[group]
        k_grad_tile, v_grad_tile = k_grad_tiles.at[group], v_grad_tiles.at[group]
        p_tile = None if p_tiles is None else p_tiles.at[group]
        s_grad_tile = None if s_grad_tiles is None else s_grad_tiles.at[group]
        mosaic.barrier_wait(loaded.at[group])

        def logits_and_gradients(stage: Scalar, s_ref: Ref, p_grad_ref: Ref) -> None:
            # Keys run along the rows, so that what is made of these is multiplied from registers.
            mosaic.wgmma(s_ref, k_tile, q_tiles.at[stage].transpose((1, 0)))
            mosaic.wgmma(p_grad_ref, v_tile, out_grad_tiles.at[stage].transpose((1, 0)))

        def factors(
            stage: Scalar, bounds: tuple[Scalar, Scalar] | None, s: jax.Array, p_grad: jax.Array
        ) -> tuple[jax.Array, ...]:
            lse, delta = (
                mosaic.load(tiles.at[stage], layout=COLUMN, optimized=False)
                for tiles in (lse_tiles, delta_tiles)
            )
            p = jnp.exp2(s * scale_log2 - by_columns(lse, s))
            s_grad = p * (p_grad - by_columns(delta, s))
            return tuple(masked(x, bounds).astype(q_ref.dtype) for x in (p, s_grad))

        def add(accs: Sequence[Ref], factors: tuple[jax.Array, ...], stage: Scalar) -> None:
            (k_acc, v_acc), (p, s_grad) = accs, factors
            multiply(v_acc, p, p_tile, out_grad_tiles.at[stage])
            multiply(k_acc, s_grad, s_grad_tile, q_tiles.at[stage])

        def store(mask: jax.Array, sums: tuple[jax.Array, ...]) -> None:
            k_sums, v_sums = sums
            store_masked(k_grad_tile, mask, k_sums * (scale_log2 * LN_2))
            store_masked(v_grad_tile, mask, v_sums)

        grad_tiles = k_grad_tile, v_grad_tile
        for tile in grad_tiles:  # of tokens of no segment
            tile[...] = filled(tile.shape, 0, SUMS, tile.dtype)
        widths = tuple(tile.shape[-1] for tile in grad_tiles)
        steps = Steps(logits_and_gradients, factors, add, store, ahead)
        differentiate_rows(ring, visited, ping_pong, group, steps, widths)
        mosaic.commit_smem()
        rows = pl.ds(visited.block_start + group * ROWS, ROWS)
        width = k_grad_tile.shape[-1]
        for tile, ref, apart in (
            (k_grad_tile, k_grad_ref, row), (v_grad_tile, v_grad_ref, width)
        ):  # fmt: skip
            mosaic.copy_smem_to_gmem(tile, ref.at[rows, pl.ds(head * apart, width)])
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)


def block_of(cu_seqlens_ref: Ref, tokens: int, max_seqlen: int) -> tuple[Scalar, Visited]:
    """What a program is for: a head, and the segments that its block of rows meets."""
    blocks = pl.cdiv(tokens, BLOCK)
    program = lax.axis_index("program")
    block_start = lax.rem(program, blocks) * BLOCK
    block_end = jnp.minimum(block_start + BLOCK, tokens)
    segments = cu_seqlens_ref.shape[0] - 1
    met = segments_of(cu_seqlens_ref, block_start, block_end, segments, max_seqlen)
    return lax.div(program, blocks), Visited(cu_seqlens_ref, tokens, *met, block_start)


def place_of(
    ref: Ref, tiles: Ref, full: Ref, row: int | None = None, part: int = 0, *, head: Scalar,
    heads: int,
) -> Operand:  # fmt: skip
    """A head's tiles, of one part of so many heads.

    row: columns from one head to the next; None: a tile's.
    """
    row = row or tiles.shape[-1]
    return Operand(ref, ((part * heads + head) * row,), (tiles,), full, None)


def first_number(head: Scalar, tokens: int) -> Scalar:
    """Where a head's numbers start: they have BLOCK rows of each program."""
    return head * (pl.cdiv(tokens, BLOCK) * BLOCK)


def numbers_of(ref: Ref, tiles: Ref, full: Ref, head: Scalar, tokens: int) -> Operand:
    """A number for each row of a head."""
    return Operand(ref, (first_number(head, tokens),), (tiles,), full, None)


def loading(kept: Sequence[Operand], ring: Ring, visited: Visited, by_one_warp: bool) -> None:
    """The group that loads: see load_tiles."""
    mosaic.set_max_registers(LOADER_REGISTERS, action="decrease")
    load = functools.partial(load_tiles, kept, ring, visited)
    if by_one_warp:
        mosaic.warp_map(lambda warp: pl.when(warp == 0)(load))
    else:
        load()


def load_tiles(kept: Sequence[Operand], ring: Ring, visited: Visited) -> None:
    """The loading warp: what stays of each group, and all tiles that pass."""
    for group in range(GROUPS):
        for x in kept:
            load_tile(x, visited.block_start + group * ROWS, group, x.full.at[group])

    def load_segment(segment: Scalar, tile: Scalar) -> Scalar:
        keys = keys_of(visited, segment, ring.rows)

        @pl.loop(0, keys.tiles)
        def load_stage(i: Scalar) -> None:
            stage = stage_of(tile + i, ring.stages)
            row, _, _ = tile_of(keys, i, ring.rows)
            wait = functools.partial(mosaic.barrier_wait, ring.empty.at[stage])
            pl.when(tile + i >= ring.stages)(wait)
            for x in ring.operands:
                load_tile(x, row, stage, ring.full.at[stage])

        return tile + keys.tiles

    last_segment = visited.last_segment
    tiles = lax.fori_loop(visited.first_segment, last_segment + 1, load_segment, jnp.int32(0))
    # A barrier must not be left before it is waited for as often as it was completed.
    for stage in range(ring.stages):
        pl.when(stage < tiles)(functools.partial(mosaic.barrier_wait, ring.empty.at[stage]))


class Steps(NamedTuple):
    """What the kernels do with a tile that passes, each of which is a stage of the ring.

    Attributes:
        multiply: start computing logits and dP, into two sums.
        factors: of these, and from and to which row the segment is (None: all), what is multiplied
            by the tile.
        add: start adding those products.
        store: sums, of the rows of a mask.
        ahead: whether products are added together with the next tile's first.
    """

    multiply: Callable[[Scalar, Ref, Ref], None]
    factors: Callable[..., tuple[jax.Array, ...]]
    add: Callable[[Sequence[Ref], tuple[jax.Array, ...], Scalar], None]
    store: Callable[[jax.Array, tuple[jax.Array, ...]], None]
    ahead: bool


def differentiate_rows(
    ring: Ring, visited: Visited, ping_pong: Ref | None, group: Scalar, steps: Steps,
    # columns of what is summed
    widths: tuple[int, ...],
) -> None:  # fmt: skip
    """A computing group of warps: the gradients of its rows, segment by segment."""
    token = visited.block_start + group * ROWS + iota((ROWS,), 0, ROW)
    # As in hopper_stream.py: group 0 multiplies first, and also waits for what is left.
    pl.when(group == GROUPS - 1)(functools.partial(ping_pong_arrive, ping_pong, group))

    def differentiate(segment: Scalar, tile: Scalar) -> Scalar:
        keys = keys_of(visited, segment, ring.rows)
        visit = functools.partial(visit_segment, ring, ping_pong, group, steps, tile, keys)
        sums = pl.run_scoped(lambda *accs: visit(accs), *map(accumulator, widths))
        steps.store((token >= keys.start) & (token < keys.end), sums)
        return tile + keys.tiles

    segments = visited.first_segment, visited.last_segment + 1
    lax.fori_loop(*segments, differentiate, jnp.int32(0))
    pl.when(group == 0)(functools.partial(ping_pong_wait, ping_pong, group))


def visit_segment(
    ring: Ring, ping_pong: Ref | None, group: Scalar, steps: Steps,
    # number of the segment's first tile
    tile: Scalar, keys: Keys,
    # sums, 0 at first
    accs: Sequence[Ref],
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Over the tiles of a segment that pass: sums of what they make times themselves."""
    rows = ring.rows

    def bounds_of(i: Scalar) -> tuple[Scalar, Scalar]:
        _, low, high = tile_of(keys, i, rows)
        return low, high

    def products(i: Scalar, before: tuple[jax.Array, ...] | None) -> tuple[jax.Array, jax.Array]:
        """Of a tile, and of what the tile before it made, if any: waited for together."""
        stage, last = stage_of(tile + i, ring.stages), stage_of(tile + i - 1, ring.stages)

        def multiply(s_ref: Ref, p_grad_ref: Ref) -> tuple[jax.Array, jax.Array]:
            steps.multiply(stage, s_ref, p_grad_ref)
            if before is not None:
                steps.add(accs, before, last)
            mosaic.wgmma_wait(0)
            ping_pong_arrive(ping_pong, group)
            if before is not None:
                mosaic.barrier_arrive(ring.empty.at[last])
            return s_ref[...], p_grad_ref[...]

        ping_pong_wait(ping_pong, group)
        return pl.run_scoped(multiply, accumulator(rows), accumulator(rows))

    def finish(factors: tuple[jax.Array, ...], stage: Scalar) -> None:
        steps.add(accs, factors, stage)
        mosaic.wgmma_wait(0)
        mosaic.barrier_arrive(ring.empty.at[stage])

    def visit(is_whole: bool, i: Scalar, before: tuple[jax.Array, ...] | None) -> tuple:
        stage = stage_of(tile + i, ring.stages)
        mosaic.barrier_wait(ring.full.at[stage])
        bounds = None if is_whole else bounds_of(i)
        if bounds is not None:
            clear(ring, stage, *bounds, group)
        factors = steps.factors(stage, bounds, *products(i, before if steps.ahead else None))
        if steps.ahead:
            return factors
        finish(factors, stage)
        return ()

    factors = visit(False, jnp.int32(0), None)
    whole = whole_of(keys, rows)
    factors = lax.fori_loop(1, whole, functools.partial(visit, True), factors)
    factors = lax.fori_loop(whole, keys.tiles, functools.partial(visit, False), factors)
    if steps.ahead:
        finish(factors, stage_of(tile + keys.tiles - 1, ring.stages))
    return tuple(acc[...] for acc in accs)


def clear(ring: Ring, stage: Scalar, low: Scalar, high: Scalar, group: Scalar) -> None:
    """Zeros into other segments' rows of what is summed over: by one group, for all."""

    @pl.when((low > 0) | (high < ring.rows))
    def has_others() -> None:
        @pl.when(group == 0)
        def overwrite() -> None:
            for x in ring.summed:
                clear_rows(x.tiles[0].at[stage], low, high)
            mosaic.barrier_arrive(ring.cleared.at[stage])

        mosaic.barrier_wait(ring.cleared.at[stage])


def multiply(acc_ref: Ref, a: jax.Array, a_tile: Ref | None, b_tile: Ref) -> None:
    """Start adding the product of what is in registers and a tile."""
    if a_tile is not None:
        a_tile[...] = a
        # To the interpreter a number that was read may still be read when its stage is loaded anew,
        # unless there is a fence. As in FlashAttention-3 a GPU goes without: it has waited for what
        # the number was needed for.
        mosaic.commit_smem()
        a = a_tile
    mosaic.wgmma(acc_ref, a, b_tile)


def masked(x: jax.Array, bounds: tuple[Scalar, Scalar] | None) -> jax.Array:
    """0 in the columns before the first bound and from the second on."""
    if bounds is None:
        return x
    column = iota(x.shape, 1, SUMS)
    return jnp.where((column >= bounds[0]) & (column < bounds[1]), x, 0.0)


def by_columns(x: jax.Array, like: jax.Array) -> jax.Array:
    """A value for each column, for all its rows."""
    return lax.broadcast_in_dim(x, like.shape, (1,))
