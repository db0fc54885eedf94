"""Derivatives through triton_kernels."""

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import triton_kernels
from compare.stress.guards import guarded, guarded_results, intact
from tests.kernel_cases import make_case
from tests.kernel_gradient_contract import (
    GradientContract,
    KernelGradientContract,
    LongGradientContract,
)
from tests.triton_kernels.adapter import (
    TorchAdapter,
    interpreted_nan,
    public_function,
    to_numpy,
    to_torch,
)
from triton_kernels import operators


class TorchGradients(TorchAdapter):
    def gradients(self, case, weights, packed=False, angles=True, **options):
        """With NaN around every input, and in and around every gradient beforehand."""
        *arguments, cu_seqlens = map(to_torch, case.packed if packed else case.separate)
        arguments = [guarded(x)[0].detach() for x in arguments]
        norms = {name: guarded(to_torch(x))[0].detach() for name, x in case.norms.items()}
        wanted = (*(arguments if angles else arguments[:-2]), *norms.values())
        wanted = [x.requires_grad_() for x in wanted]
        options = {"implementation": self.implementation, **norms, **options}
        weights, _ = guarded(to_torch(weights))
        with interpreted_nan(), guarded_results() as results:
            result = public_function(packed)(*arguments, cu_seqlens, **options)
            found = torch.autograd.grad(result, wanted, weights)
        assert all(map(intact, results))
        assert all(x.is_contiguous() for x in found)
        return [to_numpy(x) for x in found]

    def curvature(self, case, weights, direction, **options):
        *arguments, cu_seqlens = map(to_torch, case.separate)
        wanted = [x.requires_grad_() for x in arguments[: len(direction)]]
        options |= {name: to_torch(x) for name, x in case.norms.items()}
        direction = list(map(to_torch, direction))
        attend = public_function(False)
        result = attend(*arguments, cu_seqlens, implementation=self.implementation, **options)
        for _ in range(2):
            gradients = torch.autograd.grad(result, wanted, to_torch(weights), create_graph=True)
            result = sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))
            weights = np.ones((), np.float32)
        return result.item()


class TestKernel(TorchGradients, KernelGradientContract):
    implementation = "kernel"


class TestReference(TorchGradients, GradientContract, LongGradientContract):
    implementation = "reference"


def by_kernel(packed, *arguments, weights=None, **options):
    """The gradients in q, k and v, or qkv, of a kernel's result."""
    *qkv, cos, sin, cu_seqlens = arguments
    qkv = [x.detach().requires_grad_() for x in qkv]
    options = {"implementation": "kernel", "max_seqlen": 16, **options}
    out = public_function(packed)(*qkv, cos, sin, cu_seqlens, **options)
    return torch.autograd.grad(out.sum() if weights is None else out, qkv, weights)


@pytest.mark.parametrize("moved", ["qkv", "cos", "sin", "weights"])
def test_gradients_do_not_depend_on_where_tensors_begin(moved):
    """At a multiple of 16 bytes or not: a kernel reads copies of those that do not."""
    case = make_case((9, 14), head_dim=24, rotary_dim=20)
    tensors = dict(
        zip(("qkv", "cos", "sin", "cu_seqlens"), map(to_torch, case.packed), strict=True)
    )
    tensors["weights"] = torch.ones_like(tensors["qkv"][:, 0])
    weights = tensors["weights"]
    expected = by_kernel(True, *list(tensors.values())[:-1], weights=weights)
    tensors[moved] = guarded(tensors[moved], guard=4097)[0]
    *arguments, weights = tensors.values()
    [found], [expected] = by_kernel(True, *arguments, weights=weights), expected
    assert torch.equal(found, expected)


def test_gradients_of_strided_tensors():
    """Also the result's, which is expanded from one number or lies tokens inside."""
    q, k, v, *rest = map(to_torch, make_case((9, 14), head_dim=16).separate)
    weights = torch.randn_like(q)
    expected = [by_kernel(False, q, k, v, *rest, weights=x) for x in (torch.ones_like(q), weights)]
    wide = torch.stack([q, k, v], dim=2).flatten(2)  # [tokens, heads, 3 head_dim]
    strided = *wide.split(16, dim=2), *rest
    within = weights.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    found = [by_kernel(False, *strided), by_kernel(False, *strided, weights=within)]
    for x, y in zip(sum(found, ()), sum(expected, ()), strict=True):
        assert torch.equal(x, y)


def test_gradients_of_a_segment_that_no_tile_holds_are_written(monkeypatch):
    """As NaN, whatever the memory held."""
    case = make_case((9, 70), head_dim=24, dtype="float32")
    monkeypatch.setattr(torch, "empty", torch.zeros)
    for gradient in by_kernel(False, *map(to_torch, case.separate)):
        assert gradient[:9].isfinite().all()
        assert gradient[9:].isnan().all()


def test_gradients_of_windows_do_not_go_through_the_reference(monkeypatch):
    """Neither where the bound is read from cu_seqlens, nor where some need none."""
    q, k, v, *rest = map(to_torch, make_case((9, 14), head_dim=16).separate)
    expected = by_kernel(False, q, k, v, *rest)
    monkeypatch.setattr(operators, "rope_attention_reference", None)
    found = by_kernel(False, q, k, v, *rest, max_seqlen=None)
    assert all(map(torch.equal, found, expected))
    k.requires_grad_()
    out = public_function(False)(q, k, v, *rest, max_seqlen=16, implementation="kernel")
    assert torch.equal(torch.autograd.grad(out.sum(), k)[0], expected[1])


def test_only_what_requires_a_gradient_gets_one():
    q, k, v, cos, sin, cu_seqlens = map(to_torch, make_case([5], head_dim=16).separate)
    k.requires_grad_()
    out = triton_kernels.fused_rope_attention(q, k, v, cos, sin, cu_seqlens, max_seqlen=8)
    out.float().sum().backward()
    assert k.grad is not None
    assert all(x.grad is None for x in (q, v, cos, sin))


@pytest.mark.parametrize("implementation", ["kernel", "reference"])
def test_autocast_changes_no_bit(implementation):
    *tensors, cu_seqlens = map(to_torch, make_case([5, 9], head_dim=16, dtype="float32").packed)
    options = {"max_seqlen": 16, "implementation": implementation}

    def results():
        attend = public_function(True)
        qkv = tensors[0].detach().requires_grad_()
        out = attend(qkv, *tensors[1:], cu_seqlens, **options)
        unseen = attend(*tensors, cu_seqlens, **options)
        return unseen, out, *torch.autograd.grad(out.square().sum(), qkv)

    expected = results()
    with torch.autocast(tensors[0].device.type, torch.bfloat16):
        found = results()
    assert all(map(torch.equal, found, expected))


def test_second_derivatives_of_tensors_that_depend_on_each_other():
    q, _, v, cos, sin, cu_seqlens = map(to_torch, make_case([5], head_dim=8, heads=1).separate)
    q, v = q.float(), v.float()

    def penalty(implementation, q):
        out = triton_kernels.fused_rope_attention(
            q, 2 * q, v, cos, sin, cu_seqlens, max_seqlen=8, implementation=implementation
        )
        (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return gradient.square().sum()

    def by_differences(direction, step=1e-2):
        ends = [penalty("reference", (q + s * direction).requires_grad_()) for s in (-step, step)]
        return (ends[1] - ends[0]).item() / (2 * step)

    at = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(penalty("kernel", at), at)
    direction = torch.nn.functional.normalize(gradient.flatten(), dim=0).view(gradient.shape)
    assert by_differences(direction) == pytest.approx(gradient.norm().item(), rel=1e-2)


# From PyTorch's own forward_ad.py, when forward mode is first used.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("moved", range(6))
def test_forward_mode_is_refused(moved):
    *tensors, cu_seqlens = map(to_torch, make_case([5], head_dim=16).separate)
    tensors.append(torch.tensor(0.25))  # the scale
    with forward_ad.dual_level():
        tensors[moved] = forward_ad.make_dual(tensors[moved], torch.ones_like(tensors[moved]))
        *arguments, scale = tensors
        with pytest.raises(NotImplementedError, match="forward-mode differentiation is not supp"):
            triton_kernels.fused_rope_attention(*arguments, cu_seqlens, max_seqlen=8, scale=scale)


def test_a_scale_that_wants_a_gradient_is_refused():
    arguments = map(to_torch, make_case([5], head_dim=16).separate)
    scale = torch.nn.Parameter(torch.tensor(0.25))
    with pytest.raises(ValueError, match=r"scale must be a number, .* no gradient, got Parameter"):
        triton_kernels.fused_rope_attention(*arguments, max_seqlen=8, scale=scale)


def test_functional_transforms_are_refused():
    *tensors, cu_seqlens = map(to_torch, make_case([5], head_dim=16).separate)

    def loss(q):
        return triton_kernels.fused_rope_attention(q, *tensors[1:], cu_seqlens, max_seqlen=8).sum()

    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(loss)(tensors[0])


class Written(TorchDispatchMode):
    """Counts the elements that operators return."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements += sum(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        return result


def test_gradients_cost_as_much_for_each_segment_however_many_there_are():
    def cost(segments):
        case = make_case([8] * segments, head_dim=8, heads=1, dtype="float32")
        *tensors, cu_seqlens = map(to_torch, case.separate)
        q, *others = (x.requires_grad_() for x in tensors)
        with Written() as written:
            out = triton_kernels.rope_attention_reference(q, *others, cu_seqlens, 1.0)
            out.sum().backward()
        return written.elements / segments

    assert cost(128) < 1.2 * cost(16)
