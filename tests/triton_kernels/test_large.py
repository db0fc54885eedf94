"""Sizes that only a GPU can take: offsets past 2^31, many segments, a very long one."""

import numpy as np
import pytest
import torch

from tests.kernel_cases import assert_accurate, assert_accurate_gradients, make_case
from tests.kernel_contract import STREAM
from tests.triton_kernels.adapter import public_function, to_numpy, to_torch

pytestmark = [pytest.mark.gpu, pytest.mark.long]


def attend(case, packed=True, **options):
    arguments = map(to_torch, case.packed if packed else case.separate)
    return to_numpy(public_function(packed)(*arguments, implementation="kernel", **options))


# Up to 767 tokens are the stream kernels' on Hopper GPUs too.
BOUNDS = [64, 767, STREAM]


@pytest.mark.parametrize("max_seqlen", BOUNDS)
@pytest.mark.parametrize("fuse", ["qk", "none"])
def test_the_far_end_of_a_qkv_of_more_than_2_to_the_31_elements(fuse, max_seqlen):
    tokens, heads, head_dim = 600_000, 16, 80
    case = make_case((64, 64, 40), heads=heads, head_dim=head_dim)
    length = len(case.qkv)
    qkv = torch.zeros(tokens, 3, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    assert qkv.numel() > 2**31
    cos = torch.ones(tokens, head_dim // 2, device="cuda")
    sin = torch.zeros_like(cos)
    for whole, part in zip((qkv, cos, sin), case.packed[:3], strict=True):
        whole[-length:] = to_torch(part)
    # Segments all the way, so that no padding hides a wrong address.
    before = torch.arange(0, tokens - length, 64, dtype=torch.int32)
    cu_seqlens = torch.cat([before, torch.from_numpy(case.cu_seqlens) + (tokens - length)]).cuda()
    out = public_function(True)(
        qkv, cos, sin, cu_seqlens, max_seqlen=max_seqlen, fuse=fuse, implementation="kernel"
    )
    assert_accurate(to_numpy(out[-length:]), case)
    assert not out[:-length].any()


@pytest.mark.parametrize("max_seqlen", BOUNDS)
def test_gradients_at_the_far_end(max_seqlen):
    tokens, heads, head_dim = 600_000, 16, 80
    case = make_case((64, 64, 40), heads=heads, head_dim=head_dim)
    length = len(case.qkv)
    qkv = torch.zeros(tokens, 3, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    grad = torch.zeros(tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    cos = torch.ones(tokens, head_dim // 2, device="cuda")
    sin = torch.zeros_like(cos)
    weights = make_case((length,), heads=heads, head_dim=head_dim, seed=1).qkv[:, 0]
    for whole, part in zip((qkv, cos, sin, grad), (*case.packed[:3], weights), strict=True):
        whole[-length:] = to_torch(part)
    before = torch.arange(0, tokens - length, 64, dtype=torch.int32)
    cu_seqlens = torch.cat([before, torch.from_numpy(case.cu_seqlens) + (tokens - length)]).cuda()
    attend = public_function(True)
    out = attend(qkv.requires_grad_(), cos, sin, cu_seqlens, max_seqlen=max_seqlen)
    [found] = torch.autograd.grad(out, qkv, grad)
    assert_accurate_gradients(to_numpy(found[-length:].transpose(0, 1)), case, weights)
    assert not found[:-length].any()


def test_more_than_2_to_the_31_elements_of_separate_heads():
    # A stride between heads so long that the last one starts past 2^31 elements.
    case = make_case((64, 40), heads=2)
    q, k, v, *rest = map(to_torch, case.separate)
    far = torch.zeros(2, 2**31 // 80 + 200, 80, device="cuda", dtype=torch.bfloat16)
    strided = far[:, : len(q)].transpose(0, 1)
    strided.copy_(q)
    for max_seqlen in (64, STREAM):
        out = public_function(False)(strided, k, v, *rest, max_seqlen=max_seqlen)
        assert_accurate(to_numpy(out), case)


@pytest.mark.parametrize("max_seqlen", [8, STREAM])
def test_100_000_segments(max_seqlen):
    lengths = np.random.default_rng(0).integers(0, 9, 100_000)
    case = make_case(lengths, heads=1, head_dim=16, dtype="float16", leading=5, trailing=1000)
    result = attend(case, max_seqlen=max_seqlen)
    np.testing.assert_array_equal(result[case.padding], 0)
    # The oracle goes through segments in Python: the first and the last thousand.
    for first in (0, 99_000):
        part = slice(case.cu_seqlens[first], case.cu_seqlens[first + 1000])
        some = make_case(lengths[first : first + 1000], heads=1, head_dim=16, dtype="float16")
        for ours, whole in zip(some.packed[:3], case.packed[:3], strict=True):
            ours[...] = whole[part]
        assert_accurate(result[part], some)


def test_a_segment_of_131_072_tokens():
    tokens = 131_072
    case = make_case([tokens], heads=1, head_dim=64)
    result = attend(case, max_seqlen=tokens)
    q, k, v, cos, sin, _ = (to_torch(x) for x in case.separate)
    q, k = (rotate(x.double(), cos.double(), sin.double()) for x in (q, k))
    rows = torch.linspace(0, tokens - 1, 500).long().cuda()
    p = torch.softmax((q[rows, 0] @ k[:, 0].T) * 64**-0.5, dim=-1)
    expected = (p @ v[:, 0].double()).cpu().numpy()
    error = result[rows.cpu(), 0].astype(np.float64) - expected
    assert np.linalg.norm(error) <= 4e-3 * np.linalg.norm(expected)


def rotate(x, cos, sin):
    half = cos.shape[1]
    x = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, sin)[:, None]
    return torch.cat([x.real, x.imag], dim=-1)
