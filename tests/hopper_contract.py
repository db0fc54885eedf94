"""What the warp-specialized kernels promise beside KernelContract and StressContract.

Tests of one inherit HopperContract too, and an adapter by which every call takes it.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.hostile import examples
from tests.kernel_cases import (
    assert_accurate,
    assert_accurate_gradients,
    assert_same_bits,
    make_case,
    relative_rms,
)
from tests.kernel_contract import cut
from tests.kernel_gradient_contract import weights_for

# Tiles that are masked in the first and whole afterwards, or the other way; segments that meet
# within a group of warps, within a block, and across blocks; empty ones; many blocks of one.
LENGTHS = (700, 1, 0, 129, 513, 64, 128, 127, 300, 0, 0, 1024, 5)


class HopperContract:
    @pytest.mark.long
    @pytest.mark.parametrize(
        ("head_dim", "dtype"),
        [
            *zip((16, 64, 80, 96, 120), ["bfloat16"] * 5, strict=True),
            *zip((24, 72, 88, 112, 128), ["float16"] * 5, strict=True),
        ],
    )
    def test_segments_of_many_lengths(self, dtype, head_dim):
        case = make_case(LENGTHS, head_dim=head_dim, dtype=dtype, leading=37, trailing=211)
        assert_accurate(self.attention(case, max_seqlen=1024, fuse="none"), case)

    def test_each_of_several_key_heads_serves_its_own(self):
        case = make_case((100, 90, 200), heads=4, group=2)
        assert_accurate(self.attention(case, max_seqlen=1024, fuse="none"), case)

    def test_infinities_of_a_neighbour_stay_there(self):
        """They come with a tile whose other rows they belong to, and meet zeros."""
        case = make_case((100, 90, 200), head_dim=80)
        expected = self.attention(case, max_seqlen=1024, fuse="none")
        case.qkv[100:190, 2] = float("inf")
        found = self.attention(case, max_seqlen=1024, fuse="none")
        for part in (slice(100), slice(190, 390)):
            assert relative_rms(found[part], expected[part]) < 4e-3


class HopperGradientContract:
    """The same of those for gradients, which the contract of all kernels mostly has of few columns.

    Their adapter is that of the gradient contract.
    """

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("head_dim", "rotary_dim", "packed"),
        [
            *((72, 36, True), (80, None, True), (80, 70, False)),
            *((96, None, False), (120, 90, True), (128, None, True)),
        ],
    )
    def test_gradients_of_segments_of_many_lengths(self, head_dim, rotary_dim, packed):
        case = make_case(
            LENGTHS, head_dim=head_dim, rotary_dim=rotary_dim, heads=2, leading=37, trailing=211
        )
        weights = weights_for(case)
        weights[case.padding] = np.nan
        found = self.gradients(case, weights, packed=packed, angles=False, max_seqlen=1024)
        found = np.moveaxis(found[0], 1, 0) if packed else found
        assert all((x[case.padding] == 0).all() for x in found)
        assert_accurate_gradients(found, case, weights)

    def test_gradients_of_a_few_long_segments_are_the_same_bits_every_time(self):
        case = make_case((300, 129, 640), head_dim=80)
        options = {"angles": False, "max_seqlen": 1024}
        first, again = (self.gradients(case, weights_for(case), **options) for _ in range(2))
        for x, y in zip(first, again, strict=True):
            assert_same_bits(x, y)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_no_gradient_reaches_another_long_segment(self, value):
        """Whose rows come in the same tiles, and meet zeros."""
        case = make_case((100, 90, 200), head_dim=80)
        weights = weights_for(case)
        spoilt = weights.copy()
        spoilt[100:190] = value
        broken = dataclasses.replace(case, qkv=case.with_rows(slice(100, 190), value).qkv)
        options = {"angles": False, "max_seqlen": 1024}
        before = self.gradients(case, weights, **options)
        after = self.gradients(broken, spoilt, **options)
        for x, y in zip(before, after, strict=True):
            for part in (slice(100), slice(190, 390)):
                # Rows of the forward pass beside what is no number may round otherwise.
                assert np.isfinite(y[part].astype(np.float32)).all()
                assert relative_rms(y[part], x[part]) < 1e-2

    # Of one shape; lengths around those of tiles and groups, and what is no order at all.
    @given(cuts=st.lists(st.integers(-3, 520), min_size=4, max_size=4))
    @settings(max_examples=examples(4))
    @example(cuts=[0, 64, 128, 256])
    @example(cuts=[1, 130, 131, 500])
    @example(cuts=[0, 512, 100, 300])
    @example(cuts=[600, 0, 0, 5])
    def test_gradients_of_any_segments_are_safe(self, cuts):
        case = cut(cuts, tokens=512, head_dim=80)
        options = {"packed": True, "angles": False, "max_seqlen": 1024}
        [found] = self.gradients(case, weights_for(case), **options)
        # All is written, from within the tensors: around them, and in what is not written, is NaN.
        assert np.isfinite(found.astype(np.float32)).all()
