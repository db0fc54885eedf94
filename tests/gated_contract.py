"""What the gated activation behind a late norm must do; both towers' tests inherit the suite.

A subclass has `activate(product, residual, biases, eps, implementation)`, from NumPy arrays to one,
`implementations`, which can run here, and `has_gpu()`.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hostile import examples

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
TOLERANCES = {"bfloat16": 2.5e-3, "float16": 3.5e-4, "float32": 1e-6}  # one rounding, relative RMS
EPS = 1e-6


def draw(tokens, hidden, width, dtype="float32", seed=0):
    """A product, a residual and biases such as a tower has."""
    rng = np.random.default_rng(seed)
    shapes = (tokens, 2 * width), (tokens, hidden), (hidden,), (2 * width,), (2 * width,)
    arrays = map(np.multiply, (5, 3, 0.5, 0.5, 0.5), map(rng.standard_normal, shapes))
    product, residual, *biases = (x.astype(np.float32).astype(DTYPES[dtype]) for x in arrays)
    return product, residual, biases


def oracle(product, residual, biases, eps=EPS):
    """silu(gate) x up in fp64, of the very numbers."""
    product, residual, *biases = (
        np.asarray(x).astype(np.float64) for x in (product, residual, *biases)
    )
    rms = np.sqrt(((residual + biases[0]) ** 2).mean(axis=1, keepdims=True) + eps)
    gate, up = np.split((product + biases[1]) / rms + biases[2], 2, axis=1)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def relative_error(ours, exact):
    return np.linalg.norm(ours.astype(np.float64) - exact) / np.linalg.norm(exact)


class GatedContract:
    @pytest.fixture
    def run(self):
        """The result of every implementation, one by one, with its name."""

        def run(product, residual, biases, eps=EPS):
            for name in self.implementations:
                out = self.activate(product, residual, biases, eps, name)
                assert out.dtype == residual.dtype
                assert out.shape == (product.shape[0], product.shape[1] // 2)
                yield name, out

        return run

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("tokens", "hidden", "width"), [(3, 1280, 3456), (7, 64, 128)])
    def test_is_the_oracles_rounded_once(self, run, tokens, hidden, width, dtype):
        arrays = draw(tokens, hidden, width, dtype)
        for name, out in run(*arrays):
            assert relative_error(out, oracle(*arrays)) < TOLERANCES[dtype], name

    @settings(max_examples=examples(10))
    @given(st.integers(1, 5), st.integers(1, 200), st.integers(1, 200), st.integers(0, 99))
    def test_any_widths(self, tokens, hidden, width, seed):
        product, residual, biases = draw(tokens, hidden, width, seed=seed)
        for name in self.implementations:
            out = self.activate(product, residual, biases, EPS, name)
            exact = oracle(product, residual, biases)
            np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-5, err_msg=name)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_channel_of_constant_one(self, run, dtype):
        product, residual, biases = draw(4, 32, 64, dtype)
        for column, constant in ((9, 32), (64 + 9, 1 / 32)):
            product[:, column], biases[2][column] = 0, constant
        biases[1][:] = 0
        for name, out in run(product, residual, biases):
            assert (out[:, 9] == 1).all(), name

    def test_rows_do_not_see_each_other(self, run):
        product, residual, biases = draw(6, 96, 40)
        changed = product.copy(), residual.copy()
        for x in changed:
            x[3] = np.nan
        before, after = run(product, residual, biases), run(*changed, biases)
        for (name, ours), (_, theirs) in zip(before, after, strict=True):
            kept = np.arange(6) != 3
            np.testing.assert_array_equal(ours[kept], theirs[kept], err_msg=name)
            assert np.isnan(theirs[3]).all(), name

    def test_gates_that_close_and_open_wide(self, run):
        product, residual, biases = draw(4, 32, 8)
        product[:, :8] = [[-1e9], [-1e3], [1e4], [1e15]]
        for name, out in run(product, residual, biases):
            exact = oracle(product, residual, biases)
            np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-27, err_msg=name)

    def test_products_beyond_fp16(self, run):
        product, residual, biases = draw(4, 32, 8, "float16")
        product, residual = 2e4 * product.astype(np.float32), 1000 * residual
        for name, out in run(product, residual, biases):
            exact = oracle(product, residual, biases)
            assert relative_error(out, exact) < TOLERANCES["float16"], name

    @pytest.mark.gpu
    def test_offsets_beyond_31_bits(self):
        if not self.has_gpu():
            pytest.skip("the framework sees no GPU")
        tokens, hidden, width = 350_000, 16, 3456
        rows = draw(64, hidden, width, "bfloat16")
        product = np.zeros((tokens, 2 * width), ml_dtypes.bfloat16)
        residual = np.zeros((tokens, hidden), ml_dtypes.bfloat16)
        product[-64:], residual[-64:] = rows[0], rows[1]
        out = self.activate(product, residual, rows[2], EPS, "kernel")[-64:]
        assert relative_error(out, oracle(*rows)) < TOLERANCES["bfloat16"]
