"""Gradients by a kernel: of which calls, and their launch."""

import functools

import jax
from jax.typing import DTypeLike

from pallas_kernels.kernels.dialect import HAVE_TRITON
from pallas_kernels.kernels.window_backward import window_backward_kernel
from pallas_kernels.launching.choose import find_launch, head_split, window_limit
from pallas_kernels.launching.launch import run_all
from pallas_kernels.launching.plan import LOG2_E, operands


def has_backward(dtype: DTypeLike, head_dim: int, max_seqlen: int) -> bool:
    """Whether a kernel computes the gradients in Q, K and V: where the window kernel serves."""
    return HAVE_TRITON and max_seqlen <= window_limit(dtype, head_dim)


def attention_gradients(
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
    """The gradients in qkv, which is as `operands` takes it, by the kernel of `has_backward`.

    grad [tokens, heads, head_dim] is of the result.
    """
    (q, k, v), parts = operands(qkv)
    tokens, _, heads, head_dim = v.shape
    launch = find_launch("window_backward", v.dtype, head_dim, max_seqlen, tokens * heads)
    main, tail = head_split(head_dim)
    kernel = functools.partial(
        window_backward_kernel, parts=parts, scale_log2=scale * LOG2_E, main=main, tail=tail,
        block=launch.block, reload=launch.num_stages > 1, interpreted=interpret,
    )  # fmt: skip
    programs = (cu_seqlens.shape[0] - 1) * heads
    read = q, k, v, grad[:, None], cos, sin, cu_seqlens
    return run_all(kernel, programs, len(qkv), v.shape, v.dtype, launch, interpret, read)
