"""Sizes of a tower: what follows from them, and which make none."""

import subprocess
import sys

import pytest

import flax_models
from flax_models import VisionConfig


def test_derived_sizes():
    config = VisionConfig.qwen2_5_vl_7b()
    assert config.head_dim == 80
    assert config.patch_dim == 1176
    assert config.merge_unit == 4
    assert config.window_patches == 8
    assert config.max_window_seqlen == 64
    assert config.aligned_intermediate_size == 3456
    assert VisionConfig.qwen2_5_vl_72b().aligned_intermediate_size == 3520  # 3456 and two


@pytest.mark.parametrize(
    ("preset", "intermediate", "out"),
    [("3b", 3420, 2048), ("7b", 3420, 3584), ("32b", 3456, 5120), ("72b", 3456, 8192)],
)
def test_presets(preset, intermediate, out):
    config = getattr(VisionConfig, f"qwen2_5_vl_{preset}")()
    assert (config.intermediate_size, config.out_hidden_size) == (intermediate, out)
    assert (config.depth, config.hidden_size, config.num_heads) == (32, 1280, 16)
    assert config.fullatt_block_indexes == (7, 15, 23, 31)


def test_derived_sizes_of_the_other_families():
    qwen2, qwen3 = VisionConfig.qwen2_vl_7b(), VisionConfig.qwen3_vl_8b()
    assert (qwen2.head_dim, qwen2.patch_dim, qwen2.intermediate_size) == (80, 1176, 5120)
    assert (qwen3.head_dim, qwen3.patch_dim, qwen3.aligned_intermediate_size) == (72, 1536, 4352)
    assert qwen3.position_table_side == 48
    small = VisionConfig.qwen3_vl_4b()
    assert (small.head_dim, small.depth, small.out_hidden_size) == (64, 24, 2560)


def test_which_blocks_see_frames():
    windowed = VisionConfig.qwen2_5_vl_7b()
    assert [b for b in range(windowed.depth) if windowed.sees_frames(b)] == [7, 15, 23, 31]
    for config in (VisionConfig.qwen2_vl_7b(), VisionConfig.qwen3_vl_8b()):
        assert all(map(config.sees_frames, range(config.depth)))


def test_is_hashable_and_equal_by_value():
    assert len({VisionConfig(), VisionConfig.qwen2_5_vl_7b(), VisionConfig(depth=2)}) == 2
    assert VisionConfig(fullatt_block_indexes=[1]) == VisionConfig(fullatt_block_indexes=(1,))


def test_blocks_past_the_last_are_ignored_as_hugging_face_does():
    assert VisionConfig(depth=2).fullatt_block_indexes == (7, 15, 23, 31)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"depth": 0}, "depth must be a positive integer, got 0"),
        ({"hidden_size": 32.0}, "hidden_size must be a positive integer, got 32.0"),
        ({"patch_size": [14, 14]}, r"patch_size must be a positive integer, got \[14, 14\]"),
        ({"num_heads": True}, "num_heads must be a positive integer, got True"),
        ({"num_heads": 7}, "hidden_size 1280 is not divisible by num_heads 7"),
        ({"hidden_size": 1248}, "head_dim .* must be a multiple of 4, .* got 78"),
        ({"window_size": 100}, "window_size 100 is not a multiple of .* = 28 pixels"),
        ({"fullatt_block_indexes": [-1]}, r"must be block numbers from 0, got \[-1\]"),
        ({"fullatt_block_indexes": 7}, "must be block numbers from 0, got 7"),
        ({"rope_theta": 0.0}, "rope_theta must be a positive finite number, got 0.0"),
        ({"rope_theta": 10**40}, "rope_theta must be a positive finite number, got 1000"),
        ({"norm_eps": "tiny"}, "norm_eps must be a positive finite number, got 'tiny'"),
        ({"norm_eps": float("inf")}, "norm_eps must be a positive finite number, got inf"),
        ({"model_type": "vit"}, "unknown model type 'vit'; supported: qwen2_vl, qwen2_5_vl, qwen3"),
        ({"window_size": None}, "window_size must be a positive integer, got None"),
        ({"num_position_embeddings": 4}, "qwen2_5_vl has no num_position_embeddings: it must be N"),
        (
            {"deepstack_visual_indexes": [1]},
            r"qwen2_5_vl has no deepstack_visual_indexes: .*\(1,\)",
        ),
    ],
)
def test_refuses_values_that_make_no_tower(values, message):
    with pytest.raises(ValueError, match=message):
        VisionConfig(**values)


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("vit", {}, "unknown model type 'vit'"),
        ("qwen2_vl", {"window_size": 112}, "qwen2_vl has no window_size: it must be None, got 112"),
        ("qwen3_vl", {"fullatt_block_indexes": [7]}, "qwen3_vl has no fullatt_block_indexes"),
        ("qwen3_vl", {"num_position_embeddings": None}, "must be a positive integer, got None"),
        ("qwen3_vl", {"num_position_embeddings": 40}, "must be a square number, .* got 40"),
        ("qwen3_vl", {"deepstack_visual_indexes": [3, 3]}, r"different blocks, got \[3, 3\]"),
        ("qwen3_5", {"deepstack_visual_indexes": [3]}, "qwen3_5 has no deepstack_visual_indexes"),
        ("qwen3_vl", {"deepstack_visual_indexes": 3}, "must be block numbers from 0, got 3"),
    ],
)
def test_refuses_what_a_family_does_not_have(model_type, values, message):
    with pytest.raises(ValueError, match=message):
        VisionConfig.of(model_type, **values)


def test_importing_the_package_and_all_that_is_common_imports_no_framework():
    program = (
        "import importlib, pkgutil, sys, flax_models, flax_models.common as common\n"
        "assert dir(flax_models)\n"
        "modules = [module.name for module in pkgutil.iter_modules(common.__path__)]\n"
        "assert len(modules) > 9\n"
        "for module in modules: importlib.import_module(f'flax_models.common.{module}')\n"
        "print(*sorted({'jax', 'jaxlib', 'flax', 'torch'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stderr


def test_the_tower_says_what_to_install():
    program = (
        "import sys; sys.modules['jax'] = None; import flax_models\n"
        "try: flax_models.load_vision_tower\n"
        "except ImportError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "load_vision_tower needs JAX and Flax" in run.stdout, run.stderr
    assert "pip install '.[jax]' in the clone" in run.stdout


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match=r"module 'flax_models' has no attribute 'nothing'"):
        flax_models.nothing  # noqa: B018
    assert set(flax_models.__all__) <= set(dir(flax_models))
