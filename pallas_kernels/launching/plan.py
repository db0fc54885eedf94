"""All launches of a call: first rotations, if any, then attention."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.checks import NO_NORMS, Norms
from pallas_kernels.kernels.dialect import HAVE_TRITON
from pallas_kernels.kernels.rotate import rotate_kernel
from pallas_kernels.kernels.softmax import is_online
from pallas_kernels.kernels.stream import hoists, stream_kernel
from pallas_kernels.kernels.tiles import rotate_pairs
from pallas_kernels.kernels.wide import wide_kernel
from pallas_kernels.kernels.window import window_kernel
from pallas_kernels.launching.choose import (
    INVARIANT_LENGTH,
    INVARIANT_ROWS,
    column_splits,
    find_launch,
    head_split,
    invariant_limit,
    is_warp_specialized,
    is_wide,
    out_shares,
    precision,
    rotated_row,
    rows_of,
    tiles_fit,
    window_limit,
)
from pallas_kernels.launching.launch import run, run_all, run_hopper_stream
from pallas_kernels.reference import normalize_reference
from pallas_kernels.sinusoidal import cos_and_sin, frequency_steps

LOG2_E = 1.4426950408889634


def operands(qkv: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], tuple[int, int, int]]:
    """The arrays that hold q, k and v, and the part of each that does.

    qkv is one packed [tokens, 3, heads, head_dim], or q, k, v [tokens, 1, heads, head_dim].
    """
    return (qkv * 3, (0, 1, 2)) if len(qkv) == 1 else (qkv, (0, 0, 0))


class Serving(NamedTuple):
    """Which segments launches are for, and what they are looked up by."""

    max_seqlen: int
    rows: int | None = None  # tokens x heads; None: the call's
    shortest: int = 0  # of the stream kernel: shorter segments are another launch's
    shared: bool = False  # of the window kernel: longer segments, and padding, are another launch's


def attend(
    *arrays: tuple | jax.Array, max_seqlen: int, fuse: str, batch_invariant: bool, **options: Any
) -> tuple[jax.Array, ...]:
    """The operation on the GPU, or in Pallas' interpreter; returns [tokens, heads, head_dim].

    And, if they are kept, the log-sum-exp of each row [heads, tokens], in powers of two.

    Where it is batch-invariant a segment's own length alone says what serves it: short ones, and
    the others, go to a kernel each, by launches that no size decides.

    Args:
        arrays: qkv as `operands` takes it, norms, cos, sin and cu_seqlens.
        max_seqlen, scale, batch_invariant, norm_eps: as in fused_rope_attention.
        fuse: "qk", "q" or "none"; or "auto", if it is batch-invariant.
        interpret: in Pallas' interpreter.
        keeps_lse: whether log-sum-exps are written, for a backward pass.
    """
    if not batch_invariant:
        return _attend(*arrays, serving=Serving(max_seqlen), fuse=fuse, **options)
    v = arrays[0][-1]
    if is_wide(v.shape[-1]):  # of which the programs that share one depend on sizes
        serving, fuse = (
            Serving(INVARIANT_LENGTH, INVARIANT_ROWS),
            "none" if fuse == "auto" else fuse,
        )
        return _attend(*arrays, serving=serving, fuse=fuse, **options)
    limit = invariant_limit(v.dtype, v.shape[-1])
    short = Serving(limit, INVARIANT_ROWS, shared=max_seqlen > limit)
    short = functools.partial(
        _attend, *arrays, serving=short, fuse="qk" if fuse == "auto" else fuse, **options
    )
    if max_seqlen <= limit:
        return short()
    others = Serving(INVARIANT_LENGTH, INVARIANT_ROWS, shortest=limit + 1)
    fuse = "none" if fuse == "auto" else fuse
    # First, as the stream kernel puts what it rotates into all rows of the result.
    return short(written=_attend(*arrays, serving=others, fuse=fuse, **options))


def _attend(
    qkv: tuple[jax.Array, ...],
    norms: Norms,
    cos: jax.Array,
    sin: jax.Array,
    cu_seqlens: jax.Array,
    *,
    serving: Serving,
    scale: float,
    fuse: str,
    interpret: bool,
    norm_eps: float,
    embed: str,
    keeps_lse: bool = False,
    written: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, ...]:
    """What one attention kernel does of it; fuse is not "auto".

    written: what is written to, where the kernel does not write all of it.
    """
    (q, k, v), _ = operands(qkv)
    tokens, _, heads, head_dim = q.shape
    k_heads = k.shape[2]
    if embed == "positions":
        sin = jnp.asarray(frequency_steps(head_dim))  # behind positions, which are in cos' place
    if (
        fuse == "qk"
        and norms[1] is not None
        and serving.max_seqlen > window_limit(v.dtype, head_dim)
    ):
        fuse = "q"  # the stream kernel would normalise every key for every block of queries
    shape = v.dtype, head_dim, serving.max_seqlen, tokens, heads
    # Of batch-invariant calls none is, as that is for calls that fill a GPU.
    may_be = fuse == "none" and not interpret and serving.rows is None
    warp_specialized = may_be and is_warp_specialized(*shape)
    warp_specialized = warp_specialized and tiles_fit(tokens, k_heads, head_dim)
    rows = rows_of(tokens) if warp_specialized else tokens
    rotate = (
        functools.partial(rotate_by_kernel, interpret=interpret, looked_up=serving.rows)
        if HAVE_TRITON
        else rotate_by_xla
    )
    rotated = functools.partial(rotate, cos=cos, sin=sin, rows=rows, norm_eps=norm_eps, embed=embed)
    (q, k, v), parts, norms = rotate_first(qkv, rotated, fuse, norms)
    scale_log2 = scale * LOG2_E
    if warp_specialized:
        guess = min(serving.max_seqlen, tokens)
        how = parts, scale_log2, guess, keeps_lse
        return run_hopper_stream(q, k, v, cu_seqlens, heads, *how)
    read = q, k, v, cos, sin, cu_seqlens, *norms
    how = scale_log2, serving, fuse, norm_eps, interpret, keeps_lse, written, embed
    return _attention(read, heads, parts, *how)


def rotate_first(
    qkv: tuple[jax.Array, ...],
    rotated: Callable[..., jax.Array],
    fuse: str = "none",
    norms: Norms = NO_NORMS,
) -> tuple[tuple[jax.Array, ...], tuple[int, int, int], Norms]:
    """Q, K and V, rotated beforehand as far as `fuse` says; where they lie; norms that are left.

    rotated: makes so many parts of an array, as `rotate_by_kernel` does.
    """
    (q, k, v), (q_part, k_part, v_part) = operands(qkv)
    q_norm, k_norm = norms
    if fuse == "none" and len(qkv) == 1 and (q_norm is None) == (k_norm is None):
        q = k = rotated(q, q_part, 2, norms=norms)
        q_part, k_part, q_norm, k_norm = 0, 1, None, None
    else:
        if fuse == "none":
            q, q_part, q_norm = rotated(q, q_part, 1, norms=(q_norm,)), 0, None
        if fuse != "qk":
            k, k_part, k_norm = rotated(k, k_part, 1, norms=(k_norm,)), 0, None
    return (q, k, v), (q_part, k_part, v_part), (q_norm, k_norm)


def rotate_by_kernel(
    x: jax.Array, first_part: int, parts: int,
    cos: jax.Array, sin: jax.Array, rows: int, norms: tuple[jax.Array | None, ...], norm_eps: float,
    interpret: bool, looked_up: int | None = None, embed: str = "rope", joined: bool = False,
) -> jax.Array:  # fmt: skip
    """So many parts of x rotated, [rows, parts, row] as the attention kernels read them.

    norms: of each part, all or none. looked_up: tokens x heads that the launch is looked up by;
    None: those of x. joined: [rows, parts * heads, columns], a head's tiles side by side.
    """
    tokens, _, heads, head_dim = x.shape
    launch = find_launch("rotate", x.dtype, head_dim, 1, looked_up or tokens * heads)
    main, tail = head_split(head_dim)
    blocks = {"block": launch.block, "group": launch.block_k}
    blocks |= {"norm_eps": norm_eps, "embed": embed, "joined": joined}
    blocks |= {"main": main, "tail": tail, "columns": launch.columns}
    kernel = functools.partial(rotate_kernel, first_part=first_part, **blocks)
    weights = tuple(weight for weight in norms if weight is not None)
    programs = pl.cdiv(tokens, launch.block) * parts * pl.cdiv(heads, launch.block_k)
    shape = (rows, parts, rotated_row(heads, head_dim))
    if joined:
        shape = (rows, parts * heads, main + tail)
    if launch.columns is not None:
        row = rotated_row(1, head_dim, in_chunks=True)
        programs, shape = programs * (row // launch.columns), (rows, parts, heads, row)
    return run(kernel, programs, shape, x.dtype, launch, interpret, (x, cos, sin, weights))


def rotate_by_xla(
    x: jax.Array, first_part: int, parts: int,
    cos: jax.Array, sin: jax.Array, rows: int, norms: tuple[jax.Array | None, ...], norm_eps: float,
    embed: str = "rope",
) -> jax.Array:  # fmt: skip
    """What `rotate_by_kernel` returns, where there is no Triton to write its kernel for."""
    (tokens, _, heads, head_dim), dtype = x.shape, x.dtype
    if embed == "positions":
        cos, sin = cos_and_sin(cos[:, None], *sin)
    half, rest = cos.shape[1], head_dim // 2 - cos.shape[1]
    x = x[:, first_part : first_part + parts]
    if norms[0] is not None:
        of_parts = zip(x.swapaxes(0, 1), norms, strict=True)
        x = jnp.stack([normalize_reference(*part, norm_eps) for part in of_parts], axis=1)
    if embed == "rope":
        first, second, *passed = jnp.split(x, (half, 2 * half, 2 * half + rest), axis=-1)
        pair = jnp.concatenate([first, passed[0]], -1), jnp.concatenate([second, passed[1]], -1)
        angles = ((0, 0), (0, rest))  # dims that pass unrotated have angles of 0
        cos = jnp.pad(cos, angles, constant_values=1)[:, None, None]
        sin = jnp.pad(sin, angles)[:, None, None]
        columns = jnp.stack(rotate_pairs(pair, cos, sin), axis=-1).reshape(x.shape).astype(dtype)
    else:
        added = jnp.stack([sin, cos], axis=-1).reshape(tokens, 1, 1, head_dim)
        columns = (x.astype(jnp.float32) + added).astype(dtype)
    main, tail = head_split(head_dim)
    columns = jnp.pad(columns, ((0, 0), (0, 0), (0, 0), (0, main + tail - head_dim)))
    tiles = [tile.reshape(tokens, parts, -1) for tile in jnp.split(columns, (main,), axis=-1)]
    row = jnp.concatenate(tiles, axis=-1)
    padding = (0, rows - tokens), (0, 0), (0, rotated_row(heads, head_dim) - row.shape[-1])
    return jnp.pad(row, padding)


def _attention(
    read: tuple[jax.Array | None, ...],
    heads: int,
    parts: tuple[int, int, int],
    scale_log2: float,
    serving: Serving,
    fuse: str,
    norm_eps: float,
    interpret: bool,
    keeps_lse: bool,
    written: tuple[jax.Array, ...],
    embed: str,
) -> tuple[jax.Array, ...]:
    """Attention that reads (q, k, v, cos, sin, cu_seqlens), of the first three one part each, and
    the norms of what is rotated here; q is of so many heads.

    fuse: "qk", or what is rotated already, K ("q") or both. written: as in `_attend`.
    """
    _, _, v, _, _, cu_seqlens, _, _ = read
    tokens, _, _, head_dim = v.shape
    segments = cu_seqlens.shape[0] - 1
    max_seqlen, looked_up, shortest, shared = serving
    shape = v.dtype, head_dim, max_seqlen, looked_up or tokens * heads
    products = "ieee" if interpret else precision(v.dtype, max_seqlen)
    if is_wide(head_dim) and max_seqlen <= window_limit(v.dtype, head_dim):
        return _wide_attention(
            read[:6], heads, parts, scale_log2, serving, fuse, interpret, embed, products
        )
    main, tail = head_split(head_dim)
    if max_seqlen <= window_limit(v.dtype, head_dim):
        launch = find_launch("window", *shape)
        kernel, programs, blocks = window_kernel, segments * heads, {"shared": shared}
    else:
        launch = find_launch("rotating_stream" if fuse == "qk" else "stream", *shape)
        kernel, programs = stream_kernel, pl.cdiv(tokens, launch.block) * heads
        online = is_online(v.dtype, head_dim, max_seqlen)
        blocks = {"online": online, "block_k": launch.block_k, "shortest": shortest}
        blocks |= {"columns": launch.columns, "precision": "ieee"}
        if launch.columns is not None:  # else a tile holds a wide head, too
            main, tail = launch.out_columns, 0
            programs *= pl.cdiv(head_dim, main)
            blocks["precision"] = products
    kernel = functools.partial(
        kernel, parts=parts, scale_log2=scale_log2, main=main, tail=tail, block=launch.block,
        embed_q=embed if fuse != "none" else None, embed_k=embed if fuse == "qk" else None,
        norm_eps=norm_eps, interpreted=interpret,
        **blocks,
    )  # fmt: skip
    results = [((tokens, 1, heads, head_dim), v.dtype)]
    if keeps_lse:
        results.append(((heads, tokens), jnp.float32))
    disable_licm = not hoists(head_dim, v.dtype, launch.columns)
    written = (written[0][:, None], *written[1:]) if written else ()
    how = launch, interpret, read, disable_licm, written
    out, *lse = run_all(kernel, programs, results, *how)
    return out[:, 0], *lse


def _wide_attention(
    read: tuple[jax.Array, ...],
    heads: int,
    parts: tuple[int, int, int],
    scale_log2: float,
    serving: Serving,
    fuse: str,
    interpret: bool,
    embed: str,
    products: str,
) -> tuple[jax.Array]:
    """Attention within short segments of wide heads; arguments as of `_attention`.

    products: how fp32 is multiplied, see `tiles.dot`.
    """
    _, _, v, _, _, cu_seqlens = read
    tokens, _, _, head_dim = v.shape
    shape = v.dtype, head_dim, serving.max_seqlen, serving.rows or tokens * heads
    launch = find_launch("wide", *shape)
    pairs, block = (cu_seqlens.shape[0] - 1) * heads, launch.block
    splits = column_splits(pairs, head_dim, launch.columns, block)
    shares, rows = 1, block
    if splits > 1:
        shares, rows = out_shares(pairs, head_dim, launch.columns, block)
    kernel = functools.partial(
        wide_kernel, parts=parts, heads=heads, scale_log2=scale_log2, columns=launch.columns,
        precision=products, embed_q=embed if fuse != "none" else None,
        embed_k=embed if fuse == "qk" else None, block=block, splits=splits,
        out_splits=shares, out_rows=rows, interpreted=interpret,
    )  # fmt: skip
    how, partial = (launch, interpret), None
    if splits > 1:
        first, written = functools.partial(kernel, is_first=True), (pairs, splits, block, block)
        partial = run(first, pairs * splits, written, jnp.float32, *how, (*read, None))
    last, programs = functools.partial(kernel, is_first=False), pairs * shares * (block // rows)
    shape = tokens, 1, heads, head_dim
    return (run(last, programs, shape, v.dtype, *how, (*read, partial))[:, 0],)
