"""What the Triton package makes of the MLP's kernels in Pallas, on any machine."""

import functools

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from flax_models.gated_product import norm_scale
from tests.flax_models.test_gated import run
from tests.gated_contract import EPS
from tests.pallas_kernels.compiling import assemble
from tests.pallas_kernels.no_gpu import cuda_device
from tests.triton_kernels.compile_ahead import inspect_machine_code

TOKENS, HIDDEN, WIDTH = 2304, 1280, 3456  # Qwen2.5-VL 7B's, one image of 672 px


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nothing_spills(found, tmp_path, dtype):
    shapes = (TOKENS, 2 * WIDTH), (TOKENS, HIDDEN), (HIDDEN,), (2 * WIDTH,), (2 * WIDTH,)
    product, residual, *biases = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes)
    divisors = jax.jit(functools.partial(norm_scale, eps=EPS))
    with cuda_device():
        for traced in (
            divisors.trace(residual, biases[0]),
            run.trace(product, residual, biases, EPS, "kernel"),
        ):
            traced.lower(lowering_platforms=("cuda",))
    assert [kernel.name for kernel in found.kernels] == ["norm_scale_kernel", "gated_kernel"]
    for kernel in found.kernels:
        registers, stack, _ = inspect_machine_code(assemble(kernel.ptx, tmp_path))
        assert registers * kernel.threads <= 65536
        assert stack == 0
