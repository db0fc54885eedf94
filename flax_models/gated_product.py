"""Gate and up of an MLP with a late norm, activated in the kernel that multiplies.

A product by itself writes gate and up, 127 MB a layer at 1344 px, and the activation (gated.py)
reads them again, which takes a quarter of the product's time. Here each program computes the same
columns of both, activates them in its accumulators, and writes what the second product reads. A
kernel before it computes what rows are divided by.

The GPU's copy engine (TMA) loads the operands, those of the next tile while one is activated. In
the twin, compare/torch_tower/gated_product.py, Triton's compiler arranges that. Pallas' Triton
backend has no such loads, so this kernel is for Pallas' Mosaic GPU backend, and itself says which
group of warps loads and which multiply.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from flax_models import gated
from flax_models.common.weights import Biases
from flax_models.gated import Operation, differentiable, gated_activation, load, silu_times
from flax_models.products import unnormed_product
from pallas_kernels.kernels.dialect import HAVE_TRITON, plgpu
from pallas_kernels.kernels.tiles import Ref, Scalar
from pallas_kernels.launching.compile import HAVE_MOSAIC
from pallas_kernels.launching.devices import local_gpu
from pallas_kernels.launching.launch import run
from pallas_kernels.launching.table import Launch, next_power_of_2

# A tile has 128 rows and 128 columns of each of gate and up, for which 64 channels are multiplied
# at a time, up to 4 times as many having been loaded. Programs that run at once share operands: 8
# tiles of rows go through all columns.
_BLOCK = 128
_DEPTH = 64
_STAGES = 4
_GROUP = 8

# A program's groups of warps: two multiply half of a tile's rows each, the third loads. Few
# registers serve that; of the rest the others need 128 for the sums alone.
_MULTIPLIERS = 2
_ROWS = _BLOCK // _MULTIPLIERS
_MULTIPLIERS_REGISTERS, _LOADERS_REGISTERS = 232, 40

# Where tiles start: at multiples of so many rows and columns, as shared memory is laid out.
_ROW_UNIT = 8
_COLUMN_UNIT = 64

# Of the interpreter: fewer than tiles, so that it loops too. Where no GPU is at hand, an H200's.
_INTERPRETED_PROGRAMS = 2
_PROGRAMS = 132

# Of a program of the kernel before it, which has one row.
_NORM_WARPS = 4

# Of fewer tokens there are too few tiles to fill the GPU evenly, and cuBLAS has others.
_FEWEST_TOKENS = 2048


def gated_product(
    residual: jax.Array, weight: jax.Array, biases: Biases, eps: float, implementation: str
) -> jax.Array:
    """silu(gate) x up of [gate, up] = (residual weight^T + biases.product) / rms + biases.output.

    In one kernel where that is faster than in two.

    Args:
        residual: [tokens, hidden] floating; rms are the root mean squares of its rows with
            biases.residual added.
        weight: [2 x width, hidden], gate above up.
        biases: see there.
        eps: of the norm, added to the mean square.
        implementation: as in `pallas_kernels`.

    Returns:
        [tokens, width] in the dtype of the residual stream.
    """
    if implementation != "reference" and _is_faster(residual, weight.shape[0] // 2):
        return differentiable(_PRODUCT, eps, implementation, residual, weight, *biases)
    product = unnormed_product(residual, weight)
    return gated_activation(product, residual, biases, eps, implementation)


def in_one_kernel(
    residual: jax.Array, weight: jax.Array, biases: Biases, eps: float, interpret: bool = False
) -> jax.Array:
    """What `gated_product` does, without asking what is faster; has no gradients.

    Of 16-bit floating numbers, for a GPU or in Pallas' interpreter.

    Raises:
        NotImplementedError: JAX is neither 0.11.2 nor 0.12.
        ValueError: a tile does not fit: tokens are no multiple of 8, hidden or width none of 64, or
            tokens or width fewer than 128.
    """
    if not HAVE_MOSAIC:
        known = "JAX 0.11.2 and 0.12"
        raise NotImplementedError(f"the kernel is for {known}, this is {jax.__version__}")
    (tokens, hidden), width = residual.shape, weight.shape[0] // 2
    if not _fits(tokens, hidden, width):
        raise ValueError(
            f"tokens must be a multiple of {_ROW_UNIT}, hidden of {_DEPTH}, width of "
            f"{_COLUMN_UNIT}, tokens and width at least {_BLOCK}, got {tokens}, {hidden}, {width}"
        )
    scale = norm_scale(residual, biases.residual, eps, interpret)
    with jax.enable_x64(False):  # numbers of rows are 32-bit
        return _multiply(residual, weight, scale, biases.product, biases.output, interpret)


def norm_scale(
    residual: jax.Array, stream_bias: jax.Array, eps: float, interpret: bool = False
) -> jax.Array:
    """What rows are multiplied by, [tokens] fp32; the arguments are those of `in_one_kernel`."""
    if not HAVE_TRITON:
        return gated.norm_scale(eps, residual, stream_bias)[:, 0]
    tokens = residual.shape[0]
    launch = Launch(block=1, block_k=1, num_warps=_NORM_WARPS, num_stages=1)
    kernel = functools.partial(norm_scale_kernel, eps=eps)
    operands = residual, stream_bias
    return run(kernel, tokens, (tokens,), jnp.float32, launch, interpret, operands)


def _fits(tokens: int, hidden: int, width: int) -> bool:
    whole = tokens % _ROW_UNIT == hidden % _DEPTH == width % _COLUMN_UNIT == 0
    return whole and min(tokens, width) >= _BLOCK


def _is_faster(residual: jax.Array, width: int) -> bool:
    """Whether one kernel is; measured on GPUs of compute capability 9.0."""
    tokens, hidden = residual.shape
    gpu = local_gpu()
    return (
        HAVE_MOSAIC
        and tokens >= _FEWEST_TOKENS
        and _fits(tokens, hidden, width)
        and residual.dtype.itemsize == 2
        and gpu is not None
        and gpu.compute_capability == "9.0"
    )


# Jitted, so that it is lowered and compiled once for all layers.
@functools.partial(jax.jit, static_argnames="interpret")
def _multiply(
    residual: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    product_bias: jax.Array,
    bias: jax.Array,
    interpret: bool,
) -> jax.Array:
    tokens, width, dtype = residual.shape[0], weight.shape[0] // 2, residual.dtype
    if interpret:
        programs, interpreter = _INTERPRETED_PROGRAMS, mosaic.InterpretGPUParams()
    else:
        programs, interpreter = gpu.core_count if (gpu := local_gpu()) else _PROGRAMS, None
    multiply = mosaic.kernel(
        gated_product_kernel,
        out_type=jax.ShapeDtypeStruct((tokens, width), dtype),
        scratch_types=(
            mosaic.SMEM((_STAGES, _BLOCK, _DEPTH), dtype),
            mosaic.SMEM((_STAGES, 2 * _BLOCK, _DEPTH), dtype),
            mosaic.SMEM((_MULTIPLIERS, _ROWS, _BLOCK), dtype),
            mosaic.Barrier(num_arrivals=3, num_barriers=_STAGES),  # of a stage's three copies
            mosaic.Barrier(num_arrivals=_MULTIPLIERS, num_barriers=_STAGES),
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=_MULTIPLIERS + 1,
        thread_name="group",
        # Exponentials and roots by one instruction each.
        compiler_params=mosaic.CompilerParams(approx_math=True),
        interpret=interpreter,
    )
    return multiply(residual, weight, scale, product_bias, bias)


def _reference(eps: float, residual: jax.Array, weight: jax.Array, *biases: jax.Array) -> jax.Array:
    return gated.reference(eps, unnormed_product(residual, weight), residual, *biases)


def _kernel(eps: float, residual: jax.Array, weight: jax.Array, *biases: jax.Array) -> jax.Array:
    return in_one_kernel(residual, weight, Biases(*biases), eps)


def _interpreted(
    eps: float, residual: jax.Array, weight: jax.Array, *biases: jax.Array
) -> jax.Array:
    """In two: the interpreter of the one has effects, which JAX takes for no platform by itself."""
    product = unnormed_product(residual, weight)
    return gated.kernel(eps, product, residual, *biases, interpret=True)


_PRODUCT = Operation(_reference, _kernel, _interpreted)


def norm_scale_kernel(
    residual_ref: Ref, stream_bias_ref: Ref,
    scale_ref: Ref,
    *,
    eps: float,
) -> None:  # fmt: skip
    """One over the root mean square of a token's row; one program for each token."""
    hidden = residual_ref.shape[1]
    token = pl.program_id(0)
    channel = jnp.arange(next_power_of_2(hidden), dtype=jnp.int32)
    in_residual = channel < hidden
    x = load(residual_ref.at[token, channel], in_residual)
    x += load(stream_bias_ref.at[channel], in_residual)
    plgpu.store(scale_ref.at[token], jax.lax.rsqrt(jnp.sum(x * x) / hidden + eps))


def gated_product_kernel(
    residual_ref: Ref, weight_ref: Ref, scale_ref: Ref,
    product_bias_ref: Ref, bias_ref: Ref,
    out_ref: Ref,
    # in shared memory: operands of each stage, rounded results of each group that multiplies
    residual_tiles: Ref, weight_tiles: Ref, out_tiles: Ref,
    # of each stage
    full: Ref, empty: Ref,
) -> None:  # fmt: skip
    """Persistent: one program for each multiprocessor, which goes through tiles of the result."""
    (tokens, hidden), width = residual_ref.shape, out_ref.shape[1]
    tiles = pl.cdiv(tokens, _BLOCK) * pl.cdiv(width, _BLOCK)
    steps = hidden // _DEPTH
    group = lax.axis_index("group")
    loop_over_tiles = mosaic.nd_loop((tiles,), collective_axes="program")

    @pl.when(group == _MULTIPLIERS)
    def load_operands() -> None:
        """Of all tiles, as far ahead as there are stages: also while a tile is activated."""
        mosaic.set_max_registers(_LOADERS_REGISTERS, action="decrease")

        @loop_over_tiles
        def load_tile(tile: mosaic.NDLoopInfo) -> None:
            row, column = _place(tile.index[0], tokens, width)

            @pl.loop(0, steps)
            def load_stage(step: Scalar) -> None:
                count = tile.local_index * steps + step
                stage = lax.rem(count, _STAGES)
                pl.when(count >= _STAGES)(lambda: mosaic.barrier_wait(empty.at[stage]))
                channels = pl.ds(step * _DEPTH, _DEPTH)
                rows = residual_ref.at[pl.ds(row, _BLOCK), channels]
                mosaic.copy_gmem_to_smem(rows, residual_tiles.at[stage], full.at[stage])
                for half in range(2):
                    rows = weight_ref.at[pl.ds(half * width + column, _BLOCK), channels]
                    place = weight_tiles.at[stage, pl.ds(half * _BLOCK, _BLOCK)]
                    mosaic.copy_gmem_to_smem(rows, place, full.at[stage])

        # A barrier must not be left before it is waited for as often as it was completed.
        own_tiles = pl.cdiv(tiles - lax.axis_index("program"), lax.axis_size("program"))
        for stage in range(_STAGES):
            wait = functools.partial(mosaic.barrier_wait, empty.at[stage])
            pl.when(stage < own_tiles * steps)(wait)

    @pl.when(group < _MULTIPLIERS)
    def multiply_and_activate() -> None:
        """Each tile's rows of this group."""
        mosaic.set_max_registers(_MULTIPLIERS_REGISTERS, action="increase")

        @loop_over_tiles
        def multiply_tile(tile: mosaic.NDLoopInfo) -> None:
            row, column = _place(tile.index[0], tokens, width)

            def multiply(acc_ref: Ref) -> jax.Array:
                @pl.loop(0, steps)
                def multiply_stage(step: Scalar) -> None:
                    stage = lax.rem(tile.local_index * steps + step, _STAGES)
                    mosaic.barrier_wait(full.at[stage])
                    x = residual_tiles.at[stage, pl.ds(group * _ROWS, _ROWS)]
                    mosaic.wgmma(acc_ref, x, weight_tiles.at[stage].transpose((1, 0)))
                    mosaic.wgmma_wait(0)
                    mosaic.barrier_arrive(empty.at[stage])

                return acc_ref[...]

            acc = pl.run_scoped(multiply, mosaic.ACC((_ROWS, 2 * _BLOCK), jnp.float32))
            gate, up = acc[:, :_BLOCK], acc[:, _BLOCK:]

            row += group * _ROWS
            scale = _load_vector(scale_ref, row, axis=0)
            gate += _load_vector(product_bias_ref, column, axis=1)
            up += _load_vector(product_bias_ref, width + column, axis=1)
            gate = gate * scale + _load_vector(bias_ref, column, axis=1)
            up = up * scale + _load_vector(bias_ref, width + column, axis=1)
            y = silu_times(gate, up, jnp.exp2).astype(out_ref.dtype)

            mosaic.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
            out_tiles[group] = y
            mosaic.commit_smem()
            place = out_ref.at[pl.ds(row, _ROWS), pl.ds(column, _BLOCK)]
            mosaic.copy_smem_to_gmem(out_tiles.at[group], place)

        mosaic.wait_smem_to_gmem(0)


def _place(tile: Scalar, tokens: int, width: int) -> tuple[Scalar, Scalar]:
    """A tile's first row and column: groups of rows, in them column by column, there row by row.

    The last tile of rows, or of columns, overlaps the one before it where it would pass the end:
    both write the same.
    """
    row_blocks, column_blocks = pl.cdiv(tokens, _BLOCK), pl.cdiv(width, _BLOCK)
    first = lax.div(tile, _GROUP * column_blocks) * _GROUP
    rows = jnp.minimum(row_blocks - first, _GROUP)
    within = lax.rem(tile, _GROUP * column_blocks)
    row, column = (first + lax.rem(within, rows)) * _BLOCK, lax.div(within, rows) * _BLOCK
    return jnp.minimum(row, tokens - _BLOCK), jnp.minimum(column, width - _BLOCK)


def _load_vector(ref: Ref, first: Scalar, axis: int) -> jax.Array:
    """As many elements as a group's tile has along the axis, in fp32, the same along the other."""
    shape = _ROWS, _BLOCK
    layout = mosaic.Layout.WGMMA.reduce(1 - axis)  # as the sums' rows or columns lie in threads
    # Few bytes: not worth to be laid out for wide loads.
    x = mosaic.load(ref.at[pl.ds(first, shape[axis])], layout=layout, optimized=False)
    return lax.broadcast_in_dim(x.astype(jnp.float32), shape, (axis,))
