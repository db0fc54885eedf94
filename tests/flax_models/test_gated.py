"""The gated activation behind a late norm in JAX: the contract, and what only JAX has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_models.common.weights import Biases
from flax_models.gated import gated_activation
from pallas_kernels.launching.compile import compiling_by
from pallas_kernels.launching.devices import local_gpu
from tests.gated_contract import EPS, GatedContract, draw, oracle, relative_error
from tests.pallas_kernels.no_gpu import cuda_device


@functools.partial(jax.jit, static_argnums=(3, 4))
def run(product, residual, biases, eps, implementation):
    return gated_activation(product, residual, Biases(*biases), eps, implementation)


class TestGatedActivation(GatedContract):
    implementations = ("reference", "kernel", "auto")

    @staticmethod
    def activate(product, residual, biases, eps, implementation):
        arrays = jax.tree.map(jnp.asarray, (product, residual, biases))
        return np.asarray(run(*arrays, eps, implementation))

    @staticmethod
    def has_gpu():
        return local_gpu() is not None


def test_gradients_are_the_references():
    product, residual, biases = jax.tree.map(jnp.asarray, draw(3, 24, 16))

    def loss(implementation, *arguments):
        return (run(*arguments, EPS, implementation) ** 2).sum()

    ours, theirs = (
        jax.grad(functools.partial(loss, name), argnums=(0, 1, 2))(product, residual, biases)
        for name in ("kernel", "reference")
    )
    for our, their in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.abs(their).max() > 0
        np.testing.assert_allclose(our, their, rtol=1e-5, atol=1e-6)


def test_vmap():
    product, residual, biases = draw(6, 24, 16)
    calls = product.reshape(2, 3, -1), residual.reshape(2, 3, -1)
    together = jax.vmap(lambda p, s: run(p, s, biases, EPS, "kernel"))(*calls)
    exact = oracle(product, residual, biases)
    assert relative_error(np.asarray(together).reshape(6, -1), exact) < 1e-6


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")], ids=["cuda", "both"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_lowers_for_a_gpu_as_one_kernel(dtype, platforms):
    product, residual, biases = draw(64, 1280, 3456, dtype)
    with cuda_device(), compiling_by("xla"):  # which leaves the launch legible
        lowered = run.trace(product, residual, biases, EPS, "kernel").lower(
            lowering_platforms=platforms
        )
    assert lowered.as_text().count("gpu$xla.gpu.triton") == 1
