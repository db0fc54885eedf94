"""Offsets past 2^31 elements without as much memory: only the rows of a view are ever touched.

Interpreted, an offset of 32 bits ends the process, which ends the run and names the test.
"""

import pytest
import torch

from tests.kernel_cases import assert_accurate, assert_accurate_gradients, make_case
from tests.kernel_contract import STREAM
from tests.triton_kernels.adapter import DEVICE, public_function, to_numpy, to_torch
from triton_kernels.checks import MAX_TOKEN_STRIDE


def far_apart(*tensors):
    """The same tensors [tokens, heads, 16], of rows that lie as far apart as may be."""
    tokens = len(tensors[0])
    memory = torch.empty(tokens * MAX_TOKEN_STRIDE, dtype=tensors[0].dtype, device=DEVICE)
    return [
        memory.as_strided(x.shape, (MAX_TOKEN_STRIDE, 16, 1), i * 64).copy_(x)
        for i, x in enumerate(tensors)
    ]


@pytest.mark.parametrize("fuse", ["qk", "none"])
@pytest.mark.parametrize("max_seqlen", [16, STREAM])
def test_rows_that_lie_far_apart(max_seqlen, fuse):
    case = make_case([16] * 17 + [5, 0, 13], heads=2, head_dim=16, leading=2, trailing=3)
    *qkv, cos, sin, cu_seqlens = map(to_torch, case.separate)
    assert int(case.cu_seqlens[-3]) * MAX_TOKEN_STRIDE > 2**31
    far = far_apart(*qkv)
    out = public_function(False)(
        *far, cos, sin, cu_seqlens, max_seqlen=max_seqlen, fuse=fuse, implementation="kernel"
    )
    assert_accurate(to_numpy(out), case)


@pytest.mark.parametrize("max_seqlen", [16, STREAM])
def test_gradients_of_rows_that_lie_far_apart(max_seqlen):
    case = make_case([16] * 16 + [5, 0, 13], heads=1, head_dim=16)
    *qkv, cos, sin, cu_seqlens = map(to_torch, case.separate)
    assert int(case.cu_seqlens[-3]) * MAX_TOKEN_STRIDE >= 2**31
    weights = torch.randn_like(qkv[0])
    *far, far_weights = far_apart(*qkv, weights)
    far = [x.requires_grad_() for x in far]
    out = public_function(False)(
        *far, cos, sin, cu_seqlens, max_seqlen=max_seqlen, implementation="kernel"
    )
    found = torch.autograd.grad(out, far, far_weights)
    assert_accurate_gradients([to_numpy(x) for x in found], case, to_numpy(weights))
