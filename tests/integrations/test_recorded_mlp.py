"""A gated MLP whose gradients are recorded, at a width that is not its own."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.integrations.hugging_face import DEVICE, relative_error
from triton_kernels.integrations.recorded_mlp import RecordedMLP

TOKENS, CHANNELS, WIDTH, STORED = 24, 16, 20, 32
SIZES = (
    *((TOKENS, CHANNELS), (WIDTH, CHANNELS), (WIDTH,), (WIDTH, CHANNELS), (WIDTH,)),
    *((CHANNELS, WIDTH), (CHANNELS,)),
)


def operands(dtype):
    """x, and weight and bias of gate, up and down."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(size, generator=generator) for size in SIZES)
    return [x.to(DEVICE, dtype).requires_grad_() for x in drawn]


def separate_steps(x, *parameters):
    gate, up = (F.linear(x, *parameters[i : i + 2]) for i in (0, 2))
    return F.linear(F.silu(gate) * up, *parameters[4:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_result_and_gradients_are_as_exact_as_those_of_separate_steps(dtype):
    tensors = operands(dtype)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    grad = torch.randn(TOKENS, CHANNELS, device=DEVICE).to(dtype)
    errors = []
    expected = separate_steps(*exact)
    expected = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    for function in (separate_steps, lambda *x: RecordedMLP.apply(STORED, *x)):
        found = function(*tensors)
        found = [found, *torch.autograd.grad(found, tensors, grad)]
        assert [x.shape for x in found[1:]] == [x.shape for x in tensors]
        errors.append([relative_error(x.double(), y) for x, y in zip(found, expected, strict=True)])
    for theirs, ours in zip(*errors, strict=True):
        assert ours <= 1.2 * theirs  # of few numbers


@pytest.mark.parametrize("needed", [(0,), (1,), (4,), (5,), (6,), (0, 5), (2, 3)])
def test_gradients_of_some_operands_alone(needed):
    tensors = operands(torch.float64)
    for i, x in enumerate(tensors):
        x.requires_grad_(i in needed)
    wanted = [tensors[i] for i in needed]
    expected = torch.autograd.grad(separate_steps(*tensors).square().sum(), wanted)
    found = torch.autograd.grad(RecordedMLP.apply(STORED, *tensors).square().sum(), wanted)
    assert all(map(torch.allclose, found, expected))


def test_second_derivatives():
    assert torch.autograd.gradgradcheck(
        lambda *x: RecordedMLP.apply(STORED, *x), operands(torch.float64), fast_mode=True
    )


def test_parameters_of_another_dtype_get_gradients_of_their_own():
    x, *parameters = operands(torch.float32)
    RecordedMLP.apply(STORED, x.bfloat16(), *parameters).float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in parameters)
    expected = torch.autograd.grad(separate_steps(x, *parameters).square().sum(), parameters)
    for p, y in zip(parameters, expected, strict=True):
        assert relative_error(p.grad, y) < 3e-2


def test_nothing_is_kept_but_one_product_and_what_came():
    """What it puts together from the parameters would stay where those are sharded."""
    tensors, kept = operands(torch.float32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        RecordedMLP.apply(STORED, *tensors)
    given = {x.data_ptr() for x in tensors}
    others = [x.shape for x in kept if x.data_ptr() not in given]
    assert others == [(TOKENS, 2 * STORED)]


def test_what_lies_behind_the_width_reaches_no_gradient():
    tensors = operands(torch.float32)
    found = [
        torch.autograd.grad(RecordedMLP.apply(stored, *tensors).square().sum(), tensors)
        for stored in (WIDTH, STORED, 2 * STORED)
    ]
    for one, other in itertools.combinations(found, 2):
        for x, y in zip(one, other, strict=True):
            assert relative_error(x, y) < 1e-6
