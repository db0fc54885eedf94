"""`accelerate` on Hugging Face's models: the same results, and nothing left behind."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.integrations.hugging_face import (
    DEVICE,
    GRIDS,
    IMAGE_TOKEN,
    VISION_START,
    make_model,
    make_tower,
    random_inputs,
    relative_error,
    run,
    tensors_of,
)
from triton_kernels.integrations import plan
from triton_kernels.integrations.transformers import accelerate, accelerated, restore

FAMILIES = ("qwen2", "qwen2_5", "qwen3")
every_family = pytest.mark.parametrize("family", FAMILIES)
FP32_TOLERANCE = 1e-5


def snapshot(model):
    """Everything that restore has to bring back, beside the bits of parameters and buffers."""
    return {
        name: (type(module), dict.fromkeys(vars(module)), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    }


def bits_of(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_same_bits(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def kinds_of(tower):
    return {type(module).__name__.partition("_")[0] for module in tower.modules()}


@every_family
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_fp32_results_are_hugging_faces(family, grid):
    tower = make_tower(family)
    inputs = random_inputs(tower, grid)
    with torch.no_grad():
        expected = run(tower, *inputs)
        assert accelerate(tower) is tower
        results = run(tower, *inputs)
    assert len(results) == len(expected)
    for result, exact in zip(results, expected, strict=True):
        assert relative_error(result, exact) < FP32_TOLERANCE


@every_family
def test_bf16_is_no_further_from_fp32_than_hugging_faces(family, tmp_path):
    exact_tower = make_tower(family)
    inputs = random_inputs(exact_tower, [(1, 18, 20), (2, 6, 12)])
    exact_tower.save_pretrained(tmp_path)
    tower = type(exact_tower).from_pretrained(tmp_path, dtype=torch.bfloat16).eval().to(DEVICE)
    with torch.no_grad():
        exact, theirs = run(exact_tower, *inputs), run(tower, *inputs)
        ours = run(accelerate(tower), *inputs)
    for result, hugging_face, reference in zip(ours, theirs, exact, strict=True):
        limit = 1.1 * relative_error(hugging_face, reference)
        assert relative_error(result, reference) <= limit


@every_family
def test_angles_of_a_model_that_was_cast_are_exact_again(family):
    tower = make_tower(family)
    inputs = random_inputs(tower, [(1, 4, 120)])
    exact = angles_of_a_call(tower, inputs)
    bits = bits_of(tower.to(torch.bfloat16))
    theirs = angles_of_a_call(tower, inputs)
    ours = angles_of_a_call(accelerate(tower), inputs)
    for result, hugging_face, reference in zip(ours, theirs, exact, strict=True):
        assert (hugging_face - reference).abs().max() > 5e-3
        assert torch.equal(result, reference)
    assert_same_bits(bits_of(restore(tower)), bits)


def angles_of_a_call(tower, inputs):
    """cos and sin as the first layer is given them."""
    given = []
    hook = tower.blocks[0].attn.register_forward_pre_hook(
        lambda _attention, _args, kwargs: given.extend(kwargs["position_embeddings"]),
        with_kwargs=True,
    )
    with torch.no_grad():
        tower(*inputs)
    hook.remove()
    return given


def test_what_is_swapped():
    layers = {"FusedAttention", "FusedRMSNorm", "PaddedLinear"}
    assert kinds_of(accelerate(make_tower("qwen2_5"))) & layers == layers
    for family in ("qwen2", "qwen3"):
        assert kinds_of(accelerate(make_tower(family))) & layers == {"FusedAttention"}


@pytest.mark.parametrize("part", ["whole", "inner", "tower"])
def test_a_whole_model_its_inner_one_or_its_tower(part):
    model = make_model()
    tower = model.model.visual
    given = {"whole": model, "inner": model.model, "tower": tower}[part]
    assert accelerate(given) is given
    assert "FusedAttention" in kinds_of(tower)
    assert restore(given) is given
    assert "FusedAttention" not in kinds_of(tower)


def test_a_whole_models_logits():
    model = make_model()
    grid = [(1, 6, 10)]
    patches, grid_thw = random_inputs(model.model.visual, grid)
    tokens = torch.tensor([[1, VISION_START, *[IMAGE_TOKEN] * (6 * 10 // 4), 2, 3]], device=DEVICE)
    call = {"input_ids": tokens, "pixel_values": patches, "image_grid_thw": grid_thw}
    with torch.no_grad():
        expected = model(**call).logits
        changed = model(**{**call, "pixel_values": 1 - patches}).logits
        result = accelerate(model)(**call).logits
    assert relative_error(changed, expected) > 0.01, "the image must matter"
    assert relative_error(result, expected) < FP32_TOLERANCE


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


def test_state_dicts_have_the_published_shapes():
    tower = make_tower("qwen2_5")
    published = {name: tensor.clone() for name, tensor in tower.state_dict().items()}
    accelerate(tower)
    assert tower.blocks[0].mlp.down_proj.weight.shape == (64, 128)
    state = tower.state_dict()
    assert_same_bits(state, published)
    assert all(tensor.is_contiguous() for tensor in state.values())


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
        assert relative_error(result, exact) < FP32_TOLERANCE


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
    ("family", "checkpointing"), [*((family, False) for family in FAMILIES), ("qwen2_5", True)]
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


def test_training_keeps_the_padding_at_zero():
    tower = accelerate(make_tower("qwen2_5").train())
    optimizer = torch.optim.AdamW(tower.parameters(), lr=0.1, weight_decay=0.1)
    before = tower.state_dict()
    for _ in range(2):
        optimizer.zero_grad()
        tensors_of(tower(*random_inputs(tower, GRIDS["image"])))[-1].square().mean().backward()
        optimizer.step()
    mlp = tower.blocks[0].mlp
    assert not torch.equal(mlp.down_proj.weight[:, :84], before["blocks.0.mlp.down_proj.weight"])
    assert mlp.down_proj.weight[:, 84:].count_nonzero() == 0
    for linear in (mlp.gate_proj, mlp.up_proj):
        assert linear.weight[84:].count_nonzero() == linear.bias[84:].count_nonzero() == 0


def test_moves_and_casts_while_accelerated():
    tower = make_tower("qwen2_5")
    bits = bits_of(copy.deepcopy(tower).double())
    accelerate(tower).double()
    assert_same_bits(bits_of(restore(tower)), bits)


@every_family
def test_a_size_is_planned_once(family):
    tower = accelerate(make_tower(family))
    plan._plan.cache_clear()
    with torch.no_grad():
        for seed in range(3):
            tower(*random_inputs(tower, GRIDS["clip"], seed))
        tower(*random_inputs(tower, GRIDS["image"]))
    assert plan._plan.cache_info().misses == 2


def test_a_block_can_be_called_alone():
    tower = make_tower("qwen2_5")
    hidden = torch.randn(40, 64, device=DEVICE)
    angles = torch.rand(40, 8, device=DEVICE).repeat(1, 2)
    call = {
        "cu_seqlens": torch.tensor([0, 24, 40], dtype=torch.int32, device=DEVICE),
        "position_embeddings": (angles.cos(), angles.sin()),
    }
    with torch.no_grad():
        expected = [block(hidden, **call) for block in tower.blocks]
        results = [block(hidden, **call) for block in accelerate(tower).blocks]
    for result, exact in zip(results, expected, strict=True):
        assert relative_error(result, exact) < FP32_TOLERANCE


# Once for windows, and once for each power of two that bounds a frame: 256 and 128.
@pytest.mark.parametrize(("family", "compilations"), [("qwen2_5", 3), ("qwen3", 2)])
def test_blocks_compile_whole_and_seldom(family, compilations):
    torch.compiler.reset()
    tower = accelerate(make_tower(family))
    grids = [[(1, 10, 14)], [(1, 6, 18), (2, 4, 10)], [(1, 12, 16), (1, 8, 8), (3, 4, 6)]]
    inputs = [random_inputs(tower, grid) for grid in grids]
    counter = CompileCounterWithBackend("eager")
    with torch.inference_mode():  # elsewhere the first block, whose input is a view, differs
        expected = [tensors_of(tower(*given))[0] for given in inputs]
        for block in tower.blocks:
            block.compile(fullgraph=True, dynamic=True, backend=counter)
        results = [tensors_of(tower(*given))[0] for given in inputs]
    for result, exact in zip(results, expected, strict=True):
        assert relative_error(result, exact) < FP32_TOLERANCE
    assert counter.frame_count <= compilations


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5"])
def test_a_compiled_tower(family):
    torch.compiler.reset()
    tower = accelerate(make_tower(family))
    inputs = random_inputs(tower, GRIDS["several"])
    with torch.no_grad():
        expected = tensors_of(tower(*inputs))
        results = tensors_of(torch.compile(tower, backend="aot_eager")(*inputs))
    for result, exact in zip(results, expected, strict=True):
        assert relative_error(result, exact) < FP32_TOLERANCE
