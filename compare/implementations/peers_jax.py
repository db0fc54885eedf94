"""The strongest unfused baselines in JAX: XLA's rotation in front of cuDNN's or XLA's attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from compare.implementations.kernels import KernelCall, KernelImplementation, require_jax_gpu
from compare.workloads.kernels import KernelWorkload


def jax_peers() -> list[KernelImplementation]:
    """Both attentions of jax.nn, on segments padded to the longest."""
    return [
        KernelImplementation("XLA rope + cuDNN (jax.nn)", "jax", partial(_prepare, "cudnn")),
        KernelImplementation("XLA rope + XLA attention", "jax", partial(_prepare, "xla")),
    ]


def _prepare(attention: str, workload: KernelWorkload) -> KernelCall:
    require_jax_gpu()
    lengths = workload.lengths
    segments, longest = len(lengths), int(lengths.max())
    if (lengths == longest).all():
        # Whole segments are a reshape away from a batch, and need no mask.
        gather = scatter = kv_lengths = None
    else:
        gather, scatter = padding_indices(lengths)
        kv_lengths = lengths.astype(np.int32)

    def call(qkv: jax.Array, cos: jax.Array, sin: jax.Array, cu_seqlens: jax.Array) -> jax.Array:
        del cu_seqlens  # the layout is static here, which is what these baselines need
        heads, head_dim = qkv.shape[2:]
        rotated = _rotate(qkv[:, :2], cos, sin)
        q, k, v = rotated[:, 0], rotated[:, 1], qkv[:, 2]
        if gather is not None:
            q, k, v = (x[gather] for x in (q, k, v))
        q, k, v = (x.reshape(segments, longest, heads, head_dim) for x in (q, k, v))
        out = jax.nn.dot_product_attention(
            q, k, v, key_value_seq_lengths=kv_lengths, implementation=attention
        ).reshape(segments * longest, heads, head_dim)
        return out if scatter is None else out[scatter]

    return jax.jit(call)


def padding_indices(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices that pad segments to the longest, and back.

    Args:
        lengths: [segments], tokens of each.

    Returns:
        [segments x longest]: the token that each padded row reads (a padding row reads some token
        of its own segment's neighbourhood, masked later), and [tokens]: each token's padded row.
    """
    starts = np.cumsum(lengths) - lengths
    column = np.arange(lengths.max())
    gather = np.minimum(starts[:, None] + column, lengths.sum() - 1)
    real = column < lengths[:, None]
    return gather.reshape(-1), np.flatnonzero(real)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = cos.shape[-1]
    cos, sin = cos[:, None, None], sin[:, None, None]
    x1 = x[..., :half].astype(jnp.float32)
    x2 = x[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., 2 * half :]], axis=-1)
