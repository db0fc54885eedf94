"""What means over segments must do; both towers' tests inherit the suite.

A subclass has `means(rows, cu_seqlens)`, from NumPy arrays to one, fp32.
"""

import numpy as np
import pytest


class PoolingContract:
    @pytest.mark.parametrize(
        ("lengths", "padding", "empty"),
        [([4], 0, 0), ([4], 60, 3), ([700, 4, 16, 17, 300], 28, 5), ([4] * 50, 0, 0)],
    )
    def test_equals_fp64(self, lengths, padding, empty):
        ends = np.cumsum(lengths)
        rows = np.random.default_rng(0).standard_normal((ends[-1] + padding, 24)).astype(np.float32)
        rows[ends[-1] :] = np.nan
        ours = self.means(rows, np.array([0, *ends, *[ends[-1]] * empty], np.int32))
        assert ours.shape == (len(lengths) + empty, 24)
        exact = [x.mean(axis=0) for x in np.split(rows.astype(np.float64), ends)[: len(lengths)]]
        np.testing.assert_allclose(ours[: len(lengths)], exact, atol=3e-7)

    def test_segments_behind_empty_ones(self):
        rows = np.arange(20, dtype=np.float32)[:, None].repeat(8, 1)
        ours = self.means(rows, np.array([0, 4, 4, 4, 20], np.int32))
        np.testing.assert_array_equal(ours[[0, 3], 0], [1.5, 11.5])

    def test_a_nan_stays_in_its_segment(self):
        rows = np.ones((40, 8), np.float32)
        rows[19] = np.nan
        ours = self.means(rows, np.array([0, 4, 20, 40], np.int32))
        np.testing.assert_array_equal(np.isnan(ours).all(axis=1), [False, True, False])
