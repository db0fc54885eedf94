"""Which numbers, and which images, are finite."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_models import VisionConfig
from flax_models.common.finite import is_finite, non_finite_images

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_16_bits(dtype):
    """As the upper half of fp32 they are of all its exponents."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    if dtype == np.float32:
        bits = bits.astype(np.uint32) << 16
    numbers = bits.view(dtype)
    with np.errstate(invalid="ignore"):  # NaN of all kinds
        expected = np.isfinite(numbers.astype(np.float64))
    assert 0 < expected.sum() < len(numbers)
    np.testing.assert_array_equal(is_finite(numbers[:, None], axis=1), expected)
    assert is_finite(numbers[expected])
    for number in numbers[~expected]:
        assert not is_finite(np.array([1, number, -1], dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.integers(0, 5), st.integers(0, 3), st.sampled_from([np.inf, -np.inf, np.nan]))
def test_rows(dtype, row, column, value):
    numbers = np.random.default_rng(0).standard_normal((6, 4)).astype(dtype)
    assert is_finite(numbers)
    numbers[row, column] = value
    assert not is_finite(numbers)
    np.testing.assert_array_equal(is_finite(numbers, axis=1), np.arange(6) != row)


@given(st.sets(st.integers(0, 3)))
def test_images(wrong):
    grid = np.array([(1, 2, 2), (2, 4, 6), (1, 4, 2), (3, 2, 4)])
    ends = np.cumsum(grid.prod(axis=1) // 4)
    finite = np.ones(ends[-1], bool)
    finite[[ends[image] - 1 for image in sorted(wrong)]] = False
    assert non_finite_images(VisionConfig(), grid, finite, "embeddings") == sorted(wrong)


def test_rows_of_another_grid():
    with pytest.raises(ValueError, match="grid_thw asks for 12 rows of embeddings, got 6"):
        non_finite_images(VisionConfig(), [(2, 4, 6)], np.ones(6, bool), "embeddings")
