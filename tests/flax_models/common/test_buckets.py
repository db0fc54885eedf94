import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_models import Bucket, VisionConfig, choose_bucket, plan_layout
from flax_models.common.buckets import _LADDER
from flax_models.common.grid import MAX_TOKENS
from tests.random_calls import random_calls, tokens_of

CONFIG = VisionConfig.qwen2_5_vl_7b()

sides = st.integers(1, 60).map(lambda units: 2 * units)
grids = st.lists(st.tuples(st.integers(1, 12), sides, sides), min_size=1, max_size=8)


@pytest.mark.parametrize("at_most", [1, 4, 20])
@pytest.mark.parametrize("seed", range(3))
def test_few_buckets_and_little_padding_for_any_images(seed, at_most):
    """At most 16 compilations for 200 images, and at most 15 % of all tokens padding."""
    calls = random_calls(seed, 200, at_most)
    buckets = [choose_bucket(CONFIG, call) for call in calls]
    assert len(set(buckets)) <= 16
    padded = sum(bucket.tokens for bucket in buckets)
    assert sum(map(tokens_of, calls)) >= 0.85 * padded


def test_all_mixes_together_need_no_more_than_the_ladder():
    calls = [call for at_most in (1, 4, 20) for call in random_calls(7, 400, at_most)]
    assert len({choose_bucket(CONFIG, call) for call in calls}) <= len(_LADDER)


@given(grids)
def test_every_grid_fits_its_bucket(grid):
    bucket = choose_bucket(CONFIG, grid)
    plan = plan_layout(CONFIG, grid, bucket)
    assert len(plan.window_order) == bucket.tokens >= tokens_of(grid)
    assert choose_bucket(CONFIG, grid, [bucket.tokens]) == bucket
    by_tokens = plan_layout(CONFIG, grid, bucket.tokens)
    np.testing.assert_array_equal(by_tokens.cu_window_seqlens, plan.cu_window_seqlens)
    np.testing.assert_array_equal(by_tokens.cu_frame_seqlens, plan.cu_frame_seqlens)


@pytest.mark.parametrize("config", [CONFIG, VisionConfig.qwen2_vl_7b(), VisionConfig.qwen3_vl_8b()])
@pytest.mark.parametrize("visual", [(1, 448), (1, 672), (1, 896), (1, 1344), (8, 448)])
def test_workloads_fit_without_padding_but_to_whole_products(config, visual):
    """XLA pads every product whose rows are no multiple of 8: 672 px are 1,764 patches of 16 px."""
    frames, side = visual
    grid = [(frames, side // config.patch_size, side // config.patch_size)]
    assert choose_bucket(config, grid).tokens == -(-tokens_of(grid) // 8) * 8


def test_clips_need_no_buckets_of_their_own_where_frames_are_windows():
    config = VisionConfig.qwen2_vl_7b()
    for grid in ([(1, 16, 16)], [(8, 4, 8)], [(16, 4, 4)]):
        bucket = choose_bucket(config, grid)
        assert (bucket.tokens, bucket.windows) == (256, bucket.frames)


@pytest.mark.parametrize("tokens", [20_484, 65_536, 65_540, 1_000_000, MAX_TOKENS - 4, MAX_TOKENS])
def test_padding_past_the_ladder(tokens):
    bucket = choose_bucket(CONFIG, [[1, 2, tokens // 2]])
    assert tokens <= bucket.tokens <= min(1.125 * tokens, MAX_TOKENS)


def test_unusual_images_grow_the_segments():
    usual = choose_bucket(CONFIG, [[1, 32, 32]])
    assert usual == Bucket(tokens=1024, windows=32, frames=9, frame_tokens=1024)
    thumbnails = choose_bucket(CONFIG, [[1, 4, 4]] * 64)
    assert thumbnails == Bucket(tokens=1024, windows=64, frames=72, frame_tokens=1024)
    specks = choose_bucket(CONFIG, [[1, 2, 2]] * 256)
    assert specks == Bucket(tokens=1024, windows=256, frames=256, frame_tokens=1024)


def test_long_videos_keep_the_bound_on_frames():
    video = choose_bucket(CONFIG, [[1024, 32, 32]])
    assert video.tokens == 1 << 20
    assert video.frames == 1032
    assert video.frame_tokens == 1 << 15
    assert choose_bucket(CONFIG, [[1, 200, 200]]).frame_tokens == 40_960


def test_buckets_can_be_set():
    assert choose_bucket(CONFIG, [[1, 10, 12]], [4096, 120, 512]).tokens == 120
    assert choose_bucket(CONFIG, [[1, 10, 14]], np.array([4096, 120, 512])).tokens == 512


def test_odd_merge_sizes_get_whole_units():
    config = VisionConfig(spatial_merge_size=3, window_size=126)
    assert choose_bucket(config, [[1, 9, 9]]).tokens == 288  # of 9 tokens, and of 8 rows


@pytest.mark.parametrize(
    ("token_buckets", "message"),
    [
        ([64, 100], r"holds 120 tokens, more than the largest token bucket \(100\)"),
        ([], r"token_buckets must be positive multiples of the merge unit 4, got \[\]"),
        ([122, 4096], r"must be positive multiples of the merge unit 4, got \[122, 4096\]"),
        (4096, "token_buckets must be positive multiples of the merge unit 4, got 4096"),
    ],
)
def test_refuses_buckets(token_buckets, message):
    with pytest.raises(ValueError, match=message):
        choose_bucket(CONFIG, [[1, 10, 12]], token_buckets)


def test_refuses_grids():
    with pytest.raises(ValueError, match="must be divisible by spatial_merge_size 2"):
        choose_bucket(CONFIG, [[1, 3, 4]])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1, 1), "bucket tokens must be a positive integer, got 0"),
        ((4, 1.5, 1, 1), "bucket windows must be a positive integer, got 1.5"),
        ((4, 1, -1, 1), "bucket frames must be a positive integer, got -1"),
        ((4, 1, 1, "4"), "bucket frame_tokens must be a positive integer, got '4'"),
        ((MAX_TOKENS + 4, 1, 1, 1), "bucket tokens 67,108,868 pass the 67,108,864 of one call"),
    ],
)
def test_refuses_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        Bucket(*sizes)
