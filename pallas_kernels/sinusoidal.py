"""Sinusoidal embeddings: tables for whole calls, and frequencies for kernels that compute them.

PE(pos, 2i) = sin(pos / 10000^(2i / head_dim)), PE(pos, 2i + 1) = cos of the same (Vaswani et al.,
Attention Is All You Need, 2017).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.checks import MAX_HEAD_DIM

THETA = 10000.0


def sinusoidal_tables(
    positions: jax.Array, head_dim: int, theta: float = THETA
) -> tuple[jax.Array, jax.Array]:
    """Tables for fused_sinusoidal_attention, of positions on a line or on a grid.

    On a grid the first head_dim / 2 columns tell a token's row and the others its column, each as
    the whole of a head that is half as wide tells a position on a line, as in vision transformers
    (He et al., Masked Autoencoders, 2022).

    Args:
        positions: [tokens], or [tokens, 2] of rows and columns, int32 of at least 0.
        head_dim: a multiple of 8 up to 16,384.
        theta: what the wavelengths grow to, times 2 pi.

    Returns:
        cos, sin: [tokens, head_dim / 2] fp32, exact to 5e-7 at any position.

    Raises:
        TypeError, ValueError: an argument is not as stated above, but for the values of positions.
    """
    if not isinstance(positions, jax.Array | np.ndarray) or positions.dtype not in (
        jnp.int32,
        jnp.int64,
    ):
        got = getattr(positions, "dtype", type(positions).__name__)
        raise TypeError(f"positions must be an array of int32 or int64, got {got}")
    if positions.ndim != 1 and (positions.ndim != 2 or positions.shape[1] != 2):
        raise ValueError(
            f"positions must have shape [tokens] or [tokens, 2], got {positions.shape}"
        )
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}, got {head_dim}")
    axes = positions[:, None] if positions.ndim == 1 else positions
    steps = frequency_steps(head_dim // axes.shape[1], theta)
    tables = cos_and_sin(jnp.asarray(axes, jnp.int32)[..., None], *steps)
    return tuple(x.reshape(len(positions), head_dim // 2) for x in tables)


@functools.cache
def frequency_steps(head_dim: int, theta: float = THETA) -> np.ndarray:
    """theta^(-2i / head_dim) as positions are multiplied by it, [2, head_dim / 2] int32.

    In turns: first times 2^32, rounded, then what rounding took, times 2^56.
    """
    frequencies = [theta ** (-2 * i / head_dim) / (2 * math.pi) for i in range(head_dim // 2)]
    steps = [round(x * 2**32) for x in frequencies]
    rests = [round((x * 2**32 - n) * 2**24) for x, n in zip(frequencies, steps, strict=True)]
    return np.array([steps, rests], np.int32)


def cos_and_sin(
    position: jax.Array, step: jax.Array, rest: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of position x frequency; NaN where a position is negative.

    A step is the frequency in turns times 2^32, of which whole turns overflow and are gone; the
    rest that rounding took from it is in 2^-56 turns. So angles are exact to 2^-24 turns at any
    position. Of their distance to a quarter turn short polynomials give both to 2e-7, without a
    branch for large arguments, as libraries' functions have.
    """
    turns = (position * step).astype(jnp.float32) * 2.0**-32
    turns += position.astype(jnp.float32) * (rest.astype(jnp.float32) * 2.0**-56)
    turns = jnp.where(position < 0, jnp.nan, turns)
    quarter = jnp.floor(turns * 4.0 + 0.5)
    x = (turns - quarter * 0.25) * (2 * math.pi)
    x2 = x * x
    sin = x + x * x2 * (-1 / 6 + x2 * (1 / 120 + x2 * (-1 / 5040 + x2 * (1 / 362880))))
    cos = 1.0 + x2 * (-0.5 + x2 * (1 / 24 + x2 * (-1 / 720 + x2 * (1 / 40320))))
    sign = jnp.where(jnp.abs(quarter) == 2.0, -1.0, 1.0)
    is_odd = jnp.abs(quarter) == 1.0
    first = jnp.where(is_odd, -quarter * sin, sign * cos)
    return first, jnp.where(is_odd, quarter * cos, sign * sin)
