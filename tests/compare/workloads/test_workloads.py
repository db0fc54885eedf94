import itertools
import math

import numpy as np
import pytest

from compare.bench.kernels import all_implementations
from compare.common.errors import InputError
from compare.workloads.kernels import (
    DTYPES,
    FRAMES_MIX,
    FRAMES_MIX_PARTS,
    KERNEL_WORKLOADS,
    TRAINING_WORKLOADS,
    KernelWorkload,
    choose,
    variant,
)
from compare.workloads.towers import (
    INTEGRATION_WORKLOADS,
    TOWER_WORKLOADS,
    TOWERS,
    TRAINED_TOWER_WORKLOADS,
    VLLM_WORKLOADS,
)
from flax_models.common.checkpoint import expected_tensors

SIDES = (448, 672, 896, 1344)


def test_names():
    square = [f"{k}-{s}" for k in ("windows", "frames") for s in SIDES]
    assert list(KERNEL_WORKLOADS)[: len(square)] == square
    assert all(name == workload.name for name, workload in KERNEL_WORKLOADS.items())
    sizes = (*SIDES, "video-16x448")
    towers = (*TOWERS, "qwen3_5_tower", "qwen3_5_small_tower")
    shared = [f"{tower}-{size}" for tower in towers for size in sizes]
    assert list(TOWER_WORKLOADS) == [*shared, "tower-video-8x16x448", "tower-batch-32"]
    steps = [f"tower-train-{side}" for side in (448, 896, 1344)]
    assert list(TRAINED_TOWER_WORKLOADS) == [*steps, "losses-448"]
    assert set(TRAINING_WORKLOADS) < set(KERNEL_WORKLOADS)
    assert list(TRAINING_WORKLOADS)[: len(square)] == square
    integrations = ("integration", "integration_qwen3", "integration_qwen3_5")
    assert list(INTEGRATION_WORKLOADS) == [f"{i}-{s}" for i in integrations for s in SIDES]
    in_vllm = ("vllm", "vllm_qwen3", "vllm_qwen2")
    assert list(VLLM_WORKLOADS) == [f"{i}-{s}" for i in in_vllm for s in (*sizes, "batch-32")]


@pytest.mark.parametrize("side", SIDES)
def test_segments_of_square_images(side):
    windows, frames = KERNEL_WORKLOADS[f"windows-{side}"], KERNEL_WORKLOADS[f"frames-{side}"]
    assert windows.tokens == frames.tokens == (side // 14) ** 2
    assert windows.lengths.tolist() == [64] * (side // 112) ** 2
    assert frames.lengths.tolist() == [frames.tokens]


def test_other_shapes_are_what_their_names_say():
    def shape(name):
        workload = KERNEL_WORKLOADS[name]
        return workload.tokens, workload.lengths.min(), workload.lengths.max()

    assert shape("windows_other-1260x868") == (62 * 90, 6 * 2, 64)
    assert shape("windows_other-16x448") == (8 * 1024, 64, 64)
    assert len(KERNEL_WORKLOADS["windows_other-8-images"].grid_thw) == 8
    assert KERNEL_WORKLOADS["windows_other-1344-fp16"].dtype == "float16"
    assert shape("frames_other-8x1024") == (8 * 1024, 1024, 1024)
    for side, head_dim in itertools.product((448, 672, 896, 1344), (72, 128)):
        workload = KERNEL_WORKLOADS[f"frames_other-{side}-head{head_dim}"]
        assert (workload.head_dim, workload.lengths.tolist()) == (head_dim, [(side // 14) ** 2])


def test_the_mix_is_the_sum_of_its_parts():
    image, forty = (KERNEL_WORKLOADS[name] for name in FRAMES_MIX_PARTS)
    assert image.lengths.tolist() == [9216]
    assert len(forty.lengths) == 40
    assert (forty.lengths.min(), forty.lengths.max()) == (64, 1024)
    mix = KERNEL_WORKLOADS[FRAMES_MIX]
    assert mix.lengths.tolist() == [*image.lengths, *forty.lengths]


def test_peers_that_a_workload_names_exist():
    known = {implementation.name for implementation in all_implementations()}
    named = [w.peers for w in KERNEL_WORKLOADS.values() if w.peers is not None]
    assert named
    assert known.issuperset(itertools.chain.from_iterable(named))


@pytest.mark.parametrize("name", [name for name, w in KERNEL_WORKLOADS.items() if w.peers])
def test_where_peers_are_named_the_strongest_are_among_them(name):
    """Which library is the fastest depends on the size; a rotation in place always is."""
    workload = KERNEL_WORKLOADS[name]
    attentions = ["FA2 varlen"] if workload.kind == "windows" else ["FA2 varlen", "FA3 varlen"]
    if len(set(workload.lengths.tolist())) == 1:
        attentions.append("cuDNN SDPA")
    of_torch = {peer for peer in workload.peers if "XLA" not in peer}
    assert of_torch == {f"in-place rope + {attention}" for attention in attentions}


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
    workload = TOWER_WORKLOADS[f"tower-{side}"]
    floor_s = workload.matrix_flops / 790e12 + workload.bytes_moved / 4.06e12
    assert 1e3 * floor_s == pytest.approx(milliseconds, abs=0.07)


@pytest.mark.parametrize("tower", ["qwen2-tower", "qwen3-tower"])
def test_operations_of_a_tower_without_windows(tower):
    """Twice the weights of every product for each row that meets it, and the attention's."""
    workload = TOWER_WORKLOADS[f"{tower}-448"]
    config, tokens = workload.config, workload.tokens
    assert tokens == (448 // config.patch_size) ** 2
    shapes = expected_tensors(config)
    del shapes["patch_embed.proj.weight"]
    shapes.pop("pos_embed.weight", None)
    products = 2 * tokens * config.patch_dim * config.hidden_size
    for name, shape in shapes.items():
        rows = tokens if name.startswith("blocks.") else tokens // 4
        products += 2 * rows * math.prod(shape) if len(shape) == 2 else 0
    attention = config.depth * 4 * tokens**2 * config.hidden_size
    assert workload.matrix_flops == products + attention
    assert workload.bytes_moved == 0


def test_a_clip_has_two_frames_in_each_temporal_patch():
    assert TOWER_WORKLOADS["tower-video-16x448"].grid_thw == ((8, 32, 32),)
    assert TOWER_WORKLOADS["tower-video-16x448"].tokens == 8 * 32 * 32
    assert TOWER_WORKLOADS["qwen3-tower-video-16x448"].grid_thw == ((8, 28, 28),)


def test_clips_and_images_of_one_call():
    clips, images = TOWER_WORKLOADS["tower-video-8x16x448"], TOWER_WORKLOADS["tower-batch-32"]
    assert clips.grid_thw == ((8, 32, 32),) * 8
    assert clips.frames == 8 * 16
    assert images.frames == 0
    assert len(images.visuals) == 32
    long_sides = [max(visual.height, visual.width) for visual in images.visuals]
    assert long_sides == sorted(long_sides)
    assert (long_sides[0], long_sides[-1]) == (224, 1344)
    assert len({visual.height > visual.width for visual in images.visuals}) == 2


def test_choose():
    assert choose({"a": 1, "b": 2}, None) == [1, 2]
    assert choose({"a": 1, "b": 2}, ["b"]) == [2]
    with pytest.raises(InputError, match="unknown workload 'c'; known: a, b"):
        choose({"a": 1, "b": 2}, ["b", "c"])
