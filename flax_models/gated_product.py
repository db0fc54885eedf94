"""Gate and up of an MLP behind a late norm, activated in the kernel that multiplies.

By itself the product writes gate and up, 127 MB a layer at 1344 px, and the activation (gated.py)
reads them again, which takes a quarter of the product's time. Here a program multiplies for the
same columns of both, finds them in its accumulators, and writes what the second product reads.
What rows are divided by, a kernel before it computes.

The twin of compare/torch_gated_product.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from flax_models import gated
from flax_models.gated import Biases, Operation, differentiable, gated_activation, load, silu_times
from flax_models.products import unnormed_product
from pallas_kernels.compile import compiler, local_gpu
from pallas_kernels.launch_table import Launch, next_power_of_2
from pallas_kernels.run import run
from pallas_kernels.tiles import Ref, Scalar, dot

# A tile has 128 rows and 128 columns of each of gate and up, for which 64 channels are multiplied
# at a time. Programs that run at once share operands: 8 tiles of rows go through all columns.
_LAUNCH = Launch(block=128, block_k=64, num_warps=8, num_stages=3)
_GROUP = 8

# Of a program of the kernel before it, which has one row.
_NORM_WARPS = 4

# Of fewer tokens there are too few tiles to fill the GPU evenly, and cuBLAS has others.
_FEWEST_TOKENS = 2048


def gated_product(
    stream: jax.Array, weight: jax.Array, biases: Biases, eps: float, implementation: str
) -> jax.Array:
    """silu(gate) x up of [gate, up] = (stream weight^T + biases.product) / rms + biases.output.

    In one kernel where that is faster than in two.

    Args:
        stream: [tokens, hidden] floating; rms are the root mean squares of its rows with
            biases.stream added.
        weight: [2 x width, hidden], gate above up.
        biases: see there.
        eps: of the norm, added to the mean square.
        implementation: as in `pallas_kernels`.

    Returns:
        [tokens, width] in the dtype of the stream.
    """
    if implementation != "reference" and _is_faster(stream):
        return in_one_kernel(stream, weight, biases, eps, implementation)
    product = unnormed_product(stream, weight)
    return gated_activation(product, stream, biases, eps, implementation)


def in_one_kernel(
    stream: jax.Array, weight: jax.Array, biases: Biases, eps: float, implementation: str
) -> jax.Array:
    """What `gated_product` does, without asking what is faster.

    Of 16-bit floating numbers.

    Raises:
        ValueError: hidden is no multiple of 64.
    """
    if stream.shape[1] % _LAUNCH.block_k:
        raise ValueError(f"hidden must be a multiple of {_LAUNCH.block_k}, got {stream.shape[1]}")
    return differentiable(_PRODUCT, eps, implementation, stream, weight, *biases)


def _is_faster(stream: jax.Array) -> bool:
    """Whether one kernel is; measured on GPUs of compute capability 9.0, by Triton's compiler."""
    tokens, hidden = stream.shape
    gpu = local_gpu()
    return (
        tokens >= _FEWEST_TOKENS
        and hidden % _LAUNCH.block_k == 0
        and stream.dtype.itemsize == 2
        and gpu is not None
        and gpu.compute_capability == "9.0"
        and compiler() == "triton"
    )


def _reference(eps: float, stream: jax.Array, weight: jax.Array, *biases: jax.Array) -> jax.Array:
    return gated.reference(eps, unnormed_product(stream, weight), stream, *biases)


def _kernel(
    eps: float, interpret: bool, stream: jax.Array, weight: jax.Array, *biases: jax.Array
) -> jax.Array:
    tokens, width = stream.shape[0], weight.shape[0] // 2
    stream_bias, product_bias, bias = biases
    launch = Launch(block=1, block_k=1, num_warps=_NORM_WARPS, num_stages=1)
    kernel = functools.partial(norm_scale_kernel, eps=eps)
    operands = stream, stream_bias
    scale = run(kernel, tokens, (tokens,), jnp.float32, launch, interpret, operands)
    kernel = functools.partial(gated_product_kernel, interpreted=interpret)
    programs = pl.cdiv(tokens, _LAUNCH.block) * pl.cdiv(width, _LAUNCH.block)
    operands = stream, weight, scale, product_bias, bias
    return run(kernel, programs, (tokens, width), stream.dtype, _LAUNCH, interpret, operands)


_PRODUCT = Operation(_reference, _kernel)


def norm_scale_kernel(
    stream_ref: Ref, stream_bias_ref: Ref,
    scale_ref: Ref,
    *,
    eps: float,
) -> None:  # fmt: skip
    """One over the root mean square of a token's row; one program for each token."""
    hidden = stream_ref.shape[1]
    token = pl.program_id(0)
    channel = jnp.arange(next_power_of_2(hidden), dtype=jnp.int32)
    in_stream = channel < hidden
    x = load(stream_ref.at[token, channel], in_stream)
    x += load(stream_bias_ref.at[channel], in_stream)
    plgpu.store(scale_ref.at[token], jax.lax.rsqrt(jnp.sum(x * x) / hidden + eps))


def gated_product_kernel(
    stream_ref: Ref, weight_ref: Ref, scale_ref: Ref,
    product_bias_ref: Ref, bias_ref: Ref,
    out_ref: Ref,
    *,
    interpreted: bool,
) -> None:  # fmt: skip
    """One program for each tile of the result."""
    block, depth = _LAUNCH.block, _LAUNCH.block_k
    (tokens, hidden), width = stream_ref.shape, out_ref.shape[1]
    row_block, column_block = _place(pl.program_id(0), tokens, width)
    row = row_block * block + jnp.arange(block, dtype=jnp.int32)
    column = column_block * block + jnp.arange(block, dtype=jnp.int32)
    in_stream, in_width = row < tokens, column < width
    # Rows and columns past the last are computed from the first, and not written.
    stream_row = jnp.where(in_stream, row, 0)
    both = jnp.arange(2 * block, dtype=jnp.int32)
    weight_row = column_block * block + both % block
    weight_row = jnp.where(weight_row < width, weight_row, 0) + both // block * width

    def multiply(step: Scalar, acc: jax.Array) -> jax.Array:
        channel = step * depth + jnp.arange(depth, dtype=jnp.int32)
        x = plgpu.load(_tile(stream_ref, stream_row, channel))  # [block, depth]
        w = plgpu.load(_tile(weight_ref, weight_row, channel))  # [2 block, depth]
        return dot(x, w.T, acc)

    acc = jnp.zeros((block, 2 * block), jnp.float32)
    acc = jax.lax.fori_loop(0, hidden // depth, multiply, acc)
    gate, up = jnp.split(acc, 2, axis=1)

    scale = load(scale_ref.at[row], in_stream)[:, None]
    gate += load(product_bias_ref.at[column], in_width)[None]
    up += load(product_bias_ref.at[width + column], in_width)[None]
    gate = gate * scale + load(bias_ref.at[column], in_width)[None]
    up = up * scale + load(bias_ref.at[width + column], in_width)[None]
    y = silu_times(gate, up, interpreted)
    mask = in_stream[:, None] & in_width[None]
    plgpu.store(_tile(out_ref, row, column), y.astype(out_ref.dtype), mask=mask)


def _place(program: Scalar, tokens: int, width: int) -> tuple[Scalar, Scalar]:
    """The tile of a program: groups of rows, in them column after column, in that row after row."""
    row_blocks, column_blocks = pl.cdiv(tokens, _LAUNCH.block), pl.cdiv(width, _LAUNCH.block)
    first = program // (_GROUP * column_blocks) * _GROUP
    rows = jnp.minimum(row_blocks - first, _GROUP)
    within = program % (_GROUP * column_blocks)
    return first + within % rows, within // rows


def _tile(ref: Ref, row: jax.Array, column: jax.Array) -> Ref:
    shape = row.shape[0], column.shape[0]
    return ref.at[jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None], shape)]
