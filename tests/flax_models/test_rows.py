import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from flax_models.rows import first_rows  # noqa: E402


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(7,), (8, 3), (5, 2, 4)])
def test_equals_a_slice(dtype, shape):
    values = np.random.default_rng(0).standard_normal(shape)
    for rows in (1, 3, len(values)):
        array = jnp.asarray(values, dtype) * 1  # JAX's own memory, not NumPy's
        expected = np.asarray(array)[:rows].copy()
        taken = first_rows(array, rows)
        del array  # the result keeps the memory alive
        assert taken.dtype == dtype
        assert taken.devices() == {jax.devices()[0]}
        np.testing.assert_array_equal(np.asarray(taken), expected)


def test_computing_goes_on_with_the_rows_alone():
    taken = first_rows(jnp.arange(12.0).reshape(6, 2), 4)
    assert float(jax.jit(jnp.sum)(taken)) == sum(range(8))
    assert (taken + 1).shape == (4, 2)


def test_no_number_of_rows_is_compiled_for(compilations):
    array = jnp.arange(120.0).reshape(60, 2)
    compilations.clear()
    lengths = [first_rows(array, rows).shape[0] for rows in range(1, 61)]
    assert lengths == list(range(1, 61))
    assert not compilations


def test_under_a_trace():
    array = jnp.arange(12.0).reshape(6, 2)
    np.testing.assert_array_equal(jax.jit(lambda x: first_rows(x, 4))(array), array[:4])
    gradient = jax.grad(lambda x: first_rows(x, 4).sum())(array)
    np.testing.assert_array_equal(gradient, np.repeat([[1.0], [0.0]], [4, 2], axis=0) * [1, 1])
