"""What other libraries do to a model's layers, before or after it is accelerated, keeps its effect.

In the libraries' own ways, without the libraries.
"""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.integrations.hugging_face import embed, make_tower, relative_error
from triton_kernels.integrations.transformers import accelerate

TOLERANCE = 1e-5


def partition(tower):
    """As ZeRO-3 does: no elements between the calls of the module that owns a parameter."""
    whole = {}
    for parameter in tower.parameters():
        if parameter.ndim > 1:
            parameter.ds_shape, whole[parameter] = parameter.shape, parameter.data
            parameter.data = parameter.data.new_empty(0)

    def gather(module, _):
        for parameter in module.parameters(recurse=False):
            parameter.data = whole.get(parameter, parameter.data)

    def release(module, *_):
        for parameter in module.parameters(recurse=False):
            if parameter in whole:
                parameter.data = parameter.data.new_empty(0)

    for module in tower.modules():
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(release)


def offload(tower):
    """As accelerate, the library, does it: weights on the meta device between a layer's calls."""
    for module in list(tower.modules()):
        whole = dict(module.named_parameters(recurse=False))
        if whole:
            for name in whole:
                setattr(module, name, nn.Parameter(whole[name].detach().to("meta")))
            module.forward = bringing_over(module, whole)


def bringing_over(module, whole):
    forward = module.forward

    def run(*args, **kwargs):
        return torch.func.functional_call(Called(forward, module), prefixed(whole), args, kwargs)

    return run


class Called(nn.Module):
    def __init__(self, forward, module):
        super().__init__()
        self.module, self.run = module, forward

    def forward(self, *args, **kwargs):
        return self.run(*args, **kwargs)


def prefixed(whole):
    return {f"module.{name}": x for name, x in whole.items()}


def quantize(tower):
    for block in tower.blocks:
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(block.mlp, name).__class__ = Quantized


class Quantized(nn.Linear):
    """As other libraries do it: a linear layer of their own class."""

    def forward(self, x):
        weight = (self.weight * 8).round() / 8
        return nn.functional.linear(x, weight, self.bias)


def adapt(tower):
    for block in tower.blocks:
        for parent in (block.attn, block.mlp):
            for name, linear in list(parent.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(parent, name, Adapter(linear))


class Adapter(nn.Module):
    """As peft does it: a module in a layer's place that adds to the layer's result."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        generator = torch.Generator().manual_seed(4)
        shape = base_layer.out_features, base_layer.in_features
        self.delta = nn.Parameter(
            0.1 * torch.randn(shape, generator=generator).to(base_layer.weight)
        )

    def forward(self, x):
        return self.base_layer(x) + nn.functional.linear(x, self.delta)


def prune_half(tower):
    for block in tower.blocks:
        prune.l1_unstructured(block.mlp.up_proj, "weight", 0.5)
        prune.l1_unstructured(block.mlp.down_proj, "weight", 0.5)


def parametrize(tower):
    for block in tower.blocks:
        parametrizations.weight_norm(block.mlp.gate_proj)
        parametrizations.orthogonal(block.mlp.down_proj)


def hook_layers(tower):
    for block in tower.blocks:
        for name in ("gate_proj", "up_proj", "down_proj", "act_fn"):
            getattr(block.mlp, name).register_forward_hook(lambda _module, _x, y: 1.25 * y)


def put_forwards(tower):
    for block in tower.blocks:
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(block.mlp, name)
            linear.forward = lambda x, forward=linear.forward: 1.25 * forward(x)


def replace_mlp(tower):
    for block in tower.blocks:
        block.mlp = OtherMLP(block.mlp)


class OtherMLP(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x):
        return self.down_proj(nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))


def replace_norms(tower):
    for block in tower.blocks:
        block.norm1, block.norm2 = OtherNorm(block.norm1), OtherNorm(block.norm2)


class OtherNorm(nn.Module):
    """Has the attributes of an RMSNorm, and is none."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon
        self.bias = nn.Parameter(torch.full_like(norm.weight, 0.1))

    def forward(self, x):
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, 1e-6)


def put_forwards_of_norms(tower):
    for block in tower.blocks:
        block.norm1.forward = OtherNorm(block.norm1).forward


def skip_the_activation(tower):
    for block in tower.blocks:
        block.mlp.act_fn = nn.Tanh()


OTHERS_WORK = (
    partition, offload, quantize, adapt, prune_half, parametrize, hook_layers, put_forwards,
    replace_mlp, replace_norms, put_forwards_of_norms, skip_the_activation,
)  # fmt: skip


@pytest.mark.parametrize("accelerated_before", [True, False])
@pytest.mark.parametrize("change", OTHERS_WORK)
def test_what_other_libraries_do_to_a_models_layers_is_kept(change, accelerated_before, aligned):
    untouched, tower = make_tower("qwen2_5"), make_tower("qwen2_5")
    if accelerated_before:
        accelerate(tower)
    change(untouched)
    change(tower)
    accelerate(tower)
    result = embed(tower)
    assert aligned or change is replace_mlp
    assert relative_error(result, embed(untouched)) < TOLERANCE
