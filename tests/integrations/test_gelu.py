"""An MLP whose tanh GELU the first product applies: the same results, and of which calls."""

import pytest
import torch
from torch import nn

from tests.integrations.hugging_face import DEVICE, kinds_of, make_tower, relative_error
from triton_kernels.integrations import gelu
from triton_kernels.integrations.transformers import accelerate, restore

# In bf16; the operator's is the tanh approximation on a GPU, and the exact one on a CPU.
TOLERANCE = 1e-2


@pytest.fixture
def applied(monkeypatch):
    """On a CPU too; how often products applied it."""
    calls, own = [], torch._addmm_activation
    monkeypatch.setattr(gelu, "runs_gelu", lambda x: x.itemsize == 2)

    def noted(*operands, use_gelu):
        calls.append(use_gelu)
        return own(*operands, use_gelu=use_gelu)

    monkeypatch.setattr(torch, "_addmm_activation", noted)
    return calls


@pytest.fixture
def layer():
    tower = accelerate(make_tower("qwen3").bfloat16())
    assert "ActivatedMLP" in kinds_of(tower)
    return tower.blocks[0].mlp


def draw(layer):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, layer.linear_fc1.in_features, generator=generator)
    return x.to(DEVICE, torch.bfloat16)


def separate(layer, x):
    return layer.linear_fc2(layer.act_fn(layer.linear_fc1(x)))


@torch.no_grad()
def test_results_are_those_of_separate_steps(layer, applied):
    x = draw(layer)
    assert relative_error(layer(x), separate(layer, x)) < TOLERANCE
    assert applied == [True]
    layer.act_fn = nn.GELU(approximate="tanh")
    assert relative_error(layer(x), separate(layer, x)) < TOLERANCE
    assert applied == [True] * 2


def test_other_calls_run_the_layers(layer, applied):
    x = draw(layer)
    assert torch.equal(layer(x), separate(layer, x))  # gradients are recorded
    with torch.no_grad():
        for activation in (nn.GELU(), nn.SiLU()):
            own, layer.act_fn = layer.act_fn, activation
            assert torch.equal(layer(x), separate(layer, x))
            layer.act_fn = own
        with torch.autocast(DEVICE, torch.float16):
            layer(x)
        called = []
        hook = layer.linear_fc1.register_forward_hook(lambda *_: called.append(1))
        layer(x)
        assert called == [1]
        hook.remove()
        assert torch.equal(layer(x[None]), separate(layer, x[None]))
        bias, layer.linear_fc1.bias = layer.linear_fc1.bias, None
        assert torch.equal(layer(x), separate(layer, x))
        layer.linear_fc1.bias = bias
        assert torch.equal(layer.float()(x.float()), separate(layer, x.float()))
    assert applied == []


@torch.no_grad()
def test_restored_layers_are_hugging_faces(applied):
    tower = make_tower("qwen3").bfloat16()
    restore(accelerate(tower))
    layer = tower.blocks[0].mlp
    layer(draw(layer))
    assert applied == []


@torch.no_grad()
def test_a_compiled_layer_is_left_to_the_compiler(layer, applied):
    x = draw(layer)
    result = torch.compile(layer, backend="eager", fullgraph=True)(x)
    assert torch.equal(result, separate(layer, x))
    assert applied == []
