"""Launching a kernel: what every pallas_call here has in common."""

import functools

import jax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.launching.compile import compiler_params
from pallas_kernels.launching.table import Launch
from pallas_kernels.sharding import varying_axes


def run(
    kernel: functools.partial,
    programs: int,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    launch: Launch,
    interpret: bool,
    operands: tuple[jax.Array, ...],
    disable_licm: bool = False,
) -> jax.Array:
    """Run a kernel on its operands.

    Args:
        kernel: takes references to the operands and to the result.
        programs: of a one-dimensional grid.
        shape, dtype: of the result.
        launch: warps, stages, registers; block sizes are the kernel's to know.
        interpret: in Pallas' interpreter.
        operands: arrays.
        disable_licm: see `TritonParams`.
    """
    # Under shard_map the result varies over the mesh axes that any operand varies over.
    manual_axis_type = jax.sharding.ManualAxisType(varying=varying_axes(*operands))
    call = pl.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=manual_axis_type),
        compiler_params=compiler_params(launch, disable_licm),
        interpret=interpret,
        name=kernel.func.__name__,
    )
    with jax.enable_x64(False):  # numbers of rows are 32-bit
        return call(*operands)
