"""What both embeddings promise about heads of all widths, beside what KernelContract tries.

An implementation's tests inherit EmbeddingContract and what KernelContract asks for. Wide heads, of
more columns than a tile has, are read in chunks: of 512 columns one program or two launches, of 264
and 520 the last chunk is not full.
"""

import dataclasses

import numpy as np
import pytest

from tests.kernel_cases import assert_accurate, assert_same_bits, exact, make_case
from tests.kernel_contract import STREAM, WINDOW

# Few tokens and programs, as an interpreter runs one program after the other.
LENGTHS = (9, 0, 7)
ONE = {"heads": 1, "leading": 2, "trailing": 3}
WIDE = 264


class EmbeddingContract:
    """Inherited by the tests of each implementation."""

    @pytest.mark.parametrize(
        ("head_dim", "dtype", "max_seqlen", "fuse", "embed", "rotary_dim"),
        [
            # Heads that a tile holds.
            (80, "bfloat16", WINDOW, "qk", "sinusoidal", None),
            (72, "float32", WINDOW, "none", "positions", None),
            (72, "bfloat16", STREAM, "qk", "positions", None),
            (80, "float32", STREAM, "q", "sinusoidal", None),
            # Wide ones.
            (WIDE, "bfloat16", 16, "none", "rope", 250),
            (520, "float16", 16, "q", "sinusoidal", None),
            (512, "float32", 16, "qk", "positions", None),
            (WIDE, "float32", STREAM, "none", "positions", None),
            (WIDE, "bfloat16", STREAM, "qk", "sinusoidal", None),
            (WIDE, "float32", STREAM, "q", "rope", 2),
        ],
    )
    def test_every_embedding_width_and_fusion(
        self, head_dim, dtype, max_seqlen, fuse, embed, rotary_dim
    ):
        case = make_case(
            LENGTHS, head_dim=head_dim, dtype=dtype, rotary_dim=rotary_dim, embed=embed, **ONE
        )
        case = case.with_rows(case.padding, np.nan)
        assert_accurate(self.attention(case, max_seqlen=max_seqlen, fuse=fuse), case)

    def test_wide_heads_packed_grouped_and_batch_invariant(self):
        max_seqlen = 16
        case = make_case((7, 4), head_dim=WIDE, dtype="float32", heads=2, embed="sinusoidal")
        options = {"alike": True, "max_seqlen": max_seqlen, "fuse": "q"}
        separate, packed = (self.attention(case, packed=p, **options) for p in (False, True))
        assert_accurate(separate, case)
        assert_same_bits(separate, packed)
        if self.implementation != "kernel":
            return  # its products' sums are a library's
        grouped = dataclasses.replace(case, group=2, is_sinusoidal=False)
        options = {"max_seqlen": max_seqlen, "batch_invariant": True}
        found = self.attention(grouped, **options)
        assert_accurate(found, grouped)
        alone = make_case((7,), head_dim=WIDE, dtype="float32", heads=2)
        qkv, cos, sin = grouped.qkv[:7], grouped.cos[:7], grouped.sin[:7]
        alone = dataclasses.replace(alone, qkv=qkv, cos=cos, sin=sin, group=2)
        assert_same_bits(self.attention(alone, **options), found[:7])

    @pytest.mark.parametrize("segments", [1, 140])
    def test_wide_heads_by_one_launch_and_by_two(self, segments):
        """Of one short segment programs share the columns, of many each has its own."""
        lengths = [5] + [0] * (segments - 1)
        case = make_case(lengths, head_dim=320, dtype="float32", seed=segments, **ONE)
        assert_accurate(self.attention(case, max_seqlen=16), case)

    @pytest.mark.parametrize("embed", ["rope", "positions"])
    def test_a_longer_wide_segment_is_right_or_nan(self, embed):
        case = make_case((9, 30), head_dim=WIDE, dtype="float32", embed=embed, **ONE)
        result, expected = self.attention(case, max_seqlen=16), exact(case)
        assert (result[case.padding] == 0).all()
        for start, end in case.segments:
            rows = result[start:end]
            if end - start > 16 and np.isnan(rows).any():
                assert np.isnan(rows).all()
            else:
                np.testing.assert_allclose(rows, expected[start:end], rtol=0, atol=1e-5)

    @pytest.mark.parametrize("max_seqlen", [16, STREAM])
    def test_a_broken_wide_segment_breaks_no_other(self, max_seqlen):
        case = make_case((5, 1), head_dim=WIDE, dtype="float32", heads=1)
        start, end = case.segments[1]
        before = self.attention(case, max_seqlen=max_seqlen)
        after = self.attention(case.with_rows(slice(start, end), np.inf), max_seqlen=max_seqlen)
        assert np.isnan(after[start:end]).all()
        before[start:end] = after[start:end] = 0
        assert_same_bits(before, after)
