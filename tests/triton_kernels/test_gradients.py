"""Derivatives through triton_kernels."""

import functools

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
    assert_log_sum_exps,
    interpreted_nan,
    public_function,
    to_numpy,
    to_torch,
)
from triton_kernels import operators
from triton_kernels.checks import MAX_TOKEN_STRIDE
from triton_kernels.launching import backward, fast_path, plan


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


@pytest.mark.parametrize("max_seqlen", [16, 4096])
@pytest.mark.parametrize("moved", ["qkv", "cos", "sin", "weights"])
def test_gradients_do_not_depend_on_where_tensors_begin(monkeypatch, moved, max_seqlen):
    """At a multiple of 16 bytes or not: a kernel reads copies of those that do not."""
    launched, launch = [], backward.launch_kernel
    monkeypatch.setattr(
        backward, "launch_kernel", lambda *call: launched.append(call) or launch(*call)
    )
    case = make_case((14,), heads=1, head_dim=24, rotary_dim=20, leading=3)
    tensors = dict(
        zip(("qkv", "cos", "sin", "cu_seqlens"), map(to_torch, case.packed), strict=True)
    )
    tensors["weights"] = torch.ones_like(tensors["qkv"][:, 0])
    weights = tensors["weights"]
    bound = {"max_seqlen": max_seqlen}
    expected = by_kernel(True, *list(tensors.values())[:-1], weights=weights, **bound)
    tensors[moved] = guarded(tensors[moved], guard=4097)[0]
    *arguments, weights = tensors.values()
    [found], [expected] = by_kernel(True, *arguments, weights=weights, **bound), expected
    # Of long segments the result is kept, which other tiles compute of what is not aligned.
    limit = 0 if max_seqlen == 16 else 4e-3
    assert (found - expected).float().norm() <= limit * expected.float().norm()
    for _, _, (*addresses, _) in launched:
        assert not any(address % 16 for address in addresses)


@pytest.mark.parametrize("ndim", [2, 3])
def test_what_a_kernel_does_not_reach_in_32_bits_is_copied(ndim):
    shape = (2, 1, 8)[3 - ndim :]
    for stride, readable in ((MAX_TOKEN_STRIDE, True), (MAX_TOKEN_STRIDE + 8, False)):
        strides = (stride, 8, 1)[:: 1 if ndim == 3 else 2]
        x = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")
        assert backward._is_readable(x) == readable


def test_gradients_of_the_same_tensors_by_another_scale():
    tensors = [to_torch(x) for x in make_case((9, 14), head_dim=16).separate]
    found = [by_kernel(False, *tensors, scale=scale) for scale in (0.5, 0.25)]
    fast_path.plans.clear()
    assert all(map(torch.equal, found[1], by_kernel(False, *tensors, scale=0.25)))
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("max_seqlen", [16, 4096])
def test_gradients_of_strided_tensors(max_seqlen):
    """Also the result's, which is expanded from one number or lies tokens inside."""
    q, k, v, *rest = map(to_torch, make_case((14,), head_dim=16, leading=3).separate)
    weights = torch.randn_like(q)
    attend = functools.partial(by_kernel, False, max_seqlen=max_seqlen)
    expected = [attend(q, k, v, *rest, weights=x) for x in (torch.ones_like(q), weights)]
    wide = torch.stack([q, k, v], dim=2).flatten(2)  # [tokens, heads, 3 head_dim]
    strided = *wide.split(16, dim=2), *rest
    within = weights.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    found = [attend(*strided), attend(*strided, weights=within)]
    # Rows that are not at multiples of 16 bytes: of q, k, v and the result's, one alone.
    for i in range(4):
        each = [q, k, v, weights]
        each[i] = torch.nn.functional.pad(each[i], (0, 4))[..., :16]
        *narrow, grad = each
        found.append(attend(*narrow, *rest, weights=grad))
        expected.append(expected[1])
    for x, y in zip(sum(found, ()), sum(expected, ()), strict=True):
        assert torch.equal(x, y)


def test_gradients_of_a_segment_that_no_tile_holds_are_written(monkeypatch):
    """As NaN, whatever the memory held."""
    case = make_case((9, 70), head_dim=24, dtype="float32")
    monkeypatch.setattr(torch, "empty", torch.zeros)
    for gradient in by_kernel(False, *map(to_torch, case.separate)):
        assert gradient[:9].isfinite().all()
        assert gradient[9:].isnan().all()


@pytest.mark.parametrize("lengths", [(9, 14), (9, 34)])
def test_gradients_do_not_go_through_the_reference(monkeypatch, lengths):
    """Neither where the bound is read from cu_seqlens, nor where some need none."""
    case = make_case(lengths, heads=1, head_dim=16, dtype="float32")
    q, k, v, *rest = map(to_torch, case.separate)
    bound = {"max_seqlen": max(lengths)}
    expected = by_kernel(False, q, k, v, *rest, **bound)
    monkeypatch.setattr(operators, "rope_attention_reference", None)
    found = by_kernel(False, q, k, v, *rest, max_seqlen=None)
    assert all(map(torch.equal, found, expected))
    k.requires_grad_()
    out = public_function(False)(q, k, v, *rest, **bound, implementation="kernel")
    assert torch.equal(torch.autograd.grad(out.sum(), k)[0], expected[1])


@pytest.mark.parametrize("max_seqlen", [16, 4096])
def test_what_a_forward_pass_keeps(max_seqlen):
    """Of short segments nothing but its inputs; of long ones the result and a number a row."""
    qkv, *rest = map(to_torch, make_case((9, 14), heads=3, head_dim=16).packed)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        options = {"max_seqlen": max_seqlen, "implementation": "kernel"}
        out = public_function(True)(qkv.requires_grad_(), *rest, **options)
    inputs, others = saved[:4], saved[4:]
    assert [x.data_ptr() for x in inputs] == [x.data_ptr() for x in (qkv, *rest)]
    assert [x.shape for x in others] == ([] if max_seqlen == 16 else [out.shape, (3, 23)])


def test_a_forward_pass_without_gradients_computes_no_log_sum_exps(monkeypatch):
    qkv, *rest = map(to_torch, make_case((9, 14), head_dim=16).packed)
    kept = []
    launch = plan.launch_kernel
    monkeypatch.setattr(
        plan, "launch_kernel", lambda call, held, addresses, *x: (
            kept.append(addresses[-3]), launch(call, held, addresses, *x)
        )
    )  # fmt: skip
    for needed in (False, True):
        options = {"max_seqlen": 4096, "fuse": "qk", "implementation": "kernel"}
        public_function(True)(qkv.requires_grad_(needed), *rest, **options)
    with torch.no_grad():
        public_function(True)(qkv, *rest, **options)
    assert [x is not None for x in kept] == [False, True, False]


@pytest.mark.parametrize(
    ("max_seqlen", "options"),
    [(4096, {}), (4096, {"batch_invariant": True}), (512, {"fuse": "q"})],
    ids=str,
)
def test_log_sum_exps(max_seqlen, options):
    """Also of rows that their reference does not fit, which are computed again."""
    case = make_case((9, 150), heads=1, head_dim=16, leading=2, trailing=3)
    case.qkv[100:, 1] *= 40
    assert_log_sum_exps(case, max_seqlen, **options)


def test_gradients_of_long_segments_do_not_depend_on_where_what_is_kept_lies():
    """The operator may be called by others, or by a compiler that lays tensors out anew."""
    case = make_case((9, 34), head_dim=16, dtype="float32")
    *tensors, cu_seqlens = map(to_torch, case.packed)
    options = 34, 0.25
    operators = torch.ops.fused_rope_attention
    kept = operators.qkvpacked_with_lse(*tensors, cu_seqlens, *options, "auto", "kernel", False)
    grad = torch.randn_like(kept[0])
    expected, found = (
        operators.backward(
            grad, tensors, cu_seqlens, each, *options, "kernel", [True, False, False]
        )
        for each in (kept, [x.transpose(0, 1).contiguous().transpose(0, 1) for x in kept])
    )
    assert torch.equal(found[0], expected[0])


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
