"""Softmax over a segment's keys in the warp-specialized kernel, by groups of warps.

By one reference a row, or online, as in softmax.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from pallas_kernels.kernels.hopper_tiles import (
    GROUPS,
    KEYS,
    ROW,
    ROWS,
    SUMS,
    Keys,
    Operand,
    by_rows,
    clear_rows,
    filled,
    iota,
    load_tile,
    stage_of,
    tile_of,
    whole_of,
)
from pallas_kernels.kernels.softmax import PARTS, reference_of
from pallas_kernels.kernels.tiles import Ref, Scalar

# Keys among which a row finds its reference: the stream kernel's tile, so that both round alike.
REFERENCE_KEYS = 64


def visit_segment(
    q_tiles: tuple[Ref, ...], k: Operand, v: Operand, ping_pong: Ref | None, p_tile: Ref | None,
    # number of the segment's first tile
    tile: Scalar, keys: Keys, scale_log2: float, group: Scalar,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Over a segment's keys, by one reference a row: sums of the probabilities, and of V by these.

    The first returned is what was subtracted from a row's scaled logits.

    The product of a tile's probabilities and V is computed together with the logits of the next,
    and groups play ping-pong with these: while one multiplies, the other takes exponentials.
    """
    width = v.tiles[0].shape[-1]

    def first_logits(logits_ref: Ref) -> jax.Array:
        key_logits(logits_ref, q_tiles, k, stage_of(tile))
        return logits_ref[...]

    mosaic.barrier_wait(k.full.at[stage_of(tile)])
    ping_pong_wait(ping_pong, group)
    logits = pl.run_scoped(first_logits, accumulator(KEYS))
    ping_pong_arrive(ping_pong, group)
    mosaic.barrier_arrive(k.empty.at[stage_of(tile)])
    _, low, high = tile_of(keys, 0)
    logits = masked(logits, low, high)
    among = masked(logits, low, low + REFERENCE_KEYS)
    reference = reference_of(jnp.max(among, axis=1), scale_log2) * scale_log2

    def probabilities(logits: jax.Array) -> jax.Array:
        return jnp.exp2(logits * scale_log2 - by_rows(reference, logits))

    def over_keys(acc_ref: Ref) -> tuple[jax.Array, jax.Array]:
        def visit(is_whole: bool, i: Scalar, carried: tuple) -> tuple:
            p, row_sums = carried
            before, stage = stage_of(tile + i - 1), stage_of(tile + i)

            def next_logits(logits_ref: Ref) -> jax.Array:
                key_logits(logits_ref, q_tiles, k, stage)
                mosaic.wgmma_wait(0)
                ping_pong_arrive(ping_pong, group)
                mosaic.barrier_arrive(k.empty.at[stage])
                mosaic.barrier_arrive(v.empty.at[before])
                return logits_ref[...]

            mosaic.barrier_wait(v.full.at[before])
            ping_pong_wait(ping_pong, group)
            add_values(acc_ref, p, p_tile, v, before)
            mosaic.barrier_wait(k.full.at[stage])
            logits = pl.run_scoped(next_logits, accumulator(KEYS))
            if not is_whole:
                _, low, high = tile_of(keys, i)
                logits = masked(logits, low, high)
            p = probabilities(logits)
            return p.astype(v.ref.dtype), row_sums + partial_sums(p)

        p = probabilities(logits)
        carried = p.astype(v.ref.dtype), partial_sums(p)
        whole = whole_of(keys)
        carried = lax.fori_loop(1, whole, functools.partial(visit, True), carried)
        p, row_sums = lax.fori_loop(whole, keys.tiles, functools.partial(visit, False), carried)
        last = stage_of(tile + keys.tiles - 1)
        mosaic.barrier_wait(v.full.at[last])
        add_values(acc_ref, p, p_tile, v, last)
        mosaic.wgmma_wait(0)
        mosaic.barrier_arrive(v.empty.at[last])
        return jnp.sum(row_sums, axis=1), acc_ref[...]

    return reference, *pl.run_scoped(over_keys, accumulator(width))


def uses_ping_pong(main: int, tail: int) -> bool:
    """Whether groups do: where there is a narrow tail. Products of 128 columns lose by it."""
    return 0 < tail < main


def ping_pong_wait(ping_pong: Ref | None, group: Scalar) -> None:
    """Wait until the other group's products have ended: with the tile before, or with this one."""
    if ping_pong is not None:
        mosaic.barrier_wait(ping_pong.at[group])


def ping_pong_arrive(ping_pong: Ref | None, group: Scalar) -> None:
    """Let the other group multiply."""
    if ping_pong is not None:
        mosaic.barrier_arrive(ping_pong.at[GROUPS - 1 - group])


def visit_online(
    q_tiles: tuple[Ref, ...], k: Operand, v: Operand, again: Ref, p_tile: Ref | None,
    keys: Keys, group: Scalar, scale_log2: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The same by online softmax, of tiles that the group loads itself, one after the other.

    The first returned is not scaled.
    """
    width = v.tiles[0].shape[-1]

    def visit(i: Scalar, carried: tuple) -> tuple:
        row_max, row_sum, acc = carried
        row, low, high = tile_of(keys, i)
        for x in (k, v):
            load_tile(x, row, group, again.at[group])
        mosaic.barrier_wait(again.at[group])
        # Other segments' rows, as their infinities would meet zeros.
        clear_rows(v.tiles[0].at[group], low, high)

        def product(logits_ref: Ref) -> jax.Array:
            key_logits(logits_ref, q_tiles, k, group)
            return logits_ref[...]

        logits = masked(pl.run_scoped(product, accumulator(KEYS)), low, high)
        new_max = jnp.maximum(row_max, jnp.max(logits, axis=1))
        p = jnp.exp2((logits - by_rows(new_max, logits)) * scale_log2)
        decay = jnp.exp2((row_max - new_max) * scale_log2)

        def values(acc_ref: Ref) -> jax.Array:
            add_values(acc_ref, p.astype(v.ref.dtype), p_tile, v, group)
            return acc_ref[...]

        acc = acc * by_rows(decay, acc) + pl.run_scoped(values, accumulator(width))
        return new_max, row_sum * decay + jnp.sum(p, axis=1), acc

    row_max = filled((ROWS,), -jnp.inf, ROW)
    row_sum = filled((ROWS,), 0.0, ROW)
    acc = filled((ROWS, width), 0.0, SUMS)
    return lax.fori_loop(0, keys.tiles, visit, (row_max, row_sum, acc))


def key_logits(acc_ref: Ref, q_tiles: tuple[Ref, ...], k: Operand, index: Scalar) -> None:
    """Start computing the logits [ROWS, KEYS] of a tile of keys, not scaled."""
    for q_tile, k_tile in zip(q_tiles, k.tiles, strict=True):
        mosaic.wgmma(acc_ref, q_tile, k_tile.at[index].transpose((1, 0)))


def add_values(acc_ref: Ref, p: jax.Array, p_tile: Ref | None, v: Operand, index: Scalar) -> None:
    """Start adding the product of p [ROWS, KEYS] and a tile of V."""
    if p_tile is not None:
        p_tile[...] = p
        p = p_tile
    mosaic.wgmma(acc_ref, p, v.tiles[0].at[index])


def accumulator(columns: int) -> Any:
    """Sums of a product, 0 at first.

    To be made behind the last barrier before the product, which then needs no zeros in registers.
    """
    return mosaic.ACC((ROWS, columns), jnp.float32)


def masked(logits: jax.Array, low: Scalar, high: Scalar) -> jax.Array:
    """-inf for the keys before `low` and from `high` on."""
    column = iota(logits.shape, 1, SUMS)
    return jnp.where((column >= low) & (column < high), logits, -jnp.inf)


def partial_sums(p: jax.Array) -> jax.Array:
    """Sums of a row [ROWS, PARTS] that take no exchange between threads, see softmax.py."""
    parts = (p[:, first : first + PARTS] for first in range(0, p.shape[1], PARTS))
    return functools.reduce(jnp.add, parts)
