"""Gate and up behind a late norm in JAX: the contract, and what only JAX has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_models import gated_product as gated_product_module
from flax_models.gated import Biases
from flax_models.gated_product import gated_product, in_one_kernel
from pallas_kernels.compile import compiling_by, local_gpu
from pallas_kernels.launch_table import Gpu
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

    @staticmethod
    def is_faster(monkeypatch, tokens, hidden, dtype, capability):
        gpu = Gpu("a GPU", capability)
        monkeypatch.setattr(gated_product_module, "local_gpu", lambda: gpu)
        with compiling_by("triton"):
            return launches_one_kernel(monkeypatch, tokens, hidden, dtype)

    @staticmethod
    def has_gpu():
        return local_gpu() is not None


def launches_one_kernel(monkeypatch, tokens, hidden, dtype):
    """Whether `gated_product` is in one kernel, of which no part runs."""
    ways = []
    for way in ("in_one_kernel", "gated_activation"):
        monkeypatch.setattr(gated_product_module, way, lambda *_, way=way: ways.append(way))
    stream, weight = jnp.zeros((tokens, hidden), dtype), jnp.zeros((8, hidden), dtype)
    gated_product(stream, weight, None, EPS, "auto")
    return ways == ["in_one_kernel"]


def test_xlas_compiler_and_other_machines_take_two_kernels(monkeypatch):
    monkeypatch.setattr(gated_product_module, "local_gpu", lambda: Gpu("a GPU", "9.0"))
    with compiling_by("xla"):
        assert not launches_one_kernel(monkeypatch, 2048, 64, "bfloat16")
    monkeypatch.setattr(gated_product_module, "local_gpu", lambda: None)
    with compiling_by("triton"):
        assert not launches_one_kernel(monkeypatch, 2048, 64, "bfloat16")


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
def test_lowers_for_a_gpu_as_the_divisors_and_one_kernel(dtype):
    arrays = draw(2304, 1280, 3456, dtype)
    with cuda_device(), compiling_by("xla"):  # which leaves the launch legible
        lowered = run.trace(*arrays, EPS, "triton", True).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("gpu$xla.gpu.triton") == 2
    assert "stablehlo.dot_general" not in text
    assert "stablehlo.reduce" not in text
