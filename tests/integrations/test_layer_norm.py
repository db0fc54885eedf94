"""LayerNorm by one kernel: against fp64, and of which calls."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.hostile import examples
from tests.integrations.hugging_face import DEVICE, kinds_of, make_tower, random_inputs, run
from triton_kernels.attend import INTERPRETED
from triton_kernels.integrations import layer_norm
from triton_kernels.integrations.transformers import accelerate

TOLERANCES = {torch.bfloat16: 2.5e-3, torch.float16: 3.5e-4}  # one rounding, relative RMS
pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="there is no GPU, and no interpreter"
)


def draw(tokens, channels, dtype, mean=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(size, generator=generator).to(DEVICE, dtype)
        for size in ((tokens, channels), (channels,), (channels,))
    )
    norm = nn.LayerNorm(channels, eps=1e-6).to(DEVICE, dtype).requires_grad_(False)
    norm.weight.copy_(weight)
    norm.bias.copy_(bias)
    return norm, 3 * x + mean


def oracle(norm, x):
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return centred * scale * norm.weight.double() + norm.bias.double()


@pytest.fixture
def launched(monkeypatch):
    """The kernel is for tensors on a CPU, too; how often it was launched."""
    launches, own = [], layer_norm.launch_kernel
    monkeypatch.setattr(layer_norm, "runs_kernel", lambda x: x.itemsize == 2)
    monkeypatch.setattr(
        layer_norm, "launch_kernel", lambda *call: launches.append(call) or own(*call)
    )
    return launches


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("tokens", "channels"), [(3, 1152), (2, 4608), (5, 24)])
def test_is_the_oracles_rounded_once(tokens, channels, dtype, launched):
    norm, x = draw(tokens, channels, dtype)
    result, before = layer_norm.run_layer_norm(norm, x[None]), x.clone()
    assert len(launched) == 1
    assert (result.shape, result.dtype) == ((1, *x.shape), dtype)
    exact = oracle(norm, x)
    assert ((result[0].double() - exact).norm() / exact.norm()).item() < TOLERANCES[dtype]
    assert torch.equal(x, before)


@settings(max_examples=examples(10))
@given(st.integers(1, 4), st.integers(2, 300), st.integers(0, 99))
def test_any_widths(tokens, channels, seed):
    norm, x = draw(tokens, channels, torch.float16, seed=seed)
    result = layer_norm._layer_norm(x, norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(result.double(), oracle(norm, x), rtol=2e-3, atol=2e-3)


def test_a_large_mean_hides_nothing(launched):
    norm, x = draw(4, 96, torch.float16, mean=1000.0)
    result = layer_norm.run_layer_norm(norm, x)
    torch.testing.assert_close(result.double(), oracle(norm, x), rtol=2e-3, atol=2e-3)


def test_tensors_that_begin_anywhere(launched):
    norm, x = draw(4, 96, torch.bfloat16)
    expected = layer_norm.run_layer_norm(norm, x)
    moved = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
    assert torch.equal(layer_norm.run_layer_norm(norm, moved), expected)
    assert [call.binary is None for call, *_ in launched] == [False, True]


def test_other_calls_are_pytorchs(launched):
    norm, x = draw(4, 96, torch.bfloat16)
    learnt = copy.deepcopy(norm).requires_grad_()
    calls = [
        (norm.float(), x.float()),
        (learnt, x),
        (draw(4, 96, torch.bfloat16)[0], x.clone().requires_grad_()),
        (draw(4, 96, torch.bfloat16)[0], x.t().contiguous().t()),
        (draw(4, 96, torch.bfloat16)[0], x[:0]),
    ]
    for each, rows in calls:
        assert torch.equal(layer_norm.run_layer_norm(each, rows), nn.LayerNorm.forward(each, rows))
    with torch.autocast(DEVICE, torch.bfloat16):
        layer_norm.run_layer_norm(draw(4, 96, torch.bfloat16)[0], x)
    assert launched == []
    with torch.no_grad():
        layer_norm.run_layer_norm(learnt, x)
    assert len(launched) == 1


def test_a_weight_of_other_strides_is_pytorchs(launched):
    norm, x = draw(4, 96, torch.bfloat16)
    norm.weight = nn.Parameter(norm.weight.repeat_interleave(2)[::2], requires_grad=False)
    assert torch.equal(layer_norm.run_layer_norm(norm, x), nn.LayerNorm.forward(norm, x))
    assert launched == []


def test_only_pytorchs_own_of_rows_is_replaced():
    class Other(nn.LayerNorm):
        pass

    kept = [Other(8), nn.LayerNorm((2, 8)), nn.LayerNorm(8, bias=False), nn.LayerNorm(1 << 14)]
    kept += [nn.LayerNorm(8, elementwise_affine=False), nn.RMSNorm(8)]
    assert layer_norm.has_rows(nn.LayerNorm(8))
    assert not any(map(layer_norm.has_rows, kept))


def test_an_accelerated_tower_has_it(launched):
    tower = make_tower("qwen3").bfloat16()
    inputs = random_inputs(tower, [(1, 4, 6)])
    with torch.no_grad():
        expected = run(tower, *inputs)[0].float()
        accelerate(tower)
        assert "FusedLayerNorm" in kinds_of(tower)
        result = run(tower, *inputs)[0].float()
    assert launched
    assert ((result - expected).norm() / expected.norm()).item() < 2e-2


def test_the_operator_is_as_it_says():
    norm, x = draw(3, 24, torch.bfloat16)
    arguments = x, norm.weight.detach(), norm.bias.detach(), norm.eps
    torch.library.opcheck(layer_norm._operator, arguments)
