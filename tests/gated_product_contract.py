"""What gate and up behind a late norm must be, in one kernel or two; both towers' tests inherit it.

A subclass has `multiply(stream, weight, biases, eps, implementation, one_kernel)`, from NumPy
arrays to one, `implementations`, which can run here, `has_gpu()`, and
`is_faster(monkeypatch, tokens, hidden, dtype, capability)`: whether one kernel is what runs on a
GPU of that compute capability.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import gated_contract
from tests.gated_contract import DTYPES, EPS, TOLERANCES, relative_error
from tests.hostile import examples

# What one kernel takes: 16-bit numbers, and hidden a multiple of 64. Its tiles have 128 rows and
# 128 columns of each half.
DTYPES_OF_ONE_KERNEL = ("bfloat16", "float16")
SHAPES = [(1, 64, 8), (128, 128, 128), (129, 64, 200), (1200, 64, 136), (3, 1280, 3456)]


def draw(tokens, hidden, width, dtype="float32", seed=0):
    """A stream, the weight of gate and up, and biases such as a tower has."""
    _, stream, biases = gated_contract.draw(tokens, hidden, width, dtype, seed)
    weight = np.random.default_rng(seed + 1).standard_normal((2 * width, hidden)) / hidden**0.5
    return stream, weight.astype(DTYPES[dtype]), biases


def oracle(stream, weight, biases):
    """In fp64, of the very numbers."""
    product = np.asarray(stream).astype(np.float64) @ np.asarray(weight).astype(np.float64).T
    return gated_contract.oracle(product, stream, biases)


class GatedProductContract:
    def check(self, arrays, dtype, implementations=None, **ways):
        """Every implementation is the oracle's, as near as its roundings allow."""
        exact = oracle(*arrays)
        for name in implementations or self.implementations:
            out = self.multiply(*arrays, EPS, name, **ways)
            assert out.dtype == arrays[0].dtype
            assert out.shape == exact.shape
            # The reference rounds the product too; of fp16 it does not.
            assert relative_error(out, exact) < 1.6 * TOLERANCES[dtype], name

    @pytest.mark.parametrize("dtype", DTYPES_OF_ONE_KERNEL)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_one_kernel_is_the_oracles(self, shape, dtype):
        """By itself: compute-sanitizer, which runs this too, does not see cuBLAS' writes."""
        if "triton" not in self.implementations:
            pytest.skip("Triton's kernels run on a GPU, or where TRITON_INTERPRET=1")
        self.check(draw(*shape, dtype), dtype, ("triton",), one_kernel=True)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [*SHAPES, (2304, 64, 16), (2100, 40, 24)], ids=str)
    def test_whichever_way_is_faster_is_the_oracles(self, shape, dtype):
        self.check(draw(*shape, dtype), dtype, one_kernel=False)

    @settings(max_examples=examples(6))
    @given(st.integers(1, 300), st.integers(1, 3), st.integers(1, 300), st.integers(0, 99))
    def test_any_sizes(self, tokens, depth, width, seed):
        arrays = draw(tokens, 64 * depth, width, "float16", seed)
        self.check(arrays, "float16", one_kernel=True)

    def test_rows_do_not_see_each_other(self):
        stream, weight, biases = draw(300, 64, 24, "float16")
        changed = stream.copy()
        changed[150] = np.nan
        kept = np.arange(300) != 150
        for name in self.implementations:
            before, after = (
                self.multiply(x, weight, biases, EPS, name, one_kernel=True)
                for x in (stream, changed)
            )
            np.testing.assert_array_equal(before[kept], after[kept], err_msg=name)
            assert np.isnan(after[150]).all(), name

    @pytest.mark.parametrize(
        ("tokens", "hidden", "dtype", "capability", "expected"),
        [
            (2048, 1280, "bfloat16", "9.0", True),
            (2048, 64, "float16", "9.0", True),
            (2047, 1280, "bfloat16", "9.0", False),
            (2048, 1320, "bfloat16", "9.0", False),
            (2048, 1280, "float32", "9.0", False),
            (2048, 1280, "bfloat16", "8.0", False),
            (2048, 1280, "bfloat16", "10.0", False),
        ],
    )
    def test_where_one_kernel_is_what_runs(
        self, monkeypatch, tokens, hidden, dtype, capability, expected
    ):
        assert self.is_faster(monkeypatch, tokens, hidden, dtype, capability) == expected

    @pytest.mark.parametrize("hidden", [40, 96])
    def test_channels_that_are_no_whole_tiles(self, hidden):
        if "triton" not in self.implementations:
            pytest.skip("Triton's kernels run on a GPU, or where TRITON_INTERPRET=1")
        with pytest.raises(ValueError, match=f"hidden must be a multiple of 64, got {hidden}"):
            self.multiply(*draw(3, hidden, 8, "float16"), EPS, "triton", one_kernel=True)

    @pytest.mark.gpu
    def test_offsets_beyond_31_bits(self):
        if not self.has_gpu():
            pytest.skip("the framework sees no GPU")
        tokens, hidden, width = 640_000, 64, 3456
        rows, weight, biases = draw(64, hidden, width, "bfloat16")
        stream = np.zeros((tokens, hidden), ml_dtypes.bfloat16)
        stream[-64:] = rows
        assert tokens * width > 2**31
        out = self.multiply(stream, weight, biases, EPS, "triton", one_kernel=True)[-64:]
        exact = oracle(rows, weight, biases)
        assert relative_error(out, exact) < 1.6 * TOLERANCES["bfloat16"]

    def test_streams_beyond_the_products_of_fp16(self):
        stream, weight, biases = draw(140, 128, 24, "float16")
        stream = (stream.astype(np.float32) * 4000).astype(np.float16)
        weight = (weight.astype(np.float32) * 8).astype(np.float16)
        assert np.abs(stream.astype(np.float64) @ weight.astype(np.float64).T).max() > 65504
        self.check((stream, weight, biases), "float16", one_kernel=True)
        self.check((stream, weight, biases), "float16", one_kernel=False)
