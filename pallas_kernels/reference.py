"""The unfused computation in plain jnp: the oracle, the CPU path, the differentiable path."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.checks import NORM_EPS, Norms
from pallas_kernels.sharding import vary_as
from pallas_kernels.sinusoidal import cos_and_sin, frequency_steps

# Rows of Q whose logits exist at once: bounds the memory of a long segment.
QUERY_BLOCK = 256

# Like cu_seqlens, whatever width integers have by default.
_integers = functools.partial(jnp.arange, dtype=jnp.int32)

# Rows by their numbers: 0 for a number past the end.
_take = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)

_Carry = TypeVar("_Carry")


def rotate_reference(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    weight: jax.Array | None = None,
    eps: float = NORM_EPS,
) -> jax.Array:
    """Norm, if there is a weight, and split-half (NeoX) rotation in fp32; then x's dtype.

    x [tokens, heads, head_dim]; cos and sin [tokens, rotary_dim / 2] fp32; weight [head_dim]. The
    dims behind rotary_dim pass unrotated. x1' = x1 cos - x2 sin, x2' = x2 cos + x1 sin (Su et al.,
    RoFormer, 2021, in the layout of GPT-NeoX).
    """
    half, dtype = cos.shape[-1], x.dtype
    if weight is not None:
        x = normalize_reference(x, weight, eps)
    cos, sin = cos[:, None], sin[:, None]
    x1, x2, rest = jnp.split(x, (half, 2 * half), axis=-1)
    x1, x2 = x1.astype(jnp.float32), x2.astype(jnp.float32)
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return jnp.concatenate([rotated.astype(dtype), rest.astype(dtype)], axis=-1)


def embed_reference(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    embed: str,
    weight: jax.Array | None = None,
    eps: float = NORM_EPS,
) -> jax.Array:
    """What is done to Q or K: rotate_reference, or sin added to even and cos to odd columns, in
    fp32; then x's dtype. cos and sin [tokens, head_dim / 2].
    """
    if embed == "rope":
        return rotate_reference(x, cos, sin, weight, eps)
    added = jnp.stack([sin, cos], axis=-1).reshape(len(x), 1, x.shape[-1])
    return (x.astype(jnp.float32) + added).astype(x.dtype)


def tables_of(
    cos: jax.Array, sin: jax.Array, head_dim: int, embed: str
) -> tuple[jax.Array, jax.Array]:
    """Cos and sin, computed where positions stand in their place."""
    if embed != "positions":
        return cos, sin
    return cos_and_sin(cos[:, None], *frequency_steps(head_dim))


def normalize_reference(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm of each head, in fp32; x [tokens, heads, head_dim], weight [head_dim]."""
    x = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * inverse * weight.astype(jnp.float32)


def rope_attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cu_seqlens: jax.Array,
    scale: float,
    max_seqlen: int | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    norm_eps: float = NORM_EPS,
    embed: str = "rope",
) -> jax.Array:
    """Normalise and rotate, then attend segment by segment; shapes as fused_rope_attention's.

    embed "sinusoidal" does what fused_sinusoidal_attention does instead, "positions" by positions,
    which then stand in place of cos and of sin.

    Logits and softmax in fp32, probabilities cast to the dtype of v, the second product summed in
    fp32. Tokens of no segment get 0, rows of a segment longer than max_seqlen NaN.
    """
    tokens = q.shape[0]
    arrays = q, k, v, cos, sin, cu_seqlens, q_norm, k_norm
    arrays = jax.tree.map(vary_as(*jax.tree.leaves(arrays)), arrays)
    q, k, v, cos, sin, cu_seqlens, q_norm, k_norm = arrays
    if tokens == 0:
        return jnp.zeros_like(q)
    cos, sin = tables_of(cos, sin, q.shape[-1], embed)
    q = embed_reference(q, cos, sin, embed, q_norm, norm_eps)
    k = embed_reference(k, cos, sin, embed, k_norm, norm_eps)

    def attend(out: jax.Array, row: jax.Array, key: jax.Array) -> jax.Array:
        attended = _attend(_take(q, row), _take(k, key), _take(v, key), key < tokens, scale)
        return out.at[row].set(attended, mode="drop")

    out = _visit_blocks(attend, jnp.zeros_like(q), tokens, cu_seqlens, max_seqlen)
    return refuse_longer(out, cu_seqlens, max_seqlen)


def rope_attention_gradients(
    grad: jax.Array,
    primals: Sequence[jax.Array],
    cu_seqlens: jax.Array,
    scale: float,
    max_seqlen: int | None = None,
    norms: Norms = (None, None),
    norm_eps: float = NORM_EPS,
    embed: str = "rope",
) -> tuple[tuple[jax.Array, ...], Norms]:
    """Gradients in primals (q, k, v, cos, sin), and norms, from that of the reference's result.

    JAX's own derivative of the loop would make arrays of zeros as large as q, k and v for every
    block, and sum a key's gradients over blocks in its dtype. Here blocks add to the rows that they
    read, in fp32. Rows of a segment longer than max_seqlen are NaN.
    """
    tokens = grad.shape[0]
    if tokens == 0:
        return jax.tree.map(jnp.zeros_like, (tuple(primals), norms))
    vary = vary_as(grad, *primals, cu_seqlens, *jax.tree.leaves(norms))
    # Under shard_map, what is the same on several devices gets the sum of its gradients there.
    varying, sum_over_devices = jax.vjp(lambda *x: jax.tree.map(vary, x), tuple(primals), norms)
    (q, k, v, cos, sin), norms = varying
    grad, cu_seqlens = vary(grad), vary(cu_seqlens)

    def rotate(
        q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, norms: Norms
    ) -> tuple[jax.Array, ...]:
        pairs = zip((q, k), norms, strict=True)
        cos, sin = tables_of(cos, sin, q.shape[-1], embed)
        return tuple(
            embed_reference(x.astype(jnp.float32), cos, sin, embed, weight, norm_eps)
            for x, weight in pairs
        )

    rotated, rotate_back = jax.vjp(rotate, q, k, cos, sin, norms)
    q, k = (x.astype(v.dtype) for x in rotated)

    def pull(sums: tuple[jax.Array, ...], row: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        attend = functools.partial(_attend, key_mask=key < tokens, scale=scale)
        _, pull_block = jax.vjp(attend, _take(q, row), _take(k, key), _take(v, key))
        parts = zip(sums, (row, key, key), pull_block(_take(grad, row)), strict=True)
        return tuple(
            total.at[place].add(part.astype(jnp.float32), mode="drop")
            for total, place, part in parts
        )

    zeros = tuple(jnp.zeros_like(x, jnp.float32) for x in (q, k, v))
    sums = _visit_blocks(pull, zeros, tokens, cu_seqlens, max_seqlen)
    # Here, so that the gradients in norms, which are of all tokens, are refused with these.
    q_sum, k_sum, v_sum = (refuse_longer(x, cu_seqlens, max_seqlen) for x in sums)
    q_grad, k_grad, cos_grad, sin_grad, norm_grads = rotate_back((q_sum, k_sum))
    gradients = q_grad, k_grad, v_sum.astype(v.dtype), cos_grad, sin_grad
    return sum_over_devices((gradients, norm_grads))


def spread_heads(x: jax.Array, heads: int) -> jax.Array:
    """x [tokens, kv_heads, head_dim] with each of its heads as often as it serves one of Q's."""
    return x if x.shape[1] == heads else jnp.repeat(x, heads // x.shape[1], axis=1)


def _visit_blocks(
    visit: Callable[[_Carry, jax.Array, jax.Array], _Carry],
    carry: _Carry,
    tokens: int,
    cu_seqlens: jax.Array,
    max_seqlen: int | None,
) -> _Carry:
    """carry = visit(carry, row, key) for each block of rows and the keys of its segment.

    The values of cu_seqlens are unknown under jit, so a step takes the numbers of a block of rows
    and of max_seqlen keys, `tokens` for those past the segment's end. Segments that are longer are
    left out.
    """
    segments = cu_seqlens.shape[0] - 1
    longest = tokens if max_seqlen is None else max(1, min(max_seqlen, tokens))
    block = min(QUERY_BLOCK, longest)
    bounds = jnp.clip(cu_seqlens, 0, tokens)

    def visit_block(carry: _Carry, start: jax.Array, end: jax.Array, first: jax.Array) -> _Carry:
        row, key = first + _integers(block), start + _integers(longest)
        return visit(carry, jnp.where(row < end, row, tokens), jnp.where(key < end, key, tokens))

    # A second derivative visits again: kept, the logits would be those of every step, and a scan
    # keeps as many for an empty segment as for the longest.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(carry: _Carry, place: tuple[jax.Array, jax.Array]) -> tuple[_Carry, None]:
        segment, i = place
        start, end = bounds[segment], bounds[segment + 1]
        first = start + i * block
        visited = (first < end) & (end - start <= longest)
        return jax.lax.cond(visited, visit_block, lambda c, *_: c, carry, start, end, first), None

    blocks = -(-longest // block)
    places = jnp.divmod(_integers(segments * blocks), blocks)
    return jax.lax.scan(step, carry, places)[0]


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
    too_long = jnp.expand_dims(too_long, range(1, x.ndim))
    # 0 / 0, as a constant is a NaN for `jax.debug_nans` even where no segment is too long.
    divisor = jnp.where(too_long, 0, 1).astype(x.dtype)
    return jnp.where(too_long, jnp.zeros_like(divisor) / divisor, x)


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, key_mask: jax.Array, scale: float
) -> jax.Array:
    """Q [rows, heads, head_dim], k and v [keys, kv_heads, head_dim], at least one key unmasked."""
    k, v = (spread_heads(x, q.shape[1]) for x in (k, v))
    product = functools.partial(
        jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    logits = jnp.where(key_mask, product("qhd,khd->hqk", q, k) * scale, -jnp.inf)
    p = jnp.exp(logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
    normalizer = jnp.sum(p, axis=-1).T[..., None]
    out = product("hqk,khd->qhd", p.astype(v.dtype), v)
    return (out / normalizer).astype(v.dtype)
