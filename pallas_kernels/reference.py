"""The unfused computation in plain jnp: the oracle, the CPU path, the differentiable path."""

import functools

import jax
import jax.numpy as jnp

# Rows of Q whose logits exist at once: bounds the memory of a long segment.
QUERY_BLOCK = 256

# Like cu_seqlens, whatever width integers have by default.
_integers = functools.partial(jnp.arange, dtype=jnp.int32)


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
    """Rotate, then attend segment by segment; shapes as fused_rope_attention's.

    Logits and softmax in fp32, probabilities cast to the dtype of v, the second product summed in
    fp32. Tokens of no segment get 0. The values of cu_seqlens are unknown under jit, so a step
    takes a block of rows and room for max_seqlen keys; rows of a longer segment are NaN.
    """
    tokens, segments = q.shape[0], cu_seqlens.shape[0] - 1
    if tokens == 0:
        return jnp.zeros_like(v)
    longest = tokens if max_seqlen is None else max(1, min(max_seqlen, tokens))
    block = min(QUERY_BLOCK, longest)
    q, k = rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)
    bounds = jnp.clip(cu_seqlens, 0, tokens)

    def attend(out: jax.Array, start: jax.Array, end: jax.Array, first: jax.Array) -> jax.Array:
        row, key = first + _integers(block), start + _integers(longest)
        take = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)
        key = jnp.where(key < end, key, tokens)  # past the end: read as 0, and masked
        row = jnp.where(row < end, row, tokens)  # past the end: not written
        attended = _attend(take(q, row), take(k, key), take(v, key), key < tokens, scale)
        return out.at[row].set(attended, mode="drop")

    # The backward pass attends again: kept, the logits would be those of every step, and a scan
    # keeps as many for an empty segment as for the longest.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(out: jax.Array, place: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        segment, i = place
        start, end = bounds[segment], bounds[segment + 1]
        first = start + i * block
        visited = (first < end) & (end - start <= longest)
        return jax.lax.cond(visited, attend, lambda out, *_: out, out, start, end, first), None

    blocks = -(-longest // block)
    places = jnp.divmod(_integers(segments * blocks), blocks)
    out, _ = jax.lax.scan(step, jnp.zeros_like(v), places)

    return refuse_longer(out, cu_seqlens, max_seqlen)


def refuse_longer(x: jax.Array, cu_seqlens: jax.Array, max_seqlen: int | None) -> jax.Array:
    """x [tokens, ...] with NaN for the tokens of segments longer than max_seqlen.

    A segment that breaks the promise of max_seqlen must not pass for a result.
    """
    tokens, segments = x.shape[0], cu_seqlens.shape[0] - 1
    if max_seqlen is None or max_seqlen >= tokens or segments == 0:
        return x
    bounds, row = jnp.clip(cu_seqlens, 0, tokens), _integers(tokens)
    segment = jnp.clip(jnp.searchsorted(bounds, row, side="right") - 1, 0, segments - 1)
    start, end = bounds[segment], bounds[segment + 1]
    too_long = (start <= row) & (row < end) & (end - start > max(1, max_seqlen))
    return jnp.where(jnp.expand_dims(too_long, range(1, x.ndim)), jnp.nan, x)


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, key_mask: jax.Array, scale: float
) -> jax.Array:
    """Q [rows, heads, head_dim], k and v [keys, heads, head_dim], at least one key unmasked."""
    precision = jax.lax.Precision.HIGHEST
    logits = jnp.einsum(
        "qhd,khd->hqk", q, k, precision=precision, preferred_element_type=jnp.float32
    )
    logits = jnp.where(key_mask, logits * scale, -jnp.inf)
    p = jnp.exp(logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
    normalizer = jnp.sum(p, axis=-1).T[..., None]
    out = jnp.einsum(
        "hqk,khd->qhd",
        p.astype(v.dtype),
        v,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return (out / normalizer).astype(v.dtype)
