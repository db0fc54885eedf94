"""A call of more than 2^31 elements, for a process of its own: XLA keeps all memory it ever had."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fused_rope_attention_qkvpacked
from tests.kernel_cases import assert_accurate, assert_accurate_gradients, make_case

TOKENS, HEADS, HEAD_DIM = 600_000, 16, 80


def check(max_seqlen):
    """Raise AssertionError unless the last rows, and their gradients, are right."""
    case = make_case((64, 64, 40), heads=HEADS, head_dim=HEAD_DIM)
    length = len(case.qkv)

    @functools.partial(jax.jit, donate_argnums=0)
    def put(whole, part):
        return jax.lax.dynamic_update_slice_in_dim(whole, part, TOKENS - length, axis=0)

    qkv = put(jnp.zeros((TOKENS, 3, HEADS, HEAD_DIM), jnp.bfloat16), case.qkv)
    assert qkv.size > 2**31
    cos = put(jnp.ones((TOKENS, HEAD_DIM // 2)), case.cos)
    sin = put(jnp.zeros((TOKENS, HEAD_DIM // 2)), case.sin)
    # Segments all the way, so that no padding hides a wrong address.
    before = np.arange(0, TOKENS - length, 64, dtype=np.int32)
    cu_seqlens = jnp.concatenate([before, case.cu_seqlens + np.int32(TOKENS - length)])

    @functools.partial(jax.jit, static_argnames="fuse")
    def attend(qkv, fuse):
        return fused_rope_attention_qkvpacked(
            qkv, cos, sin, cu_seqlens, max_seqlen=max_seqlen, fuse=fuse, implementation="kernel"
        )

    for fuse in ("qk", "none"):
        out = attend(qkv, fuse)
        assert_accurate(np.array(out[-length:]), case)
        assert not jnp.any(out[:-length])

    @jax.jit
    def gradient(qkv, grad):
        return jax.vjp(lambda x: attend(x, "auto"), qkv)[1](grad)[0]

    weights = make_case((length,), heads=HEADS, head_dim=HEAD_DIM, seed=1).qkv[:, 0]
    found = gradient(qkv, put(jnp.zeros((TOKENS, HEADS, HEAD_DIM), jnp.bfloat16), weights))
    assert_accurate_gradients(np.moveaxis(np.array(found[-length:]), 1, 0), case, weights)
    assert not jnp.any(found[:-length])
