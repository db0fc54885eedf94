"""Gradients of long segments by the warp-specialized kernels, and their launches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.checks import NORM_EPS
from pallas_kernels.kernels.rotate import rotate_back_kernel
from pallas_kernels.launching.choose import (
    BLOCK,
    COLUMN_UNIT,
    find_launch,
    head_split,
    rows_of,
)
from pallas_kernels.launching.launch import run_all
from pallas_kernels.launching.plan import LOG2_E, rotate_by_kernel, rotate_first
from pallas_kernels.sharding import vary_as, varying_axes

# Wider heads' sums leave few registers.
_WIDEST_AT_EASE = 96


def hopper_gradients(
    grad: jax.Array,
    qkv: tuple[jax.Array, ...],
    cos: jax.Array,
    sin: jax.Array,
    cu_seqlens: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    *,
    max_seqlen: int,
    scale: float,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """The gradients in qkv, as `attention_gradients` has them.

    grad and out are [tokens, 1, heads, head_dim].
    """
    tokens, _, heads, head_dim = qkv[-1].shape
    packed = len(qkv) == 1
    rows = rows_of(tokens)
    width = pl.cdiv(head_dim, COLUMN_UNIT) * COLUMN_UNIT
    rotated = functools.partial(
        rotate_by_kernel, cos=cos, sin=sin, rows=rows, norm_eps=NORM_EPS, interpret=interpret,
        joined=True,
    )  # fmt: skip
    (q, k, v), parts, _ = rotate_first(qkv, rotated)
    if (rows, width) != (tokens, head_dim):  # copied to where tiles fit
        padding = (0, rows - tokens), (0, 0), (0, 0), (0, width - head_dim)
        v, out, grad = (jnp.pad(x, padding) for x in (v[:, parts[2] : parts[2] + 1], out, grad))
        parts = *parts[:2], 0
    if tokens % BLOCK > 0:
        lse = jnp.pad(lse, ((0, 0), (0, -tokens % BLOCK)))
    lse = lse.reshape(-1)
    q, k, v, out, grad = (x.reshape(rows, -1) for x in (q, k, v, out, grad))
    options = {"parts": parts, "scale_log2": scale * LOG2_E, "max_seqlen": min(max_seqlen, tokens)}
    options |= {"tokens": tokens, "heads": heads}
    run = functools.partial(_run, options, head_dim, interpret)
    delta, q_grad = run("q", q, k, v, out, grad, lse, cu_seqlens)
    k_grad, v_grad = run("kv", q, k, v, grad, lse, delta, cu_seqlens)

    q_grad, k_grad = (x.reshape(rows, heads, -1) for x in (q_grad, k_grad))
    v_grad = v_grad.reshape(rows, 1, heads, width)
    launch = find_launch("rotate", v.dtype, head_dim, 1, tokens * heads)
    main, tail = head_split(head_dim)
    kernel = functools.partial(
        rotate_back_kernel, main=main, tail=tail, block=launch.block, group=launch.block_k
    )
    programs = pl.cdiv(tokens, launch.block) * pl.cdiv(heads, launch.block_k)
    results = [((tokens, x.shape[1], heads, head_dim), x.dtype) for x in qkv[:2]]
    read = q_grad, k_grad, v_grad if packed else None, cos, sin
    found = run_all(kernel, programs, results, launch, interpret, read)
    return found if packed else (*found, v_grad[:tokens, ..., :head_dim])


def _run(
    options: dict[str, Any], head_dim: int, interpret: bool, which: str, *read: jax.Array
) -> tuple[jax.Array, ...]:
    """One kernel: "q" or "kv"."""
    # Here, as not every version of JAX has it.
    from jax.experimental.pallas import mosaic_gpu as mosaic

    from pallas_kernels.kernels.hopper_backward import (
        hopper_backward_kv_kernel,
        hopper_backward_q_kernel,
    )
    from pallas_kernels.kernels.hopper_softmax import uses_ping_pong
    from pallas_kernels.kernels.hopper_tiles import GROUPS, ROWS

    (rows, _), dtype, lse = read[0].shape, read[0].dtype, read[-2]
    tokens, heads = options["tokens"], options["heads"]
    width, split = pl.cdiv(head_dim, COLUMN_UNIT) * COLUMN_UNIT, head_split(head_dim)
    by_queries = which == "q"
    at_ease = head_dim <= _WIDEST_AT_EASE
    ahead = by_queries or at_ease
    # A ring holds a tile that is summed over, one that logits are made of, and one to come; the
    # first two are one where nothing is ahead.
    stages = 3 if ahead else 2
    # Rows of a tile that passes: of keys as many as leave registers for products in flight.
    passing = 128 if by_queries and at_ease else 64
    own = mosaic.SMEM((GROUPS, ROWS, width), dtype)
    tile = mosaic.SMEM((stages, passing, width), dtype)
    own_numbers = mosaic.SMEM((GROUPS, ROWS), jnp.float32)
    numbers = mosaic.SMEM((stages, passing), jnp.float32)
    gradient = jax.ShapeDtypeStruct((rows, heads * sum(split)), dtype)
    # The interpreter multiplies by nothing but shared memory.
    factors = mosaic.SMEM((GROUPS, ROWS, passing), dtype) if interpret else None
    if by_queries:
        kernel, copies = hopper_backward_q_kernel, (4, 2)
        results = jax.ShapeDtypeStruct(lse.shape, jnp.float32), gradient
        tiles = own, own, own, own_numbers, own_numbers, tile, tile
        factors = (factors,)
    else:
        kernel, copies = hopper_backward_kv_kernel, (2, 4)
        results = gradient, jax.ShapeDtypeStruct((rows, heads * width), dtype)
        tiles = own, own, own, own, tile, tile, numbers, numbers
        factors = (factors, factors)
    own_copies, passing_copies = copies
    ping_pong = mosaic.Barrier(num_arrivals=1, num_barriers=GROUPS)
    barriers = (
        mosaic.Barrier(num_arrivals=own_copies, num_barriers=GROUPS),
        mosaic.Barrier(num_arrivals=passing_copies, num_barriers=stages),
        mosaic.Barrier(num_arrivals=GROUPS, num_barriers=stages),
        mosaic.Barrier(num_arrivals=1, num_barriers=stages),
        ping_pong if uses_ping_pong(*split) else None,
    )
    # As of the forward kernel: under shard_map, JAX maps no warps over arrays that vary over axes
    # of a mesh, and the backend is not told that its results do.
    by_one_warp, vary = not varying_axes(*read), vary_as(*read)
    call = mosaic.kernel(
        functools.partial(kernel, row=sum(split), by_one_warp=by_one_warp, ahead=ahead, **options),
        out_type=results,
        scratch_types=(*tiles, *barriers, *factors),
        grid=(pl.cdiv(tokens, BLOCK) * heads,),
        grid_names=("program",),
        num_threads=GROUPS + 1,
        thread_name="group",
        # Exponentials by one instruction each.
        compiler_params=mosaic.CompilerParams(approx_math=True),
        interpret=mosaic.InterpretGPUParams() if interpret else None,
        kernel_name=kernel.__name__,
    )
    with jax.enable_x64(False):  # numbers of rows are 32-bit
        return tuple(map(vary, call(*read)))
