"""An accelerated model's weights: nothing is left behind, the published shapes, training."""

import contextlib
import copy
import pickle

import pytest
import torch

from tests.integrations.hugging_face import (
    CLASSES,
    DEVICE,
    GRIDS,
    assert_same_bits,
    bits_of,
    kinds_of,
    make_model,
    make_tower,
    random_inputs,
    relative_error,
    run,
    snapshot,
    tensors_of,
)
from triton_kernels.integrations import layers, plan
from triton_kernels.integrations.transformers import accelerate, accelerated, restore

every_family = pytest.mark.parametrize("family", CLASSES)


@every_family
def test_restore_is_exact(family):
    tower = make_tower(family)
    before, bits, parameters = snapshot(tower), bits_of(tower), list(tower.parameters())
    inputs = random_inputs(tower, GRIDS["image"])
    with torch.no_grad():
        expected = run(tower, *inputs)
        run(accelerate(tower), *inputs)
        results = run(restore(tower), *inputs)
    assert snapshot(tower) == before
    assert_same_bits(bits_of(tower), bits)
    assert all(p is q for p, q in zip(tower.parameters(), parameters, strict=True))
    assert all(p.is_contiguous() for p in tower.parameters())
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert snapshot(restore(tower)) == before


def test_twice_is_once():
    tower = make_tower("qwen2_5")
    before = snapshot(tower)
    once = snapshot(accelerate(tower))
    assert snapshot(accelerate(tower)) == once
    with accelerated(tower) as inner:
        assert inner is tower
    assert snapshot(tower) == once, "the block found it accelerated and must leave it so"
    assert snapshot(restore(tower)) == before


def test_the_block_undoes_itself_even_after_an_error():
    tower = make_tower("qwen2_5")
    before = snapshot(tower)
    with pytest.raises(TypeError, match="grid_thw"), accelerated(tower):
        tower(None)
    assert snapshot(tower) == before


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_accelerated_and_restored_by_themselves(clone):
    tower = make_tower("qwen2_5")
    before, inputs = snapshot(tower), random_inputs(tower, GRIDS["several"])
    twin = clone(accelerate(tower))
    with torch.no_grad():
        expected = run(tower, *inputs)
        assert all(torch.equal(a, b) for a, b in zip(run(twin, *inputs), expected, strict=True))
    assert snapshot(restore(twin)) == before
    assert "FusedAttention" in kinds_of(tower)


def test_a_copy_of_compiled_layers_has_weights_of_its_own():
    tower = accelerate(make_tower("qwen2_5"))
    for block in tower.blocks:
        block.attn.compile(backend="eager")
    for twin in (copy.deepcopy(tower), pickle.loads(pickle.dumps(tower))):
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
            embeddings = run(twin, *random_inputs(twin, GRIDS["image"]))[-1]
        assert not embeddings.any()


def test_state_dicts_have_the_published_shapes():
    tower = make_tower("qwen2_5")
    published = {name: tensor.clone() for name, tensor in tower.state_dict().items()}
    accelerate(tower)
    assert_same_bits(tower.state_dict(), published)


@pytest.mark.parametrize("keep_vars", [False, True])
def test_state_dicts_refer_to_the_models_own_memory(keep_vars):
    tower = accelerate(make_tower("qwen2_5"))
    inputs = random_inputs(tower, GRIDS["image"])
    with torch.no_grad():
        for tensor in tower.state_dict(keep_vars=keep_vars).values():
            tensor.mul_(0.5)
        results = run(tower, *inputs)
        untouched = make_tower("qwen2_5")
        for parameter in untouched.parameters():
            parameter.mul_(0.5)
        expected = run(untouched, *inputs)
    assert_same_bits(tower.state_dict(), untouched.state_dict())
    for result, exact in zip(results, expected, strict=True):
        assert relative_error(result, exact) < 1e-5


@pytest.mark.parametrize("assign", [False, True])
def test_loads_a_published_state_dict(assign):
    tower = accelerate(make_tower("qwen2_5"))
    other = {name: 1 - tensor for name, tensor in tower.state_dict().items()}
    given = {name: tensor.clone() for name, tensor in other.items()}
    assert not any(tower.load_state_dict(given, assign=assign))
    assert_same_bits(given, other)
    assert_same_bits(tower.state_dict(), other)
    inputs = random_inputs(tower, GRIDS["image"])
    with torch.no_grad():
        results = run(tower, *inputs)
        expected = run(restore(tower), *inputs)
    for result, exact in zip(results, expected, strict=True):
        assert relative_error(result, exact) < 1e-5


@pytest.mark.parametrize("width", [80, 128])
def test_a_state_dict_of_another_width_is_refused(width):
    tower = accelerate(make_tower("qwen2_5"))
    name = "blocks.0.mlp.down_proj.weight"
    state = tower.state_dict() | {name: torch.zeros(64, width)}
    with pytest.raises(RuntimeError, match=rf"{name}.*\[64, {width}\].*\[64, 84\]"):
        tower.load_state_dict(state)


def test_save_pretrained_writes_the_published_checkpoint(tmp_path):
    from safetensors.torch import load_file

    model = make_model()
    model.save_pretrained(tmp_path / "before")
    accelerate(model).save_pretrained(tmp_path / "after")
    saved = [load_file(tmp_path / name / "model.safetensors") for name in ("before", "after")]
    assert_same_bits(saved[1], saved[0])
    configs = [(tmp_path / name / "config.json").read_text() for name in ("before", "after")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("family", "checkpointing"), [*((family, False) for family in CLASSES), ("qwen2_5", True)]
)
def test_gradients_are_hugging_faces(family, checkpointing):
    tower = make_tower(family).train()
    if checkpointing:
        # transformers renames it on the way to 6.
        new = getattr(tower, "activation_checkpointing_enable", None)
        (new or tower.gradient_checkpointing_enable)({"use_reentrant": False})
    inputs = random_inputs(tower, GRIDS["several"])

    def gradients():
        tower.zero_grad()
        tensors_of(tower(*inputs))[-1].square().mean().backward()
        return {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}

    expected = gradients()
    accelerate(tower)
    with torch.inference_mode():  # what a call leaves behind must not spoil the next one's
        plan._plan.cache_clear()
        tower(*inputs)
    gradients()
    restore(tower)
    results = {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}
    assert results.keys() == expected.keys()
    for name, result in results.items():
        assert relative_error(result, expected[name]) < 1e-4, name


def test_gradients_and_state_dict_of_a_sharded_tower(mesh):
    from torch.distributed.fsdp import fully_shard

    untouched = make_tower("qwen2_5").cpu().train()
    inputs = [x.cpu() for x in random_inputs(untouched, GRIDS["several"])]
    tensors_of(untouched(*inputs))[-1].square().mean().backward()
    tower = accelerate(make_tower("qwen2_5").cpu().train())
    for block in tower.blocks:
        fully_shard(block, mesh=mesh)
    tensors_of(fully_shard(tower, mesh=mesh)(*inputs))[-1].square().mean().backward()
    expected = dict(untouched.named_parameters())
    for name, parameter in tower.named_parameters():
        assert relative_error(parameter.grad.full_tensor(), expected[name].grad) < 1e-4, name
    whole = {name: tensor.full_tensor() for name, tensor in tower.state_dict().items()}
    assert_same_bits(whole, untouched.state_dict())


def test_trains_after_it_was_changed_in_inference_mode():
    tower = make_tower("qwen2_5").train()
    state, inputs = tower.state_dict(), random_inputs(tower, GRIDS["image"])
    state = {name: tensor.clone() for name, tensor in state.items()}

    def train():
        tensors_of(tower(*inputs))[-1].square().mean().backward()
        torch.optim.SGD(tower.parameters(), lr=0.1).step()

    for function in (accelerate, lambda tower: tower.load_state_dict(state), restore):
        with torch.inference_mode():
            function(tower)
        train()


def test_frequencies_that_inference_left_behind_serve_gradients():
    tower = accelerate(make_tower("qwen2_5").to(torch.bfloat16))
    layers._remembered_frequencies.cache_clear()
    with torch.inference_mode():
        assert tower.rotary_pos_emb.inv_freq.dtype == torch.float32
    positions = torch.ones(3, 1, device=DEVICE, requires_grad=True)
    (positions * tower.rotary_pos_emb.inv_freq).sum().backward()
    assert positions.grad.isfinite().all()


@pytest.mark.parametrize("mode", [False, True])
def test_a_model_made_in_inference_mode(mode):
    with torch.inference_mode():
        tower = make_tower("qwen2_5")
    inputs = random_inputs(tower, GRIDS["image"])
    with torch.no_grad(), torch.inference_mode() if mode else contextlib.nullcontext():
        expected = run(tower, *inputs)
        results = run(accelerate(tower), *inputs)
        restored = run(restore(tower), *inputs)
    for result, same, exact in zip(results, restored, expected, strict=True):
        assert relative_error(result, exact) < 1e-5
        assert torch.equal(same, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moves_and_casts_while_accelerated(dtype):
    tower = make_tower("qwen2_5").to(dtype)
    bits = bits_of(copy.deepcopy(tower).double())
    accelerate(tower).double()
    assert_same_bits(bits_of(restore(tower)), bits)
