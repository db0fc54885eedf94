"""Sizes that only a GPU can take: offsets past 2^31, many segments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from tests.kernel_cases import assert_accurate, assert_accurate_gradients, make_case
from tests.kernel_contract import STREAM

pytestmark = [pytest.mark.gpu, pytest.mark.long]


def attention(max_seqlen, fuse="auto"):
    return jax.jit(
        functools.partial(
            pallas_kernels.fused_rope_attention_qkvpacked,
            max_seqlen=max_seqlen,
            fuse=fuse,
            implementation="kernel",
        )
    )


# Up to 767 tokens are the stream kernels' on Hopper GPUs too.
@pytest.mark.parametrize("max_seqlen", [64, 767, STREAM])
@pytest.mark.parametrize("fuse", ["qk", "none"])
def test_the_far_end_of_a_qkv_of_more_than_2_to_the_31_elements(fuse, max_seqlen):
    tokens, heads, head_dim = 600_000, 16, 80
    case = make_case((64, 64, 40), heads=heads, head_dim=head_dim)
    length = len(case.qkv)

    @functools.partial(jax.jit, donate_argnums=0)
    def put(whole, part):
        return jax.lax.dynamic_update_slice_in_dim(whole, part, tokens - length, axis=0)

    qkv = put(jnp.zeros((tokens, 3, heads, head_dim), jnp.bfloat16), case.qkv)
    assert qkv.size > 2**31
    cos = put(jnp.ones((tokens, head_dim // 2)), case.cos)
    sin = put(jnp.zeros((tokens, head_dim // 2)), case.sin)
    # Segments all the way, so that no padding hides a wrong address.
    before = np.arange(0, tokens - length, 64, dtype=np.int32)
    cu_seqlens = np.concatenate([before, case.cu_seqlens + np.int32(tokens - length)])
    out = attention(max_seqlen, fuse)(qkv, cos, sin, jnp.asarray(cu_seqlens))
    assert_accurate(np.array(out[-length:]), case)
    assert not jnp.any(out[:-length])
    if fuse == "none":
        return

    @jax.jit
    def gradient(qkv, grad):
        return jax.vjp(lambda x: attention(max_seqlen)(x, cos, sin, cu_seqlens), qkv)[1](grad)[0]

    weights = make_case((length,), heads=heads, head_dim=head_dim, seed=1).qkv[:, 0]
    found = gradient(qkv, put(jnp.zeros((tokens, heads, head_dim), jnp.bfloat16), weights))
    assert_accurate_gradients(np.moveaxis(np.array(found[-length:]), 1, 0), case, weights)
    assert not jnp.any(found[:-length])


@pytest.mark.parametrize("max_seqlen", [8, STREAM])
def test_100_000_segments(max_seqlen):
    lengths = np.random.default_rng(0).integers(0, 9, 100_000)
    case = make_case(lengths, heads=1, head_dim=16, dtype="float16", leading=5, trailing=1000)
    result = np.array(attention(max_seqlen)(*map(jnp.asarray, case.packed)))
    np.testing.assert_array_equal(result[case.padding], 0)
    for first in (0, 99_000):  # the oracle goes through segments in Python
        part = slice(case.cu_seqlens[first], case.cu_seqlens[first + 1000])
        some = make_case(lengths[first : first + 1000], heads=1, head_dim=16, dtype="float16")
        for ours, whole in zip(some.packed[:3], case.packed[:3], strict=True):
            ours[...] = whole[part]
        assert_accurate(result[part], some)
