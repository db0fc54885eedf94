"""What gate and up behind a late norm must be, in one kernel or two; both towers' tests inherit it.

A subclass has `multiply(residual, weight, biases, eps, implementation)` and
`multiply_in_one(residual, weight, biases, eps)`, from NumPy arrays to one, `implementations`, which
can run here, `why_not_in_one`, None where one kernel can, `has_one_kernel`, whether there is one
for these versions, `row_unit`, of which tokens are to be a multiple for that, `has_gpu()`, and
`is_faster(monkeypatch, tokens, hidden, width, dtype, capability)`: whether one kernel is what runs
on a GPU of that compute capability.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compare.common.environment import has_gpu
from tests import gated_contract
from tests.gated_contract import DTYPES, EPS, TOLERANCES, relative_error
from tests.hostile import examples

# What one kernel takes: 16-bit numbers, hidden and width in multiples of 64. Its tiles have 128
# rows and 128 columns of each half; the last ones overlap those before.
DTYPES_OF_ONE_KERNEL = ("bfloat16", "float16")
SHAPES_OF_ONE_KERNEL = [
    *((128, 128, 128), (136, 64, 192), (248, 192, 256)),
    *((1200, 64, 192), (128, 320, 3456)),
]
# On a GPU so many tokens that one kernel would be faster, if it took the other sizes.
MANY = 2304 if has_gpu() else 304
SHAPES = [
    *((1, 64, 8), (128, 128, 128), (136, 64, 192), (248, 192, 256), (128, 320, 3456)),
    *((3, 1280, 3456), (MANY, 64, 16), (MANY - 204, 40, 24)),
]


def draw(tokens, hidden, width, dtype="float32", seed=0):
    """A residual, the weight of gate and up, and biases such as a tower has."""
    _, residual, biases = gated_contract.draw(tokens, hidden, width, dtype, seed)
    weight = np.random.default_rng(seed + 1).standard_normal((2 * width, hidden)) / hidden**0.5
    return residual, weight.astype(DTYPES[dtype]), biases


def draw_beyond_fp16(*shape):
    """The same in fp16, but for the fp32 product bias that towers have, of a large residual's."""
    residual, weight, biases = draw(*shape, "float16")
    biases[0][3], weight[:, 3] = 3e4, 16 * weight[:, 3]
    biases[1] = weight.astype(np.float32) @ biases[0].astype(np.float32)
    assert np.abs(biases[1]).max() > np.finfo(np.float16).max
    return residual, weight, biases


def oracle(residual, weight, biases):
    """In fp64, of the very numbers."""
    product = np.asarray(residual).astype(np.float64) @ np.asarray(weight).astype(np.float64).T
    return gated_contract.oracle(product, residual, biases)


class GatedProductContract:
    def check(self, out, exact, arrays, dtype):
        """It is the oracle's, as near as its roundings allow."""
        assert out.dtype == arrays[0].dtype
        assert out.shape == exact.shape
        # The reference rounds the product too; of fp16 it does not.
        assert relative_error(out, exact) < 1.6 * TOLERANCES[dtype]

    @pytest.fixture
    def in_one(self):
        """The kernel by itself: compute-sanitizer, which runs this too, does not see cuBLAS."""
        if self.why_not_in_one:
            pytest.skip(self.why_not_in_one)

    @pytest.mark.parametrize("dtype", DTYPES_OF_ONE_KERNEL)
    @pytest.mark.parametrize("shape", SHAPES_OF_ONE_KERNEL, ids=str)
    def test_one_kernel_is_the_oracles(self, in_one, shape, dtype):
        arrays = draw(*shape, dtype)
        self.check(self.multiply_in_one(*arrays, EPS), oracle(*arrays), arrays, dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_whichever_way_is_faster_is_the_oracles(self, shape, dtype):
        arrays = draw(*shape, dtype)
        exact = oracle(*arrays)
        for name in self.implementations:
            self.check(self.multiply(*arrays, EPS, name), exact, arrays, dtype)

    # The fixture only skips; that several classes inherit the test is its purpose.
    @settings(
        max_examples=examples(6),
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
    )
    @given(st.integers(128, 400), st.integers(1, 6), st.integers(2, 7), st.integers(0, 99))
    def test_any_sizes(self, in_one, tokens, depth, columns, seed):
        tokens -= tokens % self.row_unit
        arrays = draw(tokens, 64 * depth, 64 * columns, "float16", seed)
        self.check(self.multiply_in_one(*arrays, EPS), oracle(*arrays), arrays, "float16")

    def test_rows_do_not_see_each_other(self, in_one):
        residual, weight, biases = draw(304, 64, 192, "float16")
        changed = residual.copy()
        changed[150] = np.nan
        kept = np.arange(304) != 150
        before, after = (self.multiply_in_one(x, weight, biases, EPS) for x in (residual, changed))
        np.testing.assert_array_equal(before[kept], after[kept])
        assert np.isnan(after[150]).all()

    @pytest.mark.parametrize("gate", [-1000, 1000])
    def test_gates_far_from_zero(self, in_one, gate):
        """They are closed, or as open as can be, though exponentials overflow."""
        residual, weight, (stream_bias, product_bias, _) = draw(128, 64, 128, "bfloat16")
        bias = np.repeat([gate, 3.0], 128).astype(ml_dtypes.bfloat16)
        arrays = residual, weight, (stream_bias, product_bias, bias)
        out = self.multiply_in_one(*arrays, EPS)
        if gate < 0:
            assert np.abs(out.astype(np.float64)).max() < 1e-30
        else:
            self.check(out, oracle(*arrays), arrays, "bfloat16")

    @pytest.mark.parametrize(
        ("tokens", "hidden", "width", "dtype", "capability", "expected"),
        [
            (2048, 1280, 3456, "bfloat16", "9.0", True),
            (2048, 64, 128, "float16", "9.0", True),
            (2040, 1280, 3456, "bfloat16", "9.0", False),
            (2048, 1320, 3456, "bfloat16", "9.0", False),
            (2048, 1280, 64, "bfloat16", "9.0", False),
            (2048, 1280, 3420, "bfloat16", "9.0", False),
            (2048, 1280, 3456, "float32", "9.0", False),
            (2048, 1280, 3456, "bfloat16", "8.0", False),
            (2048, 1280, 3456, "bfloat16", "10.0", False),
        ],
    )
    def test_where_one_kernel_is_what_runs(
        self, monkeypatch, tokens, hidden, width, dtype, capability, expected
    ):
        found = self.is_faster(monkeypatch, tokens, hidden, width, dtype, capability)
        assert found == (expected and self.has_one_kernel)

    @pytest.mark.parametrize("tokens", [2049, 2052, 2056])
    def test_which_rows_one_kernel_takes(self, monkeypatch, tokens):
        found = self.is_faster(monkeypatch, tokens, 1280, 3456, "bfloat16", "9.0")
        assert found == (tokens % self.row_unit == 0 and self.has_one_kernel)

    @pytest.mark.parametrize(
        ("tokens", "hidden", "width"),
        [(128, 96, 128), (120, 64, 128), (128, 64, 64), (128, 64, 136)],
    )
    def test_what_does_not_fit_a_tile(self, in_one, tokens, hidden, width):
        words = f"of 64, width of 64, .* at least 128, got {tokens}, {hidden}, {width}"
        with pytest.raises(ValueError, match=words):
            self.multiply_in_one(*draw(tokens, hidden, width, "float16"), EPS)

    @pytest.mark.gpu
    def test_offsets_beyond_31_bits(self, in_one):
        if not self.has_gpu():
            pytest.skip("the framework sees no GPU")
        tokens, hidden, width = 640_000, 64, 3456
        rows, weight, biases = draw(64, hidden, width, "bfloat16")
        residual = np.zeros((tokens, hidden), ml_dtypes.bfloat16)
        residual[-64:] = rows
        assert tokens * width > 2**31
        out = self.multiply_in_one(residual, weight, biases, EPS)[-64:]
        assert relative_error(out, oracle(rows, weight, biases)) < 1.6 * TOLERANCES["bfloat16"]

    def test_streams_beyond_the_products_of_fp16(self, in_one):
        residual, weight, biases = draw(144, 128, 192, "float16")
        residual = (residual.astype(np.float32) * 4000).astype(np.float16)
        weight = (weight.astype(np.float32) * 8).astype(np.float16)
        assert np.abs(residual.astype(np.float64) @ weight.astype(np.float64).T).max() > 65504
        arrays = residual, weight, biases
        exact = oracle(*arrays)
        self.check(self.multiply_in_one(*arrays, EPS), exact, arrays, "float16")
        for name in self.implementations:
            self.check(self.multiply(*arrays, EPS, name), exact, arrays, "float16")

    def test_what_the_stream_lacks_may_pass_fp16_in_the_product(self):
        arrays = draw_beyond_fp16(136, 64, 192)
        for name in self.implementations:
            self.check(self.multiply(*arrays, EPS, name), oracle(*arrays), arrays, "float16")

    def test_what_the_stream_lacks_may_pass_fp16_in_one_kernel(self, in_one):
        arrays = draw_beyond_fp16(144, 128, 192)
        self.check(self.multiply_in_one(*arrays, EPS), oracle(*arrays), arrays, "float16")
