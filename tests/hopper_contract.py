"""What the warp-specialized kernels promise beside KernelContract and StressContract.

Tests of one inherit HopperContract too, and an adapter by which every call takes it.
"""

import pytest

from tests.kernel_cases import assert_accurate, make_case, relative_rms


class HopperContract:
    # Tiles that are masked in the first and whole afterwards, or the other way; segments that meet
    # within a group of warps, within a block, and across blocks; empty ones; many blocks of one.
    @pytest.mark.long
    @pytest.mark.parametrize(
        ("head_dim", "dtype"),
        [
            *zip((16, 64, 80, 96, 120), ["bfloat16"] * 5, strict=True),
            *zip((24, 72, 88, 112, 128), ["float16"] * 5, strict=True),
        ],
    )
    def test_segments_of_many_lengths(self, dtype, head_dim):
        lengths = (700, 1, 0, 129, 513, 64, 128, 127, 300, 0, 0, 1024, 5)
        case = make_case(lengths, head_dim=head_dim, dtype=dtype, leading=37, trailing=211)
        assert_accurate(self.attention(case, max_seqlen=1024, fuse="none"), case)

    def test_infinities_of_a_neighbour_stay_there(self):
        """They come with a tile whose other rows they belong to, and meet zeros."""
        case = make_case((100, 90, 200), head_dim=80)
        expected = self.attention(case, max_seqlen=1024, fuse="none")
        case.qkv[100:190, 2] = float("inf")
        found = self.attention(case, max_seqlen=1024, fuse="none")
        for part in (slice(100), slice(190, 390)):
            assert relative_rms(found[part], expected[part]) < 4e-3
