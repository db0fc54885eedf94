"""What triton_kernels refuses."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import triton_kernels
from tests.kernel_argument_contract import CASE, ArgumentContract
from tests.kernel_cases import make_case
from tests.triton_kernels.adapter import DEVICE, TorchAdapter, to_torch


class TestKernel(TorchAdapter, ArgumentContract):
    implementation = "kernel"


class TestReference(TorchAdapter, ArgumentContract):
    implementation = "reference"


NAMES = ("q", "k", "v", "cos", "sin", "cu_seqlens")


def attend(**changed):
    arguments = dict(zip(NAMES, map(to_torch, CASE.separate), strict=True))
    return triton_kernels.fused_rope_attention(**arguments | changed, max_seqlen=8)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_the_last_axis_must_be_contiguous(name):
    x = torch.zeros(12, 2, 32)[..., ::2]
    others = {n: torch.zeros(12, 2, 16) for n in ("q", "k", "v")}
    with pytest.raises(
        ValueError, match=rf"{name} must be contiguous in its last axis, got strides \(64, 32, 2\)"
    ):
        attend(**others | {name: x})


def test_the_last_axis_of_qkv_must_be_contiguous():
    _, cos, sin, cu_seqlens = map(to_torch, CASE.packed)
    qkv = torch.zeros(12, 3, 16, 2, device=cos.device).transpose(2, 3)
    with pytest.raises(ValueError, match="qkv must be contiguous in its last axis"):
        triton_kernels.fused_rope_attention_qkvpacked(qkv, cos, sin, cu_seqlens, max_seqlen=8)


def test_the_token_stride_has_a_limit():
    x = torch.zeros(2**23 + 16 + 32, dtype=torch.bfloat16).as_strided(
        (2, 2, 16), (2**23 + 1, 16, 1)
    )
    angles = torch.ones(2, 8)
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"q must have a token stride of at most 8388608 elements, got 8388609"
    ):
        triton_kernels.fused_rope_attention(x, x, x, angles, angles, cu_seqlens)


def test_the_token_stride_of_angles_has_a_limit():
    x, angles = torch.zeros(2, 2, 16), torch.ones(2**23 + 1 + 8).as_strided((2, 8), (2**23 + 1, 1))
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="cos must have a token stride of at most 8388608"):
        triton_kernels.fused_rope_attention(x, x, x, angles, angles, cu_seqlens)


def test_the_heads_of_a_token_have_a_limit():
    """Their memory may be one another's, the result's is not."""
    x, angles = torch.zeros(2, 1, 64).expand(2, 2**17 + 1, 64), torch.ones(2, 32)
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(
        ValueError, match="heads x head_dim must be at most 8388608, got 131073 x 64"
    ):
        triton_kernels.fused_rope_attention(x, x, x, angles, angles, cu_seqlens)


def test_angles_must_be_contiguous_and_alike():
    wide = torch.ones(12, 16)
    with pytest.raises(ValueError, match="cos must be contiguous in its last axis"):
        attend(**on_cpu(cos=wide[:, ::2], sin=wide[:, ::2]))
    with pytest.raises(ValueError, match=r"sin must have the shape and strides of cos"):
        attend(**on_cpu(cos=wide[:, :8], sin=wide[:, :8].clone()))


@pytest.mark.parametrize("implementation", ["kernel", "reference"])
def test_one_column_of_angles_is_contiguous_whatever_its_stride(implementation):
    q, k, v, cos, sin, cu_seqlens = map(to_torch, make_case([5, 9], rotary_dim=2).separate)
    options = {"max_seqlen": 16, "implementation": implementation}
    rows = [x.flatten().as_strided((14, 1), (1, 14)) for x in (cos, sin)]
    results = [
        triton_kernels.fused_rope_attention(q, k, v, *angles, cu_seqlens, **options)
        for angles in ((cos, sin), rows)
    ]
    assert torch.equal(*results)


def test_cu_seqlens_must_be_contiguous():
    with pytest.raises(ValueError, match="cu_seqlens must be a contiguous vector"):
        attend(cu_seqlens=torch.zeros(6, dtype=torch.int32)[::2])


@pytest.mark.parametrize("name", NAMES)
def test_arguments_must_be_tensors(name):
    x = dict(zip(NAMES, CASE.separate, strict=True))[name]
    with pytest.raises(TypeError, match=rf"{name} must be a torch.Tensor, got list"):
        attend(**{name: np.asarray(x).tolist()})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["dtype", "device", "shape", "strides"])
def test_what_passed_before_lets_no_other_argument_pass(name, kind):
    x = dict(zip(NAMES, map(to_torch, CASE.separate), strict=True))[name]
    attend()
    wrong = {
        "dtype": lambda: x.to(torch.float64),
        "device": lambda: x.to("meta"),
        "shape": lambda: x[None],
        "strides": lambda: x.repeat_interleave(2, -1)[..., ::2],
    }
    for _ in range(2):  # nor does what failed
        with pytest.raises((TypeError, ValueError)):
            attend(**{name: wrong[kind]()})


def test_norms_of_one_call_are_not_those_of_another():
    weights = 1 + torch.rand(2, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weights = weights.bfloat16()
    calls = [
        {},
        {"q_norm": weights[0]},
        {"k_norm": weights[0]},
        {"q_norm": weights[0], "k_norm": weights[1]},
        {"q_norm": weights[1], "k_norm": weights[0], "norm_eps": 0.5},
        {"q_norm": weights[1], "k_norm": weights[0], "norm_eps": 1},
    ]
    expected = [attend(**call, implementation="reference") for call in calls]
    for _ in range(2):
        for call, exact in zip(calls, expected, strict=True):
            found = attend(**call, implementation="kernel")
            torch.testing.assert_close(found, exact, rtol=0, atol=0.03)
    for i, x in enumerate(expected):
        assert not any(torch.allclose(x, other, rtol=0, atol=0.1) for other in expected[:i])


@pytest.mark.parametrize("wrong", [lambda x: x.to("meta"), lambda x: x.repeat_interleave(2)[::2]])
def test_norms_must_be_contiguous_and_where_the_heads_are(wrong):
    weight = torch.ones(16, dtype=torch.bfloat16, device=DEVICE)
    attend(q_norm=weight)
    with pytest.raises(ValueError, match="q_norm must be contiguous and on "):
        attend(q_norm=wrong(weight))


@pytest.mark.parametrize("implementation", ["kernel", "reference"])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.asarray, torch.tensor, Fraction])
def test_a_scale_of_another_type_is_its_value(kind, implementation):
    scales = [0.3, 0.7]
    rounded = [float(kind(scale)) for scale in scales]
    results = [attend(scale=kind(scale), implementation=implementation) for scale in scales]
    expected = [attend(scale=scale, implementation=implementation) for scale in rounded]
    for result, of_a_float in zip(results, expected, strict=True):
        assert torch.equal(result, of_a_float)


def test_a_scale_that_changes_in_place():
    scale = torch.tensor(0.25)
    attend(scale=scale, implementation="kernel")
    scale.fill_(0.5)
    result = attend(scale=scale, implementation="kernel")
    assert torch.equal(result, attend(scale=0.5, implementation="kernel"))


def test_triton_is_another_word_for_the_kernel():
    kernel, triton = (attend(implementation=name) for name in ("kernel", "triton"))
    assert torch.equal(kernel, triton)


@pytest.mark.parametrize("name", ["k", "v", "cos", "sin", "cu_seqlens"])
def test_all_tensors_must_be_on_one_device(name):
    x = dict(zip(NAMES, CASE.separate, strict=True))[name]
    with pytest.raises(ValueError, match=rf"{name} must be on (cpu|cuda:\d).*, got meta"):
        attend(**{name: to_torch(x).to("meta")})


def on_cpu(**changed):
    return dict(zip(NAMES, (to_torch(x).cpu() for x in CASE.separate), strict=True)) | changed
