"""Offsets past 2^31 elements without as much memory: only the rows of a view are ever touched.

Interpreted, an offset of 32 bits ends the process, which ends the run and names the test.
"""

import pytest
import torch

from tests.kernel_cases import assert_accurate, make_case
from tests.kernel_contract import STREAM
from tests.triton_kernels.adapter import DEVICE, public_function, to_numpy, to_torch
from triton_kernels.checks import MAX_TOKEN_STRIDE


@pytest.mark.parametrize("fuse", ["qk", "none"])
@pytest.mark.parametrize("max_seqlen", [16, STREAM])
def test_rows_that_lie_far_apart(max_seqlen, fuse):
    case = make_case([16] * 17 + [5, 0, 13], heads=2, head_dim=16, leading=2, trailing=3)
    *qkv, cos, sin, cu_seqlens = map(to_torch, case.separate)
    tokens = len(case.qkv)
    assert int(case.cu_seqlens[-3]) * MAX_TOKEN_STRIDE > 2**31
    memory = torch.empty(tokens * MAX_TOKEN_STRIDE, dtype=qkv[0].dtype, device=DEVICE)
    far = [
        memory.as_strided(x.shape, (MAX_TOKEN_STRIDE, 16, 1), i * 64).copy_(x)
        for i, x in enumerate(qkv)
    ]
    out = public_function(False)(
        *far, cos, sin, cu_seqlens, max_seqlen=max_seqlen, fuse=fuse, implementation="kernel"
    )
    assert_accurate(to_numpy(out), case)
