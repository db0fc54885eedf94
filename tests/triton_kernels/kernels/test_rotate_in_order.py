"""Rotation in the caller's order, in place or not, against the formula in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hostile import examples
from triton_kernels.launching import rotate_in_order as launching
from triton_kernels.launching.rotate_in_order import rotate_in_order

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-6}


def expected(x, cos, sin):
    half = cos.shape[1]
    x, cos, sin = x.double(), cos.double()[:, None], sin.double()[:, None]
    x1, x2 = x[..., :half], x[..., half : 2 * half]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, x[..., 2 * half :]], -1)


def drawn(tokens, heads, head_dim, half, dtype, seed, offset=0):
    """Packed qkv, whose Q and K pass for twice the heads, and angles."""
    generator = torch.Generator().manual_seed(seed)
    size = tokens * 3 * heads * head_dim
    memory = torch.randn(size + offset, generator=generator).to(dtype).to(DEVICE)
    qkv = memory[offset:].view(tokens, 3 * heads, head_dim)
    angles = torch.rand(tokens, half, generator=generator).mul(6).to(DEVICE)
    return qkv, angles.cos(), angles.sin()


@given(
    tokens=st.integers(1, 40),
    heads=st.integers(1, 5),
    head_dim=st.integers(1, 12).map(lambda n: 8 * n),
    share=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(list(TOLERANCE)),
    offset=st.sampled_from([0, 1]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(25))
def test_in_place_on_packed_qkv(tokens, heads, head_dim, share, dtype, offset, seed):
    half = head_dim // 2 // share
    qkv, cos, sin = drawn(tokens, heads, head_dim, half, dtype, seed, offset)
    before = qkv.clone()
    qk = qkv[:, : 2 * heads]
    rotate_in_order(qk, qk, cos, sin)
    wanted = expected(before[:, : 2 * heads], cos, sin)
    assert (qk - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()
    assert torch.equal(qk[..., 2 * half :], before[:, : 2 * heads, 2 * half :])
    assert torch.equal(qkv[:, 2 * heads :], before[:, 2 * heads :])


@pytest.mark.parametrize("tokens", [1, 51, 52, 333])
def test_into_another_tensor(tokens):
    qkv, cos, sin = drawn(tokens, 2, 80, 40, torch.bfloat16, 0)
    before = qkv.clone()
    out = torch.full((tokens, 4, 80), float("nan"), dtype=qkv.dtype, device=DEVICE)
    rotate_in_order(qkv[:, :4], out, cos, sin)
    wanted = expected(before[:, :4], cos, sin)
    assert (out - wanted).norm() <= TOLERANCE[qkv.dtype] * wanted.norm()
    assert torch.equal(qkv, before)


@pytest.mark.parametrize(("heads", "half"), [(1, 1), (1, 3), (2, 1), (12, 96)])
def test_programs_of_many_tokens_and_of_parts_of_one(heads, half):
    """A program takes 256 vectors of pairs: as many tokens, or less than one."""
    qkv, cos, sin = drawn(300, heads, 2 * half, half, torch.float32, 0)
    before = qkv.clone()
    x = qkv[:, :heads]
    rotate_in_order(x, x, cos, sin)
    wanted = expected(before[:, :heads], cos, sin)
    assert (x - wanted).norm() <= TOLERANCE[torch.float32] * wanted.norm()
    assert torch.equal(qkv[:, heads:], before[:, heads:])


@pytest.mark.parametrize("moved", [None, 0, 1, 2, 3])
def test_each_address_counts_where_16_bytes_are_read_at_once(monkeypatch, moved):
    calls = []
    monkeypatch.setattr(launching, "launch_kernel", lambda call, *_: calls.append(call))
    qkv, cos, sin = drawn(5, 2, 16, 8, torch.bfloat16, 0)
    tensors = [qkv[:, :2].clone(), qkv[:, :2].clone(), cos, sin]
    if moved is not None:
        x = tensors[moved]
        tensors[moved] = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape)
    rotate_in_order(*tensors)
    assert [call.binary is not None for call in calls] == [moved is None]


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_tensors_of_other_dtypes_are_refused(wrong):
    qkv, cos, sin = drawn(5, 2, 16, 8, torch.bfloat16, 0)
    tensors = [qkv[:, :2], qkv[:, :2].clone(), cos, sin]
    tensors[wrong] = tensors[wrong].half()
    with pytest.raises(TypeError, match="one dtype"):
        rotate_in_order(*tensors)
