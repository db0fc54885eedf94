"""Gate and up behind a late norm in JAX: the contract, and what only JAX has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_models.gated import Biases
from flax_models.gated_product import gated_product, in_one_kernel
from pallas_kernels.compile import compiling_by
from tests.gated_contract import EPS
from tests.gated_product_contract import GatedProductContract, draw
from tests.pallas_kernels.test_lowering import cuda_device


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def run(stream, weight, biases, eps, implementation, one_kernel):
    compute = in_one_kernel if one_kernel else gated_product
    return compute(stream, weight, Biases(*biases), eps, implementation)


class TestGatedProduct(GatedProductContract):
    implementations = ("reference", "triton", "auto")

    @staticmethod
    def multiply(stream, weight, biases, eps, implementation, one_kernel):
        arrays = jax.tree.map(jnp.asarray, (stream, weight, biases))
        return np.asarray(run(*arrays, eps, implementation, one_kernel))


def test_gradients_are_the_references():
    stream, weight, biases = jax.tree.map(jnp.asarray, draw(3, 64, 16, "float16"))

    def loss(implementation, *arguments):
        return (run(*arguments, EPS, implementation, True).astype(jnp.float32) ** 2).sum()

    ours, theirs = (
        jax.grad(functools.partial(loss, name), argnums=(0, 1, 2))(stream, weight, biases)
        for name in ("triton", "reference")
    )
    for our, their in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.abs(their).max() > 0
        np.testing.assert_allclose(our, their, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lowers_for_a_gpu_as_one_kernel(dtype):
    arrays = draw(2304, 1280, 3456, dtype)
    with cuda_device(), compiling_by("xla"):  # which leaves the launch legible
        lowered = run.trace(*arrays, EPS, "triton", True).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("gpu$xla.gpu.triton") == 1
    assert "stablehlo.dot_general" not in text
