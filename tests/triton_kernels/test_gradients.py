"""Derivatives through triton_kernels."""

import torch

import triton_kernels
from tests.kernel_cases import make_case
from tests.kernel_gradient_contract import GradientContract
from tests.triton_kernels.adapter import (
    TorchAdapter,
    interpreted_nan,
    public_function,
    to_numpy,
    to_torch,
)


class TorchGradients(TorchAdapter):
    def gradients(self, case, weights, packed=False, **options):
        *arguments, cu_seqlens = map(to_torch, case.packed if packed else case.separate)
        arguments = [x.requires_grad_() for x in arguments]
        options = {"implementation": self.implementation, **options}
        with interpreted_nan():
            result = public_function(packed)(*arguments, cu_seqlens, **options)
        return [to_numpy(x) for x in torch.autograd.grad(result, arguments, to_torch(weights))]


class TestKernel(TorchGradients, GradientContract):
    implementation = "triton"


class TestReference(TorchGradients, GradientContract):
    implementation = "reference"


def test_only_what_requires_a_gradient_gets_one():
    q, k, v, cos, sin, cu_seqlens = map(to_torch, make_case([5], head_dim=16).separate)
    k.requires_grad_()
    out = triton_kernels.fused_rope_attention(q, k, v, cos, sin, cu_seqlens, max_seqlen=8)
    out.float().sum().backward()
    assert k.grad is not None
    assert all(x.grad is None for x in (q, v, cos, sin))
