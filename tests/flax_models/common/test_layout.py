import timeit
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_models import Bucket, VisionConfig, plan_layout, rotary_angles
from flax_models.common.grid import MAX_TOKENS
from flax_models.common.layout import inverse_frequencies

CONFIG = VisionConfig.qwen2_5_vl_7b()
ARRAYS = ("window_order", "output_order", "positions", "cu_window_seqlens", "cu_frame_seqlens")

# Whole windows; windows cut at the right, at the bottom and at both; a single merge unit; strips;
# clips; mixes of all of them.
GRIDS = [
    [[1, 8, 8]],
    [[1, 16, 24]],
    [[1, 8, 10]],
    [[1, 10, 8]],
    [[1, 26, 14]],
    [[1, 2, 2]],
    [[1, 2, 40], [1, 40, 2]],
    [[3, 10, 12]],
    [[1, 16, 16], [4, 6, 18], [1, 2, 2], [2, 24, 8]],
]

sides = st.integers(1, 15).map(lambda units: 2 * units)
grids = st.lists(st.tuples(st.integers(1, 3), sides, sides), min_size=1, max_size=4)


def segment_of_each_token(cu_seqlens, tokens):
    return np.searchsorted(cu_seqlens, np.arange(tokens), side="right") - 1


def hugging_face_order(grid):
    """Frame (counted over all images), row and column of each token, by the definition."""
    tokens = []
    frame = 0
    for t, h, w in grid:
        for _ in range(t):
            tokens += [
                (frame, 2 * row + patch_row, 2 * column + patch_column)
                for row in range(h // 2)
                for column in range(w // 2)
                for patch_row in range(2)
                for patch_column in range(2)
            ]
            frame += 1
    return np.array(tokens)


def capture_hugging_face(hf_model, grid):
    """Run Hugging Face's tower and take what it gives to its blocks, whatever its version."""
    torch = pytest.importorskip("torch")
    tower = hf_model.model.visual
    seen = {}
    hooks = [
        tower.patch_embed.register_forward_hook(
            lambda module, args, output: seen.update(embedded=output.detach())
        ),
        tower.merger.register_forward_hook(
            lambda module, args, output: seen.update(merged=output.detach())
        ),
    ]
    for i, block in enumerate(tower.blocks):
        hooks.append(
            block.register_forward_pre_hook(
                lambda module, args, kwargs, i=i: seen.update({i: (args, kwargs)}),
                with_kwargs=True,
            )
        )
    pixels = torch.randn(sum(t * h * w for t, h, w in grid), 1176)
    with torch.no_grad():
        output = tower(pixels, torch.tensor(grid))
    for hook in hooks:
        hook.remove()
    seen["output"] = getattr(output, "pooler_output", output)
    return seen


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_order_of_patches_is_row_by_row_of_each_frame(grid):
    tokens = sum(t * h * w for t, h, w in grid)
    plan = plan_layout(CONFIG, grid, tokens + 8, output="patches")
    assert plan_layout(CONFIG, grid, tokens + 8) is not plan
    assert (plan.num_outputs, len(plan.output_order)) == (tokens, tokens + 8)
    frames = [np.indices((h, w)).reshape(2, -1).T for t, h, w in grid for _ in range(t)]
    ours = plan.positions[plan.output_order]
    np.testing.assert_array_equal(ours[:tokens], np.concatenate(frames))
    # Each within its own frame, and the padding in its place.
    frame_of = np.searchsorted(plan.cu_frame_seqlens, plan.output_order[:tokens], side="right")
    assert (np.diff(frame_of) >= 0).all()
    np.testing.assert_array_equal(np.sort(plan.output_order), np.arange(tokens + 8))
    np.testing.assert_array_equal(plan.output_order[tokens:], np.arange(tokens, tokens + 8))


def test_the_segments_of_pooled_images():
    plan = plan_layout(CONFIG, [(3, 4, 4), (1, 2, 6)], 64, output="pooled")
    assert (plan.num_outputs, plan.output_order) == (2, None)
    assert len(plan.cu_image_seqlens) == len(plan.cu_frame_seqlens)
    np.testing.assert_array_equal(plan.cu_image_seqlens[:4], [0, 48, 60, 60])


@pytest.mark.parametrize("hf_model", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equals_hugging_face(hf_model, tiny_config, grid):
    plan = plan_layout(tiny_config, grid)
    seen = capture_hugging_face(hf_model, grid)
    (windowed_input, *_), windowed = seen[0]
    _, whole_frames = seen[1]
    np.testing.assert_array_equal(seen["embedded"].numpy()[plan.window_order], windowed_input)
    np.testing.assert_array_equal(seen["merged"].numpy()[plan.output_order], seen["output"])
    np.testing.assert_array_equal(plan.cu_window_seqlens, windowed["cu_seqlens"])
    np.testing.assert_array_equal(plan.cu_frame_seqlens, whole_frames["cu_seqlens"])
    for ours, theirs in zip(
        rotary_angles(tiny_config, plan.positions), windowed["position_embeddings"], strict=True
    ):
        # One ulp of the largest angle: the platforms' power and cosine functions differ by that.
        twice = np.concatenate([ours, ours], axis=-1)
        np.testing.assert_allclose(twice, theirs.numpy(), rtol=0, atol=4e-6)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equals_hugging_face_function(grid):
    """At the published sizes, where the installed transformers has it as a function."""
    torch = pytest.importorskip("torch")
    vision_utils = pytest.importorskip("transformers.vision_utils")
    window_index, cu_window_seqlens = vision_utils.get_vision_window_index(
        torch.tensor(grid), spatial_merge_size=2, window_size=112, patch_size=14
    )
    plan = plan_layout(CONFIG, grid)
    np.testing.assert_array_equal(plan.window_order[::4] // 4, window_index)
    np.testing.assert_array_equal(plan.cu_window_seqlens, cu_window_seqlens)
    positions = vision_utils.get_vision_position_ids(torch.tensor(grid), 2)
    np.testing.assert_array_equal(plan.positions, positions.numpy()[plan.window_order])


@given(grids)
def test_orders_are_permutations_and_inverse(grid):
    plan = plan_layout(CONFIG, grid)
    tokens = sum(t * h * w for t, h, w in grid)
    assert plan.num_tokens == tokens
    assert plan.num_merged == tokens // 4
    np.testing.assert_array_equal(np.sort(plan.window_order), np.arange(tokens))
    np.testing.assert_array_equal(np.sort(plan.output_order), np.arange(tokens // 4))
    merged = plan.window_order[::4] // 4  # what a merger would see, each unit named by its index
    np.testing.assert_array_equal(merged[plan.output_order], np.arange(tokens // 4))


@given(grids)
def test_segments_are_exactly_the_windows_and_the_frames(grid):
    plan = plan_layout(CONFIG, grid)
    frame, row, column = hugging_face_order(grid)[plan.window_order].T
    np.testing.assert_array_equal(plan.positions, np.stack([row, column], axis=-1))

    for cu_seqlens in (plan.cu_window_seqlens, plan.cu_frame_seqlens):
        assert cu_seqlens[0] == 0
        assert cu_seqlens[-1] == plan.num_tokens
        assert (np.diff(cu_seqlens) > 0).all()
    assert np.diff(plan.cu_window_seqlens).max() <= plan.max_window_seqlen
    assert np.diff(plan.cu_frame_seqlens).max() == plan.max_frame_seqlen

    # Tokens share a segment just when they share their 8 x 8 block, or their frame.
    window = segment_of_each_token(plan.cu_window_seqlens, plan.num_tokens)
    blocks = np.stack([frame, row // 8, column // 8], axis=-1)
    pairs = np.unique(np.column_stack([window, blocks]), axis=0)
    assert len(pairs) == len(np.unique(blocks, axis=0)) == len(plan.cu_window_seqlens) - 1
    np.testing.assert_array_equal(
        segment_of_each_token(plan.cu_frame_seqlens, plan.num_tokens), frame
    )


@given(grids, st.integers(0, 40))
def test_padding_extends_the_unpadded_layout(grid, extra_units):
    plain = plan_layout(CONFIG, grid)
    tokens = plain.num_tokens + 4 * extra_units
    padded = plan_layout(CONFIG, grid, pad_to=tokens)
    assert (padded.num_tokens, padded.num_merged) == (plain.num_tokens, plain.num_merged)
    assert padded.max_window_seqlen == plain.max_window_seqlen
    assert padded.max_frame_seqlen >= plain.max_frame_seqlen
    for name in ARRAYS:
        ours, short = getattr(padded, name), getattr(plain, name)
        np.testing.assert_array_equal(ours[: len(short)], short)
    np.testing.assert_array_equal(
        padded.window_order[plain.num_tokens :], np.arange(plain.num_tokens, tokens)
    )
    np.testing.assert_array_equal(
        padded.output_order[plain.num_merged :], np.arange(plain.num_merged, tokens // 4)
    )
    assert not padded.positions[plain.num_tokens :].any()
    for name in ("cu_window_seqlens", "cu_frame_seqlens"):
        assert (getattr(padded, name)[len(getattr(plain, name)) :] == plain.num_tokens).all()


@given(grids, st.sampled_from([28, 56, 112, 224]))
def test_window_size_is_the_configurations(grid, window_size):
    config = replace(CONFIG, window_size=window_size)
    plan = plan_layout(config, grid)
    side = window_size // 14
    assert plan.max_window_seqlen == side * side
    blocks = hugging_face_order(grid)[plan.window_order] // [1, side, side]
    window = segment_of_each_token(plan.cu_window_seqlens, plan.num_tokens)
    pairs = np.unique(np.column_stack([window, blocks]), axis=0)
    assert len(pairs) == len(np.unique(blocks, axis=0)) == len(plan.cu_window_seqlens) - 1


@given(grids, st.integers(0, 40))
def test_without_windows_frames_take_their_place(grid, extra_units):
    tokens = sum(t * h * w for t, h, w in grid)
    for pad_to in (None, tokens + 4 * extra_units):
        plan = plan_layout(VisionConfig.qwen2_vl_7b(), grid, pad_to)
        padded = pad_to or tokens
        np.testing.assert_array_equal(plan.window_order, np.arange(padded))
        np.testing.assert_array_equal(plan.output_order, np.arange(padded // 4))
        np.testing.assert_array_equal(plan.cu_window_seqlens, plan.cu_frame_seqlens)
        np.testing.assert_array_equal(plan.positions[:tokens], hugging_face_order(grid)[:, 1:])
        assert plan.frame_sizes is None


@given(grids, st.integers(0, 40))
def test_frame_sizes_are_those_of_each_tokens_frame(grid, extra_units):
    tokens = sum(t * h * w for t, h, w in grid)
    plan = plan_layout(VisionConfig.qwen3_vl_8b(), grid, tokens + 4 * extra_units)
    frame, _, _ = hugging_face_order(grid).T
    sizes = np.array([(h, w) for t, h, w in grid for _ in range(t)])
    assert plan.frame_sizes.dtype == np.int32
    np.testing.assert_array_equal(plan.frame_sizes[:tokens], sizes[frame])
    assert (plan.frame_sizes[tokens:] == 1).all()


def test_a_bucket_sets_every_size():
    bucket = Bucket(tokens=256, windows=9, frames=5, frame_tokens=200)
    plan = plan_layout(CONFIG, [[1, 10, 12], [2, 4, 4]], pad_to=bucket)
    assert [len(getattr(plan, name)) for name in ARRAYS] == [256, 64, 256, 10, 6]
    assert plan.max_frame_seqlen == 200


def test_arrays_are_shared_and_read_only():
    plan = plan_layout(CONFIG, [[1, 10, 12]])
    assert plan_layout(CONFIG, np.array([[1, 10, 12]], dtype=np.uint8)) is plan
    for name in ARRAYS:
        array = getattr(plan, name)
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_takes_what_numpy_takes():
    torch = pytest.importorskip("torch")
    grid = [[1, 4, 6], [2, 2, 2]]
    plan = plan_layout(CONFIG, grid)
    for same in (np.array(grid), torch.tensor(grid), tuple(map(tuple, grid))):
        assert plan_layout(CONFIG, same) is plan


def test_angles_by_their_formula():
    positions = np.random.default_rng(0).integers(0, 200, (50, 2))
    cos, sin = rotary_angles(CONFIG, positions)
    assert cos.dtype == sin.dtype == np.float32
    exponents = np.arange(20) * 2 / 40
    rows, columns = (positions[:, [axis]] * 10000.0**-exponents for axis in (0, 1))
    angles = np.concatenate([rows, columns], axis=-1)
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=2e-5)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=2e-5)


def test_inverse_frequencies():
    frequencies = inverse_frequencies(CONFIG)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, 10000.0 ** (-np.arange(20) / 20), rtol=3e-7)


def test_angles_of_no_tokens():
    cos, sin = rotary_angles(CONFIG, np.zeros((0, 2), np.int32))
    assert cos.shape == sin.shape == (0, 40)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (np.zeros((3, 3), np.int32), r"integers of shape \[tokens, 2\], got int32 \[3, 3\]"),
        (np.zeros((3, 2)), r"integers of shape \[tokens, 2\], got float64 \[3, 2\]"),
        (np.array([[0, -3]]), "must not be negative, got -3"),
    ],
)
def test_refuses_positions(positions, message):
    with pytest.raises(ValueError, match=message):
        rotary_angles(CONFIG, positions)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([1, 4, 4], r"shape \[images, 3\] with at least one image, got \[3\]"),
        ([[4, 4]], r"shape \[images, 3\] with at least one image, got \[1, 2\]"),
        (np.zeros((0, 3), int), r"shape \[images, 3\] with at least one image, got \[0, 3\]"),
        ([[1.0, 4.0, 4.0]], "must hold integers, got float64"),
        ([[1, 4, 10**30]], "must hold integers, got object"),
        (
            [[1, 4, 4], [0, 4, 4]],
            r"image 1 is \(t=0, h=4, w=4\), but t, h and w must be at least 1",
        ),
        ([[1, -4, 4]], r"image 0 is \(t=1, h=-4, w=4\), but t, h and w must be at least 1"),
        (
            [[1, 4, 4], [1, 4, 4], [1, 4, 7]],
            r"image 2 is \(t=1, h=4, w=7\), but h and w must be divisible by spatial_merge_size 2",
        ),
        ([[10**9, 2, 2]], "holds 4,000,000,000 patches, more than the 67,108,864 of one call"),
        ([[10**18, 10**18, 10**18]], "patches, more than the 67,108,864 of one call"),
        ([[1, 2, 2]] * 3 + [[1, 2, MAX_TOKENS // 2]], "holds 67,108,876 patches, more than"),
    ],
)
def test_refuses_grids(grid, message):
    for _ in range(2):  # what is remembered of grids is that they are right
        with pytest.raises(ValueError, match=message):
            plan_layout(CONFIG, grid)


@pytest.mark.parametrize(
    ("pad_to", "message"),
    [
        (116, "cannot pad 120 tokens to 116"),
        (130, "padded tokens must be a positive multiple of the merge unit 4, got 130"),
        (0, "padded tokens must be a positive multiple of the merge unit 4, got 0"),
        (128.0, "padded tokens must be a positive multiple of the merge unit 4, got 128.0"),
        (2**30, "bucket tokens 1,073,741,824 pass the 67,108,864 of one call"),
        (Bucket(116, 9, 9, 120), r"the images have tokens = 120, above Bucket\(tokens=116"),
        (Bucket(128, 3, 9, 120), r"the images have windows = 4, above Bucket\(tokens=128"),
        (Bucket(128, 9, 9, 119), r"the images have frame_tokens = 120, above Bucket\(tokens=128"),
        (Bucket(130, 9, 9, 128), "tokens that are no multiple of the merge unit 4"),
    ],
)
def test_refuses_padding(pad_to, message):
    with pytest.raises(ValueError, match=message):
        plan_layout(CONFIG, [[1, 10, 12]], pad_to)


def test_refuses_too_many_frames():
    with pytest.raises(ValueError, match=r"the images have frames = 3, above Bucket"):
        plan_layout(CONFIG, [[3, 4, 4]], Bucket(128, 9, 2, 128))


def test_planning_is_quick():
    """At most 2 ms for a new 1344 px grid and 50 microseconds for one seen before."""
    grid = [[1, 96, 96]]
    plan_layout(CONFIG, grid)
    others = iter([[1, 96, 98 + 2 * n]] for n in range(30))
    assert min(timeit.repeat(lambda: plan_layout(CONFIG, next(others)), number=1, repeat=30)) < 2e-3
    seen = min(timeit.repeat(lambda: plan_layout(CONFIG, grid), number=20, repeat=30)) / 20
    assert seen < 50e-6


def test_large_layouts_are_not_remembered():
    for grid, pad_to in (([[1, 512, 512]], None), ([[1, 8, 8]], 1 << 18)):
        assert plan_layout(CONFIG, grid, pad_to) is not plan_layout(CONFIG, grid, pad_to)
