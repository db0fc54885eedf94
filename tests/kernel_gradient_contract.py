"""What every implementation promises about gradients.

An implementation's tests inherit GradientContract and an adapter of its framework, which has

* `gradients(case, weights, packed=False, angles=True, **keywords)`: the gradients of sum(weights *
  result) with respect to (qkv, cos, sin) or (q, k, v, cos, sin), then the norms that the case has,
  as NumPy arrays; where no angles' are asked for, without those, which other kernels may compute,
* `curvature(case, weights, direction, **keywords)`: the second derivative of sum(weights * result)
  along a direction (q, k, v, cos, sin), or (q, k, v), by differentiating twice in reverse.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import kernel_cases
from tests.hostile import TOKENS, examples, hostile_cu_seqlens, refusable
from tests.kernel_cases import (
    Case,
    assert_accurate_gradients,
    assert_same_bits,
    exact,
    make_case,
    relative_rms,
)
from tests.kernel_contract import STREAM, WINDOW, both_kernels, cut

STEP = 1e-5  # of the central differences, in fp64


def weights_for(case):
    rng = np.random.default_rng(7)
    shape = (len(case.qkv), *case.qkv.shape[2:])
    return rng.standard_normal(shape).astype(case.qkv.dtype)


def moved(case, step, direction):
    """The case some way along a direction (qkv, cos, sin, and norms if it has both), in fp64."""
    start = (x.astype(np.float64) for x in (*case.packed[:3], *case.norms.values()))
    qkv, cos, sin, *norms = (x + step * d for x, d in zip(start, direction, strict=True))
    return Case(qkv, cos, sin, case.cu_seqlens, case.group, *norms)


def slope(case, weights, scale, direction):
    """Derivative of sum(weights * exact) along a direction as of `moved`, by differences."""

    def value(step):
        return (weights * exact(moved(case, step, direction), scale)).sum()

    return (value(STEP) - value(-STEP)) / (2 * STEP)


def packed_gradients(case, weights, exact=True):
    """The oracle's in qkv."""
    return in_qkv(case, *kernel_cases.gradients(case, weights, exact)[:3])


def in_qkv(case, q, k, v):
    """Gradients in q, k and v as one in qkv, of which heads that are in no group get none."""
    qkv = np.zeros(case.qkv.shape, q.dtype)
    qkv[:, 0], qkv[:, 1, :: case.group], qkv[:, 2, :: case.group] = q, k, v
    return qkv


class LongGradientContract:
    """Inherited by the tests of the references, through which all gradients go: the interpreters
    would take minutes to get there.
    """

    def test_gradients_of_a_long_segment_are_rounded_once(self):
        """Summed over blocks of rows in their dtype, they would be off by many roundings."""
        tokens = 8192
        case = make_case([tokens], heads=1, head_dim=8)
        weights = np.ones((tokens, 1, 8), case.qkv.dtype)
        *_, v_gradient, _, _ = self.gradients(case, weights, max_seqlen=tokens)
        q, k = rotated(case)
        expected = np.zeros(tokens)
        for rows in np.split(q, 16):
            p = np.exp(rows @ k.T * 8**-0.5)
            expected += (p / p.sum(axis=1, keepdims=True)).sum(axis=0)
        error = v_gradient[:, 0].astype(np.float64) - expected[:, None]
        assert np.linalg.norm(error) < 2.5e-3 * np.linalg.norm(v_gradient.astype(np.float64))


def rotated(case):
    """Rotated q and k of a case of one head, [tokens, head_dim] fp64."""
    cos, sin = case.cos.astype(np.float64), case.sin.astype(np.float64)
    for x in case.qkv[:, :2, 0].astype(np.float64).swapaxes(0, 1):
        x1, x2 = np.split(x, 2, axis=1)
        yield np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=1)


class GradientContract:
    """Inherited by the tests of each implementation."""

    @pytest.mark.parametrize(
        ("max_seqlen", "packed", "further"),
        [
            *((WINDOW, False, {}), (WINDOW, True, {"norms": "qk"})),
            *((STREAM, True, {}), (STREAM, False, {"group": 2, "norms": "qk"})),
        ],
        ids=str,
    )
    def test_gradients_are_the_slopes_of_the_oracle(self, packed, further, max_seqlen):
        case = make_case(
            (9, 0, 1, 14), head_dim=16, rotary_dim=12, dtype="float32", leading=2, trailing=3,
            **further,
        )  # fmt: skip
        weights = weights_for(case)
        found = self.gradients(case, weights, packed=packed, max_seqlen=max_seqlen, scale=0.4)
        gradients = found if packed else (in_qkv(case, *found[:3]), *found[3:])
        rng = np.random.default_rng(8)
        for part, gradient in enumerate(gradients):
            for _ in range(3):
                direction = [np.zeros(x.shape) for x in gradients]
                direction[part] = rng.standard_normal(gradient.shape)
                expected = slope(case, weights, 0.4, direction)
                size = np.linalg.norm(gradient) * np.linalg.norm(direction[part])
                found = (gradient * direction[part]).sum()
                assert abs(found - expected) <= 1e-5 * size

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("dtype", "head_dim", "rotary_dim", "lengths", "packed", "further"),
        [
            ("bfloat16", 80, None, (9, 0, 1, 64), True, {}),
            ("bfloat16", 72, 36, (33, 20), False, {"heads": 4, "group": 2, "norms": "qk"}),
            ("bfloat16", 16, None, (100,), True, {}),
            ("bfloat16", 208, None, (24,), False, {}),
            ("float32", 8, 6, (32, 5), False, {"heads": 3, "group": 3}),
            # Which no tile holds; some have shorter ones beside them.
            ("bfloat16", 80, None, (150,), True, {}),
            ("bfloat16", 72, 36, (9, 130, 0, 5), False, {}),
            ("bfloat16", 208, None, (70,), False, {}),
            ("float16", 24, 22, (3, 140), False, {"heads": 2, "group": 2, "norms": "qk"}),
            ("float32", 8, 6, (12, 70, 1), True, {}),
        ],
        ids=str,
    )
    def test_gradients_are_as_exact_as_those_of_separate_steps(
        self, dtype, head_dim, rotary_dim, lengths, packed, further
    ):
        """And padding, in the packed ones more rows than a tile and all segments, has none."""
        case = make_case(
            lengths, head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype, leading=3,
            trailing=140 if packed else 5, **further,
        )  # fmt: skip
        # No gradient of padding counts, whatever it is.
        weights = weights_for(case)
        weights[case.padding] = np.nan
        found = self.gradients(case, weights, packed=packed, angles=False, max_seqlen=max(lengths))
        found = [*np.moveaxis(found[0], 1, 0), *found[1:]] if packed else found
        assert all((x[case.padding] == 0).all() for x in found[:3])
        assert_accurate_gradients(found, case, weights)

    @both_kernels
    def test_gradients_of_large_logits(self, max_seqlen):
        """Of which only the differences within a row have exponentials."""
        case = make_case((9, 14), head_dim=16, dtype="float32")
        case.qkv[:, 0] *= 300
        weights = weights_for(case)
        [found] = self.gradients(case, weights, packed=True, angles=False, max_seqlen=max_seqlen)
        assert relative_rms(found, packed_gradients(case, weights)) < 1e-4

    @both_kernels
    def test_gradients_of_logits_far_below_0(self, max_seqlen):
        """A key that is none would have a logit of 0, whose exponential overflows beside these."""
        case = make_case((9, 14), head_dim=16, dtype="float32")
        case.cos[:], case.sin[:] = 1, 0
        case.qkv[:, 0] = np.abs(case.qkv[:, 0]) + 10
        case.qkv[:, 1] = -np.abs(case.qkv[:, 1]) - 10
        weights = weights_for(case)
        [found] = self.gradients(case, weights, packed=True, angles=False, max_seqlen=max_seqlen)
        assert relative_rms(found, packed_gradients(case, weights)) < 1e-4

    # By programs of test_no_gradient_reaches_another_segment.
    @pytest.mark.parametrize(("max_seqlen", "dtype"), [(WINDOW, "float32"), (STREAM, "float16")])
    def test_gradients_are_the_same_bits_every_time(self, max_seqlen, dtype):
        case = make_case((9, 14), head_dim=16, dtype=dtype)
        first, again = (
            self.gradients(case, weights_for(case), angles=False, max_seqlen=max_seqlen)
            for _ in range(2)
        )
        for x, y in zip(first, again, strict=True):
            assert_same_bits(x, y)

    @pytest.mark.parametrize(
        ("max_seqlen", "angles", "further"),
        [(WINDOW, True, {}), (STREAM, False, {"group": 2, "norms": "qk"})],
    )
    def test_second_derivatives_are_the_curvature_of_the_oracle(self, max_seqlen, angles, further):
        """Norms stay where they are."""
        case = make_case(
            (9, 1, 14), head_dim=16, rotary_dim=12, dtype="float32", trailing=3, **further
        )
        weights = weights_for(case)
        rng = np.random.default_rng(9)
        direction = [rng.standard_normal(x.shape).astype(np.float32) for x in case.packed[:3]]
        if not angles:
            direction[1:] = [np.zeros_like(x) for x in direction[1:]]
        q, k, v = np.moveaxis(direction[0], 1, 0)
        parts = q, k[:, :: case.group], v[:, :: case.group], *direction[1:]
        found = self.curvature(
            case, weights, parts[: 5 if angles else 3], max_seqlen=max_seqlen, scale=0.4
        )
        direction += [np.zeros_like(x) for x in case.norms.values()]
        step = 1e-3
        before, behind = (
            slope(moved(case, sign * step, direction), weights, 0.4, direction) for sign in (-1, 1)
        )
        expected = (behind - before) / (2 * step)
        assert abs(found - expected) <= 1e-3 * abs(expected)

    def test_padding_has_no_gradient_and_others_have_their_dtype(self):
        case = make_case((9, 14), head_dim=16, leading=2, trailing=30)
        gradients = self.gradients(case, weights_for(case), max_seqlen=WINDOW)
        for gradient in gradients:
            assert (gradient[case.padding] == 0).all()
            assert (gradient[~case.padding] != 0).any()
        dtypes = [x.dtype for x in gradients]  # those of the arguments
        assert dtypes == [case.qkv.dtype] * 3 + [np.dtype(np.float32)] * 2

    @pytest.mark.parametrize(
        ("cu_seqlens", "tokens", "packed", "max_seqlen", "angles"),
        [
            *(((0, 0), 0, False, bound, False) for bound in (WINDOW, STREAM)),
            *(((2, 2, 2), 5, True, bound, False) for bound in (WINDOW, STREAM)),
            *(((0,), 0, True, WINDOW, False), ((0,), 5, False, STREAM, False)),
            *(((0, 0), 0, True, WINDOW, True), ((0,), 5, False, WINDOW, True)),
        ],
        ids=str,
    )
    def test_gradients_are_zero_where_no_token_is_in_a_segment(
        self, cu_seqlens, tokens, packed, max_seqlen, angles
    ):
        case = cut(cu_seqlens, tokens=tokens, head_dim=16)
        arguments = (case.packed if packed else case.separate)[: -1 if angles else -3]
        options = {"packed": packed, "angles": angles, "max_seqlen": max_seqlen}
        gradients = self.gradients(case, weights_for(case), **options)
        for gradient, x in zip(gradients, arguments, strict=True):
            assert gradient.shape == x.shape
            assert (gradient == 0).all()

    # Above a window the stream kernel, whose rows are right nevertheless.
    @pytest.mark.parametrize(
        ("bound", "angles", "norms"),
        [
            *((WINDOW + 1, False, ""), (WINDOW, False, "")),
            (WINDOW, True, "qk"),
        ],
    )
    def test_gradients_of_a_longer_segment_are_right_or_nan(self, bound, angles, norms):
        case = make_case((9, 70, 16), head_dim=16, dtype="float32", trailing=4, norms=norms)
        right, found = (
            self.gradients(case, weights_for(case), angles=angles, max_seqlen=longest)
            for longest in (70, bound)
        )
        for x, expected in zip(found, right, strict=True):
            # Those in norms are of all tokens together.
            rows = slice(None) if x.ndim == 1 else slice(*case.segments[1])
            if np.isnan(x[rows]).any():
                assert np.isnan(x[rows]).all()
                x[rows] = expected[rows]
            np.testing.assert_allclose(x, expected, rtol=0, atol=1e-5 * np.abs(expected).max())

    @pytest.mark.parametrize(
        ("max_seqlen", "angles", "dtype"),
        [
            (WINDOW, True, "float32"),
            (WINDOW, False, "float32"),
            (STREAM, False, "float32"),
            (STREAM, False, "float16"),
        ],
    )
    def test_no_gradient_reaches_another_segment(self, max_seqlen, angles, dtype):
        case = make_case((9, 14), head_dim=16, dtype=dtype)
        weights = weights_for(case)
        weights[9:] = 0
        broken = dataclasses.replace(case, qkv=case.with_rows(slice(9, None), np.nan).qkv)
        options = {"angles": angles, "max_seqlen": max_seqlen}
        before, after = (self.gradients(c, weights, **options) for c in (case, broken))
        for x, y in zip(before, after, strict=True):
            assert (x[9:] == 0).all()
            np.testing.assert_array_equal(x[:9], y[:9])


class KernelGradientContract(GradientContract):
    """Inherited by the tests of the kernels."""

    # Of fp32, whose longest window and tiles are of 32 rows.
    @given(
        lengths=st.lists(st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 64, 65]), max_size=3),
        leading=st.integers(0, 40),
    )
    @settings(max_examples=examples(4))
    @example(lengths=[33, 31], leading=0)
    def test_gradients_of_lengths_around_those_of_tiles(self, lengths, leading):
        # Of few shapes, for each of which JAX compiles.
        lengths = [*lengths, *[0] * (3 - len(lengths)), 34]
        shape = {"head_dim": 8, "heads": 1, "dtype": "float32"}
        trailing = 128 - (leading + sum(lengths)) % 128
        case = make_case(lengths, leading=leading, trailing=trailing, **shape)
        weights = weights_for(case)
        [found] = self.gradients(case, weights, packed=True, angles=False, max_seqlen=128)
        assert (found[case.padding] == 0).all()
        right = packed_gradients(case, weights)
        for start, end in case.segments:  # each, however small its gradients are
            if end > start:
                # A single token's are 0 in q and k, but for rounding.
                assert np.abs(found - right)[start:end].max() < 1e-5 * np.abs(right).max()

    @hostile_cu_seqlens(usual=2, max_seqlen=(16, STREAM))
    def test_gradients_of_any_cu_seqlens_are_safe(self, cu_seqlens, max_seqlen):
        case = cut(cu_seqlens, tokens=TOKENS, head_dim=16, dtype="float32")
        weights = weights_for(case)
        options = {"packed": True, "angles": False, "max_seqlen": max_seqlen}
        [found] = self.gradients(case, weights, **options)
        # All is written, from within the tensors: around them, and in what is not written, is NaN.
        may_refuse = refusable(case.cu_seqlens, max_seqlen)[:, None, None, None]
        assert (np.isfinite(found) | may_refuse).all()

    @pytest.mark.parametrize(
        ("lengths", "max_seqlen"), [((2,) * 8, 16), ((2,) * 8, STREAM), ((150,), STREAM)]
    )
    def test_gradients_at_the_ends_of_their_dtype_s_range(self, lengths, max_seqlen):
        """Loss scaling takes them there. (What the reference rounds to it overflows.)"""
        case = make_case(lengths, head_dim=64, dtype="float16")
        case.qkv[:, :2] /= 10
        for factor in (2e-4, 6e4):
            weights = np.sign(weights_for(case)) * np.float16(factor)
            options = {"packed": True, "angles": False, "max_seqlen": max_seqlen}
            [found] = self.gradients(case, weights, **options)
            assert_accurate_gradients(np.moveaxis(found, 1, 0), case, weights)
