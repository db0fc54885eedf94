"""Gradients by kernels, and their launches."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.checks import MAX_TILED_HEAD_DIM, NORM_EPS
from pallas_kernels.kernels.stream import hoists
from pallas_kernels.kernels.stream_backward import (
    stream_backward_kv_kernel,
    stream_backward_q_kernel,
)
from pallas_kernels.kernels.window_backward import window_backward_kernel
from pallas_kernels.launching.choose import (
    find_launch,
    has_specialized_gradients,
    head_split,
    window_limit,
)
from pallas_kernels.launching.hopper_backward import hopper_gradients
from pallas_kernels.launching.launch import run_all
from pallas_kernels.launching.plan import LOG2_E, operands, rotate_by_kernel, rotate_first


def has_gradient_kernels(head_dim: int, embed: str) -> bool:
    """Whether kernels compute gradients in Q, K and V: of rotated heads that a tile holds."""
    return embed == "rope" and head_dim <= MAX_TILED_HEAD_DIM


def needs_lse(dtype: DTypeLike, head_dim: int, max_seqlen: int) -> bool:
    """Whether gradients in Q, K and V need what the forward pass keeps, as no tile holds a segment.

    In shorter ones all is computed again from what it read.
    """
    return max_seqlen > window_limit(dtype, head_dim)


def attention_gradients(
    grad: jax.Array,
    qkv: tuple[jax.Array, ...],
    cos: jax.Array,
    sin: jax.Array,
    cu_seqlens: jax.Array,
    *kept: jax.Array,
    max_seqlen: int,
    scale: float,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """The gradients in qkv, which is as `operands` takes it, by kernels.

    grad [tokens, heads, head_dim] is of the result; kept are the result and the log-sum-exp of each
    row, or nothing if `needs_lse` says so.
    """
    gradients = _stream_gradients if kept else _window_gradients
    tokens, _, heads, head_dim = qkv[-1].shape
    shape = grad.dtype, head_dim, max_seqlen, tokens, heads
    if kept and not interpret and has_specialized_gradients(*shape):
        gradients = hopper_gradients
    grad, *kept = (x[:, None] if x.ndim == 3 else x for x in (grad, *kept))
    bounds = {"max_seqlen": max_seqlen, "scale": scale}
    return gradients(grad, qkv, cos, sin, cu_seqlens, *kept, **bounds, interpret=interpret)


def _window_gradients(
    grad: jax.Array,
    qkv: tuple[jax.Array, ...],
    cos: jax.Array,
    sin: jax.Array,
    cu_seqlens: jax.Array,
    *,
    max_seqlen: int,
    scale: float,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    (q, k, v), parts = operands(qkv)
    tokens, _, heads, head_dim = v.shape
    launch = find_launch("window_backward", v.dtype, head_dim, max_seqlen, tokens * heads)
    main, tail = head_split(head_dim)
    kernel = functools.partial(
        window_backward_kernel, parts=parts, scale_log2=scale * LOG2_E, main=main, tail=tail,
        block=launch.block, reload=launch.num_stages > 1, interpreted=interpret,
    )  # fmt: skip
    programs = (cu_seqlens.shape[0] - 1) * heads
    read = q, k, v, grad, cos, sin, cu_seqlens
    return run_all(kernel, programs, [(v.shape, v.dtype)] * len(qkv), launch, interpret, read)


def _stream_gradients(
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
    tokens, _, heads, head_dim = qkv[-1].shape
    packed = len(qkv) == 1
    rotated = functools.partial(
        rotate_by_kernel, cos=cos, sin=sin, rows=tokens, norm_eps=NORM_EPS, interpret=interpret
    )
    (q, k, v), parts, _ = rotate_first(qkv, rotated)
    main, tail = head_split(head_dim)
    options = {
        "parts": parts, "scale_log2": scale * LOG2_E, "main": main, "tail": tail,
        "interpreted": interpret,
    }  # fmt: skip
    shape = v.dtype, head_dim, max_seqlen, tokens * heads
    disable_licm = not hoists(head_dim, v.dtype, None)
    gradient, numbers, last = (v.shape, v.dtype), (lse.shape, jnp.float32), (cos, sin, cu_seqlens)

    launch = find_launch("stream_backward_q", *shape)
    blocks = {"block": launch.block, "block_k": launch.block_k}
    kernel = functools.partial(stream_backward_q_kernel, **options, **blocks)
    programs = pl.cdiv(tokens, launch.block) * heads
    read = q, k, v, out, grad, lse, *last
    delta, found = run_all(
        kernel, programs, [numbers, gradient], launch, interpret, read, disable_licm
    )  # fmt: skip

    launch = find_launch("stream_backward_kv", *shape)
    blocks = {"block": launch.block, "block_k": launch.block_k}
    grad_parts = (1, 2) if packed else (0, 0)
    kernel = functools.partial(
        stream_backward_kv_kernel, grad_parts=grad_parts, **options, **blocks
    )
    programs = pl.cdiv(tokens, launch.block_k) * heads
    read = q, k, v, grad, lse, delta, *last
    how = launch, interpret, read, disable_licm
    if packed:
        return run_all(kernel, programs, [gradient], *how, (found,))
    return found, *run_all(kernel, programs, [gradient] * 2, *how)
