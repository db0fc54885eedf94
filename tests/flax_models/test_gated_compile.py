"""What the Triton package makes of the gated product in Pallas, on any machine."""

import re

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from tests.flax_models.test_gated_product import run
from tests.gated_contract import EPS
from tests.pallas_kernels.compiling import assemble
from tests.pallas_kernels.test_lowering import cuda_device
from tests.triton_kernels.compile_ahead import inspect_machine_code

TOKENS, HIDDEN, WIDTH = 2304, 1280, 3456  # Qwen2.5-VL 7B's, one image of 672 px


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gate_and_up_are_one_product_of_256_columns(found, tmp_path, dtype):
    """As in the twin, and nothing spills."""
    shapes = (TOKENS, HIDDEN), (2 * WIDTH, HIDDEN), (HIDDEN,), (2 * WIDTH,), (2 * WIDTH,)
    stream, weight, *biases = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes)
    with cuda_device():
        traced = run.trace(stream, weight, biases, EPS, "triton", True)
        traced.lower(lowering_platforms=("cuda",))
    assert [kernel.name for kernel in found.kernels] == [
        "norm_scale_kernel",
        "gated_product_kernel",
    ]
    for kernel in found.kernels:
        registers, stack, code = inspect_machine_code(assemble(kernel.ptx, tmp_path))
        assert registers * kernel.threads <= 65536
        assert stack == 0
    assert set(re.findall(r"HGMMA\.(\d+x\d+x\d+)", code)) == {"64x256x16"}
