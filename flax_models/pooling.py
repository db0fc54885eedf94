"""Means over segments of any length, in shapes that are static."""

import jax
import jax.numpy as jnp

_CHUNK = 16  # rows that are summed at once


def segment_means(rows: jax.Array, cu_seqlens: jax.Array) -> jax.Array:
    """The mean of each segment's rows.

    Sums are fp32, chunk by chunk in the same order at every run, as those of a scatter are not.
    Each is of its segment's rows alone, so that no NaN spreads.

    Args:
        rows: [tokens, channels] floating.
        cu_seqlens: [segments + 1] int32, increasing from 0.

    Returns:
        [segments, channels] in the dtype of rows; of empty segments rows that mean nothing.
    """
    sums, starts, longest = rows, cu_seqlens, rows.shape[0]
    while longest > 1:
        sums, starts = _chunk_sums(sums, starts)
        longest = -(-longest // _CHUNK)
    counts = jnp.maximum(jnp.diff(cu_seqlens), 1).astype(jnp.float32)
    totals = sums[jnp.minimum(starts[:-1], sums.shape[0] - 1)].astype(jnp.float32)
    return (totals / counts[:, None]).astype(rows.dtype)


def _chunk_sums(rows: jax.Array, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum up to _CHUNK rows of a segment to one, fp32; returns the sums and segments' new starts.

    There are as many sums as any segments could need.
    """
    chunks = (jnp.diff(starts) + _CHUNK - 1) // _CHUNK
    new_starts = jnp.pad(jnp.cumsum(chunks, dtype=jnp.int32), (1, 0))
    chunk = jnp.arange(rows.shape[0] // _CHUNK + chunks.shape[0], dtype=jnp.int32)
    # Of each sum its segment: one further on with every segment that starts there.
    later = jnp.zeros_like(chunk).at[new_starts[1:-1]].add(1)
    segment = jnp.cumsum(later, dtype=jnp.int32)
    first = starts[segment] + (chunk - new_starts[segment]) * _CHUNK
    entries = first[:, None] + jnp.arange(_CHUNK, dtype=jnp.int32)[None]
    inside = entries < starts[segment + 1][:, None]
    taken = rows[jnp.minimum(entries, rows.shape[0] - 1)].astype(jnp.float32)
    return jnp.where(inside[:, :, None], taken, 0).sum(axis=1), new_starts
