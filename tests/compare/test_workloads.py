import numpy as np
import pytest

from compare.errors import InputError
from compare.workloads import (
    DTYPES,
    INTEGRATION_WORKLOADS,
    KERNEL_WORKLOADS,
    TOWER_WORKLOADS,
    KernelWorkload,
    choose,
    variant,
)
from flax_models import VisionConfig

SIDES = (448, 672, 896, 1344)


def test_names():
    assert list(KERNEL_WORKLOADS) == [f"{k}-{s}" for k in ("windows", "frames") for s in SIDES]
    assert list(TOWER_WORKLOADS) == [*(f"tower-{s}" for s in SIDES), "tower-video-16x448"]
    assert list(INTEGRATION_WORKLOADS) == [f"integration-{s}" for s in SIDES]


@pytest.mark.parametrize("side", SIDES)
def test_segments_of_square_images(side):
    windows, frames = KERNEL_WORKLOADS[f"windows-{side}"], KERNEL_WORKLOADS[f"frames-{side}"]
    assert windows.tokens == frames.tokens == (side // 14) ** 2
    assert windows.lengths.tolist() == [64] * (side // 112) ** 2
    assert frames.lengths.tolist() == [frames.tokens]


def test_inputs_have_the_stated_shapes():
    workload = KernelWorkload("w", "windows", ((1, 10, 12), (2, 4, 4)), heads=3, head_dim=72)
    inputs = workload.inputs()
    tokens = 10 * 12 + 2 * 4 * 4
    assert inputs.qkv.shape == (tokens, 3, 3, 72)
    assert inputs.qkv.dtype == DTYPES["bfloat16"]
    assert inputs.cos.shape == inputs.sin.shape == (tokens, 36)
    assert inputs.cos.dtype == inputs.sin.dtype == np.float32
    assert inputs.cu_seqlens.dtype == np.int32
    assert inputs.cu_seqlens[-1] == tokens
    assert inputs.max_seqlen == np.diff(inputs.cu_seqlens).max() == 64


def test_inputs_follow_the_seed():
    workload = KERNEL_WORKLOADS["windows-448"]
    assert (workload.inputs(1).qkv == workload.inputs(1).qkv).all()
    assert (workload.inputs(1).qkv != workload.inputs(2).qkv).any()


def test_partial_rotation_has_fewer_angles():
    workload = variant(KERNEL_WORKLOADS["windows-448"], rotary_dim=40)
    assert workload.name == "windows-448 rotary_dim=40"
    assert workload.inputs().cos.shape == (1024, 20)


def test_bytes_and_operations_of_one_call():
    workload = KERNEL_WORKLOADS["windows-448"]
    qkv, out, angles = 1024 * 3 * 1280 * 2, 1024 * 1280 * 2, 2 * 1024 * 40 * 4
    assert workload.bytes_moved == qkv + out + angles
    assert workload.matrix_flops == 16 * 16 * (2 * 64 * 64 * 80 + 2 * 64 * 64 * 80)


@pytest.mark.parametrize(
    ("side", "milliseconds"), [(448, 1.8), (672, 4.1), (896, 7.4), (1344, 17.8)]
)
def test_tower_floor_is_the_known_one(side, milliseconds):
    config, workload = VisionConfig.qwen2_5_vl_7b(), TOWER_WORKLOADS[f"tower-{side}"]
    floor_s = workload.matrix_flops(config) / 790e12 + workload.bytes_moved(config) / 4.06e12
    assert 1e3 * floor_s == pytest.approx(milliseconds, abs=0.07)


def test_a_clip_has_two_frames_in_each_temporal_patch():
    assert TOWER_WORKLOADS["tower-video-16x448"].grid_thw == ((8, 32, 32),)
    assert TOWER_WORKLOADS["tower-video-16x448"].tokens == 8 * 32 * 32


def test_choose():
    assert choose({"a": 1, "b": 2}, None) == [1, 2]
    assert choose({"a": 1, "b": 2}, ["b"]) == [2]
    with pytest.raises(InputError, match="unknown workload 'c'; known: a, b"):
        choose({"a": 1, "b": 2}, ["b", "c"])
