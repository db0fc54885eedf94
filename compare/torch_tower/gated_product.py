"""Gate and up of an MLP behind a late norm, activated in the kernel that multiplies.

Why, flax_models/gated_product.py says, whose twin this is.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from compare.torch_tower.gated import gated_activation, load, unnormed_product
from flax_models.common.weights import Biases
from triton_kernels.attend import runs_kernel
from triton_kernels.checks import is_exporting
from triton_kernels.kernels.gated import place, silu_times
from triton_kernels.kernels.tiles import cast, dot
from triton_kernels.launching.table import next_power_of_2

# A tile has 128 rows and 128 columns of each of gate and up, for which 64 channels are multiplied
# at a time, up to 4 times as many having been loaded. Programs that run at once share operands: 8
# tiles of rows go through all columns.
_BLOCK = 128
_DEPTH = 64
_STAGES = 4
_GROUP = 8
_WARPS = 8

# Columns where tiles start are multiples of this, as in the twin. They start at any row, unlike
# there, where tokens are always padded.
_COLUMN_UNIT = 64

# What descriptors describe starts at a multiple of so many bytes.
_ALIGNMENT = 16

# Of the interpreter, which has no multiprocessors: fewer than tiles, so that it loops too.
_INTERPRETED_PROGRAMS = 2

# Of a program of the kernel before it, which has one row.
_NORM_WARPS = 4

# Of fewer tokens there are too few tiles to fill the GPU evenly, and cuBLAS has others.
_FEWEST_TOKENS = 2048


def gated_product(
    residual: torch.Tensor, weight: torch.Tensor, biases: Biases, eps: float, implementation: str
) -> torch.Tensor:
    """silu(gate) x up of [gate, up] = (residual weight^T + biases.product) / rms + biases.output.

    In one kernel where that is faster than in two. Arguments and result, [tokens, width] in the
    dtype of the residual stream, are the twin's.
    """
    if is_exporting():  # only operators that every runtime knows
        product = unnormed_product(residual, weight)
        return gated_activation(product, residual, biases, eps, "reference")
    return _multiply(residual, weight, *biases, eps, implementation)


# An operator, so that compiled blocks take it as it is, and are not compiled again for few tokens.
@torch.library.custom_op("late_norm::gated_product", mutates_args=())
def _multiply(
    residual: torch.Tensor,
    weight: torch.Tensor,
    stream_bias: torch.Tensor,
    product_bias: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    implementation: str,
) -> torch.Tensor:
    biases = Biases(stream_bias, product_bias, bias)
    if runs_kernel(residual.device, implementation) and _is_faster(residual, weight.shape[0] // 2):
        return in_one_kernel(residual, weight, biases, eps)
    product = unnormed_product(residual, weight)
    return gated_activation(product, residual, biases, eps, implementation)


@_multiply.register_fake
def _(residual: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return residual.new_empty((residual.shape[0], weight.shape[0] // 2))


def in_one_kernel(
    residual: torch.Tensor, weight: torch.Tensor, biases: Biases, eps: float
) -> torch.Tensor:
    """What `gated_product` does, without asking what is faster.

    Of 16-bit floating numbers.

    Raises:
        ValueError: a tile does not fit: hidden or width are no multiple of 64, or tokens or width
            fewer than 128.
    """
    (tokens, hidden), width = residual.shape, weight.shape[0] // 2
    if not _fits(tokens, hidden, width):
        raise ValueError(
            f"hidden must be a multiple of {_DEPTH}, width of {_COLUMN_UNIT}, tokens and width at "
            f"least {_BLOCK}, got {tokens}, {hidden}, {width}"
        )
    residual, weight = _described(residual), _described(weight.view(2, width, hidden))
    scale = norm_scale(residual, biases.residual, eps)
    out = residual.new_empty((tokens, width))
    device = residual.device
    programs = _multiprocessors(device.index) if residual.is_cuda else _INTERPRETED_PROGRAMS
    with torch.cuda.device_of(residual):  # Triton launches on the current device
        gated_product_kernel[(programs,)](
            TensorDescriptor.from_tensor(residual, [_BLOCK, _DEPTH]),
            TensorDescriptor.from_tensor(weight, [2, _BLOCK, _DEPTH]),
            scale, biases.product, biases.output,
            TensorDescriptor.from_tensor(out, [_BLOCK, _BLOCK]),
            tokens, hidden, width, _BLOCK, _DEPTH, _GROUP,
            num_warps=_WARPS, num_stages=_STAGES, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def norm_scale(residual: torch.Tensor, stream_bias: torch.Tensor, eps: float) -> torch.Tensor:
    """What rows are multiplied by, [tokens] fp32; the arguments are those of `in_one_kernel`."""
    tokens, hidden = residual.shape
    scale = residual.new_empty(tokens, dtype=torch.float32)
    with torch.cuda.device_of(residual):
        norm_scale_kernel[(tokens,)](
            residual, stream_bias, scale, eps, hidden, next_power_of_2(hidden),
            num_warps=_NORM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return scale


def _fits(tokens: int, hidden: int, width: int) -> bool:
    whole = hidden % _DEPTH == width % _COLUMN_UNIT == 0
    return whole and min(tokens, width) >= _BLOCK


def _described(x: torch.Tensor) -> torch.Tensor:
    """A tensor that a descriptor can describe: x, or a copy."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def _is_faster(residual: torch.Tensor, width: int) -> bool:
    """Whether one kernel is; measured on GPUs of compute capability 9.0."""
    tokens, hidden = residual.shape
    return (
        tokens >= _FEWEST_TOKENS
        and _fits(tokens, hidden, width)
        and residual.dtype.itemsize == 2
        and residual.is_cuda
        and _compute_capability(residual.device.index) == (9, 0)
    )


@functools.cache
def _compute_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@triton.jit
def norm_scale_kernel(
    residual_ptr, stream_bias_ptr, scale_ptr, eps,
    # width of a row, and the power of two that holds it
    HIDDEN: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One over the root mean square of a token's row; one program for each token."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    in_residual = channel < HIDDEN
    x = load(residual_ptr + token * HIDDEN + channel, in_residual)
    x += load(stream_bias_ptr + channel, in_residual)
    tl.store(scale_ptr + token, tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps))


@triton.jit(do_not_specialize=("tokens",))
def gated_product_kernel(
    residual_desc, weight_desc,  # [tokens, HIDDEN]; [2, WIDTH, HIDDEN], gate and up
    scale_ptr, product_bias_ptr, bias_ptr,
    out_desc,  # [tokens, WIDTH]
    tokens,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    # rows of a tile and columns of each half, channels at a time, tiles of rows in a group
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Persistent: one program for each multiprocessor, which goes through tiles of the result."""
    row_tiles, column_tiles = tl.cdiv(tokens, BLOCK), tl.cdiv(WIDTH, BLOCK)
    # Flattened, the two loops load a tile's first channels while the last one is activated.
    for tile in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True
    ):
        row_tile, column_tile = place(tile, row_tiles, column_tiles, GROUP)
        # Where the last tile would pass the end it overlaps the one before: both write the same.
        row = tl.minimum(row_tile * BLOCK, tokens - BLOCK)
        column = tl.minimum(column_tile * BLOCK, WIDTH - BLOCK)
        acc = tl.zeros([BLOCK, 2 * BLOCK], tl.float32)
        for step in range(0, HIDDEN // DEPTH):
            x = residual_desc.load([row, step * DEPTH])  # [BLOCK, DEPTH]
            w = weight_desc.load([0, column, step * DEPTH]).reshape(2 * BLOCK, DEPTH)
            acc = dot(x, tl.trans(w), acc)
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK, 2, BLOCK]), [0, 2, 1]))

        scale = tl.load(scale_ptr + row + tl.arange(0, BLOCK))[:, None]
        columns = column + tl.arange(0, BLOCK)
        gate += tl.load(product_bias_ptr + columns)[None, :]
        up += tl.load(product_bias_ptr + WIDTH + columns)[None, :]
        gate = gate * scale + tl.load(bias_ptr + columns)[None, :]
        up = up * scale + tl.load(bias_ptr + WIDTH + columns)[None, :]
        out_desc.store([row, column], cast(silu_times(gate, up), out_desc.dtype))
