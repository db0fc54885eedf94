"""The unfused computation in plain jnp: the oracle, the CPU path, the differentiable path."""

import jax
import jax.numpy as jnp

# Rows of Q whose logits exist at once: bounds the memory of a long segment.
QUERY_BLOCK = 256


def rotate_reference(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Split-half (NeoX) rotation in fp32, then back to the dtype of x.

    x [tokens, heads, head_dim]; cos and sin [tokens, rotary_dim / 2] fp32. The dims behind
    rotary_dim pass unrotated. x1' = x1 cos - x2 sin, x2' = x2 cos + x1 sin (Su et al., RoFormer,
    2021, in the layout of GPT-NeoX).
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    x1, x2, rest = jnp.split(x, (half, 2 * half), axis=-1)
    x1, x2 = x1.astype(jnp.float32), x2.astype(jnp.float32)
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)


def rope_attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cu_seqlens: jax.Array,
    scale: float,
    max_seqlen: int | None = None,
) -> jax.Array:
    """Rotate, then attend within segments; shapes as fused_rope_attention's.

    Logits and softmax in fp32, probabilities cast to the dtype of v, the second product summed in
    fp32. Tokens of no segment get 0. The values of cu_seqlens are unknown under jit, so a block of
    queries meets every key that a segment of max_seqlen tokens could reach, and a mask decides;
    rows of a longer segment are NaN.
    """
    tokens = q.shape[0]
    longest = tokens if max_seqlen is None else max(1, min(max_seqlen, tokens))
    block = min(QUERY_BLOCK, tokens)
    blocks = -(-tokens // block)
    span = min(tokens, block + 2 * (longest - 1))

    q, k = rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)
    bounds = jnp.clip(cu_seqlens, 0, tokens)
    segment = jnp.searchsorted(bounds, jnp.arange(tokens), side="right").astype(jnp.int32) - 1
    # Padding gets numbers that no key has: -1 before the first segment, -2 behind the last.
    segment = jnp.where(segment == len(cu_seqlens) - 1, -2, segment)
    lengths = jnp.diff(bounds, append=tokens)[segment]
    too_long = (segment >= 0) & (lengths > longest)

    def attend(first: jax.Array) -> jax.Array:
        # The last block is moved back to end with the tokens, and the keys to stay within them.
        first = jnp.minimum(first, tokens - block)
        first_key = jnp.clip(first - (longest - 1), 0, tokens - span)
        rows = jax.lax.dynamic_slice_in_dim(q, first, block)
        keys = jax.lax.dynamic_slice_in_dim(k, first_key, span)
        values = jax.lax.dynamic_slice_in_dim(v, first_key, span)
        row_segment = jax.lax.dynamic_slice_in_dim(segment, first, block)
        key_segment = jax.lax.dynamic_slice_in_dim(segment, first_key, span)
        return _attend(rows, keys, values, row_segment, key_segment, scale)

    out = jax.lax.map(attend, jnp.arange(blocks) * block)
    if tokens % block:
        # Rows that the moved last block has in common with its predecessor are taken once.
        out = jnp.concatenate([out[:-1].reshape(-1, *q.shape[1:]), out[-1, -(tokens % block) :]])
    out = out.reshape(q.shape)
    return jnp.where(too_long[:, None, None], jnp.nan, out)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    row_segment: jax.Array,
    key_segment: jax.Array,
    scale: float,
) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST
    mask = (row_segment[:, None] == key_segment[None, :]) & (row_segment >= 0)[:, None]
    logits = jnp.einsum(
        "qhd,khd->hqk", q, k, precision=precision, preferred_element_type=jnp.float32
    )
    # Masked logits are replaced before exp and after, so that neither values nor gradients overflow.
    row_max = jnp.max(jnp.where(mask, logits, -jnp.inf), axis=-1, keepdims=True)
    row_max = jax.lax.stop_gradient(jnp.where(jnp.isneginf(row_max), 0.0, row_max))
    p = jnp.where(mask, jnp.exp((jnp.where(mask, logits, row_max) - row_max) * scale), 0.0)
    normalizer = jnp.sum(p, axis=-1).T[..., None]
    out = jnp.einsum(
        "hqk,khd->qhd",
        p.astype(v.dtype),
        v,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return (out / jnp.where(normalizer == 0.0, 1.0, normalizer)).astype(v.dtype)
