"""The strongest unfused baselines in JAX: XLA's embedding before cuDNN's or XLA's attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from compare.implementations.kernels import KernelCall, KernelImplementation, require_jax_gpu
from compare.workloads.kernels import Embedding, KernelWorkload


def jax_peers(embedding: Embedding = "rope") -> list[KernelImplementation]:
    """Both attentions of jax.nn, on segments padded to the longest; fp32 is multiplied as such."""
    attentions = {"cuDNN (jax.nn)": "cudnn", "XLA attention": "xla"}
    return [
        KernelImplementation(f"XLA {embedding} + {name}", "jax", partial(_prepare, attention))
        for name, attention in attentions.items()
    ]


def _prepare(attention: str, workload: KernelWorkload) -> KernelCall:
    require_jax_gpu()
    # By default fp32 is multiplied in tf32.
    precision = "highest" if workload.dtype == "float32" else None
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
        embedded = _EMBEDDINGS[workload.embedding](qkv[:, :2], cos, sin)
        q, k, v = embedded[:, 0], embedded[:, 1], qkv[:, 2]
        if gather is not None:
            q, k, v = (x[gather] for x in (q, k, v))
        q, k, v = (x.reshape(segments, longest, heads, head_dim) for x in (q, k, v))
        with jax.default_matmul_precision(precision):
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


def _add(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    added = jnp.stack([sin, cos], axis=-1).reshape(len(sin), 1, 1, -1)
    return (x.astype(jnp.float32) + added).astype(x.dtype)


_EMBEDDINGS = {"rope": _rotate, "sinusoidal": _add}
