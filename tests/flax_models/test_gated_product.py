"""Gate and up behind a late norm in JAX: the contract, and what only JAX has."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as mosaic

from flax_models import gated_product as gated_product_module
from flax_models.common.weights import Biases, unnormed_dtype
from flax_models.gated_product import HAVE_MOSAIC, gated_product, in_one_kernel
from pallas_kernels.launching.compile import compiling_by
from pallas_kernels.launching.devices import local_gpu
from pallas_kernels.launching.table import Gpu
from tests.gated_contract import EPS, TOLERANCES, relative_error
from tests.gated_product_contract import GatedProductContract, draw, oracle
from tests.pallas_kernels.no_gpu import cuda_device

needs_mosaic = pytest.mark.skipif(not HAVE_MOSAIC, reason="the kernel is for JAX 0.11.2 and 0.12")


@functools.partial(jax.jit, static_argnums=(3, 4))
def run(residual, weight, biases, eps, implementation):
    return gated_product(residual, weight, Biases(*biases), eps, implementation)


@functools.partial(jax.jit, static_argnums=(3, 4))
def run_in_one(residual, weight, biases, eps, interpret):
    return in_one_kernel(residual, weight, Biases(*biases), eps, interpret)


class TestGatedProduct(GatedProductContract):
    implementations = ("reference", "kernel", "auto")
    why_not_in_one = None if HAVE_MOSAIC else "the kernel is for JAX 0.11.2 and 0.12"
    has_one_kernel = HAVE_MOSAIC
    row_unit = 8

    @staticmethod
    def multiply(residual, weight, biases, eps, implementation):
        arrays = jax.tree.map(jnp.asarray, (residual, weight, biases))
        return np.asarray(run(*arrays, eps, implementation))

    @staticmethod
    def multiply_in_one(residual, weight, biases, eps):
        arrays = jax.tree.map(jnp.asarray, (residual, weight, biases))
        return np.asarray(run_in_one(*arrays, eps, local_gpu() is None))

    @staticmethod
    def is_faster(monkeypatch, tokens, hidden, width, dtype, capability):
        gpu = Gpu("a GPU", capability)
        monkeypatch.setattr(gated_product_module, "local_gpu", lambda: gpu)
        return launches_one_kernel(monkeypatch, tokens, hidden, width, dtype)

    @staticmethod
    def has_gpu():
        return local_gpu() is not None


def launches_one_kernel(monkeypatch, tokens, hidden, width, dtype):
    """Whether `gated_product` is in one kernel, of which no part runs."""
    ways = []
    for way in ("differentiable", "unnormed_product", "gated_activation"):
        monkeypatch.setattr(gated_product_module, way, lambda *_, way=way: ways.append(way))
    residual = jax.ShapeDtypeStruct((tokens, hidden), dtype)
    weight = jax.ShapeDtypeStruct((2 * width, hidden), dtype)
    gated_product(residual, weight, Biases(None, None, None), EPS, "auto")
    assert ways in (["differentiable"], ["unnormed_product", "gated_activation"])
    return ways == ["differentiable"]


def test_machines_without_a_gpu_take_two_kernels(monkeypatch):
    monkeypatch.setattr(gated_product_module, "local_gpu", lambda: None)
    assert not launches_one_kernel(monkeypatch, 2048, 64, 128, "bfloat16")


@pytest.mark.skipif(HAVE_MOSAIC, reason="this JAX has the backend")
def test_other_versions_of_jax():
    with pytest.raises(NotImplementedError, match=r"for JAX 0\.11\.2 and 0\.12, this is "):
        TestGatedProduct.multiply_in_one(*draw(128, 64, 128, "float16"), EPS)


@needs_mosaic
def test_groups_of_warps_do_not_race(monkeypatch):
    """Loads, products and stores, as the interpreter orders them by the barriers alone."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    params = mosaic.InterpretGPUParams
    monkeypatch.setattr(mosaic, "InterpretGPUParams", functools.partial(params, detect_races=True))
    jax.clear_caches()
    arrays = draw(256, 320, 384, "float16")  # whole tiles: others write the same twice
    with jax.default_device(jax.devices("cpu")[0]):
        out = run_in_one(*jax.tree.map(jnp.asarray, arrays), EPS, True)
    assert not interpret_pallas_call.get_races().races_found
    jax.clear_caches()
    assert relative_error(np.asarray(out), oracle(*arrays)) < TOLERANCES["float16"]


def test_gradients_are_the_references(monkeypatch):
    residual, weight, biases = jax.tree.map(jnp.asarray, draw(136, 64, 192, "float16"))

    def loss(implementation, *arguments):
        return (run(*arguments, EPS, implementation).astype(jnp.float32) ** 2).sum()

    theirs = jax.grad(functools.partial(loss, "reference"), argnums=(0, 1, 2))(
        residual, weight, biases
    )
    monkeypatch.setattr(gated_product_module, "_is_faster", lambda *_: HAVE_MOSAIC)
    jax.clear_caches()
    ours = jax.grad(functools.partial(loss, "kernel"), argnums=(0, 1, 2))(residual, weight, biases)
    jax.clear_caches()
    for our, their in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.abs(their).max() > 0
        np.testing.assert_allclose(our, their, rtol=1e-2, atol=1e-2)


@needs_mosaic
def test_tiles_start_at_every_eighth_row():
    with pytest.raises(ValueError, match=r"tokens must be a multiple of 8, .*got 132, 64, 128"):
        TestGatedProduct.multiply_in_one(*draw(132, 64, 128, "float16"), EPS)


@needs_mosaic
@pytest.mark.parametrize("tokens", [128, 136, 2200, 9216, 20_000])
@pytest.mark.parametrize("width", [128, 192, 3456, 3520])
def test_what_fits_a_tile_lowers_for_a_gpu(tokens, width):
    """Mosaic's inference of layouts gives up, or does not come to an end, where others start."""
    shapes = (tokens, 1280), (2 * width, 1280), ((1280,), (2 * width,), (2 * width,))
    arrays = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        shapes,
        is_leaf=lambda shape: isinstance(shape[0], int),
    )
    with cuda_device(), compiling_by("xla"):
        run_in_one.trace(*arrays, EPS, False).lower(lowering_platforms=("cuda",))


@needs_mosaic
@pytest.mark.parametrize("implementation", ["auto", "kernel"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_layers_lower_for_a_gpu_as_the_divisors_and_one_kernel(monkeypatch, dtype, implementation):
    """The kernel for all layers once: each would be compiled for a second. Gate and up are one
    product of 256 columns in it, as in the twin.
    """
    monkeypatch.setattr(gated_product_module, "_is_faster", lambda *_: True)
    residual, weight, biases = draw(2304, 1280, 3456, dtype)
    biases[1] = biases[1].astype(unnormed_dtype(dtype))  # as towers have it

    def layers(residual, weight, biases):
        biases = Biases(*biases)
        return [gated_product(residual, weight + i, biases, EPS, implementation) for i in range(3)]

    with cuda_device(), compiling_by("xla"):  # which leaves the launch legible
        lowered = (
            jax.jit(layers).trace(residual, weight, biases).lower(lowering_platforms=("cuda",))
        )
    text = lowered.as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    assert "gpu$xla.gpu.triton" in text
    assert set(re.findall(r"wgmma\.mma_async[a-z.]*\.(m\d+n\d+k\d+)", text)) == {"m64n256k16"}
    assert "stablehlo.dot_general" not in text
    assert "stablehlo.reduce" not in text
