"""Batches by patches: every image once, within the budget, hardly any padding, few programs."""

import numpy as np
import pytest

from flax_models import ImageConfig, VisionConfig, choose_bucket
from flax_models.common.grid import MAX_TOKENS
from flax_models.common.images import smart_resize
from flax_models.ray_data.calls import call_buckets, plan_calls

BUDGET = 20480


def photographs(config, number, max_pixels):
    """Grids of photographs from 160 x 120 to 12 megapixels, in the usual shapes."""
    rng = np.random.default_rng(0)
    images = ImageConfig.of(config)
    ratios = rng.choice([16 / 9, 3 / 2, 4 / 3, 1, 3 / 4, 2 / 3, 9 / 16], number)
    areas = np.exp(rng.uniform(np.log(2e4), np.log(12e6), number))
    side = images.patch_size * images.merge_size
    sizes = [
        smart_resize(int(height), int(width), side, images.min_pixels, max_pixels)
        for height, width in zip(np.sqrt(areas / ratios), np.sqrt(areas * ratios), strict=True)
    ]
    return np.array([(1, *size) for size in np.array(sizes) // images.patch_size])


def blocks(tokens):
    """Cut as Ray cuts blocks of four calls, in the source's order."""
    return np.split(
        np.arange(len(tokens)), np.flatnonzero(np.diff(tokens.cumsum() // (4 * BUDGET))) + 1
    )


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    ("max_pixels", "most", "programs"),
    [(256 * 28 * 28, 0.05, 5), (1280 * 28 * 28, 0.04, 4), (16384 * 28 * 28, 0.08, 14)],
)
def test_padding_of_a_mix_of_photographs(model_type, max_pixels, most, programs):
    config = VisionConfig.of(model_type) if model_type != "qwen2_5_vl" else VisionConfig()
    grids = photographs(config, 2000, max_pixels)
    tokens = grids.prod(axis=1)
    calls = [
        block[call]
        for block in blocks(tokens)
        for call in plan_calls(tokens[block].tolist(), BUDGET)
    ]
    assert sorted(np.concatenate(calls)) == list(range(len(grids)))
    assert all(tokens[call].sum() <= BUDGET or len(call) == 1 for call in calls)
    sizes = call_buckets(config, BUDGET)
    buckets = [choose_bucket(config, grids[call], sizes) for call in calls]
    padding = 1 - tokens.sum() / sum(bucket.tokens for bucket in buckets)
    assert padding < most
    assert len(set(buckets)) <= programs
    if tokens.max() < BUDGET:  # else many are calls alone
        one_by_one = sum(choose_bucket(config, grid[None]).tokens for grid in grids)
        assert padding < 0.5 * (1 - tokens.sum() / one_by_one)


def test_calls_are_padded_to_quarters_of_the_budget_and_by_eighths_beyond():
    config = VisionConfig()
    assert call_buckets(config, BUDGET)[:6] == (5120, 10240, 15360, 20480, 23040, 25920)
    assert call_buckets(config, 1)[:2] == (8, 16)
    assert all(size % 8 == 0 for size in call_buckets(config, 100))
    assert call_buckets(config, BUDGET)[-1] >= MAX_TOKENS


def test_an_image_beyond_the_budget_is_a_call_alone():
    assert plan_calls([10, 30, 20, 90], 50) == [[3], [1, 2], [0]]
    assert plan_calls([], 50) == []
