"""Sizes that only a GPU can take: offsets past 2^31, many segments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from compare.common.processes import in_a_process
from tests.kernel_cases import assert_accurate, make_case
from tests.kernel_contract import STREAM
from tests.pallas_kernels import far_end

pytestmark = [pytest.mark.gpu, pytest.mark.long]


def attention(max_seqlen):
    attend = pallas_kernels.fused_rope_attention_qkvpacked
    return jax.jit(functools.partial(attend, max_seqlen=max_seqlen, implementation="kernel"))


# Up to 767 tokens are the stream kernels' on Hopper GPUs too.
@pytest.mark.parametrize("max_seqlen", [64, 767, STREAM])
def test_the_far_end_of_a_qkv_of_more_than_2_to_the_31_elements(max_seqlen):
    in_a_process(far_end.check, max_seqlen, variables={})


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
