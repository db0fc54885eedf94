"""What every implementation of the operation promises under stress: its bits, and large numbers.

An implementation's tests inherit StressContract and an adapter, as for KernelContract.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compare.common.environment import has_gpu
from tests.hostile import examples
from tests.kernel_cases import (
    DTYPES,
    assert_accurate,
    assert_same_bits,
    exact,
    make_case,
    relative_rms,
    unfused,
)
from tests.kernel_contract import LENGTHS, STREAM, WINDOW, both_kernels, cut

# Segments on both sides of every length by which kernels and tiles are chosen.
BEYOND = 100
BY_LENGTH = (16, 33, 64, 65, BEYOND)
BY_LENGTH += (1, 17, 128, 129, 512, 513, 767, 769, 3100) if has_gpu() else ()
MANY = (9400, 40000) if has_gpu() else (275,)

# Interpreters are slow, and leave nothing to chance.
RUNS = 50 if has_gpu() else 3


def products_as_written(case, spoil):
    """The case with angles of 0 and q, k, v [tokens, heads, head_dim] fp32 as `spoil` leaves them.

    spoil(q, k, v, first) changes them in place; first is each segment's first token.
    """
    qkv = case.qkv.astype(np.float32)
    spoil(*qkv.transpose(1, 0, 2, 3), case.cu_seqlens[:-1])
    return dataclasses.replace(
        case,
        qkv=qkv.astype(case.qkv.dtype),
        cos=np.ones_like(case.cos),
        sin=np.zeros_like(case.sin),
    )


def to_halves(*arrays):
    """Round to multiples of a half: fp32 sums of their products are exact in any order, so that
    what differs is what is done to the sums.
    """
    for x in arrays:
        x[:] = np.round(2 * x) / 2


def logits_of_1e4(q, k, v, first):
    to_halves(q, k)
    q[..., 0], k[..., 0] = 256, 348


def logits_of_minus_1e4(q, k, v, first):
    logits_of_1e4(q, k, v, first)
    q[..., 0] *= -1


def equal_rows(q, k, v, first):
    q[:], k[:] = q[0], k[0]


def one_dominant_key(q, k, v, first):
    q[..., 0], k[..., 0] = 256, 0
    k[first, :, 0] = 256


def values_near_the_largest_of_fp16(q, k, v, first):
    v[:] = np.sign(v) * 65504


EXTREMES = (
    logits_of_1e4,
    logits_of_minus_1e4,
    equal_rows,
    one_dominant_key,
    values_near_the_largest_of_fp16,
)


def all_near_the_largest_of_fp16(q, k, v, first):
    values_near_the_largest_of_fp16(q, k, v, first)
    # Of every query another multiple of 32, so that the logits' own rounding goes either way.
    q[..., 0], k[..., 0] = 60000 - 512 * np.arange(len(q))[:, None], 0
    k[first, :, 0] = 60000


def late_logits(case, above, rows):
    """The case with all but the first 128 keys' logits about `above` higher, for some query rows.

    The stream kernel subtracts from a row's logits the largest among a segment's first keys.
    """
    scale = case.qkv.shape[-1] ** -0.5

    def spoil(q, k, v, first):
        q[..., 0], k[..., 0] = 0, 0
        q[rows, :, 0] = 16
        for start, end in case.segments:
            k[start + 128 : end, :, 0] = above / (16 * scale)
        to_halves(q, k)

    return products_as_written(case, spoil)


class StressContract:
    """Inherited by the tests of each implementation.

    row_unit: how far places have to be apart for a segment's bits to be the same, a multiple of it.
    """

    row_unit = 1

    @both_kernels
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_extreme_numbers_are_as_accurate_as_unfused(self, dtype, max_seqlen):
        for extreme in EXTREMES:
            self.check_extreme(extreme, dtype, max_seqlen)

    @both_kernels
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_q_and_k_near_the_largest_of_fp16(self, dtype, max_seqlen):
        self.check_extreme(all_near_the_largest_of_fp16, dtype, max_seqlen)

    def check_extreme(self, extreme, dtype, max_seqlen):
        case = make_case((32, 20), head_dim=80, heads=1, dtype=dtype)
        self.check_accuracy(products_as_written(case, extreme), max_seqlen)

    def check_accuracy(self, case, max_seqlen, **options):
        expected = exact(case)
        error = relative_rms(self.attention(case, max_seqlen=max_seqlen, **options), expected)
        # An error below a rounding of the result counts as none: unfused has none by chance.
        rounding = {"bfloat16": 2**-9, "float16": 2**-12, "float32": 2**-25}[case.qkv.dtype.name]
        assert error <= 2 * max(relative_rms(unfused(case), expected), rounding)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("above", [14, 60, 1e4])
    def test_later_logits_far_above_the_first(self, dtype, above):
        """Beyond what fp16 holds, beyond where fp32 is exact, and beyond all."""
        case = make_case((170, 150), head_dim=16, heads=1, dtype=dtype)
        self.check_accuracy(late_logits(case, above, slice(None, None, 3)), STREAM)

    @pytest.mark.parametrize("fuse", ["qk", "q"])
    def test_queries_rotated_here_meet_late_logits(self, fuse):
        """The rotated tile, which is written to the result and loaded, is multiplied twice."""
        case = make_case((100, 170), head_dim=24, heads=1)
        self.check_accuracy(late_logits(case, 200, slice(None, None, 3)), STREAM, fuse=fuse)

    def test_later_logits_far_above_the_first_in_tiles_of_128_rows(self):
        """As the defaults have them for heads wider than 96; this one has a tail."""
        case = make_case((170, 150), head_dim=112, heads=1, dtype="float16")
        self.check_accuracy(late_logits(case, 14, slice(None, None, 3)), STREAM)

    @pytest.mark.parametrize("head_dim", [16, 24])
    def test_largest_values_beside_equal_late_logits(self, head_dim):
        """Probabilities that all round up by as much would lift their mean beyond fp16, if it is
        one column's alone.
        """
        case = make_case((170,), head_dim=head_dim, heads=1, dtype="float16")
        case = late_logits(case, 2.5, slice(None))
        case.qkv[:, :2, :, 1:] = 0
        case.qkv[:, 0, :, 0] = np.linspace(16, 32, 170)[:, None]  # each row rounds in its way
        for columns in (slice(None), 0, -1):
            case.qkv[:, 2] = 0
            case.qkv[:, 2, :, columns] = 65504
            self.check_accuracy(case, STREAM)

    @pytest.mark.parametrize("column", [0, -1])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_large_values_beside_late_logits(self, dtype, column):
        """Weighed by the first keys' measure their sums would overflow."""
        case = late_logits(make_case((170,), head_dim=24, heads=1, dtype=dtype), 40, slice(None))
        case.qkv[:, 2, :, column] *= 1e34
        self.check_accuracy(case, STREAM)

    # ---- the same bits ----

    @both_kernels
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_same_inputs_same_bits(self, dtype, max_seqlen):
        case = make_case(LENGTHS, trailing=3, head_dim=16, dtype=dtype)
        first = self.attention(case, max_seqlen=max_seqlen)
        for _ in range(RUNS - 1):
            assert_same_bits(first, self.attention(case, max_seqlen=max_seqlen))

    @both_kernels
    @given(
        length=st.integers(1, WINDOW),
        start=st.integers(0, 90 - WINDOW),
        before=st.integers(0, WINDOW),
        behind=st.integers(0, WINDOW),
        seed=st.integers(0, 99),
    )
    @settings(max_examples=examples(5))
    def test_a_segment_gives_the_same_bits_wherever_it_stands(
        self, length, start, before, behind, seed, max_seqlen
    ):
        end, first = start + length, start % self.row_unit
        alone = cut((first, first, first + length, first + length), tokens=90, head_dim=16)
        among = cut(
            (max(0, start - before), start, end, min(90, end + behind)),
            tokens=90, head_dim=16, seed=seed + 1,
        )  # fmt: skip
        for whole, part in zip(among.packed[:3], alone.packed[:3], strict=True):
            whole[start:end] = part[first : first + length]
        moved = self.attention(among, max_seqlen=max_seqlen)[start:end]
        expected = self.attention(alone, max_seqlen=max_seqlen)[first : first + length]
        assert_same_bits(moved, expected)

    @pytest.mark.parametrize("late", [False, True])
    @pytest.mark.parametrize("max_seqlen", [150, STREAM])
    def test_a_long_segment_gives_the_same_bits_wherever_it_stands(self, max_seqlen, late):
        alone = make_case([150], head_dim=16, heads=1)
        if late:  # whichever rows share a tile
            alone = late_logits(alone, 200, [0, 60, 61, 149])
        among = make_case((5, 32, 150, 1), head_dim=16, heads=1, leading=3, trailing=11, seed=1)
        start, end = among.segments[2]
        for whole, part in zip(among.packed[:3], alone.packed[:3], strict=True):
            whole[start:end] = part
        together = self.attention(among, max_seqlen=max_seqlen)[start:end]
        assert_same_bits(together, self.attention(alone, max_seqlen=max_seqlen))


class BatchInvarianceContract:
    """Inherited by the tests of each implementation that has kernels."""

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("dtype", "fuse", "further"),
        [
            ("bfloat16", "auto", {}),
            ("float32", "none", {}),
            ("bfloat16", "auto", {"heads": 2, "group": 2, "norms": "qk"}),
        ],
    )
    @given(
        length=st.sampled_from(BY_LENGTH),
        before=st.sampled_from(BY_LENGTH),
        behind=st.sampled_from(BY_LENGTH),
        start=st.integers(0, 9),
        tokens=st.sampled_from(MANY),
        seed=st.integers(0, 99),
    )
    # The usual kernels differ here in an interpreter too, as one tile would hold the segment alone.
    @example(length=BEYOND, before=33, behind=64, start=5, tokens=MANY[0], seed=0)
    @settings(max_examples=examples(30 if has_gpu() else 2))
    def test_batch_invariance(
        self, length, before, behind, start, tokens, seed, dtype, fuse, further
    ):
        """A segment's bits, whatever kernel and tiles its neighbours and their number ask for."""
        shape = {"head_dim": 80 if has_gpu() else 16, "dtype": dtype, "heads": 1} | further
        alone = cut((0, 0, 0, length), tokens=max(BY_LENGTH), **shape)
        bounds = start + np.cumsum([0, before, length, behind])
        among = cut(bounds, tokens=tokens, seed=seed + 1, **shape)
        among = dataclasses.replace(among, q_norm=alone.q_norm, k_norm=alone.k_norm)
        among.qkv[:] *= 100
        for whole, part in zip(among.packed[:3], alone.packed[:3], strict=True):
            whole[bounds[1] : bounds[2]] = part[:length]
        # Windows alone, or whatever there may be.
        bound = 32 if length <= 32 else max(BY_LENGTH)
        options = {"fuse": fuse, "batch_invariant": True}
        result = self.attention(alone, max_seqlen=bound, **options)[:length]
        together = self.attention(among, max_seqlen=tokens, **options)
        assert_same_bits(result, together[bounds[1] : bounds[2]])

    def test_batch_invariant_calls_keep_their_promises(self):
        shape = {"leading": 3, "trailing": 4, "head_dim": 24, "heads": 1}
        # All within a window at most, and others.
        for lengths in ((5, 64, 0), (5, 70, 64, 0, 65)):
            case = make_case(lengths, **shape)
            result = self.attention(case, max_seqlen=max(lengths), batch_invariant=True)
            assert_accurate(result, case)
            assert_same_bits(result[case.padding], np.zeros_like(result[case.padding]))
        broken = self.attention(case, max_seqlen=32, batch_invariant=True).astype(np.float32)
        for start, end in case.segments:
            rows = broken[start:end]
            assert np.isnan(rows).all() or relative_rms(rows, exact(case)[start:end]) < 0.01
