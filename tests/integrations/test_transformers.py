"""`accelerate` on Hugging Face's models: the same results, in fp32, in bf16 and compiled."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.integrations import table
from tests.integrations.hugging_face import (
    CLASSES,
    DEVICE,
    GRIDS,
    IMAGE_TOKEN,
    VISION_START,
    Waits,
    assert_same_bits,
    bits_of,
    kinds_of,
    make_model,
    make_tower,
    random_inputs,
    relative_error,
    run,
    tensors_of,
)
from triton_kernels.integrations import plan
from triton_kernels.integrations.layers import PatchProduct, stand_in
from triton_kernels.integrations.transformers import accelerate, restore

every_family = pytest.mark.parametrize("family", CLASSES)
FP32_TOLERANCE = 1e-5


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
def test_the_kernel_itself_in_a_tower(family, monkeypatch):
    # Interpreted where no GPU is.
    monkeypatch.setattr(
        "triton_kernels.attend.runs_kernel", lambda device, _: device.type == DEVICE
    )
    tower = make_tower(family)
    inputs = random_inputs(tower, [(1, 4, 10), (2, 2, 2)])
    with torch.no_grad():
        expected, results = run(tower, *inputs), run(accelerate(tower), *inputs)
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


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_every_attention_function_of_hugging_faces_is_replaced(implementation):
    tower = make_tower("qwen2_5")
    tower.config._attn_implementation = implementation
    assert "FusedAttention" in kinds_of(accelerate(tower))


def test_what_is_swapped():
    _, rows = table.read()
    for family, cls in CLASSES.items():
        tower = accelerate(make_tower(family))
        assert "FusedAttention" in kinds_of(tower)
        assert table.replaced(tower) == rows[plan.model_of(cls)][0]
    assert rows["qwen2_5_vl"][0] == "RMSNorm, gated MLP, convolution over patches"


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4), bias=False), (5, 3, 2, 4, 4)),
        (nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)), (5, 3, 4, 4, 8)),
        (nn.Conv2d(3, 8, 4, stride=4, padding="valid"), (5, 3, 4, 4)),
        (nn.Conv2d(3, 8, 4, stride=3), (5, 3, 10, 7)),
    ],
)
def test_a_convolution_is_itself_over_one_patch_or_more(convolution, shape):
    assert PatchProduct.fits(convolution)
    convolution, x = convolution.to(DEVICE), torch.randn(shape, device=DEVICE)
    expected = convolution(x)
    stand_in(convolution, PatchProduct)
    result = convolution(x)
    assert result.shape == expected.shape
    assert relative_error(result, expected) < 1e-6


def test_other_convolutions_stay():
    for further in ({"groups": 3}, {"dilation": 2}, {"padding": 1}, {"padding": "same"}):
        assert not PatchProduct.fits(nn.Conv2d(3, 9, 4, **further))
    assert not PatchProduct.fits(nn.Linear(3, 9))


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


@pytest.mark.skipif(not plan.PRECOMPUTED, reason="to transformers 4.57 itself it does")
@every_family
def test_the_default_device_does_not_matter(family):
    tower = make_tower(family).to(torch.bfloat16)
    inputs = random_inputs(tower, GRIDS["clip"])
    plan._plan.cache_clear()
    with torch.no_grad():
        expected = run(accelerate(tower), *inputs)
        restore(tower)
        plan._plan.cache_clear()
        with torch.device("meta"):
            results = run(accelerate(tower), *inputs)
    assert all(map(torch.equal, results, expected))


def joined_frames(grid_thw):
    """A clip's frames as one segment, longer than any bound on a frame."""
    return {"cu_seqlens": plan.get_vision_cu_seqlens(grid_thw, True)}


def wide_windows(grid_thw):
    """Windows of four times as many tokens, and their order."""
    order, cu_seqlens = plan.get_vision_window_index(grid_thw, 2, 224, 14)
    return {"window_index": order, "cu_window_seqlens": cu_seqlens}


def turned_positions(grid_thw):
    return {"position_ids": plan.get_vision_position_ids(grid_thw, 2).flip(1)}


@pytest.mark.skipif(not plan.PRECOMPUTED, reason="this transformers takes no precomputed values")
@pytest.mark.parametrize("own", [joined_frames, wide_windows, turned_positions])
def test_what_a_caller_has_precomputed_counts_and_not_the_plan(own, monkeypatch):
    # By a kernel that minds the bound, interpreted where no GPU is: in fp32 only short ones are.
    monkeypatch.setattr(
        "triton_kernels.attend.runs_kernel", lambda device, _: device.type == DEVICE
    )
    tower = make_tower("qwen2_5").half()
    patches, grid_thw = random_inputs(tower, [(2, 8, 12)])
    given = own(grid_thw)
    with torch.no_grad():
        planned = tensors_of(tower(patches, grid_thw))
        expected = tensors_of(tower(patches, grid_thw, **given))
        results = tensors_of(accelerate(tower)(patches, grid_thw, **given))
    for result, exact, other in zip(results, expected, planned, strict=True):
        assert relative_error(other, exact) > 0.1, "it must matter"
        assert relative_error(result, exact) < 0.01


def test_a_plan_has_one_bound_for_frames_of_many_lengths():
    geometry = plan.Geometry(2, 112, 14)
    longest = [
        plan._plan(geometry, ((1, side, side),), torch.device("cpu"))["longest_frame"]
        for side in (28, 30, 32, 34)
    ]
    assert longest == [1024, 1024, 1024, 2048]


@every_family
def test_a_size_is_planned_once(family):
    tower = accelerate(make_tower(family))
    plan._plan.cache_clear()
    with torch.no_grad():
        for seed in range(3):
            tower(*random_inputs(tower, GRIDS["clip"], seed))
        tower(*random_inputs(tower, GRIDS["image"]))
    assert plan._plan.cache_info().misses == 2


@pytest.mark.skipif(not plan.PRECOMPUTED, reason="this transformers takes no precomputed values")
@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
@every_family
def test_a_planned_call_waits_for_nothing(family, attention):
    tower = make_tower(family)
    tower.config._attn_implementation = attention
    accelerate(tower)
    pixels, grid = random_inputs(tower, GRIDS["clip"])
    with torch.no_grad():
        tower(pixels, grid)
        with Waits() as waits:
            tower(pixels, grid)
    assert waits.count == 0


@pytest.mark.filterwarnings("ignore")  # a trace warns of all that it takes for constant
@every_family
def test_a_trace_leaves_plans_as_they_are(family):
    tower = accelerate(make_tower(family))
    inputs = random_inputs(tower, GRIDS["clip"])

    class Embeddings(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = tower

        def forward(self, *inputs):
            return tensors_of(self.tower(*inputs))[0]

    with torch.no_grad():
        expected = Embeddings()(*inputs)
        plan._plan.cache_clear()
        traced = torch.jit.trace(Embeddings(), inputs, check_trace=False)
        for result in (traced(*inputs), Embeddings()(*inputs)):
            assert relative_error(result, expected) < FP32_TOLERANCE


def test_a_block_can_be_called_alone():
    tower = make_tower("qwen2_5")
    hidden = torch.randn(40, 64, device=DEVICE)
    angles = torch.rand(40, 8, device=DEVICE).repeat(1, 2)
    call = {
        "position_embeddings": (angles.cos(), angles.sin()),
    }
    bounds = torch.tensor([0, 24, 40], device=DEVICE)
    with torch.no_grad():
        expected = [block(hidden, cu_seqlens=bounds.int(), **call) for block in tower.blocks]
        accelerate(tower)
        for cu_seqlens in (bounds.int(), bounds):  # a caller's own may be int64
            results = [block(hidden, cu_seqlens=cu_seqlens, **call) for block in tower.blocks]
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
