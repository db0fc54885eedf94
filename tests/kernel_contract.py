"""What every implementation of the operation promises about its results.

An implementation's tests inherit KernelContract and an adapter of its framework, which has

* `attention(case, packed=False, **keywords)`: the public function's result as a NumPy array,
* `check_cu_seqlens(cu_seqlens, *arguments)`, on a NumPy array.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hostile import TOKENS, examples, hostile_cu_seqlens, refusable
from tests.kernel_cases import assert_accurate, assert_same_bits, exact, make_case

# Bounds on a segment's length that lead to the two kernels: the longest that a tile holds in every
# dtype, and one that no tile holds.
WINDOW, STREAM = 32, 4096
both_kernels = pytest.mark.parametrize("max_seqlen", [WINDOW, STREAM], ids=["window", "stream"])

# Lengths up to WINDOW, one of each kind: full, nearly full, odd, empty, one token.
LENGTHS = (32, 0, 1, 31, 16, 5)

# The same tokens and segments (the shapes that JAX compiles for), cut in different ways.
CUTS = {
    "equal": (0, 16, 32, 48, 64, 80, 96),
    "edge windows": (0, 32, 48, 78, 93, 95, 96),
    "empty segments": (0, 0, 32, 32, 64, 96, 96),
    "single tokens": (0, 1, 2, 3, 35, 67, 96),
    "leading padding": (19, 51, 60, 60, 70, 80, 96),
    "trailing padding": (0, 30, 33, 40, 50, 51, 51),
    "padding on both sides": (33, 33, 34, 40, 60, 61, 63),
    "nothing but padding": (40, 40, 40, 40, 40, 40, 40),
    "all padding behind": (0, 0, 0, 0, 0, 0, 0),
    "all padding before": (96, 96, 96, 96, 96, 96, 96),
}
# Full, of one token, and nearly full; of the same shapes, behind which there is padding.
LEAKING = (0, 32, 33, 64, 64, 64, 80)


def cut(cu_seqlens, tokens=96, **options):
    """A case with these cumulative lengths, of one head: where segments end, heads are alike."""
    case = make_case([tokens], **{"heads": 1} | options)
    return dataclasses.replace(case, cu_seqlens=np.array(cu_seqlens, np.int32))


class KernelContract:
    """Inherited by the tests of each implementation."""

    # ---- numerics ----

    @pytest.mark.parametrize(
        ("head_dim", "max_seqlen"),
        [
            *((64, WINDOW), (128, WINDOW)),  # 80 in every way of fusing below
            *((72, STREAM), (80, STREAM), (96, STREAM)),
        ],
    )
    def test_every_head_dim(self, head_dim, max_seqlen):
        case = make_case(LENGTHS, head_dim=head_dim, trailing=3)
        assert_accurate(self.attention(case, max_seqlen=max_seqlen), case)

    @pytest.mark.parametrize(
        ("head_dim", "max_seqlen"),
        [(8, WINDOW), (192, 128), (256, 64), (256, 128)],  # 56 in the stream kernel: a dtype's
    )
    def test_other_multiples_of_8(self, head_dim, max_seqlen):
        case = make_case(LENGTHS, head_dim=head_dim, trailing=3)
        assert_accurate(self.attention(case, max_seqlen=max_seqlen), case)

    @pytest.mark.parametrize(
        ("dtype", "head_dim", "fuse", "max_seqlen", "packed"),
        [
            ("float16", 80, "qk", WINDOW, False),
            ("float16", 64, "none", STREAM, False),
            ("float32", 72, "q", WINDOW, True),
            ("float32", 80, "qk", STREAM, True),
            ("bfloat16", 8, "qk", STREAM, True),
            ("bfloat16", 56, "q", STREAM, False),
        ],
    )
    def test_every_dtype(self, dtype, head_dim, fuse, max_seqlen, packed):
        case = make_case(LENGTHS, dtype=dtype, head_dim=head_dim, trailing=3)
        result = self.attention(case, packed=packed, max_seqlen=max_seqlen, fuse=fuse)
        assert_accurate(result, case)

    # Of each kernel what reads Q and K in its way; the other mixes, packed, are among the dtypes.
    @pytest.mark.parametrize(
        ("fuse", "max_seqlen", "head_dim"),
        [("qk", WINDOW, 80), ("q", STREAM, 64), ("none", STREAM, 64)],
    )
    def test_every_fusion_packed_equals_separate(self, fuse, max_seqlen, head_dim):
        case = make_case(LENGTHS, head_dim=head_dim, trailing=3)
        options = {"alike": True, "max_seqlen": max_seqlen, "fuse": fuse}
        separate = self.attention(case, **options)
        packed = self.attention(case, packed=True, **options)
        assert_accurate(separate, case)
        assert_same_bits(separate, packed)

    @pytest.mark.parametrize(
        ("head_dim", "rotary_dim", "fuse", "max_seqlen", "dtype"),
        [
            (80, 40, "none", STREAM, "float32"),
            (80, 70, "q", WINDOW, "float32"),  # 80 = 64 + 16: ends in the second part
            (128, 2, "qk", STREAM, "float32"),
            (80, 70, "qk", WINDOW, "bfloat16"),
        ],
    )
    def test_partial_rotation(self, head_dim, rotary_dim, fuse, max_seqlen, dtype):
        case = make_case(LENGTHS, head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype)
        assert_accurate(self.attention(case, max_seqlen=max_seqlen, fuse=fuse), case)

    # Norms, heads of K and V that serve several of Q, or both.
    @pytest.mark.parametrize(
        ("max_seqlen", "fuse", "head_dim", "rotary_dim", "dtype", "heads", "group", "norms"),
        [
            (WINDOW, "qk", 80, None, "bfloat16", 4, 2, "qk"),
            (WINDOW, "none", 16, 6, "float32", 2, 2, "k"),
            (STREAM, "none", 64, None, "float16", 2, 1, "qk"),
            (STREAM, "q", 80, 70, "bfloat16", 2, 2, "qk"),
            (STREAM, "qk", 80, None, "float32", 2, 1, "q"),
        ],
    )
    def test_grouped_queries_and_norms(
        self, max_seqlen, fuse, head_dim, rotary_dim, dtype, heads, group, norms
    ):
        case = make_case(
            LENGTHS, head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype, heads=heads,
            trailing=3, group=group, norms=norms,
        )  # fmt: skip
        case = case.with_rows(case.padding, np.nan)
        options = {"alike": group == 1, "max_seqlen": max_seqlen, "fuse": fuse}
        result = self.attention(case, **options)
        assert_accurate(result, case)
        if group == 1:
            assert_same_bits(result, self.attention(case, packed=True, **options))

    @both_kernels
    @given(
        head_dim=st.integers(1, 32).map(lambda eighths: 8 * eighths),
        pairs=st.none() | st.integers(1, 128),
        dtype=st.sampled_from(("bfloat16", "float16")),
        fuse=st.sampled_from(("auto", "qk", "q", "none")),
        heads=st.integers(1, 3),
        length=st.integers(1, WINDOW),
        is_grouped=st.booleans(),
        norms=st.sampled_from(("", "q", "k", "qk")),
    )
    @settings(max_examples=examples(3))
    def test_any_shape(
        self, max_seqlen, head_dim, pairs, dtype, fuse, heads, length, is_grouped, norms
    ):
        rotary_dim = None if pairs is None else 2 * min(pairs, head_dim // 2)
        case = make_case(
            (length, 0, 7), head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype, heads=heads,
            trailing=2, group=heads if is_grouped else 1, norms=norms,
        )  # fmt: skip
        assert_accurate(self.attention(case, max_seqlen=max_seqlen, fuse=fuse), case)

    def test_max_seqlen_may_be_any_integer(self):
        case = make_case(LENGTHS, head_dim=64, trailing=3)  # as one of every width's
        assert_same_bits(
            self.attention(case, max_seqlen=np.int64(WINDOW)),
            self.attention(case, max_seqlen=WINDOW),
        )

    @pytest.mark.parametrize("lengths", [(64, 63, 17), (128, 100)], ids=str)
    def test_windows_of_an_image(self, lengths):
        case = make_case(lengths, trailing=5)
        assert_accurate(self.attention(case, max_seqlen=max(lengths)), case)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_long_and_short_segments_together(self, dtype):
        case = make_case((100, 1, 0, 170, 7, 30), dtype=dtype, heads=1, leading=9, trailing=140)
        assert_accurate(self.attention(case, max_seqlen=170), case)

    def test_logits_far_from_zero(self):
        case = make_case(LENGTHS, dtype="float32", head_dim=16)
        case = dataclasses.replace(case, qkv=case.qkv * np.float32([12, 12, 1])[:, None, None])
        for max_seqlen in (WINDOW, STREAM):
            result = self.attention(case, max_seqlen=max_seqlen)
            assert np.abs(result - exact(case)).max() < 1e-3

    @both_kernels
    def test_scale(self, max_seqlen):
        case = make_case(LENGTHS, dtype="float32", head_dim=16)
        result = self.attention(case, max_seqlen=max_seqlen, scale=1)
        assert_accurate(result, case, scale=1)

    # ---- segments ----

    @both_kernels
    @pytest.mark.parametrize("cu_seqlens", CUTS.values(), ids=CUTS)
    def test_segments_of_every_kind(self, cu_seqlens, max_seqlen):
        case = cut(cu_seqlens, head_dim=16)
        result = self.attention(case, max_seqlen=max_seqlen)
        if case.padding.all():
            assert (result == 0).all()
        else:
            assert_accurate(result, case)

    @both_kernels
    @given(
        cuts=st.lists(st.integers(0, 32), min_size=4, max_size=4),
        leading=st.integers(0, 32),
        seed=st.integers(0, 99),
    )
    @settings(max_examples=examples(12))
    def test_any_segments(self, cuts, leading, seed, max_seqlen):
        cu_seqlens = np.minimum(np.cumsum([leading, *cuts]), 64)
        case = cut(cu_seqlens, tokens=64, head_dim=16, dtype="float32", seed=seed)
        result = self.attention(case, max_seqlen=max_seqlen)
        if case.padding.all():
            assert (result == 0).all()
        else:
            assert_accurate(result, case)

    @both_kernels
    def test_one_segment(self, max_seqlen):
        case = make_case([32], head_dim=16)
        assert_accurate(self.attention(case, max_seqlen=max_seqlen), case)

    @pytest.mark.parametrize("max_seqlen", [None, 0, WINDOW, STREAM])
    @pytest.mark.parametrize("packed", [False, True])
    def test_no_tokens_and_no_segments(self, packed, max_seqlen):
        no_tokens, no_segments = make_case([0, 0], head_dim=16), make_case([], trailing=5)
        for case in (no_tokens, no_segments):
            result = self.attention(case, packed=packed, max_seqlen=max_seqlen)
            assert result.shape == (len(case.qkv), *case.qkv.shape[2:])
            assert result.dtype == case.qkv.dtype
            assert (result == 0).all()

    @both_kernels
    def test_padding_is_zero_whatever_it_holds(self, max_seqlen):
        case = make_case([20, 12], head_dim=16, leading=70, trailing=150)
        clean = self.attention(case, max_seqlen=max_seqlen)
        dirty = self.attention(case.with_rows(case.padding, np.nan), max_seqlen=max_seqlen)
        assert (clean[case.padding] == 0).all()
        assert_same_bits(clean, dirty)

    # ---- the bound on a segment's length ----

    @pytest.mark.parametrize("lengths", [(20, 32, 7), (20, 140, 7)], ids=str)
    def test_max_seqlen_is_found_where_it_is_not_given(self, lengths):
        case = make_case(lengths, head_dim=16, trailing=4)
        assert_accurate(self.attention(case, max_seqlen=None), case)

    @pytest.mark.parametrize(
        ("max_seqlen", "dtype", "atol", "further"),
        [
            *((max_seqlen, "float32", 1e-5, {}) for max_seqlen in (0, 16, 40, 129)),
            *((9, "float16", 4e-3, {}), (9, "bfloat16", 3e-2, {})),
            (9, "float32", 1e-5, {"heads": 2, "group": 2, "norms": "qk"}),
        ],
    )
    def test_rows_of_a_longer_segment_are_right_or_nan(self, max_seqlen, dtype, atol, further):
        lengths = (9, 150, 1, 16, 40, 130, 8)
        shape = {"heads": 1, "dtype": dtype} | further
        case = make_case(lengths, head_dim=16, leading=3, trailing=70, **shape)
        result = self.attention(case, max_seqlen=max_seqlen)
        expected = exact(case)
        assert (result[case.padding] == 0).all()
        for start, end in case.segments:
            rows = result[start:end]
            if end - start > max_seqlen and np.isnan(rows).any():
                assert np.isnan(rows).all()
            else:
                np.testing.assert_allclose(rows, expected[start:end], rtol=0, atol=atol)

    # ---- nothing leaks from a segment ----

    @both_kernels
    @pytest.mark.parametrize("changed", [0, 31, 32, 45, 79])
    def test_a_token_moves_exactly_the_rows_of_its_segment(self, changed, max_seqlen):
        case = cut(LEAKING, head_dim=16)
        after = case.with_rows(changed, 2.0)
        before, after = (self.attention(c, max_seqlen=max_seqlen) for c in (case, after))
        ((start, end),) = [s for s in case.segments if s[0] <= changed < s[1]]
        moved = (before != after).any(axis=(1, 2))
        np.testing.assert_array_equal(np.flatnonzero(moved), np.arange(start, end))

    @both_kernels
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_a_broken_segment_breaks_no_other(self, value, max_seqlen):
        case = cut(LEAKING, head_dim=16)
        start, end = case.segments[2]
        cos, sin = case.cos.copy(), case.sin.copy()
        cos[start:end] = sin[start:end] = value
        broken = dataclasses.replace(case.with_rows(slice(start, end), value), cos=cos, sin=sin)
        before, after = (self.attention(c, max_seqlen=max_seqlen) for c in (case, broken))
        assert np.isnan(after[start:end]).all()
        before[start:end] = after[start:end] = 0
        assert_same_bits(before, after)

    @pytest.mark.parametrize(("head_dim", "max_seqlen"), [(24, WINDOW), (72, STREAM)])
    def test_a_broken_head_breaks_no_other(self, head_dim, max_seqlen):
        case = make_case((17, 5), head_dim=head_dim, heads=3)
        qkv = case.qkv.copy()
        qkv[:, :2, 1], qkv[:, 2, 1] = 2, np.nan
        broken = dataclasses.replace(case, qkv=qkv)
        before, after = (self.attention(c, max_seqlen=max_seqlen) for c in (case, broken))
        assert np.isnan(after[:, 1]).all()
        before[:, 1] = after[:, 1]
        assert_same_bits(before, after)

    # ---- hostile values of cu_seqlens ----

    @pytest.mark.parametrize(
        ("max_seqlen", "dtype"),
        [(16, "float32"), (WINDOW, "float32"), (STREAM, "float32"), (STREAM, "bfloat16")],
    )
    @hostile_cu_seqlens(usual=6)
    def test_any_cu_seqlens_is_safe(self, cu_seqlens, max_seqlen, dtype):
        case = cut(cu_seqlens, tokens=TOKENS, head_dim=16, dtype=dtype)
        result = self.attention(case, max_seqlen=max_seqlen).astype(np.float32)
        assert result.shape == (TOKENS, 1, 16)
        # Every row is a mean of rows of v, or refused because the bound is broken; memory that
        # nothing was written to is NaN here (see the adapters).
        rounding = {"float32": 1e-5, "bfloat16": 2**-7}[dtype]
        largest = np.abs(case.qkv[:, 2].astype(np.float32)).max() * (1 + rounding)
        may_refuse = refusable(case.cu_seqlens, max_seqlen)[:, None, None]
        assert ((np.abs(result) <= largest) | (np.isnan(result) & may_refuse)).all()

    @pytest.mark.parametrize("extreme", [(-(2**31), 2**31 - 1), (2**31 - 1, -(2**31), 30)], ids=str)
    def test_extreme_cu_seqlens_without_a_bound_are_safe(self, extreme):
        case = cut(extreme, tokens=30, head_dim=16, dtype="float32")
        result = self.attention(case, max_seqlen=None)
        assert (np.abs(result) <= np.abs(case.qkv[:, 2]).max() * (1 + 1e-5)).all()

    @given(
        cu_seqlens=st.lists(st.integers(-1, 12), min_size=1, max_size=5),
        max_seqlen=st.none() | st.integers(0, 12),
    )
    @settings(max_examples=examples(200))
    def test_check_cu_seqlens_names_the_first_fault_and_its_place(self, cu_seqlens, max_seqlen):
        fault = None
        for i, value in reversed(list(enumerate(cu_seqlens))):
            before = cu_seqlens[i - 1] if i else value
            if max_seqlen is not None and value - before > max_seqlen:
                fault = rf"segment {i - 1} \({before} to {value}\) is {value - before} tokens long"
            if value < before:
                fault = rf"cu_seqlens\[{i - 1}\] = {before} and cu_seqlens\[{i}\] = {value}$"
            if not 0 <= value <= 10:
                fault = rf"cu_seqlens\[{i}\] must be in 0\.\.10 \(tokens\), got {value}$"
        cu_seqlens = np.array(cu_seqlens, np.int32)
        if fault is None:
            self.check_cu_seqlens(cu_seqlens, 10, max_seqlen)
        else:
            with pytest.raises(ValueError, match=fault):
                self.check_cu_seqlens(cu_seqlens, 10, max_seqlen)
