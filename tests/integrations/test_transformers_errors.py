"""What `accelerate` refuses: one sentence that says why, and the model as it was."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.integrations.hugging_face import CLASSES, bits_of, make_tower, snapshot
from triton_kernels.integrations import layers
from triton_kernels.integrations.transformers import accelerate, accelerated, restore

ROOT = Path(__file__).parents[2]


def assert_refused(model, error, message):
    """accelerate raises, and has changed nothing in any tower of the model."""
    before = snapshot(model)
    with pytest.raises(error, match=message):
        accelerate(model)
    assert snapshot(model) == before


class Quantised(nn.Linear):
    """As other libraries do it: a linear layer of their own class."""


@pytest.mark.parametrize("function", [accelerate, restore, lambda m: accelerated(m).__enter__()])
@pytest.mark.parametrize("model", [nn.Linear(4, 4), None, "Qwen/Qwen2.5-VL-7B-Instruct"])
def test_another_model(function, model):
    with pytest.raises(TypeError, match=rf"Qwen2-VL, .*got {type(model).__name__}, which holds no"):
        function(model)


def test_another_family_of_transformers():
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28}
    model = CLIPVisionModel(CLIPVisionConfig(**sizes, num_attention_heads=2, patch_size=14))
    assert_refused(model, TypeError, "Qwen2-VL, .*got CLIPVisionModel")


@pytest.mark.parametrize("layer", ["gate_proj", "up_proj", "down_proj"])
def test_a_quantised_layer_that_has_to_be_padded(layer):
    sound, tower = make_tower("qwen2_5"), make_tower("qwen2_5")
    getattr(tower.blocks[2].mlp, layer).__class__ = Quantised
    both = nn.ModuleList([sound, tower])  # the first is not changed either
    assert_refused(both, TypeError, rf"blocks\.2\.mlp\.{layer} has to be padded.*got Quantised")


def prune_half(linear):
    prune.l1_unstructured(linear, "weight", 0.5)


@pytest.mark.parametrize("change", [prune_half, parametrizations.weight_norm])
def test_a_reparametrised_layer_that_has_to_be_padded(change):
    tower = make_tower("qwen2_5")
    change(tower.blocks[1].mlp.up_proj)
    assert_refused(tower, TypeError, r"blocks\.1\.mlp\.up_proj has to be padded.*type Tensor")


@pytest.mark.parametrize(
    ("layer", "change", "undo"),
    [
        ("mlp.up_proj", prune_half, lambda linear: prune.remove(linear, "weight")),
        (
            "mlp.up_proj",
            parametrizations.orthogonal,
            lambda linear: nn.utils.parametrize.remove_parametrizations(linear, "weight"),
        ),
        (
            "norm1",
            lambda norm: nn.utils.parametrize.register_parametrization(norm, "weight", nn.ReLU()),
            lambda norm: nn.utils.parametrize.remove_parametrizations(norm, "weight"),
        ),
    ],
)
def test_restore_refuses_what_another_library_has_changed(layer, change, undo):
    tower = make_tower("qwen2_5")
    before = snapshot(tower)
    both = nn.ModuleList([make_tower("qwen2_5"), accelerate(tower)])
    changed = tower.blocks[1].get_submodule(layer)
    change(changed)
    accelerated_and_changed = snapshot(both)
    with pytest.raises(ValueError, match=rf"blocks\.1\.{layer} must be as accelerate left it, got"):
        restore(both)
    assert snapshot(both) == accelerated_and_changed
    undo(changed)
    assert snapshot(restore(tower)) == before


def test_a_quantised_layer_that_need_not_be_padded():
    tower = make_tower("qwen2")
    tower.blocks[0].mlp.fc1.__class__ = Quantised
    tower.blocks[0].attn.qkv.__class__ = Quantised
    assert type(accelerate(tower).blocks[0].attn.qkv) is Quantised
    restore(tower)


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        ("mlp.up_proj", TypeError, r"blocks\.1\.mlp\.up_proj has to be padded.*DTensor"),
        ("attn.qkv", ValueError, r"blocks\.1\.attn must hold its weights whole.*sharded"),
    ],
)
def test_a_sharded_layer(mesh, layer, error, message):
    from torch.distributed.tensor import Shard, distribute_tensor

    tower = make_tower("qwen2_5").cpu()
    linear = tower.blocks[1].get_submodule(layer)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
    assert_refused(tower, error, message)


def test_restore_refuses_a_tower_sharded_since(mesh):
    from torch.distributed.fsdp import fully_shard

    tower = accelerate(make_tower("qwen2_5").cpu())
    fully_shard(tower.blocks[1].attn, mesh=mesh)
    with pytest.raises(ValueError, match=r"blocks\.1\.attn must be .* got a FSDPFusedAttention"):
        restore(tower)
    tower = accelerate(make_tower("qwen2_5").cpu())
    fully_shard(tower, mesh=mesh)
    with pytest.raises(
        ValueError, match=r"blocks\.0\.mlp\.gate_proj must be .* got a PaddedLinear"
    ):
        restore(tower)


@pytest.mark.parametrize("layer", ["attn.proj", "mlp.down_proj"])
def test_weights_that_are_not_in_memory(layer):
    tower = make_tower("qwen2_5")
    tower.blocks[0].get_submodule(layer).to("meta")
    assert_refused(tower, ValueError, r"blocks\.0\..*must hold its weights.*meta device")


@pytest.mark.parametrize("layer", ["attn", "norm2", "mlp.gate_proj"])
def test_a_layer_with_a_forward_of_its_own(layer):
    tower = make_tower("qwen2_5")
    module = tower.blocks[1].get_submodule(layer)
    module.forward = module.forward
    assert_refused(tower, ValueError, rf"blocks\.1\.{layer} has a forward of its own")


def test_a_head_that_the_kernel_does_not_take():
    tower = make_tower("qwen3")
    tower.blocks[0].attn.head_dim = 12
    assert_refused(tower, ValueError, r"head_dim .*multiple of 8 up to 256, got 12 in blocks\.0")


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, hidden_states, segments, position_embeddings, **kwargs: None,
        lambda self, hidden_states, cu_seqlens, position_embeddings, mask, **kwargs: None,
        lambda self, hidden_states, cu_seqlens, position_embeddings: None,
    ],
    ids=["renamed", "one more", "no keywords"],
)
@pytest.mark.parametrize("family", CLASSES)
def test_a_version_whose_attention_has_another_signature(monkeypatch, family, forward):
    tower = make_tower(family)
    monkeypatch.setattr(type(tower.blocks[0].attn), "forward", forward)
    message = r"\.forward of transformers [\d.]+ must take .*, got \(self, hidden_states"
    assert_refused(tower, RuntimeError, message)


def test_an_error_leaves_every_bit():
    tower = make_tower("qwen2_5")
    tower.blocks[2].mlp.down_proj.__class__ = Quantised
    bits = bits_of(tower)
    with pytest.raises(TypeError, match="has to be padded"):
        accelerate(tower)
    assert all(torch.equal(tensor, bits[name]) for name, tensor in bits_of(tower).items())


def test_a_failure_midway_is_undone(monkeypatch):
    tower = make_tower("qwen2_5")
    before, bits, pad = snapshot(tower), bits_of(tower), layers._pad
    remaining = iter([pad, pad, pad])  # the first layer's weight and bias, the second one's weight

    def pad_until_memory_is_full(values, shape):
        if (step := next(remaining, None)) is None:
            raise torch.OutOfMemoryError("full")
        return step(values, shape)

    monkeypatch.setattr(layers, "_pad", pad_until_memory_is_full)
    with pytest.raises(torch.OutOfMemoryError):
        accelerate(tower)
    assert snapshot(tower) == before
    assert all(torch.equal(tensor, bits[name]) for name, tensor in bits_of(tower).items())


def run_python(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_kernels_do_without_transformers():
    result = run_python(
        "import sys; sys.modules['transformers'] = None\n"
        "import triton_kernels, triton_kernels.integrations\n"
        "import triton_kernels.integrations.transformers"
    )
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError: triton_kernels.integrations.transformers needs")
    assert "pip install '.[transformers]' in the clone" in last_line
    assert "line 3, in <module>" in result.stderr, "the import of the line before works"
