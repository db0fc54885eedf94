"""Angles that somebody else has rounded: the operators take them, the public functions do not."""

import pytest
import torch

import triton_kernels
from compare.stress.guards import same_bits
from tests.kernel_cases import make_case
from tests.triton_kernels.adapter import interpreted_nan, to_torch

# Of each kernel that reads angles: windows, also of an odd rotary_dim; a pass beforehand, of both
# or of K; a wide head.
CALLS = {
    "window": ({"lengths": (17, 30), "rotary_dim": 24}, "qk"),
    "rotate": ({"lengths": (150, 20)}, "none"),
    "stream": ({"lengths": (150, 20)}, "q"),
    "wide": ({"lengths": (20, 9), "head_dim": 512, "heads": 1}, "qk"),
}


def arguments_of(dtype, lengths, **shape):
    """Packed arguments whose cos and sin are in fp32 and whole in a dtype, and these in that."""
    case = make_case(lengths, dtype=dtype, leading=1, trailing=2, **shape)
    qkv, cos, sin, cu_seqlens = map(to_torch, case.packed)
    rounded = cos.to(qkv.dtype), sin.to(qkv.dtype)
    exact = [x.float() for x in rounded]
    return (qkv, *exact, cu_seqlens), (qkv, *rounded, cu_seqlens)


def options_of(arguments, fuse, implementation):
    qkv, *_, cu_seqlens = arguments
    longest = int(cu_seqlens.diff().max())
    return longest, qkv.shape[-1] ** -0.5, fuse, implementation, False


@pytest.mark.parametrize("implementation", ["kernel", "reference"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CALLS)
def test_the_operator_casts_them(name, dtype, implementation):
    shape, fuse = CALLS[name]
    operator = torch.ops.fused_rope_attention.qkvpacked
    if implementation == "reference":
        operator = torch.ops.fused_rope_attention.qkvpacked_waiting
    exact, rounded = arguments_of(dtype, **shape)
    options = options_of(exact, fuse, implementation)
    with interpreted_nan():
        expected, result = (operator(*arguments, *options) for arguments in (exact, rounded))
    assert same_bits(result, expected)


@pytest.mark.parametrize("lengths", [(17, 30), (150, 20)])
def test_gradients_take_them_too(lengths):
    gradients = []
    for arguments in arguments_of("bfloat16", lengths):
        qkv = arguments[0].clone().requires_grad_()
        arguments = qkv, *arguments[1:]
        with interpreted_nan():
            out = torch.ops.fused_rope_attention.qkvpacked(
                *arguments, *options_of(arguments, "auto", "kernel")
            )
            out.float().square().sum().backward()
        gradients.append(qkv.grad)
    assert same_bits(*gradients)


def test_the_public_functions_refuse_them_whatever_was_planned():
    exact, rounded = arguments_of("bfloat16", lengths=(17, 30))
    with interpreted_nan():
        torch.ops.fused_rope_attention.qkvpacked(*rounded, *options_of(rounded, "auto", "auto"))
    for which in (1, 2):
        wrong = *exact[:which], rounded[which], *exact[which + 1 :]
        for qkv in (wrong[0], wrong[0].clone().requires_grad_()):
            with pytest.raises(
                TypeError, match=r"(cos|sin) must be float32 .* got torch\.bfloat16"
            ):
                triton_kernels.fused_rope_attention_qkvpacked(qkv, *wrong[1:], max_seqlen=30)


def test_one_of_each_is_refused():
    exact, rounded = arguments_of("bfloat16", lengths=(17, 30))
    mixed = *exact[:2], *rounded[2:]
    with pytest.raises(TypeError, match="sin must be float32"):
        torch.ops.fused_rope_attention.qkvpacked(*mixed, *options_of(mixed, "auto", "auto"))
